"""Compares generation on one thread: our engine, `generate` of transformers, and vLLM.

    python -m bench.generation_speed [--preset tiny-0.3m] [--repeats 5] [--full-text]
    python -m bench.generation_speed --folder MODEL [--vllm-python VENV/bin/python] [--repeats 5]

1. Decisions as in short games of Crafter: prompts of 35 to 60 tokens, 6 new ones, 64 callers.
2. Decisions of Crafter's full text (configs/crafter_cpu.toml with that text): prompts of 580 to 700 tokens,
   which share the first 461, 8 new ones, 16 and 64 callers. The engine that holds the shared tokens once is
   compared with the same engine that holds a copy in each row. --full-text measures this only.
3. With --folder only: 32 prompts of 150 tokens, 64 new ones each, by a larger model like SmolLM2-135M
   (tests/contract/test_real_model.py makes its folder), against `generate` and vLLM (docs/vllm.md installs
   vLLM), in float32 on one thread each. `decoding` is the time of 64 new tokens less that of one.

A further row of the tables is our engine with forward passes by `transformers`, as for models that our
decoder does not know. The exit code is 1 if the engine misses a target.

Samples have no end token, so all sides make the same number of tokens. Ratios are of CPU time, because wall
time says little on a busy machine. The sides take turns; median and range are over the turns.
"""

import asyncio
import copy
import json
import operator
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from bench import kit
from bench.shared_prefix import FULL_TEXT, model_of, played_segments
from shared_schemas.trajectory import Sampling
from trainer_backend.inference.cache import SlotCache
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.models import build_preset, load_model_folder, train_tokenizer

Prompts = list[list[int]]
FALLBACK = "engine, passes by transformers"
# Least ratios of CPU time.
DECISION_TARGETS = {"generate": 1.8, FALLBACK: 1.3}
# Least ratio for decisions of the full text with 64 callers, against rows that share nothing.
FULL_TEXT_TARGETS = {"without shared rows": 1.25}
FOLDER_TARGETS = {"generate": 1.4, "vLLM": 1.0}
BATCH, PROMPT, NEW = 32, 150, 64
TITLE = f"batch: {BATCH} prompts of {PROMPT} tokens, {NEW} new ones each"
CALLERS = 64


def by_engine(
    model: PreTrainedModel, prompts: Prompts, new_tokens: int, callers: int, *, shares: bool = True
) -> None:
    """Serve this many callers, each of which sends its next prompt after the last answer."""

    async def all_callers(engine: LocalEngine) -> None:
        async def caller(first: int) -> None:
            for i in range(first, len(prompts), callers):
                sampling = Sampling(max_tokens=new_tokens, seed=i)
                await engine.generate(prompts[i], sampling, request_id=str(i))

        await asyncio.gather(*(caller(k) for k in range(callers)))

    engine = LocalEngine(model, stop_ids=[], keys=EngineKeys(max_model_len=2048, max_running=callers))
    cache = engine._worker.batch.cache
    if isinstance(cache, SlotCache):
        cache.shares = shares
    engine.start()
    asyncio.run(all_callers(engine))
    engine.stop()


def by_generate(model: Any, prompts: Prompts, new_tokens: int, batch: int) -> None:
    """Generate in static batches with padding on the left."""
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=new_tokens,
            min_new_tokens=new_tokens, pad_token_id=0,
        )  # fmt: skip


