"""The learner as a child process, and the orchestrator's side of it: calls over HTTP on the loopback.

The child is started with the run and ends with it. Its log is RUN/learner.log.
"""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from service_kit.children import PIPE, Child, last_line
from shared_schemas.problem import Problem
from shared_schemas.trajectory import Trajectory
from trainer_backend.core.critic import OfEpisode
from trainer_backend.core.kl_reward import ScoredTokens
from trainer_backend.core.segments import Segment
from trainer_backend.errors import LearnerBusy, LearnerFailed, LearnerLost, TrainerError
from trainer_backend.job.load import dump_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import LearnerTable
from trainer_backend.learner.calls import CALLS, LEARNER_KEY, NUMBER_HEADER, SESSION_HEADER, ErrorBody
from trainer_backend.protocols import CreditedEpisode, Hardware, Progress, Reporter, WeightPart

Tell = Callable[[int, int], None]

_START_S = 300.0
_STOP_S = 10.0
_CONNECT_S = 10.0
# Of a call whose connection breaks while the process lives.
_ATTEMPTS = 3
# Calls that read a model, or fetch one from the hub, which has a pace of its own.
_LOADING, _LOAD_S = frozenset({"fixed_folders", "plan_memory", "fresh", "resumed"}), 3600.0


class LearnerConnection:
    """Calls to a learner's process, one at a time; they block.

    Args:
        silence_s: a process that says nothing for so long in a call is lost.
        log_file: of the process; errors name it.
        session: the name of this orchestrator; the process serves the first one alone.

    Raises (every call):
        LearnerLost: the process has ended, or is silent.
        TrainerError: what the call itself raised, of its own class.
    """

    def __init__(self, url: str, key: str, *, silence_s: float, log_file: Path, session: str) -> None:
        self._log_file, self._silence_s, self._number = log_file, silence_s, 0
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}", SESSION_HEADER: session},
            timeout=_CONNECT_S,
            trust_env=False,  # no proxy for the loopback
        )

    def ask(self, name: str, *arguments: Any, tell: Tell | None = None) -> Any:
        """Make a call and return its result.

        A call whose connection breaks is repeated by its number: the process does it once, and answers twice.

        Args:
            tell: receives the progress; its error ends the call.
        """
        self._number += 1
        progress, body = _Progress(tell), CALLS[name].body(arguments)
        silence_s = max(self._silence_s, _LOAD_S) if name in _LOADING else self._silence_s
        for _ in range(_ATTEMPTS):
            try:
                return self._attempt(name, body, progress, silence_s)
            except httpx.ConnectError as error:
                raise self._lost(name, "has ended") from error
            except httpx.TimeoutException as error:
                raise self._lost(name, f"said nothing for {silence_s:g} s (learner.timeout_s)") from error
            except httpx.TransportError:
                continue
        raise self._lost(name, f"broke off {_ATTEMPTS} connections")

    def close(self) -> None:
        self._client.close()

    def _attempt(self, name: str, body: bytes, progress: "_Progress", silence_s: float) -> Any:
        number = {NUMBER_HEADER: str(self._number)}
        timeout = httpx.Timeout(silence_s, connect=min(silence_s, _CONNECT_S))
        with self._client.stream(
            "POST", f"/calls/{name}", content=body, headers=number, timeout=timeout
        ) as reply:
            if not reply.is_success:
                reply.read()
                raise self._refusal(reply)
            for line in _lines(reply.iter_bytes()):
                kind, _, text = line.partition(b" ")
                if kind == b"progress":
                    if progress.is_unwelcome(*json.loads(text)):
                        self._client.post("/stop", headers=number)
                elif progress.error is not None:
                    raise progress.error  # now that the call has ended
                elif kind == b"result":
                    return CALLS[name].result.validate_json(text)[0]
                else:
                    raise self._with_log(ErrorBody.model_validate_json(text).error())
        raise httpx.RemoteProtocolError("the reply ended before the call")

    def _refusal(self, reply: httpx.Response) -> TrainerError:
        try:
            problem = Problem.model_validate_json(reply.content)
        except ValueError:
            return LearnerFailed(f"{reply.url} answered {reply.status_code}, and not as a learner does")
        kind = LearnerBusy if problem.code == LearnerBusy.code else LearnerFailed
        return self._with_log(kind(problem.detail, where=problem.where, hint=problem.hint))

    def _with_log(self, error: TrainerError) -> TrainerError:
        if isinstance(error, LearnerFailed) and error.hint is None:
            error.hint = f"Its log is {self._log_file}."
        return error

    def _lost(self, name: str, what: str) -> LearnerLost:
        return LearnerLost(
            f"the learner's process {what} in the call {name!r}; the last line of its log, {self._log_file}: "
            f"{last_line(self._log_file)!r}"
        )


class _Progress:
    """Passes the progress of a call on, until that raises.

    Attributes:
        error: what was raised; the call is to end then.
    """

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell
        self.error: Exception | None = None

    def is_unwelcome(self, done: int, total: int) -> bool:
        """Whether the call is to end."""
        if self.error is None and self._tell is not None:
            try:
                self._tell(done, total)
            except Exception as error:
                self.error = error
        return self.error is not None


