"""Compares two ways to bring new weights to real vLLM servers: the learner sends them, or writes a folder.

    python -m bench.study_broadcast --vllm-python VENV/bin/python       (make study-broadcast VLLM_PYTHON=...)

A job with [cluster] and weight_transfer.backend = "nccl" (gloo here) trains a tiny model on two servers. One
is killed in the second iteration and has to come back. Transformers computes every sampled token's log-prob
again in fp32, with the weights of the version that the token's record names. Then weights are swapped while
requests run. A server is killed while it receives weights, and the other server has to serve them.
Last, a model of 0.4 GB is published by folder and by broadcast in turns; the memory of this process, then the
learner, is measured. bench/results/broadcast.json has the figures; exit code 1: a promise does not hold.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench import kit
from bench.study_vllm import (
    in_flight,
    judge,
    make_job,
    open_pool,
    publication,
    run_and_judge,
    server_options,
    server_processes,
    started_servers,
)
from trainer_backend import learner_parts
from trainer_backend.inference.servers import Servers
from trainer_backend.inference.versions import WeightAddress
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import InferenceTable
from trainer_backend.learner.broadcast import WeightSender
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.models import save_model_folder
from trainer_backend.models.folder import load_tokenizer
from trainer_backend.processes.policy_server import make_servers
from trainer_backend.processes.vllm_servers import check_environment
from trainer_backend.processes.weight_delivery import WeightBroadcast, WeightFolders
from trainer_backend.rundir.layout import RunDirectory, create_run

BROADCAST = {"weight_transfer": {"backend": "nccl"}}
PUBLISHES = 7
PAIR_TIMEOUT_S = 20.0


class Senders:
    """Sends each version (a model folder) by a new sender, as a learner does.

    A server is killed when the tensor at the index `killed_at` is sent.
    """

    def __init__(self, pool: Servers, folders: Sequence[Path], killed_at: int | None = None) -> None:
        self._pool, self._folders, self._killed_at = pool, folders, killed_at
        self._sending: asyncio.Task[None] | None = None
        self.passes = 0

    async def publish(self, version: int) -> None:
        """Send a version tensor by tensor, and have the pool serve it."""
        await self.end()
        sender = WeightSender("127.0.0.1", backend="gloo", timeout_s=PAIR_TIMEOUT_S)
        host, port = sender.address
        self._sending = asyncio.ensure_future(self._send(sender, self._folders[version]))
        address = WeightAddress(host=host, port=port)
        await self._pool.load(publication(self._folders, version).model_copy(update={"address": address}))

    async def end(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _send(self, sender: WeightSender, folder: Path) -> None:
        """Send the weights to all servers that are ready, until cancelled, because a server may come late."""
        while True:
            if await asyncio.to_thread(sender.ready, len(self._pool.replicas), time.monotonic()):
                self.passes += 1
                await asyncio.to_thread(sender.send, self._tensors(folder))

    def _tensors(self, folder: Path) -> Iterator[tuple[str, Tensor]]:
        for place, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
            if place == self._killed_at:
                self._killed_at = None
                os.killpg(os.getpgid(server_processes()[0]), signal.SIGKILL)  # with the process of its engine
            yield name, tensor


async def swaps(job: JobConfig, directory: RunDirectory, folders: Sequence[Path]) -> dict[str, Any]:
    """Swap weights while requests run; then kill a server during a send, so that only the other gets them."""
    lines: list[str] = []
    results: dict[str, Any] = {}
    async with started_servers(job.inference, directory, folders[0], broadcasts=True) as servers:
        for mode in ("wait", "keep"):
            pool = open_pool(servers.urls, folders[0], mode, lines)
            senders = Senders(pool, folders)
            results[mode] = await in_flight(pool, folders, senders.publish)
            await senders.end()
            await pool.close()
        results["replicas_lost"] = len(lines)
        pool = open_pool(servers.urls, folders[0], "wait", lines)
        killer, began = Senders(pool, folders, killed_at=3), time.monotonic()
        await killer.publish(1)
        results["killed_amid_a_pass"] = {
            "passes": killer.passes,
            "seconds": time.monotonic() - began,
            "serving": sum(replica.state == "serving" for replica in pool.replicas),
        }
        await killer.end()
        await pool.close()
    return results


def larger_model(folder: Path, tokenizer_of: Path) -> None:
    """Write a model of 0.11e9 weights, whose publish takes long enough to be measured on a CPU."""
    tokenizer = load_tokenizer(tokenizer_of)
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, head_dim=64,
        num_key_value_heads=12, intermediate_size=2304, max_position_embeddings=1024,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    save_model_folder(folder, Qwen3ForCausalLM(config), tokenizer)


async def timed(publish: Coroutine[Any, Any, None]) -> tuple[float, float]:
    """Return the seconds of a publish, and the additional memory that it takes, in MiB."""
    before, began = kit.peak_mib(reset=True), time.monotonic()
    await publish
    return time.monotonic() - began, kit.peak_mib() - before


async def publish_both_ways(job: JobConfig, directory: RunDirectory) -> dict[str, Any]:
    """Publish a larger model by folder and by broadcast in turns; return the times and the memory."""
    learner = LocalLearner.fresh(learner_parts.learner_config(job), [])
    assert job.model.path is not None, "the job names the larger model"
    async with started_servers(job.inference, directory, job.model.path, broadcasts=True) as servers:
        table: InferenceTable = job.inference.model_copy(update={"urls": servers.urls})
        tokens = table.max_model_len - 1
        folder = WeightFolders(learner, directory.weights, prompt_tokens=tokens)
        sent = WeightBroadcast(learner, directory.weights, table)
        pool = make_servers(table, learner.facts(), print, None, sent.serve_again)

        async def publish(weights: WeightFolders, number: int) -> None:
            version = await weights.write(number)
            await weights.deliver(pool.load(version))

        costs: dict[str, list[tuple[float, float]]] = {"folder": [], "broadcast": []}
        for weights in (folder, sent):
            await publish(weights, 0)  # the first one of each is not counted
        for number in range(1, PUBLISHES + 1):
            for name, weights in (("folder", folder), ("broadcast", sent)):
                with torch.no_grad():
                    learner.model.model.norm.weight += 1e-3
                costs[name].append(await timed(publish(weights, number)))
        await sent.close()
        await pool.close()
    tensors = learner.weights().values()
    names = ("seconds", "learner_extra_mib")
    return {
        "model_mib": sum({item.data_ptr(): item.nbytes for item in tensors}.values()) / 2**20,
        "largest_tensor_mib": max(item.nbytes for item in tensors) / 2**20,
        "servers": len(servers.urls),
        "publishes": PUBLISHES,
        **{
            way: dict(zip(names, map(spread, zip(*rows, strict=True)), strict=True))
            for way, rows in costs.items()
        },
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "least": min(values), "most": max(values)}


def sent_job(python: str, iterations: int) -> JobConfig:
    """Return the job whose learner sends its weights."""
    return make_job(python, iterations, cluster={"launcher": "local"}, **BROADCAST)


def study(python: str, iterations: int) -> dict[str, Any]:
    """Run the job, the swaps with the weights that it made, and the publishes of a larger model."""
    job = make_job(python, 1, **BROADCAST)
    release = asyncio.run(check_environment(job.inference))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        trained, folders = run_and_judge(sent_job(python, iterations), root)
        swapped = asyncio.run(swaps(job, create_run(job, root / "swaps"), folders))
        larger_model(root / "larger", folders[0])
        compared = make_job(python, 1, model={"path": str(root / "larger"), "device": "cpu"}, **BROADCAST)
        publishes = asyncio.run(publish_both_ways(compared, create_run(compared, root / "both")))
    return {
        "study": "broadcast",
        "vllm": release.partition(" of ")[0],
        "machine": kit.describe_machine(torch=torch.__version__),
        "job": trained,
        "swap": swapped,
        "publish": publishes,
    }


def holds(found: dict[str, Any], iterations: int) -> dict[str, bool]:
    trained, swapped, publishes = found["job"], found["swap"], found["publish"]
    killed, extra = swapped["killed_amid_a_pass"], publishes["broadcast"]["learner_extra_mib"]
    most = publishes["largest_tensor_mib"] + 8
    return judge(trained, swapped, iterations) | {
        "no version written to a folder": trained["folders_written"] == 0,
        "a server killed amid a pass costs one more pass": killed["passes"] == 2 and killed["serving"] == 1,
        "a broadcast takes the learner no more than the largest tensor": extra["median"] <= most,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    part = ("--job", False, "the job alone; the other figures stay as they are")
    options = server_options(__doc__, part, "broadcast.json", arguments)
    if options.job:
        found = json.loads(options.results.read_text())
        with tempfile.TemporaryDirectory() as root:
            found["job"], _ = run_and_judge(sent_job(options.vllm_python, options.iterations), Path(root))
    else:
        found = study(options.vllm_python, options.iterations)
    found["holds"] = holds(found, options.iterations)
    return kit.end_study(found, options.results)


if __name__ == "__main__":
    sys.exit(main())
