"""`turnwise truth` for real: HTTP, engine, snapshots, draws, file; against an exact calculation."""

import asyncio
import html
import json
import math
import re
from dataclasses import replace
from itertools import product
from shutil import copytree

import pytest
import torch
from aiohttp import web
from typer.testing import CliRunner

from tests.conftest import (
    TASK_APP_KEY,
    ListReporter,
    at_the_task_app,
    task_app_thread,
    tiny_job,
    train_job,
)
from tests.trainer_backend.collect.scripted_task_app import ScriptedTaskApp, served
from trainer_backend import job_parts
from trainer_backend.__main__ import app
from trainer_backend.credit.recredit import recredit_run
from trainer_backend.errors import JobError, RunDirectoryError, TaskAppError
from trainer_backend.evaluation.truth import TruthOptions, find_horizon, find_source, measure_truth
from trainer_backend.models.folder import load_model_folder
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.rollout_files import read_rollouts, write_rollouts
from trainer_backend.rundir.truth_file import TruthFile, locate_truth

GAMMA = 0.8
DECISIONS = 3
TOO_LONG = (2, 3)
COINS = """
import json
from hashlib import blake2b

from shared_schemas.base import Body
from shared_schemas.messages import Message
from task_app.errors import EpisodeOver
from task_app.plugins import EnvironmentPlugin
from task_app.protocols import DecisionOutcome, Observation


class Config(Body):
    worth: int = 3
    word: str = "turn"
    frail: bool = False


class Coins:
    '''Three words, each with a vowel or without, and after each the throw of a coin.

    A frail world that was restored breaks at its last word, but for half of the draws that it may get then.
    '''

    name, outcome_definition, quick_step = "coins", "position: where it ended", True

    def __init__(self, config):
        self._worth, self._word, self._turn = config.worth, config.word, None
        self._frail, self._breaks = config.frail, False

    def reset(self, seed):
        self._turn = self._position = self._thrown = 0
        self._seed = seed
        return self._show(0.0)

    def snapshot(self):
        self._refuse_before_reset()
        return json.dumps([self._turn, self._position, self._seed, self._thrown]).encode()

    def restore(self, state):
        try:
            self._turn, self._position, self._seed, self._thrown = json.loads(state)
        except (TypeError, ValueError) as error:
            raise ValueError("no coins") from error
        self._breaks = self._frail
        return self._show(0.0)

    def reseed(self, seed):
        self._refuse_before_reset()
        self._seed, self._thrown = seed, 0
        self._breaks = self._frail and seed % 2 == 0

    def answer(self, text):
        return self._decide(int(any(letter in "aeiou" for letter in text)))

    def step(self, calls, *, invalid_reason=None):
        return self._decide(0)

    def tools(self):
        return ()

    def messages(self, observation, past):
        return (Message(role="user", content=observation.text),)

    def outcome_reward(self):
        return float(self._position)

    def _decide(self, action):
        self._refuse_before_reset()
        if self._turn == 3:
            raise EpisodeOver()
        if self._breaks and self._turn == 2:
            raise RuntimeError("the coin is lost")
        coin = blake2b(f"{self._seed} {self._thrown}".encode()).digest()[0] & 1
        reward = (3 * self._position + self._turn) % 4 + action / 2 + coin * (self._worth - 5 * action) / 2
        self._thrown += 1
        self._turn, self._position = self._turn + 1, 2 * self._position + (action ^ coin)
        return DecisionOutcome(self._show(reward), (reward,), self._turn == 3)

    def _refuse_before_reset(self):
        if self._turn is None:
            raise EpisodeOver()

    def _show(self, reward):
        text = f"{self._word} {self._turn} at {self._position}"
        if (self._turn, self._position) == (2, 3):
            text = f"{'so far ' * 500}{text}"  # no prompt that fits the model
        return Observation(text, {"turn": self._turn, "position": self._position}, {}, reward)


class Forgetful:
    def __init__(self, config):
        self._coins = Coins(config)

    def __getattr__(self, name):
        if name in ("snapshot", "restore", "reseed"):
            raise AttributeError(name)
        return getattr(self._coins, name)


ENVIRONMENTS = {"coins": EnvironmentPlugin(Config, Coins), "forgetful": EnvironmentPlugin(Config, Forgetful)}
"""


