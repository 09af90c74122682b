"""What needs a GPU is measured by code that runs everywhere, against limits that are counted right."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from bench import gpu, model_flops
from bench.gpu_setup import Report, Task
from tests.trainer_backend.learner.hand_made import make_learner, segment, tiny_tokenizer
from trainer_backend.__main__ import app
from trainer_backend.core.collate import pack_segments
from trainer_backend.learner.shapes import ModelShape, model_shape


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch):
    """No GPU is seen, and the number of threads is as before."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_without_a_gpu_it_says_why_in_a_line_and_ends_well(capsys: pytest.CaptureFixture[str]):
    assert gpu.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "not measured" in printed and "sees no GPU" in printed


def run_here(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Of `subprocess.run`: the command of Turnwise, in this process, which has torch already."""
    assert command[:3] == [sys.executable, "-m", "trainer_backend"]
    done = CliRunner().invoke(app, command[3:], catch_exceptions=False)
    return subprocess.CompletedProcess(command, done.exit_code, done.output, "")


def test_a_tiny_shape_goes_the_whole_way_on_a_cpu(tmp_path, capsys, monkeypatch, services):
    here = SimpleNamespace(run=run_here, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(gpu, "subprocess", here)
    monkeypatch.setattr(gpu, "SETTINGS", (*gpu.SETTINGS, services))
    assert gpu.main(["--smoke", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    kinds = ["agreement", "attention", "decode", "iteration", "learner", "lora", "memory", "plan", "prefill"]
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert sorted({figure["kind"] for figure in written["figures"]}) == [*kinds, "update"]
    assert all(f" {figure['line']}" in printed for figure in written["figures"])
    assert written["missing"] == []
    assert "all weights; memory (cpu, float32)" in printed
    decoded = [figure for figure in written["figures"] if figure["kind"] == "decode"]
    assert {(figure["rows"], figure["context"]) for figure in decoded} == {(4, 112), (1, 112)}
    # of five calls a cell the first computes its prompts, the others the last token of each
    assert all(0.9 < figure["reused"] < 1.0 for figure in decoded)


def report_in(folder: Path, seconds: float = 100.0) -> Report:
    return Report(folder / "gpu.json", {"device": "none"}, time.monotonic() + seconds)


def test_a_figure_that_fails_costs_no_other_and_all_are_written(tmp_path: Path):
    def broken() -> None:
        raise RuntimeError("CUDA out of memory")

    report = report_in(tmp_path)
    good = Task("update", "4b", 0.0, lambda: report.add("update", "4b", "fast", met=True, mfu=0.5))
    report.measure([Task("decode", "4b", 0.0, broken), good])
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["figures"] == [{"kind": "update", "shape": "4b", "line": "fast", "met": True, "mfu": 0.5}]
    assert written["missing"] == [
        {"kind": "decode", "shape": "4b", "reason": "RuntimeError: CUDA out of memory"}
    ]


def test_what_has_no_time_left_is_not_begun_and_a_missed_bound_is_told(tmp_path, capsys):
    report = report_in(tmp_path, seconds=10.0)
    report.measure([Task("iteration", "4b", 30.0, lambda: pytest.fail("begun"))])
    assert [one["kind"] for one in report.missing] == ["iteration"]
    assert report.met, "a missing figure misses no bound"
    report.add("update", "4b", "MFU 20%", met=False, missed="TOO SLOW")
    assert not report.met
    assert "  4b    update     MFU 20% TOO SLOW\n" in capsys.readouterr().out


TWO_LAYERS = ModelShape(
    parameters=0, layers=2, width=8, mlp_width=16, heads=2, kv_heads=1, head_dim=4, vocabulary=32
)


def test_the_flops_of_an_update_and_of_a_prefill_worked_by_hand():
    # a layer: q and o 8 * 8 each, k and v 8 * 4 each, the MLP 3 * 8 * 16
    assert model_flops.layer_weights(TWO_LAYERS) == 2 * (2 * 64 + 2 * 32 + 384) == 1152
    # segments of 3 and 5 tokens, 2 of the 8 sampled, for which alone the last layer's MLP, q and o are:
    # products 2 * ((1152 - 512) * 8 + (512 + 32 * 8) * 2), attention 2 * 2 layers * 8 * (9 + 25) = 1088;
    # forward, and twice that backward
    assert model_flops.update_flops(TWO_LAYERS, [3, 5], sampled=2) == 3 * (13312 + 1088)
    # as above, nothing read: products 2 * (1152 - 512) * 8
    assert model_flops.forward_flops(TWO_LAYERS, [3, 5], sampled=0) == 10240 + 1088


def test_adapters_save_the_gradient_of_the_base_and_of_nothing_else():
    adapted = ModelShape(
        **{name: getattr(TWO_LAYERS, name) for name in TWO_LAYERS.__slots__} | {"adapters": 10}
    )
    # forward: 13312 + 1088 + 2 * 10 * 8; backward: 13312 + 2 * (1088 + 160)
    assert model_flops.update_flops(adapted, [3, 5], sampled=2) == 14560 + 13312 + 2496


def test_the_products_are_as_many_as_torch_counts():
    learner = make_learner(tiny_tokenizer())
    parts = [segment("a", [5] * 40, [6] * 10, [-1.0] * 10), segment("b", [7] * 20, [8] * 5, [-1.0] * 5)]
    counter = FlopCounterMode(display=False)
    with counter:
        learner.scorer.logprobs(pack_segments(parts, row_tokens=64)).sum().backward()
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    shape = model_shape(learner.model.config, None)
    attention = 3 * 2 * shape.layers * shape.heads * shape.head_dim * (50**2 + 25**2)
    assert counted == model_flops.update_flops(shape, [50, 25], sampled=15) - attention


def test_a_decode_step_reads_all_weights_once_and_the_cache_of_every_row():
    # 2 bytes each of 1152 + 32 * 8 weights, and of 2 * 2 layers * 4 a cached token: 3 rows of 10
    peak = model_flops.Peak(flops=1.0, bandwidth=100.0)
    assert model_flops.decode_seconds(TWO_LAYERS, peak, rows=3, cached=10) == 2 * (1408 + 16 * 30) / 100


@pytest.mark.parametrize(
    ("name", "flops_of_it"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("A1", None),
    ],
)
def test_a_device_is_known_by_its_name(name: str, flops_of_it: float | None):
    peak = model_flops.find_peak(name)
    assert (peak and peak.flops) == flops_of_it
