"""Stores sessions, and the answers for retries, in one SQLite database; --state-dir keeps it on disk.

    sessions   id | facts: JSON | snapshot of the session; if NULL, the environment is reset with facts.seed
    steps      session, number | calls: [[tool, arguments as text]] | seen: digest of the decision's outcome
    answers    key | digest of the request | state: open, kept, process | at_s | size | status, headers, body:
               NULL if they are lost

A starting task app restores each environment from its snapshot or seed, and then replays its steps. A policy
is restored from its snapshot alone.

The effects of a request with an Idempotency-Key are written together with its answer, in one transaction. If
the process is killed before the transaction, no effect remains, and a retry carries the request out. There is
one exception: another request may need a session that the first request has changed. The changes so far are
then written early, and the key gets the state `open`. If the process is killed after that, a retry gets 409
answer_lost.

If a write fails, its statements stay in memory and are written before the session is used again.
"""

import asyncio
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from service_kit.errors import SettingsError
from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import EnvSpec
from task_app.episode.actions import json_object
from task_app.errors import JournalDamaged, JournalFailed, TaskAppError
from task_app.plugins import PlugBoards, PolicyContext
from task_app.protocols import DecisionOutcome, RestorableEnvironment, RestorablePolicy, ToolRequest
from task_app.sessions.sessions import EnvironmentSession, PolicySession
from task_app.sessions.snapshots import EnvironmentSnapshot, PolicySnapshot
from task_app.threads import Threads

FILE = "sessions.sqlite3"
FORMAT = 3
# "TWSN". The next process recognises the database by this number, and so can the command `file`.
APPLICATION_ID = 0x5457534E
SCHEMA = f"""
BEGIN;
CREATE TABLE sessions (id TEXT PRIMARY KEY, facts TEXT NOT NULL, snapshot BLOB);
CREATE TABLE steps (session TEXT, number INTEGER, calls TEXT NOT NULL, seen TEXT NOT NULL,
    PRIMARY KEY (session, number)) WITHOUT ROWID;
CREATE TABLE answers (key TEXT PRIMARY KEY, digest TEXT NOT NULL, state TEXT NOT NULL, at_s REAL NOT NULL,
    size INTEGER NOT NULL, status INTEGER, headers BLOB, body BLOB);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
COMMIT;
"""

log = structlog.get_logger("task_app")

Statement = tuple[str, tuple[Any, ...]]
RawHeaders = tuple[tuple[bytes, bytes], ...]
Session = EnvironmentSession | PolicySession


class Failure(NamedTuple):
    """How to report a failed write: the error reads "{what} the journal cannot be written"."""

    what: str
    hint: str


