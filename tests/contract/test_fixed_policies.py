"""Fixed policies and teachers over real HTTP: a task app, the gateway of a job, and foreign servers."""

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import PolicyLogprobs
from tests.conftest import ListReporter, at_the_task_app, policy_server, rows_of, tiny_job, train_job
from tests.exact_server import exact_server
from tests.foreign_server import foreign_server
from trainer_backend import job_parts, learner_parts
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.segments import build_segments
from trainer_backend.errors import JobError, NothingToLearnFrom
from trainer_backend.evaluation.play import Checkpoint, TaskAppPolicy, evaluate
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.scoring import Scorer
from trainer_backend.models import build_preset, save_model_folder
from trainer_backend.models.folder import load_tokenizer
from trainer_backend.run.fixed_policies import FixedPolicies
from trainer_backend.run.preflight import checked_folders
from trainer_backend.rundir.layout import FIXED_RECORD, RunDirectory
from trainer_backend.rundir.rollout_files import read_rollouts

KEY = "sk-very-secret-0123456789abcdef"


@pytest.fixture(autouse=True)
def their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)


@pytest.fixture(scope="module")
def folders(
    trained: tuple[RunDirectory, Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Path]:
    """Models of the same tokens: of a warm-up, of two iterations after it, and one that knows nothing."""
    checkpoints = trained[0].path / "checkpoints"
    fresh = tmp_path_factory.mktemp("fresh")
    tokenizer = load_tokenizer(checkpoints / "iteration_0")
    save_model_folder(fresh, build_preset("tiny-0.3m", tokenizer, seed=7), tokenizer)
    return {"warm": checkpoints / "iteration_0", "later": checkpoints / "iteration_2", "fresh": fresh}


def mixed_job(actor: Path, *, alpha: float = 0.5, **overrides: Any) -> JobConfig:
    """8 episodes of 3 decisions an iteration, no warm-up, each rollout drawn for itself."""
    job = tiny_job(
        **{
            "model__preset": None,
            "model__path": str(actor),
            "rollout__max_turns": 3,
            "training__iterations": 1,
            "evaluation__instances": 1,
            "rollout_allocation_schedule__alpha": alpha,
            "rollout_allocation_schedule__unit": "rollout",
            **overrides,
        }
    )
    return job.model_copy(update={"warmup": None})


async def played(job: JobConfig, learner: LocalLearner, tmp_path: Path) -> Sequence[Rollout]:
    """The first iteration."""
    folders = checked_folders(job.fixed_policies, job.model)
    with policy_server(job) as gateway:
        fixed = FixedPolicies.of(job.fixed_policies, folders, learner.facts(), gateway.table)
        async with (
            job_parts.task_apps(at_the_task_app(job), tmp_path / "log") as apps,
            gateway.serving(learner, fixed) as server,
        ):
            planner = job_parts.planner(job, uuid4().hex, server.inference)  # others play there too
            batch = await Dispatcher(apps, timeout_s=100).collect(planner.training(1))
        fixed.verify()
    assert not batch.failed, batch.failed
    return batch.rollouts


def exact(rollout: Rollout) -> list[PolicyLogprobs]:
    return [step.policy_logprobs for step in rollout.trajectory.steps]


def scorer_in(folder: Path) -> Scorer:
    """As a learner that holds the model of the folder scores."""
    return LocalLearner.fresh(
        learner_parts.learner_config(tiny_job(model__preset=None, model__path=str(folder))), []
    ).scorer


def scored(scorer: Scorer, rollout: Rollout) -> list[float]:
    segments = build_segments(rollout.trajectory.steps, rollout_id=rollout.rollout_id)
    found = scorer.score(segments, LoopKeys(row_tokens=512, micro_batch_tokens=1024))
    return [value for part in found for value in part]


def sampled(rollout: Rollout) -> list[float]:
    return [value for call in exact(rollout) for value in call.logprobs]


def by_policy(job: JobConfig, rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    names = {job_parts.credit(job).policies.policy_by(rollout) for rollout in rollouts}
    return {
        name: [item for item in rollouts if job_parts.credit(job).policies.policy_by(item) == name]
        for name in names
    }


@pytest.fixture(scope="module")
def mixed(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Rollout]]:
    """An iteration by policy."""
    job = mixed_job(
        folders["fresh"],
        alpha=0.4,
        rollout_only__model_path=str(folders["warm"]),
        rollout__episodes_per_batch=16,
        rollout__allow_truncated_sampling=True,
    )
    (fixed,) = job.rollout_only
    cut = fixed.model_copy(update={"name": "cut", "top_k": 1})
    job = job.model_copy(update={"rollout_only": (fixed, cut)})
    learner = LocalLearner.fresh(learner_parts.learner_config(job), [])
    return by_policy(job, asyncio.run(played(job, learner, tmp_path_factory.mktemp("mixed"))))


def test_rollouts_of_a_fixed_policy_have_the_ids_and_log_probs_that_a_learner_of_its_weights_finds(
    mixed: dict[str, list[Rollout]], folders: Mapping[str, Path]
):
    assert {name: len(found) > 0 for name, found in mixed.items()} == {
        ACTOR: True, "fixed": True, "cut": True
    }  # fmt: skip
    owner = scorer_in(folders["warm"])
    for rollout in mixed["fixed"]:
        assert (rollout.trajectory.model, {call.versions for call in exact(rollout)}) == (
            "tiny/fixed", {((0, 0),)}
        )  # fmt: skip
        assert scored(owner, rollout) == pytest.approx(sampled(rollout), abs=1e-4)
    for rollout in mixed[ACTOR]:
        assert max(abs(a - b) for a, b in zip(scored(owner, rollout), sampled(rollout), strict=True)) > 0.1


def test_what_is_drawn_from_a_part_of_the_vocabulary_has_its_probability_there(
    mixed: dict[str, list[Rollout]],
):
    for rollout in mixed["cut"]:
        assert sampled(rollout) == pytest.approx([0.0] * len(sampled(rollout)), abs=1e-6)


def assert_key_is_nowhere(directory: RunDirectory, reporter: ListReporter) -> None:
    for path in directory.path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    assert not any(KEY in line for line in reporter.lines)


def remote_job(folders: Mapping[str, Path], url: str, *, alpha: float = 0.5, **keys: Any) -> JobConfig:
    """`keys` of [rollout_only], or of another table as `table__key`."""
    remote = {"inference_url": url, "model": "their/model-1", "api_key_env": "THEIR_KEY", **keys}
    named = {key if "__" in key else f"rollout_only__{key}": value for key, value in remote.items()}
    return mixed_job(folders["later"], alpha=alpha, rollout__allow_truncated_sampling=True, **named)


def test_a_foreign_server_samples_under_the_policys_name_and_its_key_is_stored_nowhere(
    folders: Mapping[str, Path], tmp_path: Path
):
    with exact_server(folders["warm"], key=KEY) as server:
        job = remote_job(folders, server.url)
        directory, reporter, progress = train_job(job, tmp_path / "run")
    assert progress.iteration == 1
    found = by_policy(job, read_rollouts(directory.rollouts_file("iteration_1")))
    owner = scorer_in(folders["warm"])
    for rollout in found["fixed"]:
        assert rollout.trajectory.model == "tiny/fixed"
        assert scored(owner, rollout) == pytest.approx(sampled(rollout), abs=1e-4)
    (row,) = rows_of(directory, "iteration")
    assert row["mixture/fixed/episodes"] == len(found["fixed"]) > 0
    # two requests were the probe's
    assert len(server.bodies) == 2 + sum(len(rollout.trajectory.steps) for rollout in found["fixed"])
    assert all(type(body["prompt"]) is list for body in server.bodies[1:]), "ids, and no messages"
    assert f"fixed policy 'fixed': their/model-1 at {server.url} returns exact tokens, which" in "".join(
        reporter.lines
    )
    recorded = json.loads((directory.path / FIXED_RECORD).read_text())
    assert recorded == {"fixed": {"model": "their/model-1", "url": server.url}}
    assert_key_is_nowhere(directory, reporter)


def test_the_same_weights_play_the_same_episodes_here_and_at_a_server(
    folders: Mapping[str, Path], tmp_path: Path
):
    with exact_server(folders["warm"], key=KEY) as server:
        there = remote_job(folders, server.url, alpha=0.0)
        learner = LocalLearner.fresh(learner_parts.learner_config(there), [])
        (near,) = mixed_job(folders["later"], rollout_only__model_path=str(folders["warm"])).rollout_only
        here = there.model_copy(update={"rollout_only": (near,)})
        episodes = [asyncio.run(played(job, learner, tmp_path)) for job in (there, here)]
    remote, local = ([item.trajectory for item in found] for found in episodes)
    for one, other in zip(remote, local, strict=True):
        assert one.outcome_reward == other.outcome_reward
        for step, twin in zip(one.steps, other.steps, strict=True):
            assert step.policy_logprobs.token_ids == twin.policy_logprobs.token_ids
            assert (step.tool_calls, step.step_info.invalid_reason) == (
                twin.tool_calls, twin.step_info.invalid_reason
            )  # fmt: skip
    assert any(step.tool_calls for trajectory in remote for step in trajectory.steps)


# Of a server, and of the job; and what is told.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no log-probs": ({"leaves_out": {"logprobs"}}, {}, "choices.0.logprobs is missing"),
    "tokens": ({"shift": 1}, {}, "the same text becomes other ids: number 0 is"),
    "key": ({"key": "another"}, {}, "the server of the fixed policy refused: status 401"),
    "down": ({"answers": 0}, {}, "the server of the fixed policy answers status 503 the server is shutting"),
    "raw": ({}, {"logprobs": "processed", "temperature": 0.7}, "with top_k = 1 its log-probs should be 0"),
}


