"""A task app of the job's own: a child process on a free loopback port, with a fresh key.

It lives exactly as long as this process: it is told to stop at the end, and its standard input is a pipe
from us, so that it also ends when this process is killed and can tell nobody anything.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import SecretStr

from service_kit.children import PIPE, Child
from service_kit.keys import TASK_APP_KEY
from trainer_backend.collect.slices import DEFAULT_BODY_BYTES
from trainer_backend.errors import JobError, TaskAppError

_START_S = 60.0
_STOP_S = 10.0
# Its exit code for a setting or a plug-in file that is wrong (task_app.__main__).
_REFUSED = 2
_BODY_BYTES = "TURNWISE_MAX_BODY_BYTES"
# The setting's own bound.
_MOST_BODY_BYTES = 1 << 30


class EmbeddedTaskApp:
    """Async context manager around the child process.

    Args:
        log_file: its log lines are appended to it.
        hosts_to_call: `host:port` of inference servers that it may call beside those on this machine.
        plugins: files with environments and policies of the job's own.
        interactions: the file of its interactions, if it has one.
        body_bytes: a request may hold so many, unless the variable for that is set already.
    """

    def __init__(
        self,
        log_file: Path,
        hosts_to_call: Sequence[str] = (),
        *,
        plugins: Sequence[Path] = (),
        interactions: Path | None = None,
        body_bytes: int = DEFAULT_BODY_BYTES,
    ) -> None:
        self._log_file = log_file
        self._allowed = [word for host in hosts_to_call for word in ("--allow-inference-host", host)]
        self._allowed += [word for file in plugins for word in ("--plugins", str(file))]
        if interactions is not None:
            self._allowed += ["--interactions", str(interactions)]
        self._environment = {_BODY_BYTES: str(min(body_bytes, _MOST_BODY_BYTES)), **os.environ}
        self.api_key = SecretStr(secrets.token_urlsafe(32))
        self.url = ""
        self._child: Child | None = None

    async def __aenter__(self) -> Self:
        with self._log_file.open("ab") as log:
            self._child = await Child.start(
                (
                    sys.executable, "-m", "task_app", "--host", "127.0.0.1", "--port", "0",
                    "--exit-with-parent", *self._allowed,
                ),
                stdout=PIPE,
                stderr=log,
                env={**self._environment, TASK_APP_KEY: self.api_key.get_secret_value()},
            )  # fmt: skip
        try:
            async with asyncio.timeout(_START_S):
                self.url = await self._address(self._child)
        except BaseException as error:
            await self._child.end(_STOP_S)
            if isinstance(error, TimeoutError):
                raise TaskAppError(f"the embedded task app did not start within {_START_S:g} s") from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            await self._child.end(_STOP_S)

    async def _address(self, child: Child) -> str:
        address = await child.address()
        if address is not None:
            return address
        code = await child.ended()
        if code == _REFUSED:
            # Its last line says what is wrong; the log may be in a folder that goes with us.
            lines = self._log_file.read_text(encoding="utf-8", errors="replace").splitlines()
            raise JobError(f"the job's own task app did not start: {lines[-1].removeprefix('task_app: ')}")
        raise TaskAppError(f"the embedded task app ended with exit code {code}; see {self._log_file}")
