"""The policy's versions as folders, RUN/weights/version_n, for engines that load from disk."""

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from trainer_backend.inference.versions import PolicyVersion, ScoredPrompt
from trainer_backend.parts import Learner
from trainer_backend.processes.vllm_servers import VllmServers

Result = TypeVar("Result")
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
    """

    servers: VllmServers | None = None
    """Those that the run starts itself: with the first version, until `close`."""

    def __init__(
        self, learner: Learner, path: Path, *, prompt_tokens: int = 0, has_adapters: bool = False
    ) -> None:
        self._learner, self._path, self._prompt_tokens = learner, path, prompt_tokens
        self._has_adapters = has_adapters
        self._base: Path | None = None

    async def write(self, number: int) -> PolicyVersion:
        """Write the policy of now under this version; at first, start servers."""
        version = await on_thread(self._write, number)
        if self.servers is not None:
            await self.servers.start(version.model)
        return version

    async def deliver(self, loading: Coroutine[None, None, None]) -> None:
        """Await what has engines load the version that was written last."""
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
        # By age, not by number: a run that goes on from an older checkpoint writes lower numbers anew.
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
        return ScoredPrompt(ids=tuple(ids), logprobs=tuple(self._learner.logprobs_of(ids)))


class WeightCopies(WeightFolders):
    """The policy's versions for an engine of this process, which copies the learner's own weights."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner, Path())

    def _write(self, number: int) -> PolicyVersion:
        return PolicyVersion(number=number, folder=self._path)
