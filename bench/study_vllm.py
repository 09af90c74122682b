"""Real vLLM servers, started by a run: exact log-probs, swaps during requests, and a server that is killed.

    python -m bench.study_vllm --vllm-python VENV/bin/python        (make study-vllm VLLM_PYTHON=...)

A job trains a tiny model on two servers of its own. One server is killed in the second iteration and has to
come back. Then transformers computes every sampled token's log-prob again in fp32, with the weights of the
version that the token's record names, so that a wrong record shows. After that, weights are swapped while
requests run, some with stop strings, with weight_update = "wait" and "keep". A job with [lora] publishes
adapters alone, which a server merges into the base; their log-probs are computed again too. docs/vllm.md
installs vLLM. bench/results/vllm.json has the figures; the exit code is 1 if a bound does not hold.
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench import kit
from bench.kit import ROOT
from shared_schemas.trajectory import Sampling
from trainer_backend.inference.actor import Extras, Generation
from trainer_backend.inference.servers import Servers
from trainer_backend.inference.stop_strings import StopStrings
from trainer_backend.inference.versions import PolicyVersion, ScoredPrompt
from trainer_backend.inference.vllm_engine import VllmEngine
from trainer_backend.job.load import parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import InferenceTable
from trainer_backend.models.folder import load_tokenizer
from trainer_backend.parts import Hardware
from trainer_backend.processes.vllm_servers import VllmServers, check_environment
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.start import run_job

LIMIT = 1e-4
EPISODES, TEMPERATURE = 8, 0.7
IN_FLIGHT, SWAPS = 12, 3
ADAPTER_ITERATIONS = 6
# One thread and 1 GiB for each server, because two servers and the trainer share a small machine.
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class Killer(kit.Reporter):
    """Prints the lines of a run, and kills one of its servers while that samples requests of a stage."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self.lines: list[str] = []
        self.killed = 0

    def say(self, text: str) -> None:
        self.lines.append(text)
        print(text, flush=True)

    def metrics(self, row: dict[str, Any], line: str) -> None:
        print(row["kind"], row.get("iteration"), flush=True)

    def stage(self, name: str, done: int, total: int) -> None:
        if name == self._stage and not self.killed:
            self.killed = 1
            threading.Thread(target=kill_a_busy_server, daemon=True).start()

    def requests_met_it(self) -> bool:
        """Whether the loss was noticed by a request that the server was sampling, not by the next publish."""
        return any(" is lost: vLLM at " in line for line in self.lines)

    def lost(self) -> int:
        """Return how often a replica was lost."""
        return sum(" is lost: " in line for line in self.lines)

    def came_back(self) -> int:
        """Return how many of the killed servers serve again."""
        killed = re.findall(r"vLLM server (\S+) ended with SIGKILL", "\n".join(self.lines))
        return sum(any(f"replica {url} serves version" in line for line in self.lines) for url in killed)


def kill_a_busy_server() -> None:
    """Kill the first server of this process that reports a running request."""
    while True:
        for process in server_processes():
            words = process.cmdline()
            url = f"http://127.0.0.1:{words[words.index('--port') + 1]}/metrics"
            # A server that is starting does not answer yet.
            with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                counts = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", answer.read().decode(), re.M)
                if any(map(float, counts)):
                    process.kill()
                    return