FREE_SPACE = "free space under the task app's --state-dir"
NOT_CARRIED_OUT = Failure("nothing was done:", f"{FREE_SPACE}, then send it again")
CARRIED_OUT = Failure(
    "this request was carried out, but",
    f"{FREE_SPACE}, then send it again with this Idempotency-Key: it is not carried out twice",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A stored response, which retries get unchanged."""

    status: int
    headers: RawHeaders
    body: bytes

    @property
    def size(self) -> int:
        return len(self.body) + sum(len(name) + len(value) for name, value in self.headers)


@dataclass(slots=True, eq=False)
class Work:
    """The SQL statements of one request that are not written yet; `changes` lists them by session id.

    If the request has an Idempotency-Key (`key`), the statements are written together with the answer. If
    another request needs one of the sessions earlier, the statements are written before that request, and
    `is_partly_written` is set. `survives` is False if the next process deletes the answer.
    """

    key: str = ""
    digest: str = ""
    survives: bool = True
    answer: Answer | None = None
    is_partly_written: bool = False
    changes: dict[str, list[Statement]] = field(default_factory=dict)
    done_event: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_open(self) -> bool:
        return bool(self.key) and self.answer is None

    @property
    def has_effects(self) -> bool:
        return bool(self.changes) or self.is_partly_written


# The work of the current request; None if the request has no Idempotency-Key.
WORK: ContextVar[Work | None] = ContextVar("work", default=None)


class Database:
    """The SQLite database of a task app; only one process can open it at a time.

    Args:
        folder: Where the file is; created if missing. If None, the database is in memory.
        most, most_bytes: Limits of the number and total bytes of stored answers; the oldest is deleted first.
        most_s: How long an answer is stored. For answers of an earlier process, the time starts with `open`.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        most: int,
        most_bytes: int,
        most_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.most, self.most_bytes, self._most_s = most, most_bytes, most_s
        self._clock = clock
        # By key: requests that have no answer yet, and requests whose answer could not be written.
        self.requests: dict[str, Work] = {}
        self._connection: sqlite3.Connection | None = None
        # By session: the work with unwritten changes of the session. At most one request has such changes.
        self._unwritten: dict[str, Work] = {}
        # Work whose write failed.
        self._backlog: list[Work] = []
        # Number of keys in the database, and the bytes of their answers.
        self.totals = (0, 0)
        # Threads that carry out steps also write, not only the event loop.
        self._lock = threading.RLock()

    @property
    def connection(self) -> sqlite3.Connection:
        assert self._connection is not None, "the database is not open"
        return self._connection

    def open(self) -> None:
        """Open the database; a second call does nothing."""
        if self._connection is not None:
            return
        if self.folder is None:
            self._connection = _connect(":memory:")
            self._connection.executescript(SCHEMA)
        else:
            self._connection = _open_database(self.folder)
        self.connection.execute("DELETE FROM answers WHERE state = 'process'")
        self.connection.execute("UPDATE answers SET state = 'kept', at_s = ?", (self._clock(),))
        totals_query = "SELECT count(*), coalesce(sum(size), 0) FROM answers"
        self.totals = self.connection.execute(totals_query).fetchone()

    def close(self) -> None:
        """Close the database, so that another process can open it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def answer(self, key: str) -> tuple[str, Answer | None] | None:
        """Return the digest and the answer of the request with this key, or None if there is no such request.

        The answer is None if it is lost.
        """
        query = "SELECT digest, status, headers, body FROM answers WHERE key = ? AND at_s >= ?"
        try:
            with self._lock:
                row = self.connection.execute(query, (key, self._clock() - self._most_s)).fetchone()
        except sqlite3.Error as exc:
            raise _report_failure(NOT_CARRIED_OUT, exc) from exc
        if row is None or row[1] is None:
            return row and (row[0], None)
        digest, status, headers, body = row
        lines = (line.partition(b":") for line in headers.splitlines())
        return digest, Answer(status, tuple((name, value) for name, _, value in lines), body)

    def ready(self, session_id: str) -> None:
        """Write the changes that other requests have made to a session; call this before the session is used.

        Raises JournalFailed if the changes cannot be written.
        """
        with self._lock:
            work = self._unwritten.get(session_id)
            if work is not None and work is not _find_open_work():
                self.write(work, NOT_CARRIED_OUT)

    def record(self, session_id: str, statements: list[Statement], failure: Failure, *, whole: bool) -> None:
        """Write statements that store a change of a session.

        If the current request has an Idempotency-Key, the statements are written together with its answer,
        otherwise now. If `whole` is true, the new statements replace the session's unwritten statements.
        `failure` tells how to report a failed write.
        """
        with self._lock:
            own = _find_open_work()
            work = self._unwritten.setdefault(session_id, own or Work())
            if whole:
                work.changes.pop(session_id, None)
            work.changes.setdefault(session_id, []).extend(statements)
            if work is not own:
                self.write(work, failure)

    def discard(self, session_id: str) -> None:
        with self._lock:
            del self._unwritten.pop(session_id).changes[session_id]

    def write(self, work: Work, failure: Failure = CARRIED_OUT) -> None:
        """Write a request's changes and answer, and all earlier work whose write failed, in one transaction.

        Raises JournalFailed if the transaction fails; the work is then written by the next call.
        """
        with self._lock:
            works = list(dict.fromkeys([*self._backlog, work]))
            try:
                self._commit(works)
            except sqlite3.Error as exc:
                self._backlog = [each for each in works if not each.is_open]
                raise _report_failure(failure, exc) from exc
            self._backlog = []
            for each in works:
                for session_id in each.changes:
                    del self._unwritten[session_id]
                each.changes.clear()
                each.is_partly_written = True
                if not each.is_open:
                    self.requests.pop(each.key, None)

    def _commit(self, works: Sequence[Work]) -> None:
        totals, connection = self.totals, self.connection
        connection.execute("BEGIN")
        try:
            for work in works:
                for statement in chain(*work.changes.values()):
                    connection.execute(*statement)
                if work.key:
                    self._write_answer(work)
            connection.execute("COMMIT")
        except BaseException:
            self.totals = totals
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _write_answer(self, work: Work) -> None:
        """Write the row of the work's key; if the work has an answer, first make room for the answer."""
        answer, at_s = work.answer, self._clock()
        self._delete_answer("key = ?", work.key)
        row: tuple[Any, ...] = ("open", at_s, 0, None, None, None)
        if answer is not None:
            state, size = "kept" if work.survives else "process", answer.size
            headers = b"\n".join(name + b":" + value for name, value in answer.headers)
            row = (state, at_s, size, answer.status, headers, answer.body)
            self._make_room(size, at_s)
        self.connection.execute(
            "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (work.key, work.digest, *row)
        )
        self.totals = (self.totals[0] + 1, self.totals[1] + row[2])

    def _make_room(self, size: int, at_s: float) -> None:
        """Delete expired answers, and then the oldest answers until a new answer of `size` bytes fits."""
        oldest = "SELECT rowid, at_s FROM answers WHERE state != 'open' ORDER BY rowid LIMIT 1"
        while (row := self.connection.execute(oldest).fetchone()) is not None:
            fits = self.totals[0] < self.most and self.totals[1] + size <= self.most_bytes
            if fits and row[1] >= at_s - self._most_s:
                return
            self._delete_answer("rowid = ?", row[0])

    def _delete_answer(self, which: str, value: str | int) -> None:
        row = self.connection.execute(f"SELECT rowid, size FROM answers WHERE {which}", (value,)).fetchone()
        if row is not None:
            self.connection.execute("DELETE FROM answers WHERE rowid = ?", row[:1])
            self.totals = (self.totals[0] - 1, self.totals[1] - row[1])


class SessionStore:
    """Stores live sessions in the database, and restores them when a task app starts.

    If the database is in memory, sessions are not stored. `snapshot_every` is the number of decisions after
    which a new snapshot replaces the stored steps of an environment session.
    """

    def __init__(
        self, database: Database, boards: PlugBoards, *, snapshot_every: int, max_snapshot_bytes: int
    ) -> None:
        self.database, self.boards = database, boards
        self.snapshot_every, self.max_snapshot_bytes = snapshot_every, max_snapshot_bytes

    def add(self, session_id: str, session: Session) -> None:
        """Store a new session and give it a journal, unless it is a policy that cannot be restored.

        Raises JournalFailed if the session cannot be written.
        """
        can_restore = isinstance(session, EnvironmentSession) or isinstance(session.policy, RestorablePolicy)
        if can_restore and self.database.folder is not None:
            journal = SessionJournal(self, session_id)
            journal.begin(session)
            session.journal = journal

    def remove(self, session_id: str, session: Session) -> None:
        """Delete a session that was terminated or has expired."""
        journal, session.journal = session.journal, None
        if journal is not None:
            journal.remove()

    async def recover(
        self, threads: Threads, make_context: Callable[[], PolicyContext]
    ) -> tuple[dict[str, EnvironmentSession], dict[str, PolicySession]]:
        """Restore the sessions of the earlier process; return environments and policies by id.

        A session that cannot be restored is logged, and stays in the database.
        """
        policies: dict[str, PolicySession] = {}
        environments: dict[str, EnvironmentSession] = {}
        for session_id, facts, snapshot in self._read_sessions("policy"):
            with _log_refusal(session_id):
                loaded = json.loads(facts)
                policies[session_id] = self._restore_policy(session_id, loaded, snapshot, make_context())
        for session_id, facts, snapshot in self._read_sessions("env"):
            with _log_refusal(session_id):
                session = self._restore_environment(json.loads(facts), snapshot)
                session.threads = threads
                for policy_id, policy in policies.items():
                    if policy.bound_env_id == session_id and policy.switches is not None:
                        session.switches[policy_id] = policy.switches
                if snapshot is None:
                    await session.reset(session.seed)
                since = await self._replay_steps(session_id, session)
                session.journal = SessionJournal(self, session_id, since=since)
                environments[session_id] = session
        return environments, policies

    def _read_sessions(self, kind: str) -> list[tuple[str, str, bytes | None]]:
        query = "SELECT id, facts, snapshot FROM sessions WHERE substr(id, 1, ?) = ?"
        return self.database.connection.execute(query, (len(kind) + 1, f"{kind}_")).fetchall()

    def _restore_policy(
        self, session_id: str, facts: dict[str, Any], snapshot: bytes | None, context: PolicyContext
    ) -> PolicySession:
        policy = PolicySnapshot.open(snapshot or b"", at_most_bytes=self.max_snapshot_bytes)
        session = policy.session(self.boards, context)
        session.bound_env_id, session.switches = policy.bound_env_id, policy.step_rewards
        # The inference_key was only in the memory of the earlier process.
        session.has_lost_key = facts["had_key"]
        session.journal = SessionJournal(self, session_id)
        return session

    def _restore_environment(self, facts: dict[str, Any], snapshot: bytes | None) -> EnvironmentSession:
        """Return the session without its steps. If `snapshot` is None, the caller must still reset it."""
        if snapshot is not None:
            environment_snapshot = EnvironmentSnapshot.open(snapshot, at_most_bytes=self.max_snapshot_bytes)
            session = environment_snapshot.session(self.boards)
        else:
            spec = EnvSpec.model_validate(facts["env"])
            environment = self.boards.environment(spec.env_name, spec.config)
            session = EnvironmentSession(environment=environment, spec=spec, seed=facts["seed"])
        session.rl_run_id = facts["rl_run_id"]
        session.switches = {name: StepRewards.model_validate(one) for name, one in facts["switches"].items()}
        return session

    async def _replay_steps(self, session_id: str, session: EnvironmentSession) -> int:
        """Replay the stored steps of the session, and return their number.

        Raises JournalDamaged if a step has another outcome than before.
        """
        query = "SELECT calls, seen FROM steps WHERE session = ? ORDER BY number"
        steps = self.database.connection.execute(query, (session_id,)).fetchall()
        for calls, digest in steps:
            requests = tuple(ToolRequest(name, json_object(raw), raw) for name, raw in json.loads(calls))
            _, outcome = await session.step(requests)
            if outcome_digest(outcome) != digest:
                raise JournalDamaged(
                    f"decision {session.turn} had another outcome when it was replayed: environment "
                    f"{session.environment.name!r} is not reproducible, or its code has changed"
                )
        return len(steps)


class SessionJournal:
    """Writes the changes of one live session; the caller must hold the session's lock.

    If the current request has no Idempotency-Key, each method writes at once, and raises JournalFailed if it
    cannot. Otherwise the change is written together with the request's answer. `since` is the number of
    decisions since the whole session was last written.
    """

    def __init__(self, store: SessionStore, session_id: str, *, since: int = 0) -> None:
        self._store, self._database = store, store.database
        self._id = session_id
        self._since = since
        self._is_removed = False

    def begin(self, session: Session) -> None:
        try:
            self._database.record(self._id, self._write_whole(session), NOT_CARRIED_OUT, whole=True)
        except JournalFailed:
            self._database.discard(self._id)
            raise

    def ready(self, session: Session) -> None:
        """Write the session's pending changes before it is used. Raises JournalFailed if that fails."""
        self._database.ready(self._id)

    def reset(self, session: EnvironmentSession) -> None:
        """Write a reset of the environment, and delete the stored steps."""
        self._since = 0
        self._record(self._write_row(_list_facts(session), None), whole=True, what="the reset was done, but")

    def add_step(self, session: EnvironmentSession, requests: Sequence[ToolRequest]) -> None:
        """Write a decision, or instead a snapshot of the whole session if one is due.

        If the environment has no snapshots, all decisions since its last reset stay stored.
        """
        what = f"decision {session.turn} was taken, but"
        self._since += 1
        is_due = self._since >= self._store.snapshot_every
        if is_due and isinstance(session.environment, RestorableEnvironment):
            self._since = 0
            try:
                self._record(self._write_whole(session), whole=True, what=what)
                return
            except JournalFailed:
                raise
            except TaskAppError as exc:
                # The session can still be restored from its steps, only more slowly.
                log.error("journal_not_compacted", session=self._id, reason=exc.detail)
        # The text of the arguments is stored, because even arguments that are not valid JSON can be written.
        calls = json.dumps([[call.name, call.raw_arguments] for call in requests])
        row = (self._id, session.turn, calls, outcome_digest(session.past[-1].outcome))
        self._record([("INSERT INTO steps VALUES (?, ?, ?, ?)", row)], whole=False, what=what)

    def add_decision(self, session: PolicySession) -> None:
        self._record(self._write_whole(session), whole=True, what=f"decision {session.turn} was made, but")

    def remove(self) -> None:
        """Delete an ended session from the database; if this fails, the next write deletes it."""
        tables = ("steps WHERE session", "sessions WHERE id")
        statements: list[Statement] = [(f"DELETE FROM {table} = ?", (self._id,)) for table in tables]
        with suppress(JournalFailed):
            self._record(statements, whole=True, what="a session has ended, but")
        self._is_removed = True

    def _record(self, statements: list[Statement], *, whole: bool, what: str) -> None:
        if not self._is_removed:
            failure = Failure(what, "do not send it again; the next request writes it first")
            self._database.record(self._id, statements, failure, whole=whole)

    def _write_whole(self, session: Session) -> list[Statement]:
        """Return the SQL statements that write the whole session and delete its steps."""
        at_most = self._store.max_snapshot_bytes
        if isinstance(session, PolicySession):
            had_key = session.has_lost_key or session.spec.inference_key is not None
            policy = PolicySnapshot.take(session, where="policy_id")
            return self._write_row({"had_key": had_key}, policy.seal(at_most_bytes=at_most))
        if not isinstance(session.environment, RestorableEnvironment):
            return self._write_row(_list_facts(session), None)
        snapshot = EnvironmentSnapshot.take(session, self._store.boards, where="env_id")
        return self._write_row(_list_facts(session), snapshot.seal(at_most_bytes=at_most))

    def _write_row(self, facts: dict[str, Any], snapshot: bytes | None) -> list[Statement]:
        return [
            ("DELETE FROM steps WHERE session = ?", (self._id,)),
            ("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", (self._id, json.dumps(facts), snapshot)),
        ]


def _list_facts(session: EnvironmentSession) -> dict[str, Any]:
    # Switches that policies have set are stored with the policies.
    own = {name: one for name, one in session.switches.items() if not name.startswith("policy_")}
    return {
        "env": session.spec.model_dump(mode="json"),
        "seed": session.seed,
        "switches": {name: one.model_dump(mode="json") for name, one in own.items()},
        "rl_run_id": session.rl_run_id,
    }


def outcome_digest(outcome: DecisionOutcome) -> str:
    """Return a digest of a decision's outcome; a replay of the decision must give the same digest."""
    fields = [outcome.observation.text, list(outcome.env_rewards), outcome.terminated, outcome.truncated]
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=8).hexdigest()


