"""How the policy's versions reach engines: as folders, RUN/weights/version_n, or from the learner's process,
tensor by tensor."""

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
# A server that has said that it is about to ask does so within this time, or says so again.
_ABOUT_TO_ASK_S = 5.0
_PROMPT_TOKENS = 64
_KEPT_VERSIONS = 2


async def on_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    """Run work on a thread. A cancelled call still waits for its thread, as the learner may be saved next."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(working)
    finally:
        await asyncio.gather(working, return_exceptions=True)


class WeightFolders:
    """Writes the learner's policy, one folder a version.

    The newest two are kept: an engine that comes back loads the newest, and one may still be reading the one
    before.

    Args:
        prompt_tokens: the most tokens of a prompt that the learner scores for each version; 0: none.
        has_adapters: whether a version is a folder of adapters; the model that they are over is then written
            once, at the first version.
        sleeps: whether servers sleep while the learner works.

    Attributes:
        held: the version that is loaded again before anything is sampled; None: one is served.
    """

    servers: VllmServers | None = None
    """Those that the run starts itself: with the first version, until `close`."""

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

    async def write(self, number: int) -> PolicyVersion:
        """Write the policy of now under this version; at first, start servers."""
        self._newest = version = await on_thread(self._write, number)
        if self.servers is not None:
            await self.servers.start(version.model)
        return version

    def hold(self) -> None:
        """Start no server again until the next load, where servers sleep: the learner needs the memory."""
        if self._sleeps:
            self.held = self._newest
            if self.servers is not None:
                self.servers.may_start.clear()

    async def deliver(self, loading: Coroutine[None, None, None]) -> None:
        """Await what has engines load the version that was written last."""
        self.held = None
        if self.servers is not None:
            self.servers.may_start.set()
        await loading

    def serve_again(self) -> None:
        """Do nothing: folders stay where they are, for an engine that comes back."""

    @property
    def renew(self) -> Callable[[str], None] | None:
        """Starts the server of an address again; None where the run starts none."""
        return None if self.servers is None else self.servers.renew

    async def close(self) -> None:
        """End what it holds."""
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
    """The policy's versions for an engine of this process, which copies the learner's own weights."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner, Path())

    def _write(self, number: int) -> PolicyVersion:
        return PolicyVersion(number=number, folder=self._path)


class WeightBroadcast(WeightFolders):
    """Has the learner send its policy to the servers that ask for it, at a publish and whenever one is back.

    A folder is written at the first version alone, RUN/weights/model: for its config and tokenizer, and for
    the run's own servers to start from. A server that comes back while the learner changes its weights gets
    those of the next publish.
    """

    def __init__(self, learner: Learner, path: Path, table: InferenceTable) -> None:
        super().__init__(learner, path, prompt_tokens=table.max_model_len - 1)
        self._url = table.urls[0]
        self._servers, self._wait_s = len(table.urls), table.replica_wait_s
        self._model: Path | None = None
        self._sending: asyncio.Task[None] | None = None
        self._enough = threading.Event()
        # Servers that have loaded the newest version, and those that ask for it now.
        self._served, self._asking = self._servers, 0

    async def write(self, number: int) -> PolicyVersion:
        """Have the learner offer its policy as this version; at first, start servers."""
        version = await super().write(number)
        # Where servers were placed says by which of its addresses the learner is reached.
        url = self._url if self.servers is None else self.servers.urls[0]
        host, port = await on_thread(self._learner.offer, urlsplit(url).hostname or "")
        return version.model_copy(update={"address": WeightAddress(host=host, port=port)})

    async def deliver(self, loading: Coroutine[None, None, None]) -> None:
        """Await what has servers load the version that was written last, and send it to them meanwhile."""
        # A server that is lost is not waited for: it asks once it is back.
        expected, self._served, self._asking = max(1, self._served), 0, 0
        sending = self._begin(expected, self._wait_s)
        try:
            async with racing(loading, sending) as (task, _):
                if sending.done():
                    sending.result()  # the learner may be lost
                await task
        finally:
            await self._settle()
        if self._asking > 0:
            self._begin(self._asking, _ABOUT_TO_ASK_S)

    def serve_again(self) -> None:
        """Send the weights to a server that is about to ask for them."""
        self._asking += 1
        if self._sending is None or self._sending.done():
            self._begin(self._asking, _ABOUT_TO_ASK_S)

    async def close(self) -> None:
        await self._settle()
        await super().close()

    async def _settle(self) -> None:
        """Wait until nothing is sent."""
        self._enough.set()
        if self._sending is not None:
            with suppress(TrainerError):  # whoever asks the learner next hears of it
                await asyncio.gather(self._sending)

    def _begin(self, expected: int, wait_s: float) -> asyncio.Task[None]:
        self._enough = threading.Event()
        self._sending = asyncio.ensure_future(self._send_all(expected, wait_s))
        return self._sending

    async def _send_all(self, expected: int, wait_s: float) -> None:
        """Send to servers, and then to those that have asked meanwhile."""
        while True:
            count = await asyncio.to_thread(self._send, expected, wait_s, self._enough)
            self._served = min(self._served + count, self._servers)
            self._asking -= count
            if not count or self._asking <= 0:
                self._asking = max(self._asking, 0)
                return
            expected, wait_s = self._asking, _ABOUT_TO_ASK_S

    def _send(self, expected: int, wait_s: float, enough: threading.Event) -> int:
        """How many servers have loaded it."""
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
            # On a device without NCCL the learner uses gloo, and the job says neither.
            backend = "nccl" if self._learner.hardware().devices else "gloo"
            log.info("weights_are_sent", backend=backend, servers=self._servers)
        return PolicyVersion(number=number, folder=self._model, prompt=self._scored_prompt(self._model))


class _Enough(Exception):
    """Raised in a learner's wait for servers that need not come any more."""


def make_delivery(
    learner: Learner, table: InferenceTable, directory: RunDirectory, tell: Callable[[str], None], *,
    broadcasts: bool, has_adapters: bool, launcher: Launcher = LOCAL, device: str = "auto",
) -> tuple[WeightFolders, InferenceTable]:  # fmt: skip
    """How versions reach engines of other processes; and the table with the addresses of the run's servers.

    Args:
        broadcasts: the learner sends them, instead of writing folders.
        device: that of [model].
    """
    if table.engine == "local":  # it needs no test, and reads adapters beside a model
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