async def _probed(
    folders: Mapping[str, Path], habits: Mapping[str, Any], keys: Mapping[str, Any]
) -> tuple[str, str, int]:
    """What is told of such a server, its address, and how many answers it gave."""
    with exact_server(folders["warm"], **{"key": KEY, **habits}) as server:
        job = remote_job(folders, server.url, **keys)
        learner = LocalLearner.fresh(learner_parts.learner_config(job), [])
        with policy_server(job) as gateway:
            (remote,) = FixedPolicies.of(job.fixed_policies, {}, learner.facts(), gateway.table).remote
        try:
            told = await remote.probe()
        except JobError as error:
            told = str(error)
        return told, server.url, len(server.bodies)


@pytest.mark.parametrize("case", REFUSED)
async def test_a_server_whose_samples_could_not_be_weighed_is_refused_with_the_reason(
    folders: Mapping[str, Path], case: str
):
    habits, keys, reason = REFUSED[case]
    told, url, answers = await _probed(folders, habits, keys)
    assert told.startswith(f"[rollout_only] 'fixed', their/model-1 at {url}: ")
    assert reason in told and KEY not in told
    assert answers <= 3, "nothing but the probe"


@pytest.mark.parametrize(
    ("habits", "keys"),
    [({}, {}), ({"processed": True}, {"logprobs": "processed", "temperature": 0.7, "top_k": 3})],
)
async def test_a_server_that_can_be_mixed_is_told_after_two_answers_or_three(
    folders: Mapping[str, Path], habits: Mapping[str, Any], keys: Mapping[str, Any]
):
    told, url, answers = await _probed(folders, habits, keys)
    exact = f"their/model-1 at {url} returns exact tokens, which are the actor's"
    assert told == f"fixed policy 'fixed': {exact}" and answers == 2 + len(habits)


