"""Fixed policies before they are served: looked at, loaded next to the actor, or refused with the reason."""

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import SecretStr
from transformers import PreTrainedTokenizerFast

from shared_schemas.trajectory import Sampling
from tests.conftest import policy_server, tiny_job
from tests.model_folders import edit_json
from tests.trainer_backend.inference.test_gateway_edges import BrokenRule
from tests.trainer_backend.learner.hand_made import make_learner, tiny_tokenizer
from trainer_backend import job_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.errors import EngineStopped, JobError, ModelFolderError, TrainerError
from trainer_backend.inference.actor import Extras
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.job.schema import JobConfig
from trainer_backend.models import build_preset, save_model_folder, train_tokenizer
from trainer_backend.processes.policy_server import PolicyServer
from trainer_backend.run.fixed_policies import FixedPolicies
from trainer_backend.run.fixed_setup import FixedSetup
from trainer_backend.run.preflight import checked_folders
from trainer_backend.rundir.checkpoint_paths import best_checkpoint
from trainer_backend.rundir.layout import create_run

GATEWAY = Inference("http://127.0.0.1:9", "tiny/actor", SecretStr("k"), 256)
SERVER = {"inference_url": "https://gpu.example:8443/v1", "model": "Qwen/Qwen3-8B"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same tokens as `make_learner(tokenizer)`, with other weights."""
    path = tmp_path_factory.mktemp("fixed") / "model"
    save_model_folder(path, build_preset("tiny-0.3m", tokenizer, seed=8), tokenizer)
    return path


def mixed(*tables: Mapping[str, Any], unit: str = "iteration", **overrides: Any) -> JobConfig:
    """The tiny job with fixed policies; a table each."""
    job = tiny_job(
        rollout_only__model_path="x",
        rollout_allocation_schedule__alpha=0.5,
        rollout_allocation_schedule__unit=unit,
        **overrides,
    )
    return JobConfig.model_validate({**job.model_dump(), "rollout_only": list(tables)})


def find_folders(job: JobConfig, checkpoint: Path | None = None) -> dict[str, Path]:
    return checked_folders(job.fixed_policies, job.model, checkpoint)


def fixed_servers(job: JobConfig) -> dict[str, Inference]:
    servers = dict(job_parts.planner(job, "run", GATEWAY).players.servers)
    assert servers.pop("actor") == GATEWAY
    return servers


@pytest.fixture
def server() -> Iterator[PolicyServer]:
    with policy_server(tiny_job()) as held:
        yield held


def local(path: Path, **keys: Any) -> dict[str, Any]:
    return {"model_path": str(path), **keys}


def test_a_folder_stands_for_itself_and_a_run_for_its_best_checkpoint(trained, tmp_path):
    run = trained[0].path
    newest = run / "checkpoints" / "iteration_2"
    assert find_folders(mixed(local(newest)))["fixed"] == newest
    best = best_checkpoint(run / "checkpoints")
    assert find_folders(mixed(local(run, name="old")))["old"] == best
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / "best.json").unlink()
    assert find_folders(mixed(local(copy)))["fixed"] == copy / "checkpoints" / "iteration_2"


def test_what_is_no_model_is_told_by_the_name_of_the_policy(tmp_path: Path, folder: Path):
    with pytest.raises(ModelFolderError, match=r"^\[rollout_only\] 'fixed': .*nowhere: no such folder"):
        find_folders(mixed(local(tmp_path / "nowhere")))
    with pytest.raises(JobError, match=r"'fixed': model_path is a run directory, and .* no checkpoint yet"):
        find_folders(mixed(local(create_run(tiny_job(), tmp_path / "run").path)))
    shutil.copytree(folder, tmp_path / "half", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelFolderError, match=r"^\[rollout_only\] 'b': .*half: no weights in this folder"):
        find_folders(mixed(local(folder, name="a"), local(tmp_path / "half", name="b")))


def test_another_vocabulary_than_the_actors_is_told_before_any_weights_are_read(
    model_folders: Mapping[str, Path], folder: Path, tmp_path: Path
):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"never read")
    job = mixed(local(tmp_path / "copy"), model__preset=None, model__path=str(model_folders["qwen3"]))
    with pytest.raises(JobError, match=r"^\[rollout_only\] 'fixed': it cannot be weighed .*vocabulary has"):
        find_folders(job)


def test_those_next_to_a_preset_must_be_alike(folder: Path, tmp_path: Path):
    other = train_tokenizer(["other words of another run"] * 20, 300, whole_words=["noop", "do"])
    save_model_folder(tmp_path, build_preset("tiny-0.3m", other, seed=1), other)
    with pytest.raises(JobError, match=r"'b': it cannot be weighed against the actor: "):
        find_folders(mixed(local(folder, name="a"), local(tmp_path, name="b")))
    assert set(find_folders(mixed(local(folder, name="a"), local(folder, name="b")))) == {"a", "b"}


def test_a_run_that_goes_on_is_compared_with_its_checkpoint(folder: Path, model_folders: Mapping[str, Path]):
    assert find_folders(mixed(local(folder)), folder) == {"fixed": folder}
    with pytest.raises(JobError, match="cannot be weighed against the actor"):
        find_folders(mixed(local(folder)), model_folders["qwen3"])


def end_otherwise(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    edit_json(folder / "generation_config.json", eos_token_id=ends)


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (end_otherwise, JobError, r"ends its answers with the ids \[0, (\d+)\], the actor with \[\1\]"),
        (
            lambda folder, _: edit_json(folder / "config.json", max_position_embeddings=64),
            ModelFolderError,
            r"^\[rollout_only\] 'fixed': .*made for 64 positions",
        ),
        (
            lambda folder, _: (folder / "model.safetensors").write_bytes(b"broken"),
            ModelFolderError,
            r"^\[rollout_only\] 'fixed': .*the model cannot be loaded",
        ),
    ],
    ids=["other end", "few positions", "broken weights"],
)
def test_a_folder_that_cannot_be_served_with_the_actor_is_refused_by_its_name(
    tokenizer: PreTrainedTokenizerFast, folder: Path, tmp_path: Path, server: PolicyServer,
    damage: Any, error: type[TrainerError], words: str,
):  # fmt: skip
    shutil.copytree(folder, tmp_path / "copy")
    damage(tmp_path / "copy", tokenizer)
    with pytest.raises(error, match=words):
        FixedPolicies.of((), {"fixed": tmp_path / "copy"}, make_learner(tokenizer).facts(), server.table)


def test_ids_that_the_actor_does_not_embed_are_never_sampled(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, server: PolicyServer
):
    model = build_preset("tiny-0.3m", tokenizer, seed=8)
    model.resize_token_embeddings(len(tokenizer) + 28, mean_resizing=False)
    save_model_folder(tmp_path, model, tokenizer)
    learner = make_learner(tokenizer)
    found = FixedPolicies.of((), {"large": tmp_path}, learner.facts(), server.table)
    assert found._local[0].line.endswith(
        "; it never samples the 28 ids that no tokenizer has and the actor does not embed"
    )
    assert found.policies["large"].engine._vocabulary == len(tokenizer)
    assert len(found.verify()) == 1


def one_fixed(learner: Any, folder: Path, server: PolicyServer) -> FixedPolicies:
    table = mixed(local(folder)).fixed_policies
    return FixedPolicies.of(table, {"fixed": folder}, learner.facts(), server.table)


async def test_weights_that_changed_while_they_served_are_told_and_published_ones_change_none(
    tokenizer: PreTrainedTokenizerFast, folder: Path, server: PolicyServer
):
    learner = make_learner(tokenizer)
    found = one_fixed(learner, folder, server)
    async with server.serving(learner, found) as actor:
        await actor.publish(1)
    (line,) = found.verify()
    assert line == (
        "fixed policy 'fixed': its weights are as they were loaded, sha256 "
        f"{found.models['fixed'].sha256[:12]}"
    )
    with torch.no_grad():
        next(found.policies["fixed"].engine._weights._model.parameters())[0, 0] += 1e-3
    with pytest.raises(
        TrainerError, match=r"'fixed': its weights have changed since they were loaded: sha256"
    ):
        found.verify()


async def test_an_update_has_the_memory_of_their_caches_too(tokenizer, folder, server):
    learner = make_learner(tokenizer)
    found = one_fixed(learner, folder, server)
    (policy,) = found._local
    engine = LocalEngine(policy.engine._weights._model, stop_ids=[], keys=server.table, paged=True)
    found = FixedPolicies([replace(policy, engine=engine, policy=ServedPolicy(engine, learner.tokenizer))])
    async with server.serving(learner, found) as actor:
        await engine.generate([1, 2, 3], Sampling(max_tokens=2), request_id="r")
        memory = engine._worker.batch.cache.memory
        assert memory.slabs
        await actor.release()
        assert not memory.slabs


async def test_what_waits_for_an_engine_that_ends_by_itself_ends_with_its_reason(tokenizer, folder, server):
    """Also that of a fixed policy: a rollout would only ask again until its patience is over."""
    learner = make_learner(tokenizer)
    found = one_fixed(learner, folder, server)
    async with server.serving(learner, found) as actor:
        assert await actor.while_serving(asyncio.sleep(0, "done")) == "done"
        waiting = asyncio.ensure_future(actor.while_serving(asyncio.Event().wait()))
        engine = found.policies["fixed"].engine
        with pytest.raises(EngineStopped):
            await engine.generate([1], Sampling(), request_id="r", extras=Extras(stop=BrokenRule()))
        with pytest.raises(EngineStopped, match="its thread ended on ValueError: the rule is broken"):
            await asyncio.wait_for(waiting, 30)


def test_each_is_asked_at_the_gateway_by_its_own_name_and_a_servers_key_goes_nowhere_else(folder: Path):
    job = mixed(
        local(folder, name="near"),
        local(folder, name="cut", top_k=5),
        {"name": "far", "api_key_env": "GPU_KEY", **SERVER},
        {"name": "warm", "logprobs": "processed", "temperature": 0.7, "top_p": 0.9, **SERVER},
        rollout__allow_truncated_sampling=True,
    )
    processed = {"processed_logprobs": True}
    assert fixed_servers(job) == {
        "near": Inference(GATEWAY.url, "tiny/near", GATEWAY.key, 256),
        "cut": Inference(GATEWAY.url, "tiny/cut", GATEWAY.key, 256, processed),
        "far": Inference(GATEWAY.url, "tiny/far", GATEWAY.key, 256),
        "warm": Inference(GATEWAY.url, "tiny/warm", GATEWAY.key, 256, processed),
    }


def test_a_key_that_is_not_set_is_told_before_anything_is_started(folder, monkeypatch):
    monkeypatch.delenv("GPU_KEY", raising=False)
    job = mixed(local(folder), {"name": "far", "api_key_env": "GPU_KEY", **SERVER})
    with pytest.raises(JobError, match=r"'far': api_key_env: the environment variable GPU_KEY is not set"):
        find_folders(job)


@pytest.mark.parametrize(
    ("threads", "unit", "local_policies", "each"),
    [
        (4, "group", 1, 2),
        (4, "rollout", 2, 1),
        (1, "group", 1, 1),
        (4, "iteration", 1, 4),
        (4, "group", 0, 4),
    ],
)
def test_engines_that_may_sample_at_a_time_share_the_threads(folder, threads, unit, local_policies, each):
    job = mixed(local(folder), unit=unit, inference__threads=threads)
    folders = {str(number): folder for number in range(local_policies)}
    setup = FixedSetup(job.fixed_policies, folders, job.rollout_allocation_schedule)
    assert setup.share_threads(job.inference).threads == each
    assert FixedSetup().share_threads(job.inference).threads == threads, "without fixed policies"
