"""A model that writes what a script says, behind the real gateway, playing for real task apps over HTTP."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import SecretStr
from transformers import PreTrainedTokenizerFast

from service_kit.server import Listener, ServerThread
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import Sampling
from tests.conftest import at_the_task_app
from trainer_backend import job_parts
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.plan import Inference
from trainer_backend.core.policies import ACTOR, name_model
from trainer_backend.inference.actor import NO_EXTRAS, Extras, Generation
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.gateway_app import create_gateway
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.job.schema import JobConfig

END = "<|end|>"
# What the model writes, from the text of its prompt alone.
Script = Callable[[str], str]


@dataclass(frozen=True)
class Seen:
    """What an engine was given, and what it sampled then."""

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]


class ScriptedEngine:
    """Samples the words of a script; `seen` holds its requests in order.

    Args:
        by_character: an id for each character, as no tokenizer would write it: tokenising an
            answer again gets other ids.
        real: whose log-probs the tokens have; without it they are made up.
    """

    version = 0

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        script: Script,
        *,
        max_model_len: int = 100_000,
        by_character: bool = False,
        real: LocalEngine | None = None,
    ) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.seen: list[Seen] = []
        self._renderer = ChatRenderer(tokenizer)
        self._script, self._by_character, self._real = script, by_character, real

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        sampled = self._encoded(self._script(self._renderer.decode(ids)))
        assert len(sampled) <= sampling.max_tokens, "the script writes more than the job lets a decision have"
        self.seen.append(Seen(tuple(ids), tuple(sampled)))
        logprobs = [await self._logprob(ids, sampled, i, sampling) for i in range(len(sampled))]
        return Generation(tuple(sampled), tuple(logprobs), "stop", ((0, 0),))

    def _encoded(self, text: str) -> list[int]:
        parts = list(text) if self._by_character else [text]
        return [token for part in [*parts, END] for token in self._renderer.encode(part)]

    async def _logprob(self, ids: Sequence[int], sampled: list[int], i: int, sampling: Sampling) -> float:
        """That of token i: what the real engine says of every token at its place, the one before it kept."""
        if self._real is None:
            return -0.5
        found = await self._real.generate(
            [*ids, *sampled[:i]],
            sampling.model_copy(update={"max_tokens": 1}),
            request_id=f"{len(self.seen)}.{i}",
            extras=Extras(likeliest=len(self.tokenizer)),
        )
        return dict(found.likeliest[0])[sampled[i]]


async def played(job: JobConfig, engine: ScriptedEngine, folder: Path) -> list[Rollout]:
    """The first iteration of the job, in the order of the plan."""
    key = SecretStr("scripted")
    app = create_gateway({name_model(job.job.name, ACTOR): ServedPolicy(engine, engine.tokenizer)}, key=key)
    with ServerThread(app, Listener("127.0.0.1", 0)) as url:
        run_id = f"run.{uuid4().hex}"  # others play at the same task app
        plan = job_parts.planner(job, run_id, Inference(url, name_model(job.job.name, ACTOR), key)).training(
            1
        )
        async with job_parts.task_apps(at_the_task_app(job), folder / "task_app.log") as apps:
            found = await Dispatcher(apps, timeout_s=100).collect(plan)
    assert not found.failed, found.failed
    return list(found.rollouts)