def test_a_server_that_dies_in_the_middle_ends_the_run_with_its_name_and_what_was_learned_stays(
    folders: Mapping[str, Path], tmp_path: Path
):
    quick = {"rollout__policy_config": {"retry_budget_s": 0.2}, "training__iterations": 3}
    with exact_server(folders["warm"], key=KEY, answers=20) as server:
        job = remote_job(folders, server.url, **quick)
        with pytest.raises(NothingToLearnFrom) as caught:
            train_job(job, tmp_path / "run")
    assert "'fixed'" in str(caught.value) and f"their/model-1 at {server.url}" in str(caught.value)
    assert "inference_unavailable" in str(caught.value)
    assert list((tmp_path / "run" / "checkpoints").glob("iteration_*"))


@pytest.fixture(scope="module")
def run(
    folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunDirectory, ListReporter]:
    """A preset that learns next to a fixed policy whose folder is a copy of its own, to be taken away."""
    path = tmp_path_factory.mktemp("mixture")
    shutil.copytree(folders["warm"], path / "fixed")
    job = mixed_job(folders["warm"], rollout_only__model_path=str(path / "fixed"))
    table = job.model.model_copy(update={"path": None, "preset": "tiny-0.3m"})
    directory, reporter, _ = train_job(job.model_copy(update={"model": table}), path / "run")
    return directory, reporter


