"""Starts a learner process, calls it over HTTP, and ends it, on behalf of the orchestrator.

If the learner is external, another system starts and ends the process. If not, its log is RUN/learner.log.
"""

import asyncio
import inspect
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, cast

import httpx

from service_kit.process import Process, last_line, name_exit
from service_kit.release import version
from service_kit.replies import ReplyFault, ReplyInvalid, bounded, plain_client, read_reply
from service_kit.rpc import MOST_REFUSAL_BYTES, PATH, Reply
from service_kit.tasks import end_tasks
from shared_schemas.trajectory import Trajectory
from trainer_backend.core.critic import OfEpisode
from trainer_backend.errors import JobError, LearnerFailed, LearnerLost, TrainerError
from trainer_backend.job.tables import RANKS_JOIN_S, LearnerTable
from trainer_backend.learner.calls import (
    CALLS,
    LEARNER_KEY,
    NUMBER_HEADER,
    SESSION_HEADER,
    About,
    learner_role,
)
from trainer_backend.parts import CreditedEpisode, Learner, Progress, Reporter
from trainer_backend.processes.launching import LOCAL, PACKAGE, Elsewhere, Launcher, NotReady, read_address
from trainer_backend.rundir.layout import RunDirectory

Tell = Callable[[int, int], None]

# A file in the run's directory that the learner's machine must see.
_MARK, _LOOK_S = ".seen_by_the_learner", 1.0

# A learner of several ranks is ready once all ranks have joined; a single process is ready after its imports.
_START_S, _RANKS_START_S = 300.0, RANKS_JOIN_S + 60.0
_STOP_S = 10.0
# Time to wait for the exit code of a process whose connections broke.
_EXIT_S = 2.0
_CONNECT_S = 10.0
# Attempts of a call whose connection breaks while the process lives.
_ATTEMPTS = 3
# Calls that read a model, or download one from the hub, have a longer timeout.
_LOADING = frozenset({"fixed_folders", "plan_memory", "fresh", "resumed", "gradient_cosines"})
_LOAD_S = 3600.0


