"""Measures real models on a CUDA device, in one run of some 8 minutes.

    python -m bench.gpu [--out runs/gpu] [--minutes 8] [--shapes 0.6b 4b] [--only decode iteration] [--smoke]

For each shape of Qwen3, with random weights, and with learner and engine on the device as in a run:

    agreement   difference of the learner's log-probs from the engine's, for tokens that the engine sampled:
                <= 2e-2 nats rms in bfloat16, <= 1e-4 nats for each in float32
    attention   distance of log-probs and gradients of packed segments from float32, on 4 layers: by the
                device's kernel, <= 1.5 times that by a mask over rows
    update      seconds and MFU (bench/model_flops.py has the formula and the peaks) of LocalLearner.update on
                16,384 packed tokens, a quarter of them sampled: scoring and one optimizer step, >= 35 %. The
                first of WAYS (bench/gpu_setup.py) that fits the memory plan is trained
    memory      the peak of the update's memory, which must not exceed our plan
    lora        whether LoRA of rank 32 and 64 requests of 8192 tokens fit the plan, last shape only
    decode      tokens a second of LocalEngine at 1, 16 and 64 rows of 288, 1k and 4k tokens, and their share
                of what memory bandwidth would allow: 4b at 64 x 1k >= 60 %, 0.6b at 16 x 1k >= 40 %
    prefill     tokens a second, and MFU, of the same prompts
    shared      a decode step of rows that begin alike, with and without reading their beginning once
    iteration   one iteration of configs/crafter_online.toml as a user runs it, on a folder of random weights

Each figure is printed and written to OUT/gpu.json as soon as it is measured. If one fails or no time is left
for it, the others are still measured. The exit code is 1 if a bound is missed or a figure is missing. Without
a CUDA device nothing is measured and the exit code is 0. `--smoke` does everything on a CPU with a tiny shape
and an invented peak. The Makefile says at `gpu-wheels` how to run this script on a bare machine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from bench import kit
from bench.gpu_engine import agreement_in_float32, decode_figures, shared_pages_figure
from bench.gpu_learner import attention_figures, learner_figures, long_lora_figure
from bench.gpu_setup import FULL, SHAPES, SMOKE, Plan, Report, Task, make_config, make_model
from bench.model_flops import Peak, find_peak
from trainer_backend.learner.device import Found, Placement, place
from trainer_backend.models import train_tokenizer
from trainer_backend.models.folder import save_model_folder
from trainer_backend.rundir.layout import open_run

JOB = kit.ROOT / "configs" / "crafter_online.toml"
# Random weights never write a call: without a higher limit, their episodes would end after five decisions.
SETTINGS = (
    "training.iterations=1", "training.checkpoint_every=1", "evaluation.instances=1", "rollout.max_turns=10",
    "rollout.max_invalid_decisions=10", "rollout.max_tokens=64",
    "model.chat_template_kwargs={}",  # our tokenizer's template reads none
)  # fmt: skip
SMALLER = (
    "rollout.episodes_per_batch=4", "rollout.max_turns=2", "rollout.max_tokens=8", "training.group_size=2",
)  # fmt: skip


def iteration_figure(report: Report, name: str, plan: Plan, placement: Placement) -> None:
    """Play and train 64 episodes of up to 10 decisions of 64 tokens, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder) / "model", name, placement)
        run = Path(folder) / "run"
        row = played(report, model, run, placement, SMALLER if name == "tiny" else ())
    seconds = {key: value for key, value in row.items() if key.startswith("time/")}
    told = ", ".join(f"{key.removeprefix('time/')} {value:.1f}" for key, value in seconds.items())
    counts = f"{row['episode/count']:.0f} episodes, {row['decision/count']:.0f} decisions"
    report.add("iteration", name, f"crafter_online: {counts}; {told}", row=row)


def model_folder(folder: Path, name: str, placement: Placement) -> Path:
    """Write a model folder as a user would bring one: random weights, and a tokenizer of Crafter's texts."""
    # Imported here, so that a machine without crafter can measure everything else.
    from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment

    environment = CrafterEnvironment(CrafterConfig(text="full", max_actions=8))
    texts = [environment.reset(seed).text for seed in range(8)]
    config = make_config(name)
    tokenizer = train_tokenizer(texts, min(4096, config.vocab_size))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    save_model_folder(folder, make_model(config, placement.device), tokenizer)
    return folder


