"""`turnwise recredit` and `turnwise inspect` on the tiny trained run."""

import json
import math
import re
from contextlib import asynccontextmanager
from dataclasses import replace
from shutil import copytree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shared_schemas.messages import Message
from tests.conftest import ListReporter, tiny_job
from tests.trainer_backend.pages.hand_made import WOOD, rollout
from trainer_backend import job_parts, learner_parts
from trainer_backend.__main__ import app
from trainer_backend.core.critic import ByToken
from trainer_backend.core.truth import TrueAdvantage
from trainer_backend.credit.inspect import episode_view, find_rollout
from trainer_backend.credit.recredit import (
    Recredited,
    figures,
    recredit_run,
    recredit_tables,
    recredited,
    select_advantages,
    stored_iterations,
)
from trainer_backend.errors import AdvantageError, RunDirectoryError
from trainer_backend.parts import CreditedEpisode
from trainer_backend.plugins import ESTIMATORS
from trainer_backend.rundir.layout import RunDirectory, open_run
from trainer_backend.rundir.rollout_files import Credit, finished_rows, rollout_ids, write_rollouts
from trainer_backend.rundir.truth_file import TruthFile, TruthSetting, select_rewards


@pytest.fixture
def directory(trained):
    return trained[0]


def recredit(directory, out, *, names=(), iterations=(), checkpoint=None, overrides=(), truth=None):
    tables, folder = recredit_run(
        directory.path, names, iterations, checkpoint, out, overrides, truth=truth, reporter=ListReporter()
    )
    return printed(tables), json.loads((folder / "figures.json").read_text()), folder


def printed(tables, width=200):
    console = Console(width=width, record=True)
    console.print(tables, crop=False)
    return console.export_text()


def test_the_jobs_own_estimator_gives_what_training_stored(directory, tmp_path):
    _, _, folder = recredit(directory, tmp_path / "two", names=["stepwise", "grpo"], iterations=[1])
    assert (folder / "agreement.html").exists(), "two are enough to compare"
    recredit(directory, tmp_path, names=["stepwise"], iterations=[1])
    assert not (tmp_path / "agreement.html").exists()
    columns = ["rollout_id", "decisions"]
    stored = finished_rows(directory.rollouts_file("iteration_1"), columns)
    assert finished_rows(tmp_path / "stepwise.parquet", columns) == stored


def test_every_estimator_is_computed_or_refused_by_name(directory, tmp_path):
    shown, figures, folder = recredit(directory, tmp_path)
    assert figures["estimators"].keys() | figures["refused"].keys() == ESTIMATORS.keys()
    assert {"grpo", "rloo", "stepwise", "reinforce_pp"} <= figures["estimators"].keys()
    pair = next(pair for pair in figures["pairs"] if pair["estimators"] == ["grpo_no_std", "rloo"])
    assert pair["correlation"] == pytest.approx(1.0), "one is the other times G / (G - 1)"
    assert b"saved-charts" in (folder / "agreement.html").read_bytes()
    assert all(name in shown for name in ESTIMATORS)
    (heads,) = re.findall("^correlation .*", shown, re.MULTILINE)
    assert heads.split() == ["correlation", *map(str, range(1, len(figures["estimators"])))]
    tables, _ = recredit_run(directory.path, (), (), None, tmp_path, (), reporter=ListReporter())
    assert not {*"…│┃━"} & {*printed(tables, width=60)}, (
        "every number is whole, however narrow the terminal is"
    )


def test_the_ranks_of_a_jobs_learner_find_the_cosines_under_a_name_of_their_own(
    directory, tmp_path, monkeypatch
):
    """Their numbers are those of one process (`test_learner_ranks.py`), whose factory stands for theirs."""
    asked = []

    @asynccontextmanager
    async def ranks(job, run, *_):
        asked.append((job.learner.ranks, run.run_id))
        yield learner_parts.local_learners(job.model_copy(update={"learner": tiny_job().learner}))

    monkeypatch.setattr(job_parts, "learner_process", ranks)
    _, found, _ = recredit(
        directory, tmp_path, names=["grpo_no_std", "rloo", "stepwise"], iterations=[1],
        checkpoint=directory.checkpoints / "iteration_2",
        overrides=("cluster.launcher=local", "learner.nproc_per_node=2"),
    )  # fmt: skip
    assert asked == [(2, f"{directory.run_id}.recredit")]
    cosines = {tuple(pair["estimators"]): pair["gradient_cosine"] for pair in found["pairs"]}
    assert cosines["grpo_no_std", "rloo"] == pytest.approx(1.0, abs=1e-5), (
        "one is the other times G / (G - 1)"
    )
    assert -1.0 <= cosines["rloo", "stepwise"] < 1.0