def test_a_preset_takes_the_tokens_of_its_fixed_policy_and_no_play_is_needed_for_them(
    run: tuple[RunDirectory, ListReporter], folders: Mapping[str, Path]
):
    directory, reporter = run
    own = load_tokenizer(directory.checkpoints / "iteration_1").get_vocab()
    assert own == load_tokenizer(folders["warm"]).get_vocab()
    assert rows_of(directory, "prompts") == rows_of(directory, "teacher") == []
    loaded, ended = (line for line in reporter.lines if line.startswith("fixed policy 'fixed': "))
    assert loaded.rpartition(" ")[2] == ended.rpartition(" ")[2] and "as they were loaded" in ended
    (memory,) = (line for line in reporter.lines if line.startswith("memory "))
    assert ", fixed " in memory and ", fixed cache " in memory


def test_a_run_goes_on_with_the_same_weights_and_with_no_others(
    run: tuple[RunDirectory, ListReporter], folders: Mapping[str, Path]
):
    directory, _ = run
    job = directory.job()
    moved = job.rollout_only[0].model_copy(update={"model_path": folders["warm"]})
    again = job.model_copy(update={"rollout_only": (moved,)})
    train_job(again, directory.path, resume=directory)
    other = moved.model_copy(update={"model_path": folders["fresh"]})
    with pytest.raises(
        JobError, match=r"'fixed': the run has samples of the weights with sha256 [0-9a-f]{64}"
    ):
        train_job(job.model_copy(update={"rollout_only": (other,)}), directory.path, resume=directory)
    assert directory.job().rollout_only == (moved,), "a job that was refused does not stay"


def test_what_was_learned_is_played_without_the_fixed_policy(
    run: tuple[RunDirectory, ListReporter], tmp_path: Path
):
    directory, _ = run
    job = directory.job()
    gone = job.rollout_only[0].model_copy(update={"model_path": tmp_path / "gone"})
    job = job.model_copy(update={"rollout_only": (gone,)})
    found = asyncio.run(evaluate(at_the_task_app(job), Checkpoint(directory.checkpoints / "iteration_1")))
    assert found.models == ("tiny/actor",)


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


def test_a_model_is_imitated_without_token_ids_and_its_key_is_stored_nowhere(tmp_path):
    with foreign_server(key=KEY) as server:
        directory, reporter, _ = train_job(job_with_teacher(server.url), tmp_path / "run")
    (teacher,) = rows_of(directory, "teacher")
    (warmup,) = rows_of(directory, "warmup")
    assert (teacher["eval/episodes"], teacher["rollout/failed"]) == (6, 0.0)
    assert warmup["warmup/examples"] == len(server.bodies) == 6 * 8  # 8 decisions an episode, none refused
    assert len({body["seed"] for body in server.bodies}) == 6 * 8
    stored = read_rollouts(directory.rollouts_file("warmup"))
    assert all(rollout.trajectory.seed < 2**30 for rollout in stored)  # worlds of training
    assert_key_is_nowhere(directory, reporter)


def test_the_teacher_is_evaluated_as_the_job_configures_it_with_its_key():
    with foreign_server(key=KEY) as server:
        found = asyncio.run(evaluate(at_the_task_app(job_with_teacher(server.url)), TaskAppPolicy("openai")))
    assert (found.unique.count, found.models) == (1, ("their-model-2026-01-01",))
    assert len(server.bodies) == 8


def test_a_variable_without_a_key_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("THEIR_KEY", raising=False)
    with pytest.raises(JobError, match=r"warmup.api_key_env: the environment variable THEIR_KEY is not set"):
        train_job(job_with_teacher("http://127.0.0.1:9"), tmp_path / "run")