class LearnerConnection:
    """Makes blocking calls to a learner process, one at a time.

    Args:
        silence_s: a process counts as lost if it sends nothing for this many seconds during a call.
        log_file: the log of the process, quoted in errors; None: the log is on another machine.
        session: RUN/START, the name of this start of the run. The process refuses other runs until `leave`.
        wait_for_exit: returns the exit code of a process that cannot be reached; None if it is unknown.

    Raises (every call):
        LearnerLost: the process has ended, or sent nothing for too long.
        TrainerError: the call itself failed in the process.
    """

    def __init__(
        self, url: str, key: str, *, silence_s: float, log_file: Path | None, session: str,
        wait_for_exit: Callable[[], int | None] = lambda: None,
    ) -> None:  # fmt: skip
        self.url, self._log_file, self._silence_s, self._number = url, log_file, silence_s, 0
        self._wait_for_exit = wait_for_exit
        self._turn = threading.Lock()
        self._client = plain_client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}", SESSION_HEADER: session},
            timeout=_CONNECT_S,
            trust_env=False,  # no proxy within the machine or the cluster
        )

    def ask(self, name: str, *arguments: Any, tell: Tell | None = None) -> Any:
        """Make a call and return its result.

        If the connection breaks, the call is sent again with the same number, by which the process recognizes
        the call and does not execute it twice.

        Args:
            tell: receives the progress of the call; an error that it raises makes the process stop the call.
        """
        # The process may have another working directory.
        absolute = [item.absolute() if isinstance(item, Path) else item for item in arguments]
        body = CALLS.write_arguments(name, absolute)
        silence_s = max(self._silence_s, _LOAD_S) if name in _LOADING else self._silence_s
        with self._turn:
            self._number += 1
            return self._answer(Reply(CALLS, name, body, tell), silence_s)

    def _answer(self, call: Reply, silence_s: float) -> Any:
        name = call.name
        for _ in range(_ATTEMPTS):
            try:
                return self._attempt(call, silence_s)
            except httpx.ConnectError as error:
                code = self._wait_for_exit()
                how = "" if code is None else f" with {name_exit(code)}"
                raise self._lost(name, f"has ended{how}") from error
            except httpx.TimeoutException as error:
                raise self._lost(name, f"said nothing for {silence_s:g} s (learner.timeout_s)") from error
            except ReplyFault as error:
                raise self._with_log(LearnerFailed(f"{self.url}{PATH}{name}: {error}")) from error
            except httpx.TransportError:
                call = call.again()
        raise self._lost(name, f"broke off {_ATTEMPTS} connections")

    def fault(self, run: str) -> str:
        """Return why the process cannot serve the run `run` at the moment; "" if it can.

        Raises:
            JobError: the process runs another release of Turnwise.
            LearnerFailed: the process is not a learner, or its key differs.
        """
        try:
            with self._client.stream("GET", "/about") as reply:
                if not reply.is_success:
                    raise self._refusal(reply)
                content = _content(reply)
        except httpx.TransportError as error:
            return f"{type(error).__name__}: {error}"
        except ReplyFault as error:
            raise LearnerFailed(f"{self.url} answered, and not as a learner does: {error}") from error
        try:
            about = read_reply(About, content, "its reply")
        except ReplyInvalid as error:
            raise LearnerFailed(
                f"{reply.url} answered, and not as a learner does: {error.finding}"
            ) from error
        if about.version != (own := version()):
            raise JobError(
                f"the learner at {self.url} is of {PACKAGE} {about.version}, and this is {own}",
                hint="Install the same release on all machines of a run.",
            )
        # The last call of an ended run may still be running.
        is_busy = about.call and about.run in ("", run)
        return f"it is busy with call {about.call} of an earlier start" if is_busy else ""

    def leave(self) -> None:
        """Tell the learner's process that its run has ended. Ignore a failure to send this message."""
        with suppress(httpx.HTTPError, ReplyFault):
            self._tell("/leave", {})

    def close(self) -> None:
        self._client.close()

    def _tell(self, path: str, headers: Mapping[str, str]) -> None:
        """Send a POST request and ignore the reply."""
        with self._client.stream("POST", path, headers=headers):
            pass

    def _attempt(self, call: Reply, silence_s: float) -> Any:
        number, path = {NUMBER_HEADER: str(self._number)}, PATH + call.name
        timeout = httpx.Timeout(silence_s, connect=min(silence_s, _CONNECT_S))
        with self._client.stream("POST", path, content=call.body, headers=number, timeout=timeout) as reply:
            if not reply.is_success:
                raise self._refusal(reply)
            for part in reply.iter_raw():
                if call.take(part):
                    try:
                        return call.result()
                    except LearnerFailed as error:
                        raise self._with_log(error) from error.__cause__
                if call.unwelcome is not None:
                    self._tell("/stop", number)
        raise httpx.RemoteProtocolError("the reply ended before the call")

    def _refusal(self, reply: httpx.Response) -> TrainerError:
        url, location = str(reply.url), reply.headers.get("Location")
        return self._with_log(CALLS.refusal(url, reply.status_code, location, _content(reply)))

    def _with_log(self, error: TrainerError) -> TrainerError:
        if isinstance(error, LearnerFailed) and error.hint is None and self._log_file is not None:
            error.hint = f"Its log is {self._log_file}."
        return error

    def _lost(self, name: str, what: str) -> LearnerLost:
        return LearnerLost(f"the learner's process {what} in the call {name!r}{_last_words(self._log_file)}")


def _last_words(log_file: Path | None) -> str:
    """Return text about the last line of the log, for the end of an error message; "" without a log."""
    if log_file is None:
        return ""
    return f"; the last line of its log, {log_file}: {last_line(log_file)!r}"


def remote_learner(ask: Callable[..., Any]) -> Learner:
    """Return a learner whose methods make calls with `ask`, which is `LearnerConnection.ask`."""
    return cast(Learner, _Remote(ask))


