"""Delivers the policy's versions to engines: as folders (RUN/weights/version_n), or as tensors."""

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
# A server that has announced a request for weights makes it within this time, or announces it again.
_ABOUT_TO_ASK_S = 5.0
_PROMPT_TOKENS = 64
_KEPT_VERSIONS = 2


async def on_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    """Run work on a thread. Wait for its end even if cancelled, since the learner may be saved next."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(working)
    finally:
        await asyncio.gather(working, return_exceptions=True)


class WeightFolders:
    """Writes the learner's policy, one folder per version.

    The newest two are kept: a restarted engine loads the newest, and another may still read the previous one.

    Args:
        prompt_tokens: length limit of the test prompt that the learner scores for each version; 0: no prompt.
        has_adapters: whether versions are folders of adapters; the base model is then written once, with the
            first version.
        sleeps: whether servers sleep while the learner works.
    """

    servers: VllmServers | None = None
    """The run's own servers, from the first version to `close`."""

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
        """The version that servers must load again before they sample; None: a version is served."""

    async def write(self, number: int) -> PolicyVersion:
        """Write the current policy as this version; the first call starts the servers."""
        self._newest = version = await on_thread(self._write, number)
        if self.servers is not None:
            await self.servers.start(version.model)
        return version

    def hold(self) -> None:
        """Do not restart sleeping servers until the next load, since the learner needs the memory."""
        if self._sleeps:
            self.held = self._newest
            if self.servers is not None:
                self.servers.may_start.clear()

    async def deliver(self, loading: Coroutine[None, None, None]) -> None:
        """Await `loading`, in which engines load the newest version."""
        self.held = None
        if self.servers is not None:
            self.servers.may_start.set()
        await loading

    def serve_again(self) -> None:
        """Do nothing: a restarted engine reads the newest version's folder without the learner."""

    @property
    def renew(self) -> Callable[[str], None] | None:
        """Restarts the server of an address; None if the run has no own servers."""
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
    """Versions for an engine of this process, which copies the learner's own weights."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner, Path())

    def _write(self, number: int) -> PolicyVersion:
        return PolicyVersion(number=number, folder=self._path)


class WeightBroadcast(WeightFolders):
    """Lets the learner send its policy to servers that ask, at a publish and after a server's restart.

    The only folder, RUN/weights/model, is written with the first version: for config and tokenizer, and for
    the start of the run's own servers. A server that restarts during an update gets the next version.
    """

    def __init__(self, learner: Learner, path: Path, table: InferenceTable) -> None:
        super().__init__(learner, path, prompt_tokens=table.max_model_len - 1)
        self._url = table.urls[0]
        self._servers, self._wait_s = len(table.urls), table.replica_wait_s
        self._model: Path | None = None
        self._sending: asyncio.Task[None] | None = None
        self._enough = threading.Event()
        # Numbers of servers that have loaded the newest version, and that ask for it now.
        self._served, self._asking = self._servers, 0

    async def write(self, number: int) -> PolicyVersion:
        """Let the learner offer its policy as this version; the first call starts the servers."""
        version = await super().write(number)
        # The learner offers the one of its addresses at which these servers can reach it.
        url = self._url if self.servers is None else self.servers.urls[0]
        host, port = await on_thread(self._learner.offer, urlsplit(url).hostname or "")
        return version.model_copy(update={"address": WeightAddress(host=host, port=port)})

    async def deliver(self, loading: Coroutine[None, None, None]) -> None:
        """Await `loading`, in which servers load the newest version, while the learner sends it."""
        # Lost servers are not waited for: they ask after their restart.
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
        """Stop waiting for further servers, and wait for the sending to end."""
        self._enough.set()
        if self._sending is not None:
            with suppress(TrainerError):  # the next call to the learner raises it
                await asyncio.gather(self._sending)

    def _begin(self, expected: int, wait_s: float) -> asyncio.Task[None]:
        self._enough = threading.Event()
        self._sending = asyncio.ensure_future(self._send_all(expected, wait_s))
        return self._sending

    async def _send_all(self, expected: int, wait_s: float) -> None:
        """Send to the expected servers, and then to servers that have asked meanwhile."""
        while True:
            count = await asyncio.to_thread(self._send, expected, wait_s, self._enough)
            self._served = min(self._served + count, self._servers)
            self._asking -= count
            if not count or self._asking <= 0:
                self._asking = max(self._asking, 0)
                return
            expected, wait_s = self._asking, _ABOUT_TO_ASK_S

    def _send(self, expected: int, wait_s: float, enough: threading.Event) -> int:
        """Return the number of servers that have loaded the weights."""
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
            # Logged, since the job does not name the backend: gloo without CUDA GPUs.
            backend = "nccl" if self._learner.hardware().devices else "gloo"
            log.info("weights_are_sent", backend=backend, servers=self._servers)
        return PolicyVersion(number=number, folder=self._model, prompt=self._scored_prompt(self._model))


class _Enough(Exception):
    """Ends the learner's wait for servers that are no longer needed."""


def make_delivery(
    learner: Learner, table: InferenceTable, directory: RunDirectory, tell: Callable[[str], None], *,
    broadcasts: bool, has_adapters: bool, launcher: Launcher = LOCAL, device: str = "auto",
) -> tuple[WeightFolders, InferenceTable]:  # fmt: skip
    """Make the delivery of versions to engines; return it, and the table with the run's servers' addresses.

    Args:
        broadcasts: whether the learner sends versions instead of writing folders.
        device: the device of [model].
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
