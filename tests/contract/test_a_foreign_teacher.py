"""A warm-up on a foreign model: its key comes from the environment and goes nowhere else."""

import asyncio

import pytest

from tests.conftest import at_the_task_app, rows_of, tiny_job, train_job
from tests.foreign_server import foreign_server
from trainer_backend.errors import JobError
from trainer_backend.evaluation.play import TaskAppPolicy, evaluate
from trainer_backend.rundir.rollout_files import read_rollouts

KEY = "sk-very-secret-0123456789abcdef"


def job_with_teacher(url):
    return tiny_job(
        warmup__policy_name="openai",
        warmup__policy_config={"inference_url": url, "model": "their-model", "ask_token_ids": False},
        warmup__api_key_env="THEIR_KEY",
        warmup__episodes=6,
        warmup__epochs=1,
        training__iterations=0,
        evaluation__instances=1,
    )


def test_a_model_is_imitated_without_token_ids_and_its_key_is_stored_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", KEY)
    with foreign_server(key=KEY) as server:
        directory, reporter, _ = train_job(job_with_teacher(server.url), tmp_path / "run")
    (teacher,) = rows_of(directory, "teacher")
    (warmup,) = rows_of(directory, "warmup")
    assert (teacher["eval/episodes"], teacher["rollout/failed"]) == (6, 0.0)
    assert warmup["warmup/examples"] == len(server.bodies) == 6 * 8  # 8 decisions an episode, none refused
    assert len({body["seed"] for body in server.bodies}) == 6 * 8
    stored = read_rollouts(directory.rollouts_file("warmup"))
    assert all(rollout.trajectory.seed < 2**30 for rollout in stored)  # worlds of training
    for path in directory.path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    assert not any(KEY in line for line in reporter.lines)


def test_the_teacher_is_evaluated_as_the_job_configures_it_with_its_key(monkeypatch):
    monkeypatch.setenv("THEIR_KEY", KEY)
    with foreign_server(key=KEY) as server:
        found = asyncio.run(evaluate(at_the_task_app(job_with_teacher(server.url)), TaskAppPolicy("openai")))
    assert (found.unique.count, found.models) == (1, ("their-model-2026-01-01",))
    assert len(server.bodies) == 8


def test_a_variable_without_a_key_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("THEIR_KEY", raising=False)
    with pytest.raises(JobError, match=r"warmup.api_key_env: the environment variable THEIR_KEY is not set"):
        train_job(job_with_teacher("http://127.0.0.1:9"), tmp_path / "run")
