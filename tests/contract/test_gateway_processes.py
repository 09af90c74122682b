"""A run with [cluster] whose gateway, a process of its own, asks a vLLM server (a fake, real weights)."""

from pathlib import Path

import pytest

from tests.conftest import train_job
from tests.contract.test_vllm import vllm_job
from tests.trainer_backend.inference.fake_vllm import fake_vllm
from trainer_backend.errors import EngineStopped
from trainer_backend.job.tables import ClusterTable


def test_a_gateway_without_any_server_left_ends_the_run_with_the_reason(model_folders, tmp_path: Path):
    folder = model_folders["qwen3"]
    with fake_vllm(folder, max_model_len=640) as (fake, url):
        fake.loads_at_most, fake.down_after = 2, 16  # an evaluation has 3 decisions, an iteration 12
        job = vllm_job(folder, url, replica_wait_s=1.0).model_copy(update={"cluster": ClusterTable()})
        with pytest.raises(EngineStopped, match=r"gateway_0: no replica has served for 1 s") as caught:
            train_job(job, tmp_path / "run")
    assert f"{url}: " in str(caught.value)
    assert [Path(load).name for load in fake.loads] == ["version_0", "version_1"]
    log = (tmp_path / "run" / "gateway_0.log").read_text(encoding="utf-8")
    assert log.splitlines()[-1].startswith("no replica has served for 1 s")
