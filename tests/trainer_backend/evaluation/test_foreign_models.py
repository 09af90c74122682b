"""`turnwise eval --model --inference-url`: real HTTP to servers that know nothing of ours."""

import asyncio
import json
import tempfile
from hashlib import blake2b
from pathlib import Path

import pytest
from pydantic import SecretStr

from tests.conftest import TASK_APP_KEY, at_the_task_app, policy_server, task_app_thread, tiny_job
from tests.foreign_server import foreign_server, nonsense, repeats_the_key, words
from tests.trainer_backend.test_command_line import turnwise
from trainer_backend import learner_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.errors import NothingToLearnFrom, TaskAppError
from trainer_backend.evaluation.play import evaluate
from trainer_backend.job.load import load_job
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.rundir.rollout_files import read_rollouts

KEY = "sk-very-secret-0123456789abcdef"
ROOT = Path(__file__).parents[3]


def short_job(**overrides):
    """Two worlds, three decisions each."""
    return tiny_job(rollout__max_turns=3, evaluation__instances=2, **overrides)


def asked(server) -> Inference:
    return Inference(server.url, "their-model", SecretStr(KEY))


def played(job, player, **options):
    return asyncio.run(evaluate(at_the_task_app(job), player, **options))


def test_plain_openai_is_spoken_and_the_episodes_are_kept(tmp_path):
    with foreign_server(key=KEY) as server:
        found = played(short_job(), asked(server), keep=tmp_path / "episodes.parquet")
    assert (found.unique.count, found.decisions.mean, found.failures) == (2, 3.0, {})
    assert (found.prompt_tokens, found.sampled_tokens) == (600, 42)  # 2 worlds, 3 decisions
    assert (found.policy, found.models) == (f"their-model at {server.url}", ("their-model-2026-01-01",))
    assert set(server.bodies[0]) == {
        "model", "messages", "tools", "tool_choice", "temperature", "top_p", "max_tokens", "seed"
    }  # fmt: skip
    assert not any(name.startswith("x-turnwise") for headers in server.headers for name in headers)
    stored = read_rollouts(tmp_path / "episodes.parquet")
    assert [rollout.trajectory.seed for rollout in stored] == [2**30, 2**30 + 1]
    assert all(step.policy_logprobs is None for rollout in stored for step in rollout.trajectory.steps)


def test_a_world_that_failed_once_is_played_again_and_counted():
    with foreign_server(nonsense, key=KEY) as server:
        found = played(short_job(), asked(server))
    assert (found.unique.count, found.lost, found.failures) == (2, 0, {"inference_protocol": 1})


def test_nothing_but_nonsense_is_told_and_kept_as_failures(tmp_path):
    path = tmp_path / "episodes.parquet"
    with (
        foreign_server(*[nonsense] * 4, key=KEY) as server,
        pytest.raises(NothingToLearnFrom, match="evaluation: 2 of 2 rollouts lost") as caught,
    ):
        played(short_job(), asked(server), keep=path)
    assert "answered nonsense: its reply is" in str(caught.value)
    assert [rollout.failure.code for rollout in read_rollouts(path)] == ["inference_protocol"] * 2


def test_a_task_app_of_its_operators_refuses_a_host_that_is_not_on_its_list(monkeypatch):
    monkeypatch.setenv("ENVIRONMENT_API_KEY", TASK_APP_KEY.get_secret_value())
    with (
        foreign_server(key=KEY) as server,
        task_app_thread() as operators,
        pytest.raises(TaskAppError, match="the operator extends it with TURNWISE_ALLOWED") as caught,
    ):
        played(short_job(services__task_url=operators), asked(server))
    place = server.url.removeprefix("http://")
    assert f"inference host {place} is not on this task app's list" in str(caught.value)
    assert server.bodies == []


async def test_our_own_gateway_asked_as_a_foreign_one_gives_the_checkpoints_figures(trained):
    directory, reporter, _ = trained
    job, folder = directory.job(), directory.checkpoints / "iteration_2"
    model = job.model.model_copy(update={"preset": None, "path": folder})
    learner = LocalLearner.fresh(learner_parts.learner_config(job.model_copy(update={"model": model})), [])
    job = at_the_task_app(job)
    with policy_server(job) as gateway:
        async with gateway.serving(learner) as server:
            await server.publish(0)
            over_the_wire = await evaluate(job, server.inference)
    row = next(row for row in reporter.rows if row["kind"] == "evaluation" and row["iteration"] == 2)
    assert {name: rate.mean for name, rate in over_the_wire.rates.items()} == row["eval/success_rates"]
    assert over_the_wire.unique.mean == row["eval/unique_achievements"]
    assert over_the_wire.env_reward.mean == pytest.approx(row["eval/env_reward"])


def test_the_key_is_in_no_output_and_no_file(tmp_path, monkeypatch):
    """A key in the environment, and a server that repeats it wherever it can."""
    words = ("crafter", "-n", "1", "-r", "2", "--set", "rollout.max_turns=3", "-m", "their-model")
    monkeypatch.setenv("THEIR_KEY", KEY)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with foreign_server(*[repeats_the_key] * 9, key=KEY) as server:
        asks = ("--inference-url", server.url, "--api-key-env", "THEIR_KEY")
        keeps = ("--json", "figures.json", "--rollouts", "episodes.parquet")
        done = turnwise("eval", *words, *asks, *keeps, cwd=tmp_path)
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert done.returncode == 0, done.stderr
    assert KEY not in done.stdout + done.stderr
    one, other = read_rollouts(tmp_path / "episodes.parquet")
    assert "You sent me Bearer [key]." in one.model_dump_json()
    assert json.loads((tmp_path / "figures.json").read_text())["models"] == ["their-model-2026-01-01"]
    assert one.trajectory.seed == other.trajectory.seed == 2**30, "one world, played twice"
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


GAMES = json.loads((ROOT / "tests/task_app/environments/crafter/balrog_games.json").read_text())["games"]


def test_a_server_gets_the_requests_of_balrog_and_the_figures_are_its_progress():
    game = next(game for game in GAMES if game["seed"] == 61)  # most of its answers are empty
    turns = len(game["answers"])
    config, shorter = ROOT / "configs/crafter_balrog.toml", f"rollout.max_turns={turns}"
    whole = load_job(config).config
    assert (whole.rollout.max_turns, whole.evaluation.instances) == (2_000, 10), "the limits are its own too"
    job = load_job(config, [f"evaluation.seeds=[{game['seed']}]", shorter]).config
    with foreign_server(*map(words, game["answers"])) as server:
        result = asyncio.run(evaluate(at_the_task_app(job), Inference(server.url, "their-model", None)))
    prompts = [
        [[message["role"], message["content"]] for message in body.pop("messages")] for body in server.bodies
    ]
    digests = [blake2b(json.dumps(prompt).encode(), digest_size=8).hexdigest() for prompt in prompts]
    assert digests == game["digests"]
    assert server.bodies == [{"model": "their-model", "temperature": 1.0, "max_tokens": 8192}] * turns
    assert result.outcome.mean / 22 == game["progression"]
    assert result.endings == {"max_decisions": 1}
    assert result.invalid_frac == game["answers"].count("") / turns
