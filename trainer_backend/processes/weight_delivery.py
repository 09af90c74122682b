"""Delivers the policy's versions to engines: as folders RUN/weights/version_n, or as tensors."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog

from service_kit.tasks import racing
from trainer_backend.errors import TrainerError
from trainer_backend.inference.versions import PolicyVersion, ScoredPrompt, WeightAddress
from trainer_backend.job.tables import InferenceTable
from trainer_backend.parts import Learner
from trainer_backend.processes.launching import LOCAL, Launcher
from trainer_backend.processes.vllm_servers import VllmServers
from trainer_backend.rundir.layout import RunDirectory

log = structlog.get_logger("weights")
Result = TypeVar("Result")
# A server that has announced a request for weights sends it within this time, or announces it again.
_ABOUT_TO_ASK_S = 5.0
_PROMPT_TOKENS = 64
_KEPT_VERSIONS = 2


async def on_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    """Run `work` on a thread and return its result.

    If the call is cancelled, wait until `work` has ended, because the caller may save the learner next.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(working)
    finally:
        await asyncio.gather(working, return_exceptions=True)


class WeightFolders:
    """Delivers the learner's policy to engines by writing one folder per version.

    The newest two folders are kept: a restarted engine loads the newest version, and another engine may still
    be reading the previous one.

    Args:
        prompt_tokens: most tokens of the prompt with which a server's weights are tested; 0: no test.
        has_adapters: whether the folders contain adapters only. The base model is then written once, with the
            first version.
        sleeps: whether vLLM servers sleep while the learner works.
    """

    servers: VllmServers | None = None
    """The vLLM servers that the run starts with its first version, if any. `close` stops them."""

    def __init__(
        self,
        learner: Learner,
        path: Path,
        *,
        prompt_tokens: int = 0,
        has_adapters: bool = False,
        sleeps: bool = False,
    ) -> None:
        self._learner, self._path, self._prompt_tokens = learner, path, prompt_tokens
        self._has_adapters = has_adapters
        self._base: Path | None = None
        self._sleeps = sleeps
        self._newest: PolicyVersion | None = None
        self.held: PolicyVersion | None = None
        """The version that sleeping servers must load before they sample; None: no server sleeps."""

    async def write(self, number: int) -> PolicyVersion:
        """Write the policy as version `number` and return the version; the first call starts `servers`."""
        self._newest = version = await on_thread(self._write, number)
        if self.servers is not None:
            await self.servers.start(version.model)
        return version

    def hold(self) -> None:
        """If servers sleep, restart none of them until the next `deliver`: the learner needs their memory."""
        if self._sleeps:
            self.held = self._newest
            if self.servers is not None:
                self.servers.may_start.clear()

    async def deliver(self, loading: Coroutine[None, None, None]) -> None:
        """Await `loading`, a coroutine that lets engines load the newest version."""
        self.held = None
        if self.servers is not None:
            self.servers.may_start.set()
        await loading

    def serve_again(self) -> None:
        """Do nothing, because a restarted engine reads the newest version from its folder."""

    @property
    def renew(self) -> Callable[[str], None] | None:
        """A function that restarts the server at an address; None if the run started no servers."""
        return None if self.servers is None else self.servers.renew

    async def close(self) -> None:
        if self.servers is not None:
            await self.servers.stop()

    def _write(self, number: int) -> PolicyVersion:
        folder = self._path / f"version_{number}"
        if self._has_adapters and self._base is None:
            base = (self._path / "base").resolve()
            self._learner.publish(base, "base")
            self._base = base
        self._learner.publish(folder, "whole" if self._base is None else "adapters")
        # By age, not by number: a run resumed from an older checkpoint writes lower numbers again.
        versions = sorted(self._path.glob("version_*"), key=lambda path: path.stat().st_mtime_ns)
        for old in (*versions[:-_KEPT_VERSIONS], *self._path.glob(".version_*")):
            shutil.rmtree(old, ignore_errors=True)
        folder = folder.resolve()
        prompt = self._scored_prompt(self._base or folder)
        return PolicyVersion(number=number, folder=folder, base=self._base, prompt=prompt)

    def _scored_prompt(self, model: Path) -> ScoredPrompt | None:
        if not self._prompt_tokens:
            return None
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        vocabulary = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
        # Spread over the vocabulary, so that no part of the embedding or the head goes untested.
        stride = vocabulary // _PROMPT_TOKENS + 1
        places = range(min(_PROMPT_TOKENS, self._prompt_tokens))
        ids = [(7 + place * stride) % vocabulary for place in places]
        return ScoredPrompt(ids=tuple(ids), logprobs=tuple(self._learner.score_ids(ids)))