def test_an_estimator_whose_critic_was_never_trained_or_that_lacks_its_states_is_refused_by_name(
    directory, tmp_path
):
    shown, figures, _ = recredit(directory, tmp_path, names=["stepwise", "gae", "gae_token", "gigpo"])
    assert "0 values of a critic for 8 decisions" in figures["refused"]["gae"]
    assert "no values of its tokens" in figures["refused"]["gae_token"]
    assert "gae_token: rollout" in shown
    assert "gigpo" in figures["refused"] and figures["met_after_start_frac"] == {}
    assert "occurs twice" not in shown, "no estimator compares states"
    with pytest.raises(AdvantageError, match=r"no estimator can be computed\. gae: .*They are stored while"):
        recredit(directory, tmp_path, names=["gae"])


def test_the_truth_of_an_iteration_is_compared_with_that_iteration_alone(directory, tmp_path):
    job = directory.job()
    setting = TruthSetting(
        run_id=directory.run_id, iteration=1, checkpoint="iteration_0", gamma=job.algorithm.gamma,
        continuations=2, horizon=None, fresh_draws=False, seed=0, play={},
        rewards=select_rewards(job.training),
    )  # fmt: skip
    file = TruthFile(tmp_path / "truth.jsonl", setting, [])
    name = rollout_ids(directory.rollouts_file("iteration_1"))[0]
    file.add(TrueAdvantage(name, 1, 0.0, 1.0, 0.1, None, 4, 0, 2, 9))
    _, found, _ = recredit(directory, tmp_path, names=["stepwise"], truth=file.path)
    assert (found["episodes"], found["truth"]["noise"]["decisions"]) == (8, 1)
    with pytest.raises(RunDirectoryError, match="the truth of iteration 1, and --iteration asks for 2"):
        recredit(directory, tmp_path, names=["stepwise"], iterations=[2], truth=file.path)


def test_with_a_truth_decisions_that_were_not_measured_have_no_gradient():
    played = rollout(1, [WOOD, ()])
    truth = TrueAdvantage(played.rollout_id, 2, 0.0, 5.0, 0.1, None, 4, 0, 2, 9)
    by_decision = Credit([0.0, 0.0], [1.0, 2.0])
    by_token = replace(by_decision, token_advantages=ByToken([[1.0, 1.0], [1.5, 2.5]]))
    credited = Recredited([played], {"rloo": [by_decision], "gae_token": [by_token]}, {})
    assert select_advantages(credited, {(truth.rollout_id, truth.turn): truth}) == {
        "truth": [[0.0, 5.0]], "rloo": [[0.0, 2.0]], "gae_token": [ByToken([[0.0, 0.0], [1.5, 2.5]])],
    }  # fmt: skip
    assert select_advantages(credited, None) == {
        "rloo": [[1.0, 2.0]],
        "gae_token": [by_token.token_advantages],
    }


def met_in(*keys_by_episode):
    """Siblings whose decisions were made in these states, each with a text of its own."""
    rollouts = []
    for sibling, keys in enumerate(keys_by_episode):
        played = rollout(1, [WOOD, *[()] * (len(keys) - 1)], sibling=sibling)
        steps = [
            step.model_copy(
                update={
                    "observation_data": step.observation_data.model_copy(
                        update={
                            "state_keys": {"default": key},
                            "messages": (Message(role="user", content=f"you are at {key}"),),
                        }
                    )
                }
            )
            for step, key in zip(played.trajectory.steps, keys, strict=True)
        ]
        episode = played.trajectory.model_copy(update={"steps": tuple(steps)})
        rollouts.append(played.model_copy(update={"trajectory": episode}))
    return rollouts


MET = " of the decisions after the first of their episode have a {0} that occurs twice in their group"


@pytest.mark.parametrize(
    ("second", "share", "of_states", "of_texts"),
    [
        # Of four decisions after the first ones two were made in state a, or none in a state of another one.
        ("sac", 0.5, "; states are compared by gigpo, g2po.\n", "; texts are compared by gigpo_soft.\n"),
        (
            "scd",
            0.0,
            ", so gigpo, g2po can compare first decisions only; another "
            "algorithm.state_hashing_function may distinguish fewer states.\n",
            ", so gigpo_soft can only compare different texts",
        ),
    ],
)
def test_how_often_states_and_texts_were_met_twice_is_said_and_what_is_left_to_compare(
    second, share, of_states, of_texts
):
    job = tiny_job(algorithm__advantage="gigpo", algorithm__context_depth=1)
    names = ["stepwise", "gigpo", "gigpo_soft", "g2po"]
    found = recredited(job_parts.credit(job), [met_in("sab", second)], names)
    assert not found.refused
    shown = printed(recredit_tables(found), width=400)
    assert figures(found)["met_after_start_frac"] == {"state": share, "text": share}
    assert f"\n\n{share:.1%}" + MET.format("state") + of_states in shown
    assert f"{share:.1%}" + MET.format("text") + of_texts in shown


def test_another_reward_mode_is_set_as_in_training(directory, tmp_path):
    recredit(directory, tmp_path, names=["grpo"], overrides=["training.step_rewards_mode=env_sparse"])
    for row in finished_rows(tmp_path / "grpo.parquet", ["decisions"]):
        assert all(decision["reward"] == decision["env_reward"] for decision in row["decisions"])