class _Remote:
    """Implements each method of `parts.Learner` as a call with the name of the method."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in CALLS:
            raise AttributeError(name)
        signature = inspect.signature(getattr(Learner, name))

        def call(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(self, *arguments, **named)
            bound.apply_defaults()
            _, *values = (_plain(value) for key, value in bound.arguments.items() if key != "tell")
            return self._ask(name, *values, tell=bound.arguments.get("tell"))

        return call


def _plain(value: Any) -> Any:
    """Convert sequences to lists and mappings to dicts, which the types of `CALLS` require."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    match value:
        case [*items]:  # does not match a str
            return [_plain(item) for item in items]
    return value


class LearnerProcess:
    """Implements `parts.LearnerFactory` with a learner in another process.

    Entering this async context manager starts the process; leaving it ends the process.

    Args:
        job: the job as TOML text, which is sent to the process.
        directory: the run's directory. The process must see it under the same path.
        reporter: shows the state of the process, also when the process ends between two calls.
        device: the job's `model.device`.
        wait_s: how long to wait until an external learner is ready (cluster.wait_s).

    Raises (on entry):
        JobError: the job's device is missing, or the process runs another release of Turnwise or does not see
            the run's directory.
        LearnerFailed: the process did not start, or did not answer in time.
        LearnerBusy: the process works for another run.
        LearnerLost: a signal ended the process, or the process sent nothing for too long.
        NotPlaced: no machine had free resources for the process in time.
    """

    def __init__(
        self,
        job: str,
        table: LearnerTable,
        directory: RunDirectory,
        reporter: Reporter,
        launcher: Launcher = LOCAL,
        *,
        device: str,
        wait_s: float = 0.0,
    ) -> None:
        self._job, self._table, self._device, self._wait_s = job, table, device, wait_s
        self._directory, self._reporter, self._launcher = directory, reporter, launcher
        self._log_file = directory.learner_log
        self._watch: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._end_is_known = False
        self._exit_code: Future[int] = Future()
        self._connection: LearnerConnection | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> Self:
        self._report("starting")
        try:
            await self._start()
        except BaseException as error:
            await self._end(error)
            raise
        self._report("serving", f"process {self.pid}" if self.pid else "")
        return self

    async def _start(self) -> None:
        key = self._launcher.key(LEARNER_KEY)
        table = self._table
        self._process = await self._launcher.start(learner_role(table, self._device, key, self._log_file))
        self._connection = LearnerConnection(
            await self._address(self._process), key, silence_s=table.timeout_s,
            log_file=None if isinstance(self._process, Elsewhere) else self._log_file,
            session=f"{self._directory.run_id}/{secrets.token_hex(8)}",
            wait_for_exit=self._wait_for_exit,
        )  # fmt: skip
        self._watch = asyncio.ensure_future(self._report_end(self._process))
        await self._meet(self._connection)
        await asyncio.to_thread(self._ask, "open", self._job)
        if self._launcher is not LOCAL:
            await self._refuse_other_disk()

    async def _meet(self, connection: LearnerConnection) -> None:
        """Wait until an external learner can serve the run. Any other learner must be ready at once."""
        is_elsewhere, limit_s, last_fault = isinstance(self._process, Elsewhere), self._wait_s, ""
        deadline = time.monotonic() + limit_s
        while fault := await asyncio.to_thread(connection.fault, self._directory.run_id):
            if not is_elsewhere:
                raise LearnerLost(f"the learner's process was ready, and then: {fault}")
            if time.monotonic() > deadline:
                raise LearnerFailed(
                    f"no learner was ready at {connection.url} within {limit_s:g} s (cluster.wait_s): "
                    f"{fault}",
                    hint="docs/cluster.md says how to start one.",
                )
            if fault != last_fault:
                self._reporter.say(
                    f"waiting for the learner at {connection.url}, at most {limit_s:g} s: {fault}"
                )
                last_fault = fault
            await asyncio.sleep(_LOOK_S)

    async def _refuse_other_disk(self) -> None:
        """Raise JobError if the process cannot read files in the run's directory, such as checkpoints."""
        mark, text = self._directory.path.absolute() / _MARK, secrets.token_hex(8)
        mark.write_text(text, encoding="utf-8")
        try:
            if not await asyncio.to_thread(self._ask, "sees", mark, text):
                raise JobError(
                    f"the learner's machine does not see the run's directory, {mark.parent}",
                    hint="Weights and checkpoints are files: put job.runs_dir on a disk that all machines of "
                    "the run have mounted under the same path.",
                )
        finally:
            mark.unlink(missing_ok=True)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._end(error)

    def fixed_folders(self, checkpoint: Path | None) -> Mapping[str, Path]:
        return cast(dict[str, Path], self._ask("fixed_folders", checkpoint))

    def plan_memory(self, checkpoint: Path | None, fixed: Sequence[Path]) -> str:
        return cast(str, self._ask("plan_memory", checkpoint, list(fixed)))

    def fresh(self, prompts: Sequence[Trajectory], tokenizer_folder: Path | None) -> Learner:
        self._ask("fresh", list(prompts), tokenizer_folder)
        return remote_learner(self._ask)

    def resumed(self, checkpoint: Path) -> tuple[Learner, Progress]:
        return remote_learner(self._ask), cast(Progress, self._ask("resumed", checkpoint))

    def gradient_cosines(
        self,
        checkpoint: Path,
        episodes: Sequence[CreditedEpisode],
        advantages: Mapping[str, Sequence[OfEpisode]],
        tell: Tell,
    ) -> list[tuple[str, str, float]]:
        given = {name: list(of_episodes) for name, of_episodes in advantages.items()}
        cosines = self._ask("gradient_cosines", checkpoint, list(episodes), given, tell=tell)
        return cast(list[tuple[str, str, float]], cosines)

    def _ask(self, name: str, *arguments: Any, tell: Tell | None = None) -> Any:
        assert self._connection is not None
        return self._connection.ask(name, *arguments, tell=tell)

    async def _address(self, process: Process) -> str:
        limit_s = _START_S if self._table.ranks == 1 else _RANKS_START_S
        try:
            return await read_address(process, self._log_file, limit_s)
        except NotReady as error:
            # A process that a signal ended, perhaps for lack of memory, is worth another start.
            kind = LearnerLost if (error.code or 0) < 0 else LearnerFailed
            raise kind(f"the learner's process {error}", hint=f"Its log is {self._log_file}.") from error

    async def _report_end(self, process: Process) -> None:
        """Wait until the process ends, and report this. Waiting also reads the process's output."""
        code = await process.ended()
        self._exit_code.set_result(code)
        if not self._end_is_known:
            self._end_is_known = True
            line = f"the learner's process ended with {name_exit(code)}{_last_words(self._log_file)}"
            self._reporter.say(line)
            self._report("lost", line)

    def _wait_for_exit(self) -> int | None:
        """Return the exit code of the process; None if it is not known within `_EXIT_S`.

        It runs in the thread of a call, which may notice the end before the event loop does.
        """
        with suppress(TimeoutError):
            return self._exit_code.result(_EXIT_S)
        return None

    def _report(self, state: str, word: str = "") -> None:
        self._reporter.process("learner", role="learner", state=state, word=word)

    async def _end(self, error: BaseException | None) -> None:
        if isinstance(error, LearnerLost) and not self._end_is_known:
            self._report("lost", str(error))
        self._end_is_known = True
        if self._connection is not None and not isinstance(error, LearnerLost):
            await asyncio.to_thread(self._connection.leave)
        if self._process is not None:
            await self._process.end(_STOP_S)
        if self._watch is not None:
            await end_tasks(self._watch)
        if self._connection is not None:
            self._connection.close()


def _content(reply: httpx.Response) -> bytes:
    """Return the short body of a reply that contains no result of a call, such as a refusal."""
    try:
        return b"".join(bounded(reply.iter_raw(), MOST_REFUSAL_BYTES))
    except ReplyFault as error:
        raise LearnerFailed(f"{reply.url} answered, and not as a learner does: {error}") from error