class WeightCopies(WeightFolders):
    """Lets an engine in this process copy the weights from the learner's model, without writing folders."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner, Path())

    def _write(self, number: int) -> PolicyVersion:
        return PolicyVersion(number=number, folder=self._path)


class WeightBroadcast(WeightFolders):
    """Delivers the learner's policy by letting the learner send it to servers that ask for it.

    Servers ask at each publish and after a restart. A server that restarts during an update gets the next
    version. One folder, RUN/weights/model, is written with the first version. It provides config and
    tokenizer, and the run's own servers start from it.
    """

    def __init__(self, learner: Learner, path: Path, table: InferenceTable) -> None:
        super().__init__(learner, path, prompt_tokens=table.max_model_len - 1)
        self._url = table.urls[0]
        self._servers, self._wait_s = len(table.urls), table.replica_wait_s
        self._model: Path | None = None
        self._sending: asyncio.Task[None] | None = None
        self._enough = threading.Event()
        # How many servers have loaded the newest version, and how many are about to ask for it.
        self._served, self._asking = self._servers, 0

    async def write(self, number: int) -> PolicyVersion:
        """Let the learner offer its policy as version `number`; the first call starts `servers`."""
        version = await super().write(number)
        # The learner returns the address of its machine at which these servers can reach it.
        url = self._url if self.servers is None else self.servers.urls[0]
        host, port = await on_thread(self._learner.offer, urlsplit(url).hostname or "")
        return version.model_copy(update={"address": WeightAddress(host=host, port=port)})

    async def deliver(self, loading: Coroutine[None, None, None]) -> None:
        """Await `loading`, a coroutine that lets servers load the newest version; the learner sends it."""
        # Do not wait for lost servers: they ask after their restart.
        expected, self._served, self._asking = max(1, self._served), 0, 0
        sending = self._begin(expected, self._wait_s)
        try:
            async with racing(loading, sending) as (task, _):
                if sending.done():
                    sending.result()  # raises if the learner is lost
                await task
        finally:
            await self._settle()
        if self._asking > 0:
            self._begin(self._asking, _ABOUT_TO_ASK_S)

    def serve_again(self) -> None:
        """Let the learner send the weights to a server that is about to ask for them."""
        self._asking += 1
        if self._sending is None or self._sending.done():
            self._begin(self._asking, _ABOUT_TO_ASK_S)

    async def close(self) -> None:
        await self._settle()
        await super().close()

    async def _settle(self) -> None:
        """Stop waiting for further servers, and wait until the learner has stopped sending."""
        self._enough.set()
        if self._sending is not None:
            with suppress(TrainerError):  # the next call to the learner raises it again
                await asyncio.gather(self._sending)

    def _begin(self, expected: int, wait_s: float) -> asyncio.Task[None]:
        self._enough = threading.Event()
        self._sending = asyncio.ensure_future(self._send_all(expected, wait_s))
        return self._sending

    async def _send_all(self, expected: int, wait_s: float) -> None:
        """Send the weights to `expected` servers, and then to servers that asked during the sending."""
        while True:
            count = await asyncio.to_thread(self._send, expected, wait_s, self._enough)
            self._served = min(self._served + count, self._servers)
            self._asking -= count
            if not count or self._asking <= 0:
                self._asking = max(self._asking, 0)
                return
            expected, wait_s = self._asking, _ABOUT_TO_ASK_S

    def _send(self, expected: int, wait_s: float, enough: threading.Event) -> int:
        """Send the weights to `expected` servers until `enough` is set; return how many have loaded them."""
        served = 0

        def tell(done: int, total: int) -> None:
            nonlocal served
            served = done
            if enough.is_set():
                raise _Enough

        with suppress(_Enough):
            served = self._learner.broadcast(expected, wait_s, tell)
        return served

    def _write(self, number: int) -> PolicyVersion:
        if self._model is None:
            model = (self._path / "model").resolve()
            self._learner.publish(model)
            self._model = model
            # Logged, because the job does not name the backend. It is gloo without CUDA GPUs.
            backend = "nccl" if self._learner.hardware().devices else "gloo"
            log.info("weights_are_sent", backend=backend, servers=self._servers)
        return PolicyVersion(number=number, folder=self._model, prompt=self._scored_prompt(self._model))


class _Enough(Exception):
    """Raised in a progress report to end the learner's wait for further servers."""


def make_delivery(
    learner: Learner, table: InferenceTable, directory: RunDirectory, tell: Callable[[str], None], *,
    broadcasts: bool, has_adapters: bool, launcher: Launcher = LOCAL, device: str = "auto",
) -> tuple[WeightFolders, InferenceTable]:  # fmt: skip
    """Return the object that delivers versions to engines, and [inference] with the servers' addresses.

    If `inference.urls` is empty, the addresses are those of the servers that the run will start.

    Args:
        broadcasts: whether the learner sends versions instead of writing folders.
        device: the job's `model.device`.
    """
    if table.engine == "local":  # no test prompt is scored, and adapters are in the model's folder
        return WeightFolders(learner, directory.weights), table
    servers = None
    if not table.urls:
        servers = VllmServers(
            table, learner.hardware(), directory, tell,
            launcher=launcher, device=device, broadcasts=broadcasts,
        )  # fmt: skip
        table = table.model_copy(update={"urls": servers.urls})
    weights: WeightFolders
    if broadcasts:
        weights = WeightBroadcast(learner, directory.weights, table)
    else:
        tokens = table.max_model_len - 1
        weights = WeightFolders(
            learner, directory.weights, prompt_tokens=tokens, has_adapters=has_adapters, sleeps=table.sleep
        )
    weights.servers = servers
    return weights, table
