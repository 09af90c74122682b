"""What only a task app can find wrong in a job, asked of a real one: told by its TOML key."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tests.conftest import tiny_job, with_its_plugins
from trainer_backend import job_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.collect.trial import try_job
from trainer_backend.errors import JobError
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.schema import JobConfig

GATEWAY = Inference("http://127.0.0.1:9", "tiny/actor", SecretStr(""))
FAULTY = Path(__file__).parents[1] / "faulty_environment.py"
SENT = "services.gateway_host and services.gateway_port, sent to rollout.policy_name"
FORBIDDEN = "a gateway that the operator does not allow"
NO_TEACHER = {"warmup__policy_name": "crafter_techer"}

# Overrides of the tiny job, and what is told.
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "environment": (
        {"rollout__env_name": "craftr"},
        "rollout.env_name: unknown environment 'craftr'. Did you mean 'crafter'?",
    ),
    "key of the environment": (
        {"rollout__env_config": {"txt": "compact"}},
        "rollout.env_config.txt: unknown key 'txt'. Did you mean 'text'?",
    ),
    "value of the environment": (
        {"rollout__env_config": {"max_actions": 99}},
        "rollout.env_config.max_actions: Input should be less than or equal to 8; found 99",
    ),
    "conversation in an environment without one": (
        {"multi_turn__enable": True, "multi_turn__statelm_enabled": True},
        "multi_turn.statelm_enabled: it has no effect in 'crafter', whose prompts are fresh for each",
    ),
    "policy": (
        {"rollout__policy_name": "opnai"},
        "rollout.policy_name: unknown policy 'opnai'. Did you mean 'openai'?",
    ),
    "key of the policy": (
        {"rollout__policy_config": {"max_attempt": 2}},
        "rollout.policy_config.max_attempt: unknown key 'max_attempt'",
    ),
    "a policy that is no model": (
        {"rollout__policy_name": "crafter_teacher"},
        f"{SENT} 'crafter_teacher' as 'inference_url': unknown key 'inference_url'",
    ),
    FORBIDDEN: (
        {},
        f"{SENT} 'openai' as 'inference_url': inference host 10.1.2.3:5 is not on this task app's list",
    ),
    "temperature of the evaluation": (
        {"evaluation__temperature": 1000.0},
        "evaluation.temperature, sent to rollout.policy_name 'openai' as 'temperature': "
        "Input should be less than or equal to 100; found 1000.0",
    ),
    "reward function": (
        {"rollout__reward_function": "fair"},
        "rollout.reward_function: unknown reward function 'fair'; it has none",
    ),
    "teacher": (NO_TEACHER, "warmup.policy_name: unknown policy 'crafter_techer'"),
    "key of the teacher": (
        {"warmup__policy_config": {"memry": False}},
        "warmup.policy_config.memry: unknown key 'memry'",
    ),
    "seed of the teacher": (
        {"warmup__policy_config": {"seed": -1}},
        "warmup.policy_config.seed: Input should be greater than or equal to 0; found -1",
    ),
    "a teacher that asks a model of its own": (
        {
            "warmup__policy_name": "openai",
            "warmup__policy_config": {"inference_url": "http://gpu:1", "model": "m"},
        },
        "warmup.policy_config.inference_url: inference host gpu:1 is not on this task app's list",
    ),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What one task app said to each job; to good ones nothing. It holds one session of a kind at a time."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TURNWISE_MAX_SESSIONS", "1")
        yield asyncio.run(_ask(tmp_path_factory.mktemp("trial") / "task_app.log"))


async def _ask(log_file: Path) -> dict[str, str]:
    async with job_parts.task_apps(tiny_job(), log_file) as apps:

        async def answer(job: JobConfig, gateway: Inference = GATEWAY, *, from_scratch: bool = True) -> str:
            planner = job_parts.planner(job, "run.1", gateway)
            try:
                await try_job(planner, apps, from_scratch=from_scratch)
            except JobError as error:
                return str(error)
            return ""

        found = {name: await answer(tiny_job(**keys)) for name, (keys, _) in MISTAKES.items()}
        elsewhere = Inference("http://10.1.2.3:5", "tiny/actor", SecretStr(""))
        found[FORBIDDEN] = await answer(tiny_job(), elsewhere)
        found["good"] = await answer(tiny_job())
        found["good, without warm-up"] = await answer(tiny_job().model_copy(update={"warmup": None}))
        found["good, the teacher is done"] = await answer(tiny_job(**NO_TEACHER), from_scratch=False)
        mixed = {"rollout_only": (RolloutOnlyTable(model_path=Path("m")),)}
        found["good, mixed"] = await answer(tiny_job().model_copy(update=mixed))
        found["url"] = apps.serving[0].url
        return found


FAULTS = {
    "no_reset": r"environment\.reset raised RuntimeError: no level of this number",
    "stop_iteration": r"environment\.step raised StopIteration",
    "exit": r"environment\.step raised SystemExit: 3",
    "cancel": r"environment\.step raised CancelledError",
    "bad_text": r"environment\.step raised WithoutText: its text cannot be read, which raises ValueError",
}


async def test_an_environment_that_raises_is_told_with_file_and_line_before_anything_is_played(
    tmp_path: Path,
):
    def faulty(kind: str) -> JobConfig:
        return tiny_job(
            rollout__env_name="faulty", rollout__env_config={"kind": kind}, services__task_plugins=[FAULTY]
        ).model_copy(update={"warmup": None})

    with with_its_plugins(faulty("fine")) as there:
        async with job_parts.task_apps(there, tmp_path / "task_app.log") as apps:
            for kind in ("fine", "numpy_values"):
                await try_job(job_parts.planner(faulty(kind), "run.1", GATEWAY), apps, from_scratch=True)
            for kind, told in FAULTS.items():
                match = rf"^rollout\.env_name: {told} \(faulty_environment\.py:\d+\)"
                with pytest.raises(JobError, match=match):
                    await try_job(job_parts.planner(faulty(kind), "run.1", GATEWAY), apps, from_scratch=True)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_by_its_key(told: dict[str, str], mistake: str):
    _, expected = MISTAKES[mistake]
    assert told[mistake].startswith(expected)
    assert f"(says the task app at {told['url']})" in told[mistake]


def test_a_good_job_is_taken_and_leaves_no_session_behind(told: dict[str, str]):
    # with room for one session, a second trial would find none if the first had kept its own
    assert [text for name, text in told.items() if name.startswith("good")] == [""] * 4