def _report_failure(failure: Failure, exc: sqlite3.Error) -> JournalFailed:
    log.error("journal_failed", reason=str(exc))
    return JournalFailed(f"{failure.what} the journal cannot be written: {exc}", hint=failure.hint)


def _find_open_work() -> Work | None:
    """Return the work of the current request, if it has an Idempotency-Key and no answer yet."""
    work = WORK.get()
    # Code that still runs after the answer was stored no longer belongs to the request's work.
    return work if work is not None and work.is_open else None


@contextmanager
def _log_refusal(session_id: str) -> Iterator[None]:
    """Log and suppress an error that occurs while a session is restored."""
    try:
        yield
    except TaskAppError as exc:
        log.error("journal_refused", session=session_id, reason=exc.detail)
    except (KeyError, TypeError, ValueError) as exc:
        reason = f"it does not say what it should: {type(exc).__name__}: {exc}"[:300]
        log.error("journal_refused", session=session_id, reason=reason)


def _open_database(folder: Path) -> sqlite3.Connection:
    """Open the database in `folder`, and lock it so that other processes cannot open it.

    Raises SettingsError if the folder or the database cannot be used.
    """
    path = folder / FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = _connect(str(path))
    except (OSError, sqlite3.Error) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise SettingsError(f"{folder} cannot be used: {reason}", where="--state-dir") from exc
    try:
        _prepare_tables(connection, path)
    except sqlite3.Error as exc:
        connection.close()
        if getattr(exc, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            raise SettingsError(f"{folder} is in use by another task app", where="--state-dir") from exc
        raise SettingsError(
            f"{path} cannot be read, as if damaged: {exc}",
            where="--state-dir",
            hint="name another folder, or move this file away: the sessions in it are lost",
        ) from exc
    except SettingsError:
        connection.close()
        raise
    return connection


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)


def _prepare_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Check that the database is undamaged and has the format FORMAT; create the tables if it is new."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    (application_id,), (version,), (tables,) = (
        connection.execute(query).fetchone()
        for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_schema")
    )
    if tables and application_id != APPLICATION_ID:
        raise SettingsError(f"{path} is a database, but not of a task app", where="--state-dir")
    if tables and version != FORMAT:
        raise SettingsError(
            f"{path} has format {version}; this task app reads {FORMAT}",
            where="--state-dir",
            hint="name another folder; the sessions in this one need the version that wrote them",
        )
    if (verdict := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(verdict)
    connection.execute("PRAGMA journal_mode = WAL")
    # If the process is killed, no committed change is lost. A power cut may lose the last seconds, but it
    # cannot damage the file.
    connection.execute("PRAGMA synchronous = NORMAL")
    if not tables:
        connection.executescript(SCHEMA)