def played(
    report: Report, model: Path, run: Path, placement: Placement, settings: tuple[str, ...]
) -> dict[str, Any]:
    """Run the iteration, and return its row of metrics.

    Raises:
        RuntimeError: the run failed (with the end of its output), or took longer than the time left.
    """
    given = (f'model.path="{model}"', f'model.device="{placement.device.type}"', *SETTINGS, *settings)
    command = [sys.executable, "-m", "trainer_backend", "train", str(JOB), "--run", str(run), "--no-report"]
    for setting in given:
        command += ["--set", setting]
    try:
        done = subprocess.run(
            command, cwd=kit.ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, timeout=max(1.0, report.left_s), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"it took more than the {error.timeout:.0f} s that were left") from error
    if done.returncode != 0:
        raise RuntimeError(f"the run ended with code {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    return next(row for row in open_run(run).metrics() if row["kind"] == "iteration")


KINDS = ("agreement", "attention", "learner", "lora", "decode", "shared", "iteration")


def list_tasks(report: Report, shapes: Sequence[str], plan: Plan, device: str, peak: Peak) -> list[Task]:
    """Return the tasks in order, so that the first shape has a figure of each important kind early."""
    placement = place(device)
    figures: list[tuple[str, float, Callable[[str], None]]] = [
        ("agreement", 20.0, lambda name: agreement_in_float32(report, name, plan, placement)),
        ("decode", 30.0, lambda name: decode_figures(report, name, plan, placement, peak)),
        ("learner", 30.0, lambda name: learner_figures(report, name, plan, placement, peak)),
        ("attention", 10.0, lambda name: attention_figures(report, name, plan, placement)),
    ]
    if placement.device.type == "cuda":  # the kernels for pages need it
        figures.append(("shared", 20.0, lambda name: shared_pages_figure(report, name, plan, placement)))
    tasks = [
        Task(kind, name, least_s, partial(run, name)) for name in shapes for kind, least_s, run in figures
    ]
    first, largest = shapes[0], shapes[-1]
    return [
        *tasks,
        Task("lora", largest, 0.0, lambda: long_lora_figure(report, largest, plan, placement)),
        Task("iteration", first, 30.0, lambda: iteration_figure(report, first, plan, placement)),
    ]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of gpu.json; default: runs/gpu, none with --smoke")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no figure is begun")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=["0.6b", "4b"])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="some kinds of figures")
    parser.add_argument("--peak-tflops", type=float, help="bfloat16, of a device that the table has not")
    parser.add_argument("--bandwidth-gbs", type=float, help="likewise, GB/s")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; nothing is judged slow")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    end = time.monotonic() + 60 * options.minutes
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if options.smoke:
        torch.set_num_threads(1)
        shapes, plan, device, name, peak = ["tiny"], SMOKE, "cpu", "cpu", Peak(1e11, 1e10)
    elif not torch.cuda.is_available():
        print(f"not measured: {Found.by_torch()}, and these figures are a CUDA device's")
        return 0
    else:
        shapes, plan, device, name = options.shapes, FULL, "cuda", torch.cuda.get_device_name()
        peak = find_peak(name)
        if options.peak_tflops and options.bandwidth_gbs:
            peak = Peak(1e12 * options.peak_tflops, 1e9 * options.bandwidth_gbs)
        if peak is None:
            print(f"not measured: the peak of {name!r} is unknown; give --peak-tflops and --bandwidth-gbs")
            return 1
    out = options.out or (None if options.smoke else Path("runs/gpu"))
    machine = {"device": name, "flops": peak.flops, "bandwidth": peak.bandwidth, **versions}
    report = Report(out / "gpu.json" if out else None, machine, end)
    print(f"{name}, torch {torch.__version__}: {peak.flops / 1e12:g} TFLOP/s, {peak.bandwidth / 1e9:g} GB/s")
    tasks = list_tasks(report, shapes, plan, device, peak)
    report.measure([task for task in tasks if task.kind in options.only])
    return int(not report.met or bool(report.missing))


if __name__ == "__main__":
    sys.exit(main())
