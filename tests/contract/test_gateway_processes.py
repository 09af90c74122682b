"""A gateway of [cluster], a process of its own, that asks a vLLM server (a fake, real weights)."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.contract.test_vllm import vllm_job
from tests.trainer_backend.inference.fake_vllm import fake_vllm
from trainer_backend import job_parts, learner_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.errors import EngineStopped
from trainer_backend.job.tables import ClusterTable
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.run.fixed_setup import FixedSetup
from trainer_backend.rundir.layout import create_run


async def played(inference: Inference) -> None:
    """A sample that gets no answer, and an iteration that does not end without it."""
    assert inference.key is not None
    headers = {"Authorization": f"Bearer {inference.key.get_secret_value()}"}
    messages = [{"role": "user", "content": "tree left"}]
    body = {"model": inference.model, "messages": messages, "max_tokens": 4}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{inference.url}/v1/chat/completions", json=body) as reply,
    ):
        assert reply.status >= 500
    await asyncio.Event().wait()


async def test_a_gateway_without_any_server_left_ends_the_run_with_the_reason(model_folders, tmp_path: Path):
    folder = model_folders["qwen3"]
    with fake_vllm(folder, max_model_len=640) as (fake, url):
        job = vllm_job(folder, url, replica_wait_s=2.0, sleep=True)
        job = job.model_copy(update={"cluster": ClusterTable()})
        learner = LocalLearner.fresh(learner_parts.learner_config(job), [])
        directory = create_run(job, tmp_path / "run")
        with job_parts.gateways(job, FixedSetup(), directory, print) as gateways:
            async with gateways.serving(learner) as server:
                await server.publish(0)
                await server.release()  # its process has the servers sleep
                assert not server.gateways[0].may_start.is_set(), "another process would wake them"
                await server.resume()  # an update without a step
                assert server.gateways[0].may_start.is_set()
                assert fake.turns == ["load", "sleep 2", "wake weights", "load", "wake kv_cache"]
                await server.publish(1)
                fake.down, fake.loads_at_most = True, 0
                with pytest.raises(
                    EngineStopped, match=r"gateway_0: no replica has served for 2 s"
                ) as caught:
                    await server.while_serving(played(gateways.inference))
    assert f"{url}: " in str(caught.value)
    assert [Path(load).name for load in fake.loads] == ["version_0", "version_0", "version_1"]
    log = (tmp_path / "run" / "gateway_0.log").read_text(encoding="utf-8")
    assert log.splitlines()[-1].startswith("no replica has served for 2 s")