def server_processes() -> list[psutil.Process]:
    """Return this process's servers, without the guards, whose command lines contain a server's."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            words = process.cmdline()
            if "turnwise_serve" in words and not any(word.endswith("/guard.py") for word in words):
                found.append(process)
    return found


def make_job(python: str, iterations: int, **tables: Any) -> JobConfig:
    """Return the job; `tables` are added to its own tables or replace them."""
    document = {
        "job": {"name": "study-vllm"},
        "model": {"preset": "tiny-0.3m", "device": "cpu"},
        "inference": {
            "engine": "vllm", "replicas": 2, "vllm_python": python,
            "vllm": {"enforce_eager": True, "max_num_seqs": 32},
        },
        "rollout": {
            "env_config": {"text": "compact", "max_actions": 2}, "max_turns": 4, "max_tokens": 24,
            "temperature": TEMPERATURE, "episodes_per_batch": EPISODES,
        },
        "training": {
            "iterations": iterations, "group_size": 4, "learning_rate": 1e-3,
            "checkpoint_every": 1, "keep_checkpoints": iterations + 1,
            "step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise",
        },
        "algorithm": {"advantage": "stepwise"},
        "evaluation": {"instances": 2, "every_n_iters": iterations},
        **tables,
    }  # fmt: skip
    return parse_job(document, where="study").config


@cache
def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def reference(folder: Path, prompt: Sequence[int], ids: Sequence[int], temperature: float) -> list[float]:
    """Return log-probs of `ids` after the prompt, by one forward pass of transformers in fp32."""
    logits = load_model(folder)(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double()
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def apart(first: Sequence[float], second: Sequence[float]) -> float:
    return max(abs(one - other) for one, other in zip(first, second, strict=True))


def decisions(directory: RunDirectory, iteration: int) -> Iterator[tuple[list[int], Any]]:
    """Yield the prompt and the exact tokens of every decision of an iteration."""
    for rollout in read_rollouts(directory.rollouts_file(f"iteration_{iteration}")):
        ids: list[int] = []
        for step in rollout.trajectory.steps if rollout.trajectory is not None else ():
            tokens = step.policy_logprobs
            ids = [*ids[: tokens.prompt_ids_reused], *tokens.prompt_token_ids]
            yield ids, tokens
            ids = [*ids, *tokens.token_ids]


def judged_job(directory: RunDirectory, iterations: int, killer: Killer) -> dict[str, Any]:
    """Return figures from the run's files, with every log-prob computed again."""
    rows = [row for row in directory.metrics() if row["kind"] == "iteration"]
    worst, old, count, moved = 0.0, 0, 0, []
    for number in range(1, iterations + 1):
        folder = directory.checkpoints / f"iteration_{number - 1}"
        for prompt, tokens in decisions(directory, number):
            count += 1
            own = reference(folder, prompt, tokens.token_ids, TEMPERATURE)
            worst = max(worst, apart(own, tokens.logprobs))
            old += tokens.versions != ((0, number - 1),)
            if number > 1:
                before = reference(folder.with_name(f"iteration_{number - 2}"), prompt, tokens.token_ids, 1.0)
                moved.append(apart(before, reference(folder, prompt, tokens.token_ids, 1.0)))
    return {
        "iterations": len(rows),
        "decisions": count,
        "rollouts_lost": iterations * EPISODES - sum(int(row["rollout/finished"]) for row in rows),
        "servers_killed": killer.killed,
        "servers_back": killer.came_back(),
        "replicas_lost": killer.lost(),
        "killed_amid_requests": killer.requests_met_it(),
        "logprob_max": worst,
        "decisions_of_old_weights": old,
        # The error of log-probs by the previous version's weights, which shows that the check can fail.
        "versions_apart_median": sorted(moved)[len(moved) // 2],
    }


@asynccontextmanager
async def started_servers(
    table: InferenceTable, directory: RunDirectory, folder: Path, **settings: Any
) -> AsyncIterator[VllmServers]:
    servers = VllmServers(table, Hardware("float32"), directory, print, **settings)
    try:
        await servers.start(folder)
        yield servers
    finally:
        await servers.stop()


def open_pool(urls: Sequence[str], folder: Path, mode: Any, lines: list[str]) -> Servers:
    """Return engines at these servers, with `mode` as weight_update; `lines` gets the pool's messages."""
    tokenizer = load_tokenizer(folder)
    engines = [
        VllmEngine(
            url, stop_ids=[tokenizer.eos_token_id], vocabulary=len(tokenizer), max_model_len=1024,
            wait_s=300.0, weight_update=mode,
        )
        for url in urls
    ]  # fmt: skip
    return Servers(engines, wait_s=300.0, canary_limit=LIMIT, tell=lines.append)


async def swaps(table: InferenceTable, folders: Sequence[Path], directory: RunDirectory) -> dict[str, Any]:
    """Swap weights while one server runs requests, in both ways."""
    lines: list[str] = []
    results: dict[str, Any] = {}
    async with started_servers(table, directory, folders[0]) as servers:
        for mode in ("wait", "keep"):
            pool = open_pool(servers.urls[:1], folders[0], mode, lines)
            results[mode] = await in_flight(pool, folders, partial(by_folder, pool, folders))
            await pool.close()
    return results | {"replicas_lost": len(lines)}


def publication(folders: Sequence[Path], version: int) -> PolicyVersion:
    chance, count = random.Random(0), len(load_tokenizer(folders[0]))
    ids = tuple(chance.randrange(count) for _ in range(64))
    logprobs = tuple(reference(folders[version], ids[:1], ids[1:], 1.0))
    prompt = ScoredPrompt(ids=ids, logprobs=logprobs)
    return PolicyVersion(number=version, folder=folders[version], prompt=prompt)


async def by_folder(pool: Servers, folders: Sequence[Path], version: int) -> None:
    await pool.load(publication(folders, version))


async def in_flight(
    pool: Servers, folders: Sequence[Path], publish: Callable[[int], Coroutine[Any, Any, None]]
) -> dict[str, Any]:
    """Swap weights while requests run; `publish(n)` sends the weights of `folders[n]`."""
    chance, tokenizer = random.Random(0), load_tokenizer(folders[0])

    async def request(place: int, tell: Callable[[object], None] | None = None) -> tuple[Any, ...]:
        prompt = [chance.randrange(len(tokenizer)) for _ in range(chance.randint(3, 200))]
        temperature = chance.choice([0.5, 0.7, 1.0, 1.3])
        stop = StopStrings(tokenizer.decode, ["zz", "e w", "st"]) if place % 3 == 1 else None
        sampling, extras = Sampling(temperature=temperature, max_tokens=300), Extras(stop=stop, on_token=tell)
        generation = await pool.generate(prompt, sampling, request_id=str(place), extras=extras)
        return prompt, temperature, generation

    lost: list[str] = []
    worst, changed, old, stops = 0.0, 0, 0, 0
    await publish(0)
    for version in range(1, SWAPS + 1):
        runs = asyncio.Event()
        tasks = [asyncio.ensure_future(request(0, lambda token, runs=runs: runs.set()))]  # type: ignore[misc]
        tasks += [asyncio.ensure_future(request(place)) for place in range(1, IN_FLIGHT)]
        await runs.wait()
        await publish(version)
        tasks.append(asyncio.ensure_future(request(2)))  # sent after the new weights are served
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        lost += [repr(answer) for answer in answers if isinstance(answer, BaseException)]
        for prompt, temperature, generation in (a for a in answers if not isinstance(a, BaseException)):
            worst = max(worst, largest_difference(folders, prompt, temperature, generation))
            changed += len(generation.versions) > 1
            stops += generation.stop_string is not None
        if not isinstance(answers[-1], BaseException):
            old += answers[-1][2].versions != ((0, version),)
    return {
        "swaps": SWAPS, "requests": SWAPS * (IN_FLIGHT + 1), "requests_lost": len(lost), "errors": lost,
        "requests_of_two_versions": changed, "ended_by_a_stop_string": stops, "logprob_max": worst,
        "requests_of_old_weights": old,
    }  # fmt: skip


def largest_difference(
    folders: Sequence[Path], prompt: list[int], temperature: float, generation: Generation
) -> float:
    """Return the largest difference of log-probs from those under the version recorded for each token."""
    starts = [*(start for start, _ in generation.versions), len(generation.token_ids)]
    worst = 0.0
    for (start, version), end in zip(generation.versions, starts[1:], strict=True):
        own = reference(folders[version], prompt, generation.token_ids, temperature)[start:end]
        worst = max(worst, apart(own, generation.logprobs[start:end]))
    return worst


def study_adapters(python: str) -> dict[str, Any]:
    """Run a job with adapters; return its figures, and the sizes of a publish and of the merged model."""
    job = make_job(python, ADAPTER_ITERATIONS, lora={"rank": 2, "merged_checkpoints": True})
    training = job.training.model_copy(update={"learning_rate": 1e-2})
    inference = job.inference.model_copy(update={"replicas": 1})
    job, quiet = job.model_copy(update={"training": training, "inference": inference}), Killer("")
    with tempfile.TemporaryDirectory() as folder:
        directory = create_run(job, Path(folder) / "run")
        asyncio.run(run_job(job, directory, quiet, resume=False))
        judged = judged_job(directory, ADAPTER_ITERATIONS, quiet)
        merged = directory.checkpoints / f"iteration_{ADAPTER_ITERATIONS}" / "model.safetensors"
        published = directory.weights / f"version_{ADAPTER_ITERATIONS}"
        return judged | {
            "publish_bytes": sum(path.stat().st_size for path in published.iterdir()),
            "merged_bytes": merged.stat().st_size,
            "base_bytes": (directory.weights / "base" / "model.safetensors").stat().st_size,
        }


def judge_adapters(found: dict[str, Any]) -> dict[str, bool]:
    shows = found["versions_apart_median"] > 10 * LIMIT
    lost = found["rollouts_lost"] + found["replicas_lost"]
    is_small = 10 * found["publish_bytes"] <= found["merged_bytes"]
    old = found["decisions_of_old_weights"]
    return {
        "with adapters: log-probs within 1e-4 of fp32 transformers": found["logprob_max"] <= LIMIT,
        "with adapters: a decision of old weights would show, and there is none": shows and old == 0,
        "with adapters: no rollout and no replica lost": lost == 0,
        "a publish of adapters is a tenth of the merged model at most": is_small,
    }


def run_and_judge(job: JobConfig, root: Path) -> tuple[dict[str, Any], list[Path]]:
    """Run a job and kill one of its servers; return its figures and the folders of its first versions."""
    directory, killer = create_run(job, root / "run"), Killer("collect 2")
    asyncio.run(run_job(job, directory, killer, resume=False))
    left = {"servers_left": len(server_processes())}
    written = {"folders_written": len(list(directory.weights.glob("version_*")))}
    folders = [directory.checkpoints / f"iteration_{number}" for number in range(SWAPS + 1)]
    return judged_job(directory, job.training.iterations, killer) | left | written, folders


def study(python: str, iterations: int) -> dict[str, Any]:
    """Run the job, then the swaps with the weights that it made."""
    job = make_job(python, iterations)
    release = asyncio.run(check_environment(job.inference))
    with tempfile.TemporaryDirectory() as folder:
        trained, folders = run_and_judge(job, Path(folder))
        table = job.inference.model_copy(update={"replicas": 1})
        swapped = asyncio.run(swaps(table, folders, RunDirectory(Path(folder), "swaps")))
    return {
        "study": "vllm",
        "vllm": release.partition(" of ")[0],
        "machine": kit.describe_machine(torch=torch.__version__),
        "job": trained,
        "swap": swapped,
        "holds": judge(trained, swapped, iterations),
    }


def judge(trained: dict[str, Any], swapped: dict[str, Any], iterations: int) -> dict[str, bool]:
    """Return whether each promise holds, for a job with a killed server and for swaps during requests."""
    modes = [swapped["wait"], swapped["keep"]]

    def total(name: str) -> int:
        return sum(int(mode[name]) for mode in modes)

    back = (trained["servers_killed"], trained["servers_back"], trained["replicas_lost"])
    old = trained["decisions_of_old_weights"] + total("requests_of_old_weights")
    all_played = trained["rollouts_lost"] == 0 and trained["iterations"] == iterations
    most = max(one["logprob_max"] for one in (trained, *modes))
    return {
        "log-probs within 1e-4 of fp32 transformers": most <= LIMIT,
        "a decision of old weights would show": trained["versions_apart_median"] > 10 * LIMIT,
        "nothing served with old weights": old == 0,
        "no request lost at a swap in flight": total("requests_lost") == swapped["replicas_lost"] == 0,
        "a swap met requests in flight": swapped["keep"]["requests_of_two_versions"] > 0,
        "no rollout lost at a killed replica": all_played and trained["killed_amid_requests"],
        "the killed replica, and no other, was lost and serves again": back == (1, 1, 1),
        "no server left behind": trained["servers_left"] == 0,
    }


def server_options(
    doc: str | None, part: tuple[Any, ...], results: str, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Return the options of a study with servers, whose environment it sets; `part` is a flag for a part."""
    options = kit.options(
        doc,
        ("--vllm-python", "", "the Python of vLLM's environment"),
        ("--iterations", 60, "of the job; a killed server needs a minute or two to come back"),
        part,
        ("--results", ROOT / "bench" / "results" / results),
        arguments=arguments,
    )
    if not options.vllm_python:
        raise SystemExit("--vllm-python VENV/bin/python: docs/vllm.md says how to make one")
    for name, value in SMALL.items():
        os.environ.setdefault(name, value)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    part = ("--adapters", False, "the job with adapters alone; the other figures stay as they are")
    options = server_options(__doc__, part, "vllm.json", arguments)
    if options.adapters:
        found = json.loads(options.results.read_text())
    else:
        found = study(options.vllm_python, options.iterations)
    found["adapters"] = study_adapters(options.vllm_python)
    found["holds"] |= judge_adapters(found["adapters"])
    return kit.end_study(found, options.results)


if __name__ == "__main__":
    sys.exit(main())