def reward_of(turn, position, action, coin):
    return (3 * position + turn) % 4 + action / 2 + coin * (3 - 5 * action) / 2


def options(directory, **changes):
    given = {"horizon": None, "budget": None, "iteration": None, "checkpoint": None}
    given |= {"decisions": 200, "continuations": 24, "out": locate_truth(directory.path)} | changes
    return TruthOptions(**given)


def measure(run, **changes):
    directory, job = run
    return asyncio.run(measure_truth(directory, job, options(directory, **changes)))


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    file = tmp_path_factory.mktemp("coins") / "coins.py"
    file.write_text(COINS, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def url(plugins):
    """A task app on a thread, since a process of its own costs each measurement seconds."""
    with task_app_thread(plugins=[plugins]) as url:
        yield url


@pytest.fixture(scope="module")
def run(model_folders, tmp_path_factory, plugins, url):
    """A run, and its job at that task app; its folder names the plug-in."""
    job = tiny_job(
        model={"path": str(model_folders["qwen3"]), "device": "cpu"}, warmup=None,
        rollout__env_name="coins", rollout__env_config={}, rollout__max_turns=DECISIONS,
        rollout__max_tokens=1, rollout__episodes_per_batch=8, rollout__max_concurrent_rollouts=96,
        rollout__max_invalid_decisions=DECISIONS + 1, services__task_plugins=[str(plugins)],
        inference__max_running=96, training__step_rewards_mode="env_sparse", training__iterations=1,
        algorithm__gamma=GAMMA, evaluation__instances=1,
    )  # fmt: skip
    there = at_the_task_app(job.model_copy(update={"services": tiny_job().services}), url)
    directory, _, _ = train_job(there, tmp_path_factory.mktemp("runs") / "run")
    directory.replace_job(job)
    return directory, there


def chance_of_a_vowel(directory, rollouts):
    """By turn and position, the probability of a word with a vowel, from the weights themselves."""
    model, tokenizer = load_model_folder(directory.checkpoints / "iteration_0")
    words = [tokenizer.decode([token], skip_special_tokens=True) for token in range(model.config.vocab_size)]
    has_vowel = torch.tensor([any(letter in "aeiou" for letter in word) for word in words])
    states = [(turn, position) for turn in range(DECISIONS) for position in range(2**turn)]
    states.remove(TOO_LONG)
    prompts = {
        state: tokenizer.apply_chat_template(
            [{"role": "user", "content": "turn {} at {}".format(*state)}], add_generation_prompt=True,
            return_dict=False,
        )
        for state in states
    }  # fmt: skip
    for rollout in rollouts:
        for t, step in enumerate(rollout.trajectory.steps):
            known = prompts[t, position_before(rollout.trajectory.steps, t)]
            assert list(step.policy_logprobs.prompt_token_ids) == known
    with torch.no_grad():
        return {
            state: float(model(torch.tensor([ids])).logits[0, -1].softmax(-1)[has_vowel].sum())
            for state, ids in prompts.items()
        }


def position_before(steps, t):
    return int(steps[t].observation_data.messages[-1].content.rsplit(" ", 1)[1])


def position_after(steps, t):
    return position_before(steps, t + 1) if t + 1 < len(steps) else TOO_LONG[1]


def value(chances, turn, position):
    """V of a state, over the policy's words and the coins to come."""
    if turn == DECISIONS or (turn, position) == TOO_LONG:
        return 0.0
    return sum(
        0.5 * chance(chances, turn, position, action) * worth(chances, turn, position, action, coin)
        for action, coin in product((0, 1), (0, 1))
    )


def chance(chances, turn, position, action):
    vowel = chances[turn, position]
    return vowel if action else 1 - vowel


def worth(chances, turn, position, action, coin):
    """Q of an action, given how the coin falls."""
    after = 2 * position + (action ^ coin)
    return reward_of(turn, position, action, coin) + GAMMA * value(chances, turn + 1, after)


def exact(chances, steps, t):
    """Q - V of a stored decision, for the coin that it met: which action and coin led on is known."""
    position, reward = position_before(steps, t), steps[t].env_rewards[0]
    possible = [
        (action, coin)
        for action, coin in product((0, 1), (0, 1))
        if reward_of(t, position, action, coin) == reward
        and (t + 1 == DECISIONS or position_after(steps, t) == 2 * position + (action ^ coin))
    ]
    (action, coin), *rest = possible
    assert not rest, "reward and next state tell action and coin apart"
    baseline = sum(
        chance(chances, t, position, other) * worth(chances, t, position, other, coin) for other in (0, 1)
    )
    return worth(chances, t, position, action, coin) - baseline


def test_the_measured_truth_is_the_exact_one_within_its_standard_error(run):
    directory, _ = run
    measured = measure(run)
    rollouts = {item.rollout_id: item for item in read_rollouts(directory.rollouts_file("iteration_1"))}
    chances = chance_of_a_vowel(directory, rollouts.values())
    decisions = sum(len(item.trajectory.steps) for item in rollouts.values())
    assert len(measured.file.truths) == decisions < 8 * DECISIONS, "some episodes end where nothing fits"
    assert measured.lost == 0
    assert all(truth.pairs == 24 and truth.others <= 24 for truth in measured.file.truths.values())
    beyond = []
    for (rollout_id, turn), truth in measured.file.truths.items():
        known = exact(chances, rollouts[rollout_id].trajectory.steps, turn - 1)
        if truth.error == 0.0:
            # The policy chose as stored, or what followed was alike.
            assert abs(truth.advantage - known) < 1.0
            continue
        beyond.append((truth.advantage - known) / truth.error)
    assert len(beyond) > 15
    assert max(map(abs, beyond)) < 4.5
    assert 0.6 < math.fsum(z * z for z in beyond) / len(beyond) < 1.7, "the standard errors are right too"


def test_continuations_end_where_gamma_leaves_a_twentieth_unless_the_end_pays(run):
    _, job = run

    def horizon(gamma, mode="env_sparse"):
        return find_horizon(job.training.model_copy(update={"step_rewards_mode": mode}), gamma)

    # 0.9^28 is 0.052 and 0.9^29 is 0.047
    assert [horizon(gamma) for gamma in (0.9, 0.5, 0.04, 0.0)] == [29, 5, 1, 1]
    assert horizon(1.0) is None and horizon(0.9, "off") is None


def test_a_measurement_goes_on_where_it_was_stopped_and_ends_with_the_same_numbers(run, url, tmp_path):
    whole = measure(run, out=tmp_path / "whole.jsonl", decisions=6, continuations=4)
    path = tmp_path / "parts.jsonl"
    shown = command(run, *at(url), "--decisions", 6, "--continuations", 4, "--budget", 20, "--out", path)
    begun = TruthFile.read(path, run[0]).truths
    assert 0 < len(begun) < 6 and begun.items() <= whole.file.truths.items()
    assert f"the budget is spent after {len(begun)} of 6 decisions" in shown
    assert f"{len(begun)} decisions of iteration 1, by 4 pairs" in shown and f"written: {path}" in shown
    assert "could not be played" not in shown
    path.write_text(path.read_text() + '{"rollout_id": "cut sh', encoding="utf-8")
    parts = measure(run, out=path, decisions=6, continuations=4)
    assert parts.file.truths == whole.file.truths
    with pytest.raises(RunDirectoryError, match="measured with continuations = 4 instead of 5; --out"):
        measure(run, out=path, continuations=5)
    directory, job = run
    cold = job.model_copy(update={"rollout": job.rollout.model_copy(update={"temperature": 0.5})})
    with pytest.raises(RunDirectoryError, match=r"temperature = 1\.0 instead of 0\.5"):
        asyncio.run(measure_truth(directory, cold, options(directory, out=path, continuations=4)))
    begun = tmp_path / "begun.jsonl"  # killed before its first decision, with another setting
    begun.write_text(path.read_text().splitlines()[0].replace('"seed": 0', '"seed": 9') + "\n")
    assert measure(run, out=begun, decisions=6, continuations=4).file.truths == whole.file.truths


def at(url):
    return "--set", f"services.task_url={url}", "--set", "services.task_plugins=[]"


def command(run, *options):
    """What `turnwise truth` prints, on one line."""
    key = {"ENVIRONMENT_API_KEY": TASK_APP_KEY.get_secret_value()}
    shown = CliRunner().invoke(app, ["truth", str(run[0].path), *map(str, options)], env=key)
    assert shown.exit_code == 0, shown.output
    return " ".join(shown.output.split())


def test_continuations_that_fail_are_counted_and_in_no_mean_and_lost_decisions_are_told(run, url, tmp_path):
    directory, path = run[0], tmp_path / "frail.jsonl"
    shown = command(
        run, *at(url), "--set", "rollout.env_config.frail=true", "--decisions", 12, "--continuations", 8,
        "--horizon", 1, "--out", path,
    )  # fmt: skip
    truths = TruthFile.read(path, directory).truths
    pairs, lost = (int(re.search(told, shown)[1]) for told in (
        r"(\d+) pairs failed and are not counted",
        r"(\d+) decisions could not be played; the same command tries them again",
    ))  # fmt: skip
    assert lost == 12 - len(truths) > 0 and pairs == sum(item.failed for item in truths.values()) > 0
    assert all(item.pairs + item.failed == 8 for item in truths.values())
    assert not any(item.failed for item in truths.values() if item.turn == 1), "it ends before a world breaks"
    assert {item.turn for item in truths.values()} == {1, 2}, "no choice is left of a third decision"
    path, budget = tmp_path / "short.jsonl", 200
    shown = command(
        run, *at(url), "--set", "rollout.env_config.frail=true", "--set", "rollout.max_concurrent_rollouts=8",
        "--decisions", 12, "--continuations", 8, "--horizon", 1, "--budget", budget, "--out", path,
    )  # fmt: skip
    lost = int(re.search(r"(\d+) decisions could not be played", shown)[1])
    played = sum(item.decisions for item in TruthFile.read(path, directory).truths.values())
    assert lost > 0, "their choices, 32 each, are of the budget too; the last two may go beyond it"
    assert played + 32 * lost < budget + 2 * 48
    rollouts = {item.rollout_id: item for item in read_rollouts(directory.rollouts_file("iteration_1"))}
    chances = chance_of_a_vowel(directory, rollouts.values())
    for (rollout_id, turn), truth in truths.items():
        if turn == 2 and truth.error:
            known = exact(chances, rollouts[rollout_id].trajectory.steps, 1)
            assert abs(truth.advantage - known) < 4.5 * truth.error


ORDERS = {
    "rollout__env_name": "orders", "rollout__env_config": {"requests": 2, "rules": False},
    "warmup__policy_name": "orders_teacher", "training__step_rewards_mode": "env_sparse",
}  # fmt: skip


def test_it_works_in_an_environment_without_draws(tmp_path):
    job = tiny_job(
        **ORDERS, warmup__policy_config={"epsilon": 0.1}, warmup__episodes=4, rollout__max_turns=4,
        rollout__max_tokens=24, rollout__episodes_per_batch=4, training__iterations=1,
        evaluation__instances=1, algorithm__gamma=0.9,
    )  # fmt: skip
    directory, _, _ = train_job(job, tmp_path / "run")
    asked = options(directory, decisions=16, continuations=2)
    measured = asyncio.run(measure_truth(directory, at_the_task_app(directory.job()), asked))
    truths = measured.file.truths.values()
    assert (measured.lost, sum(item.failed for item in truths)) == (0, 0)
    assert not measured.file.setting.fresh_draws and any(item.others for item in truths)
    steps = {
        item.rollout_id: item.trajectory.steps
        for item in read_rollouts(directory.rollouts_file("iteration_1"))
    }
    assert len(truths) == sum(map(len, steps.values()))
    for item in truths:
        if item.others and item.turn == len(steps[item.rollout_id]):
            assert item.action_value == item.reward, "nothing follows the last decision"


def test_estimators_are_scored_against_the_truth(run, tmp_path):
    directory, _ = run
    measure(run)
    shown = CliRunner().invoke(
        app, ["recredit", str(directory.path), "--truth", "--advantage", "stepwise", "--advantage", "rloo",
              "--advantage", "grpo", "--out", str(tmp_path)],
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    found = json.loads((tmp_path / "figures.json").read_text())["truth"]
    assert found["noise"]["decisions"] == len(TruthFile.read(locate_truth(directory.path), directory).truths)
    assert set(found["estimators"]) == {"stepwise", "rloo", "grpo"}
    assert 0 < found["estimators"]["stepwise"]["correlation"] <= 1
    assert all(0 < found["estimators"][name]["unbiased"] <= 1 for name in ("stepwise", "rloo"))
    assert found["estimators"]["grpo"]["unbiased"] is None, "its unit is a standard deviation"
    page = html.unescape((tmp_path / "truth.html").read_text())
    assert "saved-charts" in page
    assert f"True advantages have a standard error of {found['noise']['error']:.3f}" in page
    for score in found["estimators"].values():
        low, high = score["low"], score["high"]
        told = f"Correlation {score['correlation']:+.2f} (95 %: {low:+.2f} to {high:+.2f})"
        if (unbiased := score["unbiased"]) is not None:
            told += f"; an unbiased estimator as noisy would have {unbiased:+.2f}"
        assert told in page


def test_the_gradient_of_the_measured_decisions_is_compared_with_that_of_the_truth(run, tmp_path):
    directory, _ = run
    measure(run)
    recredit_run(
        directory.path, ["stepwise", "rloo"], [], directory.checkpoints / "iteration_0", tmp_path, (),
        truth=locate_truth(directory.path), reporter=ListReporter(),
    )  # fmt: skip
    cosines = json.loads((tmp_path / "figures.json").read_text())["truth"]["estimators"]
    assert all(-1 <= item["gradient_cosine"] <= 1 for item in cosines.values())
    with pytest.raises(RunDirectoryError, match=r"give --checkpoint .*/iteration_0"):
        recredit_run(
            directory.path, ["stepwise"], [], directory.checkpoints / "iteration_1", tmp_path, (),
            truth=locate_truth(directory.path), reporter=ListReporter(),
        )  # fmt: skip


def sampled_by(version):
    """The change of a rollout whose tokens are all of that version."""

    def changed(rollout):
        steps = [
            step.model_copy(
                update={
                    "policy_logprobs": step.policy_logprobs.model_copy(update={"versions": ((0, version),)})
                }
            )
            for step in rollout.trajectory.steps
        ]
        trajectory = rollout.trajectory.model_copy(update={"steps": tuple(steps)})
        return rollout.model_copy(update={"trajectory": trajectory})

    return changed


def test_the_policy_that_sampled_an_iteration_is_found_by_its_version(run, tmp_path):
    """As with training.max_staleness, where it is not the checkpoint just before."""
    directory, job = run
    copied = open_run(copytree(directory.path, tmp_path / "run"))

    def source(iteration=None):
        found = find_source(copied, job_parts.policies(job), options(copied, iteration=iteration))
        return found.iteration, found.checkpoint.name

    played = read_rollouts(copied.rollouts_file("iteration_1"))
    mixed = [played[0], *map(sampled_by(1), played[1:])]
    write_rollouts(copied.rollouts_file("iteration_2"), list(map(sampled_by(0), played)))
    write_rollouts(copied.rollouts_file("iteration_3"), list(map(sampled_by(0), played)))
    write_rollouts(copied.rollouts_file("iteration_4"), mixed)
    write_rollouts(copied.rollouts_file("iteration_5"), list(map(sampled_by(4), played)))
    assert source() == (3, "iteration_0"), "the newest of a stored policy"
    assert source(1) == (1, "iteration_0")
    with pytest.raises(RunDirectoryError, match="policies of the versions 0 to 1 sampled iteration 4"):
        source(4)
    with pytest.raises(
        RunDirectoryError, match=r"version 4 that sampled iteration 5 is gone.*1 \(version 1\)"
    ):
        source(5)


def test_a_file_that_another_command_has_begun_meanwhile_keeps_its_lines(run, tmp_path):
    directory, _ = run
    stored = measure(run).file
    first, second = (TruthFile.open(tmp_path / "truth.jsonl", stored.setting) for _ in range(2))
    one, other = list(stored.truths.values())[:2]
    first.add(one)
    second.add(other)
    assert list(TruthFile.read(first.path, directory).truths.values()) == [one, other]


def test_what_cannot_be_measured_is_refused_by_name(run, trained, tmp_path):
    directory, job = run

    def refused(error, match, *, job=job, **changes):
        with pytest.raises(error, match=match):
            asyncio.run(measure_truth(directory, job, options(directory, out=tmp_path / "x", **changes)))

    refused(JobError, "--budget 119 is too small for a single decision", budget=119)
    refused(RunDirectoryError, "no rollouts of iteration 2; stored: 1$", iteration=2)
    training = job.training.model_copy(update={"kl_reward_coef": 0.1})
    refused(JobError, "kl_reward_coef is 0.1", job=job.model_copy(update={"training": training}))
    judged = job.model_copy(update={"rollout": job.rollout.model_copy(update={"reward_function": "lively"})})
    refused(JobError, "reward_function judges whole episodes, and no part of one", job=judged)
    off = job.model_copy(update={"training": job.training.model_copy(update={"step_rewards_mode": "off"})})
    refused(JobError, "--horizon cuts continuations short", horizon=2, job=off)
    short = job.model_copy(update={"rollout": job.rollout.model_copy(update={"max_turns": 2})})
    refused(JobError, "max_turns allows 2 decisions, and a stored episode has 3", job=short)
    for config, told in (
        ({"worth": 8}, "departed from the recorded episode"),
        ({"word": "round"}, "the prompt of decision . is another one"),
    ):
        other = job.model_copy(update={"rollout": job.rollout.model_copy(update={"env_config": config})})
        refused(
            TaskAppError,
            f"{told}.*was played in another environment than the task app has",
            job=other,
            decisions=2,
            continuations=2,
        )
    with pytest.raises(RunDirectoryError, match="is the truth of run 'tiny"):
        TruthFile.read(measure(run).file.path, replace(trained[0]))
    with pytest.raises(RunDirectoryError, match=r"other returns, with gamma = 0\.8 instead of 0\.5"):
        recredit_run(
            directory.path, [], [], None, tmp_path, ["algorithm.gamma=0.5"],
            truth=locate_truth(directory.path), reporter=ListReporter(),
        )  # fmt: skip
    with pytest.raises(RunDirectoryError, match="no truth is measured"):
        TruthFile.read(tmp_path / "none.jsonl", directory)


class OldTaskApp(ScriptedTaskApp):
    """It does not say yet whether an environment has snapshots."""

    async def create(self, request):
        return web.json_response({"env_id": "e", "info": {"conversation": False}})


async def test_an_environment_that_cannot_be_played_on_from_is_refused_by_name(run, url, tmp_path):
    directory, job = run

    async def refusal(url, env_name, config):
        rollout = job.rollout.model_copy(update={"env_name": env_name, "env_config": config})
        other = job.model_copy(update={"rollout": rollout, "services": tiny_job().services})
        with pytest.raises(JobError) as refused:
            await measure_truth(
                directory, at_the_task_app(other, url), options(directory, out=tmp_path / "none.jsonl")
            )
        assert not (tmp_path / "none.jsonl").exists()
        return str(refused.value)

    assert (await refusal(url, "forgetful", {})).startswith(
        "rollout.env_name: 'forgetful' has no snapshots, and the truth is measured by playing on from one"
    )
    document = {"document_content": "The code is 1.", "question": "What is it?", "ground_truth": "1"}
    told = await refusal(url, "documents", document)
    assert "'documents' is a conversation, which no snapshot holds" in told

    async def terminate(request):
        return web.json_response({})

    async with served(OldTaskApp(), routes={"/env/terminate": terminate}) as client:
        told = await refusal(client.url, "coins", {})
        assert f"a task app that does not say whether it has snapshots ({client.url}); update it" in told