def test_rollouts_that_were_played_with_rewards_off_are_credited_by_their_counters(directory):
    job = directory.job()
    (first, *_), *_ = stored_iterations(directory, [1])
    bare_steps = tuple(
        step.model_copy(update={"metadata": type(step.metadata)()}) for step in first.trajectory.steps
    )
    bare = first.model_copy(update={"trajectory": first.trajectory.model_copy(update={"steps": bare_steps})})
    credit = job_parts.credit(job)
    with_records, without = (
        recredited(credit, [[rollout]], ["grpo"]).credits["grpo"][0].rewards_T for rollout in (first, bare)
    )
    assert without == with_records


def test_an_episode_is_shown_decision_by_decision(directory):
    rollout, credits = find_rollout([directory], "train/1/0/1")
    shown = printed(episode_view(rollout, credits, full=False))
    assert shown.count("decision ") == len(rollout.trajectory.steps)
    assert rollout.trajectory.steps[0].observation_data.messages[-1].content.split()[0] in shown
    assert f"{credits[0]['return_to_go']:+.3f}" in shown
    unique, every = (sum(row[name] for row in credits) for name in ("unique_delta", "ach_delta"))
    assert f"achievements over its decisions: unique {unique}, all {every}\n" in shown
    counts = shown.count("user: "), printed(episode_view(rollout, credits, full=True)).count("user: ")
    assert counts == (0, len(rollout.trajectory.steps)), "whole prompts say who speaks"


def test_an_episode_is_shown_with_the_credit_of_an_estimator_that_did_not_train(directory, tmp_path):
    run = open_run(copytree(directory.path, tmp_path / "run"))
    with pytest.raises(RunDirectoryError, match=r"turnwise recredit .*/run --advantage rloo` credits"):
        find_rollout([run], "train/1/0/1", "rloo")
    with pytest.raises(RunDirectoryError, match="only rollouts of training are credited"):
        find_rollout([run], rollout_ids(run.rollouts_file("evaluation_0"))[0], "rloo")
    recredit_run(run.path, ["rloo"], [], None, None, (), reporter=ListReporter())
    rollout, credits = find_rollout([run], "train/1/0/1", "rloo")
    shown = printed(episode_view(rollout, credits, full=False))
    assert len(re.findall("advantage .* = .*mean of .* siblings", shown)) == len(credits)
    assert credits[0]["estimator"] == "rloo" != find_rollout([run], "train/1/0/1")[1][0]["estimator"]


def test_an_id_that_fits_several_rollouts_and_an_iteration_that_is_not_stored_are_refused(
    directory, tmp_path
):
    with pytest.raises(RunDirectoryError, match="stored rollouts are '/1'"):
        find_rollout([directory], "/1")
    with pytest.raises(RunDirectoryError, match="no rollouts of iteration 9; stored: 1, 2"):
        stored_iterations(directory, [9])
    # A whole id is no end of another one.
    run, found = RunDirectory(tmp_path, "r"), rollout(1, [WOOD])
    other = found.model_copy(update={"rollout_id": f"other-{found.rollout_id}"})
    write_rollouts(run.rollouts_file("iteration_1"), [other, found])
    assert find_rollout([run], found.rollout_id)[0] == found


def test_the_commands_print_and_name_the_folder(directory, tmp_path):
    done = CliRunner().invoke(
        app, ["recredit", str(directory.path), "--advantage", "grpo", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0 and "written:" in done.output
    shown = CliRunner().invoke(app, ["inspect", "train/2/0/0", "--run", str(directory.path)])
    assert shown.exit_code == 0 and "decision 1" in shown.output
    assert re.search(r"advantage \S+ = return \S+ - baseline \S+; baseline: mean of 3 siblings", shown.output)


@pytest.mark.parametrize("aggregation", ["token_mean", "episode_equal", "constant"])
def test_gradients_of_two_parts_of_the_decisions_lie_in_one_plane_with_that_of_all(directory, aggregation):
    """g = a g' + b g'' with a, b > 0, so the cosines' Gram determinant is 0; decisions without advantages are
    left out of a gradient, and change its length alone."""
    job = directory.job_of_stored([f'training.aggregation="{aggregation}"']).config
    credit = job_parts.credit(job)
    (played,) = stored_iterations(directory, [1])
    advantages = [item.advantages_T for item in credit.credits(played)]
    episodes = [CreditedEpisode(item.rollout_id, credit.policies.segments_by(item), ()) for item in played]

    def of_turns(parity):
        return [[value * (t % 2 == parity) for t, value in enumerate(own)] for own in advantages]

    cosines = job_parts.gradient_cosines(
        job, directory.checkpoints / "iteration_0", directory, episodes,
        {"all": advantages, "even": of_turns(0), "odd": of_turns(1)}, reporter=ListReporter(),
    )  # fmt: skip
    even, odd, parts = cosines["all", "even"], cosines["all", "odd"], cosines["even", "odd"]
    assert max(even, odd) < 0.999
    assert 1 + 2 * even * odd * parts - even**2 - odd**2 - parts**2 == pytest.approx(0, abs=1e-5)
    assert math.acos(even) + math.acos(odd) == pytest.approx(math.acos(parts), abs=1e-2), "between the two"
