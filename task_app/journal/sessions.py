"""The file of one session under --state-dir, while the session lives (the format: task_app.journal.keeping).

What cannot be written is kept, and written before anything else happens to the session: a step that was taken
is never missing from its file, and never there twice.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import structlog

from task_app.errors import JournalFailed, TaskAppError
from task_app.guards.idempotency import CLAIM, Claim
from task_app.journal.files import FORMAT, JournalFile, read_records
from task_app.plugins import PlugBoards
from task_app.protocols import DecisionOutcome, RestorableEnvironment, ToolRequest
from task_app.sessions import EnvironmentSession, PolicySession
from task_app.snapshots.sessions import seal_environment, seal_policy, take_environment, take_policy

Record = dict[str, Any]
S = TypeVar("S", EnvironmentSession, PolicySession)

FREE_SPACE = "free space under the task app's --state-dir"

log = structlog.get_logger("task_app")


class Home(Protocol):
    """What a journal needs of the state folder that it is in (task_app.journal.keeping.StateDir)."""

    boards: PlugBoards
    snapshot_every: int
    max_snapshot_bytes: int

    def file(self, name: str) -> JournalFile: ...


class SessionJournal(Generic[S]):
    """What environment and policy sessions have in common.

    Args:
        home: the folder, and how often a session is written as a whole.
        session_id: names the file.
        since: decisions that the file holds.
        owing: claims that it names, whose answers are yet to be written.
    """

    def __init__(self, home: Home, session_id: str, *, since: int = 0, owing: Iterable[Claim] = ()) -> None:
        self._home = home
        self._id = session_id
        self._file = home.file(session_id)
        self._since = since
        self._unwritten: list[Record] = []
        self._open: set[tuple[str, str]] = set()
        self._removed = False
        # Slow steps are written down in their threads, and answers told of on the event loop meanwhile.
        self._lock = threading.Lock()
        for claim in owing:
            self._owe(claim)

    def begin(self, session: S) -> None:
        """Write a new session, as it is now; raises JournalFailed."""
        claim = _undone_with()
        try:
            self._file.replace([self._head(session), _due_to(claim, self._now(session))])
        except OSError as exc:
            raise failed("nothing was done:", exc, hint=f"{FREE_SPACE}, then send it again") from exc
        self._owe(claim)

    def ready(self, session: S) -> None:
        """Before anything happens: the next record will follow the last one; raises JournalFailed."""
        with self._lock:
            try:
                self._flush()
                if self._since >= self._home.snapshot_every:
                    self._compact(session)
            except OSError as exc:
                raise failed("nothing was done:", exc, hint=f"{FREE_SPACE}, then send it again") from exc

    def catch_up(self) -> None:
        """Write what could not be written when it happened; raises OSError."""
        with self._lock:
            if not self._removed:
                self._flush()

    def told(self, claim: Claim) -> None:
        """The claim has been answered, which survives the process: what was done for it stays done."""
        with self._lock:
            self._open.discard(claim.due)
            if self._removed:
                return
            self._unwritten.append({"op": "told", "claim": claim.due})
            try:
                self._flush()
            except OSError as exc:
                # The answer is written; this is needed only once that is forgotten.
                log.error("journal_failed", file=self._file.path.name, reason=str(exc))

    def remove(self) -> None:
        """The session has ended."""
        with self._lock:
            self._removed = True
            self._file.remove()
        claim = CLAIM.get()
        if claim is not None:
            claim.touched.pop(self._id, None)

    def _append(self, record: Record, *, done: str) -> None:
        """Write down what was `done`. If that fails, whoever answers the keyed request will find out."""
        claim = _undone_with()
        with self._lock:
            self._unwritten.append(_due_to(claim, record))
            self._since += 1
            self._owe(claim)
            try:
                self._flush()
            except OSError as exc:
                error = failed(done, exc, hint="do not send it again; the next request writes it first")
                if claim is None:
                    raise error from exc

    def _flush(self) -> None:
        if self._unwritten:
            self._file.append(self._unwritten)
            self._unwritten.clear()

    def _owe(self, claim: Claim | None) -> None:
        if claim is not None:
            self._open.add(claim.due)
            claim.touched[self._id] = self

    def _compact(self, session: S) -> None:
        """Let the file begin at the session as it is now; raises OSError."""
        self._since = 0
        try:
            records = [self._head(session), *self._compacted(session)]
        except TaskAppError as exc:
            # What it holds is enough to play the session again; only longer.
            log.error("journal_not_compacted", file=self._file.path.name, reason=exc.detail)
            return
        self._file.replace(records)

    def _compacted(self, session: S) -> list[Record]:
        """The session as it is now. What open claims did is a part of it, and cannot be undone any more."""
        return [self._now(session) | self._still_open()]

    def _still_open(self) -> Record:
        return {"open": sorted(self._open)} if self._open else {}

    def _head(self, session: S) -> Record:
        raise NotImplementedError

    def _now(self, session: S) -> Record:
        raise NotImplementedError


class EnvironmentJournal(SessionJournal[EnvironmentSession]):
    """The file of an environment session (task_app.sessions.Journal).

    An environment without snapshots is played again from its last reset, however long that takes.
    """

    def reset(self, session: EnvironmentSession) -> None:
        """It has been reset; raises JournalFailed to a request without a key."""
        self._append({"op": "reset", "seed": session.seed}, done="the reset was done, but")

    def stepped(self, session: EnvironmentSession, requests: Sequence[ToolRequest]) -> None:
        """It has taken a decision; raises JournalFailed to a request without a key."""
        # The text alone: it can be written whatever it says, and the arguments follow from it.
        calls = [[call.name, call.raw_arguments] for call in requests]
        record = {"op": "step", "calls": calls, "seen": seen(session.past[-1].outcome)}
        self._append(record, done=f"decision {session.turn} was taken, but")

    def _compacted(self, session: EnvironmentSession) -> list[Record]:
        if isinstance(session.environment, RestorableEnvironment):
            return super()._compacted(session)
        return _from_last_reset(self._file.path, self._still_open())

    def _head(self, session: EnvironmentSession) -> Record:
        # What policies brought is in their own files.
        own = {name: found for name, found in session.switches.items() if not name.startswith("policy_")}
        return {
            "format": FORMAT,
            "kind": "env",
            "id": self._id,
            "env": session.spec.model_dump(mode="json"),
            "switches": {name: found.model_dump(mode="json") for name, found in own.items()},
            "rl_run_id": session.rl_run_id,
        }

    def _now(self, session: EnvironmentSession) -> Record:
        if not isinstance(session.environment, RestorableEnvironment):
            return {"op": "reset", "seed": session.seed}
        taken = take_environment(session, self._home.boards, where="env_id")
        data = seal_environment(taken, at_most_bytes=self._home.max_snapshot_bytes)
        return {"op": "state", "snapshot": base64.b64encode(data).decode()}


class PolicyJournal(SessionJournal[PolicySession]):
    """The file of a policy session: its state after each decision. Its inference_key is in none of them."""

    def decided(self, session: PolicySession) -> None:
        """It has decided; raises JournalFailed to a request without a key."""
        self._append(self._now(session), done=f"decision {session.turn} was made, but")

    def _head(self, session: PolicySession) -> Record:
        return {"format": FORMAT, "kind": "policy", "id": self._id}

    def _now(self, session: PolicySession) -> Record:
        taken = take_policy(session, where="policy_id")
        data = seal_policy(taken, at_most_bytes=self._home.max_snapshot_bytes)
        had_key = session.key_lost or session.spec.inference_key is not None
        return {"op": "state", "snapshot": base64.b64encode(data).decode(), "had_key": had_key}


def seen(outcome: DecisionOutcome) -> str:
    """A digest of what a decision showed: playing it again must show the same."""
    shown = [outcome.observation.text, list(outcome.env_rewards), outcome.terminated, outcome.truncated]
    return hashlib.blake2b(json.dumps(shown).encode(), digest_size=8).hexdigest()


def failed(what: str, exc: OSError, *, hint: str) -> JournalFailed:
    """`what` came of it, in words that end before "the journal cannot be written"; the log says where."""
    reason = exc.strerror or str(exc)
    log.error("journal_failed", file=Path(exc.filename).name if exc.filename else None, reason=reason)
    return JournalFailed(f"{what} the journal cannot be written: {reason}", hint=hint)


def _undone_with() -> Claim | None:
    """The request that is being carried out, if it has a key: without its answer, what it does is undone."""
    claim = CLAIM.get()
    # One that is answered already left something running that does not belong to its answer.
    return claim if claim is not None and claim.answer is None else None


def _due_to(claim: Claim | None, record: Record) -> Record:
    return record if claim is None else record | {"claim": claim.due}


def _from_last_reset(path: Path, still_open: Record) -> list[Record]:
    records = list(read_records(path, kind="env"))
    last = max(index for index, record in enumerate(records) if record.get("op") == "reset")
    reset = {name: value for name, value in records[last].items() if name not in ("claim", "open")}
    return [reset | still_open, *records[last + 1 :]]
