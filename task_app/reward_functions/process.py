"""The processes of a reward function, from the service's side: a pool of pebble's, and what they print."""

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import Pipe
from typing import Any

import structlog
from pebble import ProcessExpired, ProcessFuture, ProcessPool
from pydantic import TypeAdapter, ValidationError

from shared_schemas.evaluate_result import EvaluateResult
from task_app.errors import RewardFunctionFailed
from task_app.plugins import RewardPlugin
from task_app.reward_functions.child import Sessions, answer, begin
from task_app.settings import Settings

log = structlog.get_logger("task_app")

# What Python and its libraries need to run as they do here, and no service hides a key in.
HARMLESS = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HOME",
)  # fmt: skip
# The code of what took too long.
DEADLINE = "reward_function_deadline"
# At the deadline the child says where it was; this long after it, it is killed.
GRACE_S = 0.1
# Lines of up to 4,096 bytes are written whole into a pipe, and this is all that one holds.
_PRINTED_AT_ONCE = 65_536
_PRINTED_A_CALL = 65_536
_RESULTS = TypeAdapter(tuple[EvaluateResult, ...])


class RewardProcesses:
    """As many as the settings say, started at the first call. One that was killed or died is replaced.

    To cancel a call kills its process.
    """

    def __init__(self, name: str, plugin: RewardPlugin, settings: Settings) -> None:
        self._name = name
        self._file = plugin.file
        self._settings = settings
        self._prints = _Prints(name)
        self._pool: ProcessPool | None = None

    async def ask(self, episodes: Sequence[Mapping[str, Any]]) -> tuple[EvaluateResult, ...]:
        """Call the function with these episodes: one result for each.

        Raises:
            RewardFunctionFailed: it raised, died, took too long, or answered what is no result.
        """
        self._prints.count_anew()
        deadline_s, start_s = self._settings.reward_deadline_s, self._settings.reward_start_s
        most = {"deadline_s": deadline_s, "max_bytes": self._settings.max_reward_bytes}
        is_new = self._pool is None
        pool = self._pool = self._pool or self._new_pool()
        begun_s = time.monotonic()
        try:
            told = await self._result(pool.schedule(answer, (self._file, self._name, episodes), most))
            return _RESULTS.validate_json(told)
        except TimeoutError as exc:
            raise self._late("did not answer", deadline_s) from exc
        except ProcessExpired as exc:
            how = f"signal {-exc.exitcode}" if exc.exitcode < 0 else f"exit code {exc.exitcode}"
            raise self._failed(f"ended its process ({how}) before it answered") from exc
        except ValidationError as exc:
            raise self._failed(f"answered what is no result: {exc.errors()[0]['msg']}") from exc
        except (BrokenProcessPool, RuntimeError) as exc:
            # A process died that had no call: one that had waited for calls, or one that could not start.
            await self._end(pool)
            if is_new and time.monotonic() - begun_s >= start_s:
                raise self._late("did not start", start_s) from exc
            if is_new:
                raise self._failed("ended its process before it answered") from exc
        return await self.ask(episodes)

    async def _result(self, future: ProcessFuture[str]) -> str:
        """Wait until the deadline, counted from when a process takes the call, and kill it then.

        Pebble's own timeout goes by a clock that can be set.
        """
        deadline_s, start_s = self._settings.reward_deadline_s, self._settings.reward_start_s
        result = asyncio.wrap_future(future)
        try:
            async with asyncio.timeout(start_s + deadline_s):
                while not future.running() and not result.done():
                    await asyncio.wait({result}, timeout=GRACE_S / 2)
            async with asyncio.timeout(deadline_s + GRACE_S):
                return await result
        finally:
            result.cancel()

    async def close(self) -> None:
        """Kill them, with whatever they started."""
        if self._pool is not None:
            await self._end(self._pool)
        self._prints.close()

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            self._settings.max_reward_processes,
            initializer=begin,
            initargs=(
                self._file,
                self._name,
                environment_of(os.environ, self._settings.reward_variables),
                self._prints.writer,
                self._settings.reward_start_s,
            ),
            context=Sessions(),
        )

    async def _end(self, pool: ProcessPool) -> None:
        if self._pool is pool:
            self._pool = None
        pool.stop()  # type: ignore[no-untyped-call]
        await asyncio.to_thread(pool.join)

    def _failed(self, what: str) -> RewardFunctionFailed:
        return RewardFunctionFailed(f"reward function {self._name!r} {what}")

    def _late(self, did_not: str, within_s: float) -> RewardFunctionFailed:
        return RewardFunctionFailed(
            f"reward function {self._name!r} {did_not} within {within_s:g} s and was killed; the log of the "
            "task app says where it was",
            code=DEADLINE,
        )


class _Prints:
    """What the function prints goes to our log; per call no more than a bound, then only how much."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._logged = self._left_out = 0
        self._reader, self.writer = Pipe(duplex=False)
        os.set_blocking(self._reader.fileno(), False)
        asyncio.get_running_loop().add_reader(self._reader.fileno(), self._read)

    def count_anew(self) -> None:
        """Begin a call's count, and say what the log does not hold."""
        if self._left_out:
            log.warning("reward_function_prints_left_out", reward_function=self._name, bytes=self._left_out)
        self._logged = self._left_out = 0

    def close(self) -> None:
        """Log what the pipe still holds: what a process left running may hold it open for ever."""
        while self._read():
            pass
        self.count_anew()
        asyncio.get_running_loop().remove_reader(self._reader.fileno())
        self._reader.close()
        self.writer.close()

    def _read(self) -> bool:
        try:
            printed = os.read(self._reader.fileno(), _PRINTED_AT_ONCE)
        except BlockingIOError:
            return False
        self._log(printed)
        return True

    def _log(self, printed: bytes) -> None:
        if not printed.strip():
            return
        if self._logged + len(printed) > _PRINTED_A_CALL:
            self._left_out += len(printed)
            return
        self._logged += len(printed)
        text = printed.decode("utf-8", "replace")
        log.info("reward_function_printed", reward_function=self._name, text=text)


def environment_of(ours: Mapping[str, str], more: Sequence[str]) -> dict[str, str]:
    """The environment variables of the process: the harmless ones of ours, those that the operator lists, and
    where Python finds modules. No key is among the first."""
    chosen = {name: ours[name] for name in (*HARMLESS, *more) if name in ours}
    return chosen | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
