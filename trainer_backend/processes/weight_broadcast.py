"""The policy's versions as the learner's process sends them to vLLM servers, tensor by tensor; no folders."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from trainer_backend.errors import TrainerError
from trainer_backend.inference.versions import PolicyVersion, WeightAddress
from trainer_backend.job.tables import InferenceTable
from trainer_backend.parts import Learner
from trainer_backend.processes.launching import LOCAL, Launcher
from trainer_backend.processes.vllm_servers import VllmServers
from trainer_backend.processes.weight_folders import WeightFolders, on_thread
from trainer_backend.run.stopping import racing
from trainer_backend.rundir.layout import RunDirectory

log = structlog.get_logger("weights")

# A server that has said that it is about to ask does so within this time, or says so again.
_ABOUT_TO_ASK_S = 5.0


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
            async with racing(loading, sending) as task:
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


def deliver_to_servers(
    learner: Learner, table: InferenceTable, directory: RunDirectory, tell: Callable[[str], None], *,
    broadcasts: bool, has_adapters: bool, launcher: Launcher = LOCAL, device: str = "auto",
) -> tuple[WeightFolders, InferenceTable]:  # fmt: skip
    """How versions reach vLLM servers; and the table with the addresses of those that the run starts.

    Args:
        broadcasts: the learner sends them, instead of writing folders.
        device: that of [model].
    """
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
        weights = WeightFolders(learner, directory.weights, prompt_tokens=tokens, has_adapters=has_adapters)
    weights.servers = servers
    return weights, table
