"""What a fixed policy at another's server adds to the time that its server takes.

    python -m bench.remote_latency [--latency-ms 100] [--episodes 16] [--decisions 20] [--limit 0.1]

A stand-in for that server continues token ids in vLLM's words, and tells ids and log-probs, after half to one
and a half of the latency, so that answers do not come in step. Everything else is a job's own: its plan, its
gateway, its task app in a process, its way to collect. All rollouts are the remote policy's, and run side by
side. It prints how long the policy of a decision took, seen from the task app, and how long the server had
its request; and the time of the whole collection against what an episode had of the server, on average.

Exit code 1 where the first is more than the limit longer, as a share of the server's.
"""

import asyncio
import sys
import tempfile
import time
import tomllib
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from aiohttp import web
from pydantic import SecretStr

from bench import kit
from service_kit.server import Listener, ServerThread
from shared_schemas.trajectory import Trajectory
from trainer_backend import job_parts
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.plan import Inference
from trainer_backend.inference.gateway_app import create_gateway
from trainer_backend.inference.remote_engine import RemoteEngine
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.job.load import parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.models import train_tokenizer

JOB = kit.ROOT / "configs" / "crafter_mixture.toml"
LIMIT = 0.1
CALL = "<|call|> do noop<|end|>"
WORDS = "wood stone coal iron tree grass sand water cow zombie hp food drink rest 0 1 2 3 4 5 6 7 8 9"


@dataclass
class Server:
    """A foreign inference server.

    Attributes:
        latency_s: of an answer, on average.
        call: the ids that it answers with.
        took_s: how long it had each request.
    """

    latency_s: float
    call: list[int]
    took_s: list[float] = field(default_factory=list)
    random: Random = field(default_factory=lambda: Random(0))

    async def answer(self, request: web.Request) -> web.Response:
        begun = time.perf_counter()
        body = await request.json()
        assert body["return_token_ids"]
        await asyncio.sleep(self.latency_s * self.random.uniform(0.5, 1.5))
        choice = {
            "index": 0,
            "text": CALL,
            "finish_reason": "stop",
            "logprobs": {"token_logprobs": [-0.5] * len(self.call)},
            "token_ids": self.call,
            "prompt_token_ids": body["prompt"],
        }
        self.took_s.append(time.perf_counter() - begun)
        return web.json_response({"object": "text_completion", "model": body["model"], "choices": [choice]})


def job_at(url: str, options: Namespace) -> JobConfig:
    """The mixture's job, with all rollouts played by a model at that server."""
    tables = tomllib.loads(JOB.read_text(encoding="utf-8"))
    del tables["warmup"]
    tables["model"] = {"path": "."}
    tables["rollout_only"] = {"inference_url": url, "model": "theirs"}
    tables["rollout_allocation_schedule"] = {"type": "constant", "alpha": 0.0}
    tables["rollout"] |= {"episodes_per_batch": options.episodes, "max_turns": options.decisions}
    return parse_job(tables, where=JOB.name).config


async def played(options: Namespace) -> tuple[Server, list[Trajectory], float]:
    """The server, the played rollouts, and the total time."""
    tokenizer = train_tokenizer([WORDS] * 20, 400, whole_words=["do", "noop"])
    call = tokenizer.encode(CALL, add_special_tokens=False)
    server, app = Server(options.latency_ms / 1e3, call), web.Application()
    app.router.add_post("/v1/completions", server.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    job = job_at(f"http://127.0.0.1:{runner.addresses[0][1]}", options)
    ends = {"stop_ids": call[-1:], "vocabulary": len(tokenizer), "max_model_len": 4096}
    engine = RemoteEngine(job.fixed("fixed").inference_url, "theirs", **ends)
    gateway = create_gateway({f"{job.job.name}/fixed": ServedPolicy(engine, tokenizer)}, key="key")
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerThread(gateway, Listener("127.0.0.1", 0)) as url,
    ):
        actor = Inference(url, f"{job.job.name}/actor", SecretStr("key"))
        planner = job_parts.planner(job, "run", actor)
        async with job_parts.task_apps(job, Path(folder) / "task_app.log", actor) as apps:
            dispatcher = Dispatcher(apps, timeout_s=600)
            await dispatcher.collect(planner.training(1))  # first touch of everything
            server.took_s.clear()
            begun = time.perf_counter()
            found = await dispatcher.collect(planner.training(2))
            took_s = time.perf_counter() - begun
    await runner.cleanup()
    assert not found.failed, found.failures
    return server, [item.trajectory for item in found.rollouts if item.trajectory is not None], took_s


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__,
        ("--latency-ms", 100.0),
        ("--episodes", 16),
        ("--decisions", 20),
        ("--limit", LIMIT, "most of the server's time"),
        arguments=arguments,
    )
    server, episodes, took_s = asyncio.run(played(options))
    waited = [step.step_info.policy_s for episode in episodes for step in episode.steps]
    assert len(waited) == len(server.took_s), "one request a decision"
    own, seen = sum(server.took_s) / len(waited), sum(waited) / len(waited)
    had_s = own * len(waited) / len(episodes)
    added = seen / own - 1.0
    print(f"{len(waited)} decisions of {len(episodes)} episodes, side by side")
    print(f"the server has a request for {1e3 * own:.1f} ms, the task app waits {1e3 * seen:.1f} ms")
    print(f"all took {took_s:.2f} s, where an episode had {had_s:.2f} s of the server")
    figure = f"added to its latency: {added:.1%} (at most {options.limit:.0%})"
    return kit.report(figure, added <= options.limit)


if __name__ == "__main__":
    sys.exit(main())