def by_transformers(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose class our decoder does not know, so that the engine runs it by `transformers`."""
    other = copy.deepcopy(model)
    other.__class__ = type("Other", (type(model),), {})
    return other


@contextmanager
def vllm_of(python: str, folder: str) -> Iterator[Callable[[Prompts, int], float]]:
    """Yield a function that generates by vLLM, in a process of vLLM's Python, and returns the CPU seconds."""
    command = [python, str(kit.ROOT / "bench/peers/vllm_generation.py"), folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None and peer.stdout is not None

        def generate(prompts: Prompts, new_tokens: int) -> float:
            print(json.dumps({"prompts": prompts, "tokens": new_tokens}), file=peer.stdin, flush=True)
            return float(peer.stdout.readline())

        generate([[1, 2, 3]], 2)  # compiles what is compiled at first use
        yield generate
        peer.stdin.close()


def cpu_of(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each run in each round; a run may return seconds that it measured itself."""

    def timed(run: Callable[[], object]) -> float:
        start = time.process_time()
        own = run()
        return own if isinstance(own, float) else time.process_time() - start

    sides = {name: partial(timed, run) for name, run in runs.items()}
    return kit.in_turns(sides, repeats, warm=False)


def ratios_of(title: str, seconds: Mapping[str, list[float]], tokens: int) -> dict[str, float]:
    """Print a table; return each side's CPU time as a multiple of the engine's, median over the turns."""
    print(title)
    medians: dict[str, float] = {}
    for name, cpu in seconds.items():
        ratios = [own / engine for own, engine in zip(cpu, seconds["engine"], strict=True)]
        medians[name] = statistics.median(ratios)
        micro = 1e6 * statistics.median(cpu) / tokens
        print(f"  {name:32s} cpu {micro:8.0f} us a token  engine is x{kit.spread(ratios)}")
    return medians


def folder_ratios(folder: str, vllm_python: str, repeats: int) -> dict[str, float]:
    model, _ = load_model_folder(Path(folder))
    prompts = random_prompts(model, [PROMPT] * BATCH)
    by: dict[str, Callable[[int], object]] = {
        "engine": lambda new: by_engine(model, prompts, new, BATCH),
        "generate": lambda new: by_generate(model, prompts, new, BATCH),
    }
    if not vllm_python:
        return folder_tables(by, repeats)
    with vllm_of(vllm_python, folder) as vllm:
        return folder_tables(by | {"vLLM": partial(vllm, prompts)}, repeats)


def folder_tables(by: Mapping[str, Callable[[int], object]], repeats: int) -> dict[str, float]:
    runs = {f"{name}, {new}": partial(run, new) for name, run in by.items() for new in (1, NEW)}
    seconds = cpu_of(runs, repeats)
    whole = {name: seconds[f"{name}, {NEW}"] for name in by}
    rest = {name: list(map(operator.sub, whole[name], seconds[f"{name}, 1"])) for name in by}
    ratios_of("decoding", rest, BATCH * (NEW - 1))
    return ratios_of(TITLE, whole, BATCH * NEW)


def decision_ratios(model: PreTrainedModel, repeats: int) -> dict[str, float]:
    draw = random.Random(1)
    prompts = random_prompts(model, [draw.randint(35, 60) for _ in range(10 * CALLERS)])
    other = by_transformers(model)
    runs = {
        "engine": lambda: by_engine(model, prompts, 6, CALLERS),
        FALLBACK: lambda: by_engine(other, prompts, 6, CALLERS),
        "generate": lambda: by_generate(model, prompts, 6, CALLERS),
    }
    title = f"decisions as in short games: {len(prompts)} prompts, 6 new tokens, {CALLERS} callers"
    return ratios_of(title, cpu_of(runs, repeats), len(prompts) * 6)


def full_text_prompts() -> Prompts:
    """Return the prompts of every fifth decision of 64 episodes; with all prompts, a turn takes minutes."""
    settings = [setting for setting in FULL_TEXT if not setting.startswith("rollout.episodes_per_batch")]
    segments = played_segments([*settings, "rollout.episodes_per_batch=64"])
    prompts = [part.token_ids[:start].tolist() for part in segments for start in part.spans["start"]]
    return prompts[::5]


def full_text_ratios(preset: str, prompts: Prompts, repeats: int, callers: int) -> dict[str, float]:
    model = model_of(preset, 1 + max(map(max, prompts)))
    runs = {
        "engine": lambda: by_engine(model, prompts, 8, callers),
        "without shared rows": lambda: by_engine(model, prompts, 8, callers, shares=False),
    }
    title = f"decisions of the full text: {len(prompts)} prompts, 8 new tokens, {callers} callers"
    return ratios_of(title, cpu_of(runs, repeats), len(prompts) * 8)


def random_prompts(model: PreTrainedModel, lengths: list[int]) -> Prompts:
    draw = random.Random(len(lengths))
    return [[draw.randrange(model.config.vocab_size) for _ in range(length)] for length in lengths]


def targets_met(ratios: Mapping[str, float], targets: Mapping[str, float]) -> bool:
    for name, least in targets.items():
        kit.report(
            f"the engine is x{ratios[name]:.2f} {name} (at least x{least})", ratios[name] >= least, "TOO SLOW"
        )
    return all(ratios[name] >= least for name, least in targets.items())


def main() -> int:
    options = kit.options(
        __doc__, ("--preset", "tiny-0.3m"), ("--repeats", 5), ("--full-text", False), ("--folder", ""),
        ("--vllm-python", ""),
    )  # fmt: skip
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    if options.folder:
        ratios = folder_ratios(options.folder, options.vllm_python, options.repeats)
        targets = {name: least for name, least in FOLDER_TARGETS.items() if name in ratios}
        return 0 if targets_met(ratios, targets) else 1
    prompts = full_text_prompts()
    _, many = (full_text_ratios(options.preset, prompts, options.repeats, n) for n in (16, CALLERS))
    met = targets_met(many, FULL_TEXT_TARGETS)
    if options.full_text:
        return 0 if met else 1
    tokenizer = train_tokenizer(["wood stone tree"], 512)
    model = build_preset(options.preset, tokenizer)
    print(f"{options.preset}, torch {torch.__version__}, 1 thread")
    met &= targets_met(decision_ratios(model, options.repeats), DECISION_TARGETS)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