class RemoteLearner:
    """Implements `protocols.Learner` at a learner's process."""

    def __init__(self, connection: LearnerConnection) -> None:
        self._ask = connection.ask

    def warm_up(self, episodes: Sequence[Trajectory], tell: Tell) -> dict[str, float]:
        metrics: dict[str, float] = self._ask("warm_up", list(episodes), tell=tell)
        return metrics

    def values(self, episodes: Mapping[str, Sequence[Segment]]) -> dict[str, OfEpisode]:
        values: dict[str, OfEpisode] = self._ask("values", dict(episodes))
        return values

    def score(self, episodes: Mapping[str, Sequence[Segment]]) -> dict[str, ScoredTokens]:
        scores: dict[str, ScoredTokens] = self._ask("score", dict(episodes))
        return scores

    def update(
        self, episodes: Sequence[CreditedEpisode], *, iteration: int, policy_version: int | None = None
    ) -> dict[str, float]:
        metrics: dict[str, float] = self._ask("update", list(episodes), iteration, policy_version)
        return metrics

    def save(self, folder: Path, progress: Progress) -> None:
        self._ask("save", folder, progress)

    def publish(self, folder: Path, part: WeightPart = "whole") -> None:
        self._ask("publish", folder, part)

    def logprobs_of(self, ids: Sequence[int]) -> list[float]:
        logprobs: list[float] = self._ask("logprobs_of", list(ids))
        return logprobs

    def hardware(self) -> Hardware:
        hardware: Hardware = self._ask("hardware")
        return hardware


class LearnerProcess:
    """Implements `protocols.LearnerFactory` with a child process; an async context manager around it.

    Args:
        log_file: receives its log.
        reporter: is given its process, and hears of its end when that comes, also between two calls; the next
            call raises LearnerLost.

    Raises (on entry):
        JobError: the device that the job names is not there.
        LearnerFailed: the process did not start.
        LearnerLost: a signal ended it, or it was silent.
    """

    def __init__(self, job: JobConfig, log_file: Path, reporter: Reporter) -> None:
        self._job, self._log_file, self._reporter = job, log_file, reporter
        self._watch: asyncio.Task[None] | None = None
        self._child: Child | None = None
        self._end_is_known = False
        self._connection: LearnerConnection | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def __aenter__(self) -> Self:
        self._report("starting")
        try:
            await self._start()
        except BaseException as error:
            await self._end(error)
            raise
        self._report("serving", f"process {self.pid}")
        return self

    async def _start(self) -> None:
        key = secrets.token_urlsafe(32)
        with self._log_file.open("ab") as log:
            self._child = await Child.start(
                _command(self._job.learner),
                stdout=PIPE,
                stderr=log,
                env={**os.environ, LEARNER_KEY: key},
            )
        self._connection = LearnerConnection(
            await self._address(self._child), key,
            silence_s=self._job.learner.timeout_s, log_file=self._log_file,
            session=secrets.token_hex(8),
        )  # fmt: skip
        self._watch = asyncio.ensure_future(self._tell_of_its_end(self._child))
        await asyncio.to_thread(self._ask, "open", dump_job(self._job))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end(error)

    def fixed_folders(self, checkpoint: Path | None) -> Mapping[str, Path]:
        folders: dict[str, Path] = self._ask("fixed_folders", checkpoint)
        return folders

    def plan_memory(self, checkpoint: Path | None, fixed: Sequence[Path]) -> str:
        plan: str = self._ask("plan_memory", checkpoint, list(fixed))
        return plan

    def fresh(self, prompts: Sequence[Trajectory], tokenizer_of: Path | None) -> RemoteLearner:
        self._ask("fresh", list(prompts), tokenizer_of)
        return self._learner()

    def resumed(self, checkpoint: Path) -> tuple[RemoteLearner, Progress]:
        progress: Progress = self._ask("resumed", checkpoint)
        return self._learner(), progress

    def _ask(self, name: str, *arguments: Any) -> Any:
        assert self._connection is not None
        return self._connection.ask(name, *arguments)

    def _learner(self) -> RemoteLearner:
        assert self._connection is not None
        return RemoteLearner(self._connection)

    async def _address(self, child: Child) -> str:
        try:
            async with asyncio.timeout(_START_S):
                address = await child.address()
        except TimeoutError as error:
            raise LearnerFailed(f"the learner's process did not start within {_START_S:g} s") from error
        if address is None:
            code = await child.ended()
            # One that a signal ended, the system short of memory, is worth another start.
            raise (LearnerLost if code < 0 else LearnerFailed)(
                f"the learner's process ended with exit code {code} before it was ready: "
                f"{last_line(self._log_file)!r}",
                hint=f"Its log is {self._log_file}.",
            )
        return address

    async def _tell_of_its_end(self, child: Child) -> None:
        """Read what libraries print, which nobody needs and which would block it, until it ends."""
        code = await child.ended()
        if not self._end_is_known:
            self._end_is_known = True
            line = (
                f"the learner's process ended with exit code {code}; the last line of its log, "
                f"{self._log_file}: {last_line(self._log_file)!r}"
            )
            self._reporter.say(line)
            self._report("lost", line)

    def _report(self, state: str, word: str = "") -> None:
        self._reporter.process("learner", role="learner", state=state, word=word)

    async def _end(self, error: BaseException | None) -> None:
        if isinstance(error, LearnerLost) and not self._end_is_known:
            self._report("lost", str(error))
        self._end_is_known = True
        if self._child is not None:
            await self._child.end(_STOP_S)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()


def _command(table: LearnerTable) -> tuple[str, ...]:
    if table.nproc_per_node == 1:
        return (sys.executable, "-m", "trainer_backend.learner.process")
    ranks = f"--nproc-per-node={table.nproc_per_node}"
    return (sys.executable, "-m", "trainer_backend.learner.group", "--standalone", ranks)


def _lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Lines that end with a line feed; JSON may hold the other characters that httpx takes for an end."""
    rest = bytearray()
    for part in parts:
        rest += part
        if b"\n" in part:
            *lines, rest = rest.split(b"\n")
            yield from map(bytes, lines)
