"""Sessions, and the answers that retries get, in one SQLite database; --state-dir keeps it on disk.

    sessions   id | facts: JSON | snapshot: the whole session, or NULL: an environment, reset to facts.seed
    steps      session, number | calls: [[tool, arguments as text]] | seen: digest of what the decision showed
    answers    key | digest of the request | state: open, kept, process | at_s | size | status, headers, body:
               NULL if they are lost

A session is its row and its steps, which are played again at the start. A policy has no steps.

What a request with an Idempotency-Key does is written with its answer, in one transaction: a kill before that
undoes all of it, and its retry does it. When another request comes to one of its sessions first, what it has
done so far is written before anything else happens there, and its key in the state `open`. It is not undone
any more, and after a kill its retry is told that the answer is lost (409 answer_lost).

If a write fails, its statements stay in memory and are written before anything else happens to the session.
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
from task_app.sessions.snapshots import (
    environment_session,
    open_environment,
    open_policy,
    policy_session,
    seal_environment,
    seal_policy,
    take_environment,
    take_policy,
)
from task_app.threads import Threads

FILE = "sessions.sqlite3"
FORMAT = 3
# "TWSN": what `file` and the next start know the database by.
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


class Wording(NamedTuple):
    """What a request did that cannot be written; "the journal cannot be written" follows these words."""

    what: str
    hint: str


FREE_SPACE = "free space under the task app's --state-dir"
NOTHING_DONE = Wording("nothing was done:", f"{FREE_SPACE}, then send it again")
CARRIED_OUT = Wording(
    "this request was carried out, but",
    f"{FREE_SPACE}, then send it again with this Idempotency-Key: it is not carried out twice",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, as it was sent."""

    status: int
    headers: RawHeaders
    body: bytes

    @property
    def size(self) -> int:
        return len(self.body) + sum(len(name) + len(value) for name, value in self.headers)


@dataclass(slots=True, eq=False)
class Work:
    """The statements of one request that the database does not hold yet, by session.

    The work of a keyed request is written together with its answer, or partly before, when another request
    needs a session: then it `is_begun`. `survives`: the next process can use the answer.
    """

    key: str = ""
    digest: str = ""
    survives: bool = True
    answer: Answer | None = None
    is_begun: bool = False
    changes: dict[str, list[Statement]] = field(default_factory=dict)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_open(self) -> bool:
        """Its answer is yet to come."""
        return bool(self.key) and self.answer is None

    @property
    def has_effects(self) -> bool:
        return bool(self.changes) or self.is_begun


# The work of the current request; None without an Idempotency-Key.
WORK: ContextVar[Work | None] = ContextVar("work", default=None)


class Database:
    """The one connection to the database, which no other process may open meanwhile.

    Args:
        folder: made if it is not there; None: in memory, for this process.
        most, most_bytes: answers that are kept, and their bytes together; the oldest goes first.
        most_s: an answer is kept for so long.
        clock: seconds that only grow. What the process before kept, is kept from the start of this one on.
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
        # Requests that are carried out, or whose answer could not be written, by key.
        self.requests: dict[str, Work] = {}
        self._connection: sqlite3.Connection | None = None
        # What is not written of a session: all of it is of one request.
        self._unwritten: dict[str, Work] = {}
        # What could not be written.
        self._backlog: list[Work] = []
        # Keys in the database, and the bytes of their answers.
        self.totals = (0, 0)
        # Slow steps end in threads, requests on the event loop.
        self._lock = threading.RLock()

    @property
    def connection(self) -> sqlite3.Connection:
        assert self._connection is not None, "the database is not open"
        return self._connection

    def open(self) -> None:
        """Open it, if that is still to be done."""
        if self._connection is not None:
            return
        if self.folder is None:
            self._connection = _connected(":memory:")
            self._connection.executescript(SCHEMA)
        else:
            self._connection = _opened(self.folder)
        self.connection.execute("DELETE FROM answers WHERE state = 'process'")
        self.connection.execute("UPDATE answers SET state = 'kept', at_s = ?", (self._clock(),))
        held = "SELECT count(*), coalesce(sum(size), 0) FROM answers"
        self.totals = self.connection.execute(held).fetchone()

    def close(self) -> None:
        """Let another process use the folder."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def answer(self, key: str) -> tuple[str, Answer | None] | None:
        """The digest of the request that a key came with, and its answer, or None for a lost one."""
        asked = "SELECT digest, status, headers, body FROM answers WHERE key = ? AND at_s >= ?"
        try:
            with self._lock:
                row = self.connection.execute(asked, (key, self._clock() - self._most_s)).fetchone()
        except sqlite3.Error as exc:
            raise _error(NOTHING_DONE, exc) from exc
        if row is None or row[1] is None:
            return row and (row[0], None)
        digest, status, headers, body = row
        lines = (line.partition(b":") for line in headers.splitlines())
        return digest, Answer(status, tuple((name, value) for name, _, value in lines), body)

    def ready(self, session_id: str) -> None:
        """Write what another request did to the session, before anything happens; raises JournalFailed."""
        with self._lock:
            work = self._unwritten.get(session_id)
            if work is not None and work is not _open_work():
                self.write(work, NOTHING_DONE)

    def record(self, session_id: str, statements: list[Statement], wording: Wording, *, whole: bool) -> None:
        """Keep a session's statements until its keyed request is answered; without a key, write them now.

        Args:
            session_id: whose it is.
            statements: what was done.
            wording: the same in words, for an error.
            whole: they say all of the session, so what was not written yet need not be.
        """
        with self._lock:
            own = _open_work()
            work = self._unwritten.setdefault(session_id, own or Work())
            if whole:
                work.changes.pop(session_id, None)
            work.changes.setdefault(session_id, []).extend(statements)
            if work is not own:
                self.write(work, wording)

    def discard(self, session_id: str) -> None:
        """What could not be written of the session need not be."""
        with self._lock:
            del self._unwritten.pop(session_id).changes[session_id]

    def write(self, work: Work, wording: Wording = CARRIED_OUT) -> None:
        """Write in one transaction what a request did, its answer, and what could not be written before."""
        with self._lock:
            works = list(dict.fromkeys([*self._backlog, work]))
            try:
                self._commit(works)
            except sqlite3.Error as exc:
                self._backlog = [each for each in works if not each.is_open]
                raise _error(wording, exc) from exc
            self._backlog = []
            for each in works:
                for session_id in each.changes:
                    del self._unwritten[session_id]
                each.changes.clear()
                each.is_begun = True
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
                    self._put(work)
            connection.execute("COMMIT")
        except BaseException:
            self.totals = totals
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _put(self, work: Work) -> None:
        """Write the row of a key as it is now; the oldest answers make room for it."""
        answer, at_s = work.answer, self._clock()
        self._forget("key = ?", work.key)
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
        """Forget the oldest answers until one more is within the bounds."""
        oldest = "SELECT rowid, at_s FROM answers WHERE state != 'open' ORDER BY rowid LIMIT 1"
        while (row := self.connection.execute(oldest).fetchone()) is not None:
            fits = self.totals[0] < self.most and self.totals[1] + size <= self.most_bytes
            if fits and row[1] >= at_s - self._most_s:
                return
            self._forget("rowid = ?", row[0])

    def _forget(self, which: str, value: str | int) -> None:
        row = self.connection.execute(f"SELECT rowid, size FROM answers WHERE {which}", (value,)).fetchone()
        if row is not None:
            self.connection.execute("DELETE FROM answers WHERE rowid = ?", row[:1])
            self.totals = (self.totals[0] - 1, self.totals[1] - row[1])


class SessionStore:
    """Writes sessions down while they live, and brings them back.

    Args:
        database: one in memory is left as it is: nobody would read it.
        boards: what sessions were built from.
        snapshot_every: decisions between two snapshots of a session.
        max_snapshot_bytes: of one.
    """

    def __init__(
        self, database: Database, boards: PlugBoards, *, snapshot_every: int, max_snapshot_bytes: int
    ) -> None:
        self.database = database
        self.boards = boards
        self.snapshot_every = snapshot_every
        self.max_snapshot_bytes = max_snapshot_bytes

    def opened(self, session_id: str, session: Session) -> None:
        """Write a new session down, if it can be brought back at all; raises JournalFailed."""
        for_good = isinstance(session, EnvironmentSession) or isinstance(session.policy, RestorablePolicy)
        if for_good and self.database.folder is not None:
            journal = SessionJournal(self, session_id)
            journal.begin(session)
            session.journal = journal

    def closed(self, session_id: str, session: Session) -> None:
        """The session was terminated, or has expired."""
        journal, session.journal = session.journal, None
        if journal is not None:
            journal.remove()

    async def recover(
        self, threads: Threads, make_context: Callable[[], PolicyContext]
    ) -> tuple[dict[str, EnvironmentSession], dict[str, PolicySession]]:
        """The sessions of the process before. One that cannot be brought back is named in the log, and stays
        in the database."""
        policies: dict[str, PolicySession] = {}
        environments: dict[str, EnvironmentSession] = {}
        for session_id, facts, snapshot in self._rows("policy"):
            with _one_session(session_id):
                policies[session_id] = self._policy(session_id, json.loads(facts), snapshot, make_context())
        for session_id, facts, snapshot in self._rows("env"):
            with _one_session(session_id):
                session = self._environment(json.loads(facts), snapshot)
                session.threads = threads
                for policy_id, policy in policies.items():
                    if policy.bound_env_id == session_id and policy.switches is not None:
                        session.switches[policy_id] = policy.switches
                if snapshot is None:
                    await session.reset(session.seed)
                since = await self._played(session_id, session)
                session.journal = SessionJournal(self, session_id, since=since)
                environments[session_id] = session
        return environments, policies

    def _rows(self, kind: str) -> list[tuple[str, str, bytes | None]]:
        asked = "SELECT id, facts, snapshot FROM sessions WHERE substr(id, 1, ?) = ?"
        return self.database.connection.execute(asked, (len(kind) + 1, f"{kind}_")).fetchall()

    def _policy(
        self, session_id: str, facts: dict[str, Any], snapshot: bytes | None, context: PolicyContext
    ) -> PolicySession:
        found = open_policy(snapshot or b"", at_most_bytes=self.max_snapshot_bytes)
        session = policy_session(found, self.boards, context)
        session.bound_env_id, session.switches = found.bound_env_id, found.step_rewards
        # The key is gone with the process that knew it.
        session.key_lost = facts["had_key"]
        session.journal = SessionJournal(self, session_id)
        return session

    def _environment(self, facts: dict[str, Any], snapshot: bytes | None) -> EnvironmentSession:
        """The session before its steps; one without a snapshot is yet to be reset."""
        if snapshot is not None:
            taken = open_environment(snapshot, at_most_bytes=self.max_snapshot_bytes)
            session = environment_session(taken, self.boards)
        else:
            spec = EnvSpec.model_validate(facts["env"])
            environment = self.boards.environment(spec.env_name, spec.config)
            session = EnvironmentSession(environment=environment, spec=spec, seed=facts["seed"])
        session.rl_run_id = facts["rl_run_id"]
        session.switches = {name: StepRewards.model_validate(one) for name, one in facts["switches"].items()}
        return session

    async def _played(self, session_id: str, session: EnvironmentSession) -> int:
        """Take the steps of the session again; how many there are."""
        asked = "SELECT calls, seen FROM steps WHERE session = ? ORDER BY number"
        steps = self.database.connection.execute(asked, (session_id,)).fetchall()
        for calls, digest in steps:
            requests = tuple(ToolRequest(name, json_object(raw), raw) for name, raw in json.loads(calls))
            _, outcome = await session.step(requests)
            if seen(outcome) != digest:
                raise JournalDamaged(
                    f"decision {session.turn} played again shows something else: environment "
                    f"{session.environment.name!r} is not reproducible, or not the same code any more"
                )
        return len(steps)


class SessionJournal:
    """Writes one session down while it lives (task_app.sessions.sessions.Journal).

    Work without an Idempotency-Key is in the database when these return, or they raise JournalFailed.

    Args:
        store: where it is written.
        session_id: whose journal it is.
        since: decisions since the session was last written as a whole.
    """

    def __init__(self, store: SessionStore, session_id: str, *, since: int = 0) -> None:
        self._store, self._database = store, store.database
        self._id = session_id
        self._since = since
        self._removed = False

    def begin(self, session: Session) -> None:
        """Write a new session, as it is now."""
        try:
            self._database.record(self._id, self._whole(session), NOTHING_DONE, whole=True)
        except JournalFailed:
            self._database.discard(self._id)
            raise

    def ready(self, session: Session) -> None:
        """Before anything happens: what others did to the session is written."""
        self._database.ready(self._id)

    def reset(self, session: EnvironmentSession) -> None:
        """Note a reset of the environment; earlier steps no longer count."""
        self._since = 0
        self._write(self._row(_facts(session), None), whole=True, done="the reset was done, but")

    def stepped(self, session: EnvironmentSession, requests: Sequence[ToolRequest]) -> None:
        """The environment has taken a decision. Without snapshots it is played again from its last reset."""
        done = f"decision {session.turn} was taken, but"
        self._since += 1
        restorable = isinstance(session.environment, RestorableEnvironment)
        if (
            restorable
            and self._since >= self._store.snapshot_every
            and (everything := self._snapshot(session))
        ):
            self._write(everything, whole=True, done=done)
            return
        # The text alone: it can be written whatever it says, and the arguments follow from it.
        calls = json.dumps([[call.name, call.raw_arguments] for call in requests])
        row = (self._id, session.turn, calls, seen(session.past[-1].outcome))
        self._write([("INSERT INTO steps VALUES (?, ?, ?, ?)", row)], whole=False, done=done)

    def decided(self, session: PolicySession) -> None:
        """The policy has decided."""
        self._write(self._whole(session), whole=True, done=f"decision {session.turn} was made, but")

    def remove(self) -> None:
        """The session has ended. If that cannot be written now, the next write takes it along."""
        ended = [
            ("DELETE FROM steps WHERE session = ?", (self._id,)),
            ("DELETE FROM sessions WHERE id = ?", (self._id,)),
        ]
        with suppress(JournalFailed):
            self._write(ended, whole=True, done="a session has ended, but")
        self._removed = True

    def _write(self, statements: list[Statement], *, whole: bool, done: str) -> None:
        if not self._removed:
            words = Wording(done, "do not send it again; the next request writes it first")
            self._database.record(self._id, statements, words, whole=whole)

    def _snapshot(self, session: EnvironmentSession) -> list[Statement] | None:
        self._since = 0
        try:
            return self._whole(session)
        except TaskAppError as exc:
            # Its steps are enough to play it again; only longer.
            log.error("journal_not_compacted", session=self._id, reason=exc.detail)
            return None

    def _whole(self, session: Session) -> list[Statement]:
        """All of the session, as it is now."""
        at_most = self._store.max_snapshot_bytes
        if isinstance(session, PolicySession):
            had_key = session.key_lost or session.spec.inference_key is not None
            policy = take_policy(session, where="policy_id")
            return self._row({"had_key": had_key}, seal_policy(policy, at_most_bytes=at_most))
        if not isinstance(session.environment, RestorableEnvironment):
            return self._row(_facts(session), None)
        taken = take_environment(session, self._store.boards, where="env_id")
        return self._row(_facts(session), seal_environment(taken, at_most_bytes=at_most))

    def _row(self, facts: dict[str, Any], snapshot: bytes | None) -> list[Statement]:
        return [
            ("DELETE FROM steps WHERE session = ?", (self._id,)),
            ("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", (self._id, json.dumps(facts), snapshot)),
        ]


def _facts(session: EnvironmentSession) -> dict[str, Any]:
    # What policies brought is in their own rows.
    own = {name: found for name, found in session.switches.items() if not name.startswith("policy_")}
    return {
        "env": session.spec.model_dump(mode="json"),
        "seed": session.seed,
        "switches": {name: found.model_dump(mode="json") for name, found in own.items()},
        "rl_run_id": session.rl_run_id,
    }


def seen(outcome: DecisionOutcome) -> str:
    """A digest of what a decision showed: playing it again must show the same."""
    shown = [outcome.observation.text, list(outcome.env_rewards), outcome.terminated, outcome.truncated]
    return hashlib.blake2b(json.dumps(shown).encode(), digest_size=8).hexdigest()


def _error(wording: Wording, exc: sqlite3.Error) -> JournalFailed:
    log.error("journal_failed", reason=str(exc))
    return JournalFailed(f"{wording.what} the journal cannot be written: {exc}", hint=wording.hint)


def _open_work() -> Work | None:
    """The work of the current request, if it has an Idempotency-Key and no answer yet."""
    work = WORK.get()
    # What still runs after its answer does not belong to it.
    return work if work is not None and work.is_open else None


@contextmanager
def _one_session(session_id: str) -> Iterator[None]:
    """A session that cannot be brought back costs no other one."""
    try:
        yield
    except TaskAppError as exc:
        log.error("journal_refused", session=session_id, reason=exc.detail)
    except (KeyError, TypeError, ValueError) as exc:
        reason = f"it does not say what it should: {type(exc).__name__}: {exc}"[:300]
        log.error("journal_refused", session=session_id, reason=reason)


def _opened(folder: Path) -> sqlite3.Connection:
    """The database of a folder, which nobody else can open until this process ends, however it ends."""
    path = folder / FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = _connected(str(path))
    except (OSError, sqlite3.Error) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise SettingsError(f"{folder} cannot be used: {reason}", where="--state-dir") from exc
    try:
        _prepare(connection, path)
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


def _connected(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """See that the database is whole and of this format; a new one gets its tables."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    (application_id,), (version,), (tables,) = (
        connection.execute(asked).fetchone()
        for asked in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_schema")
    )
    if tables and application_id != APPLICATION_ID:
        raise SettingsError(f"{path} is a database, but not of a task app", where="--state-dir")
    if tables and version != FORMAT:
        raise SettingsError(
            f"{path} has format {version}; this task app reads {FORMAT}",
            where="--state-dir",
            hint="name another folder; the sessions in this one need the version that wrote them",
        )
    if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(found)
    connection.execute("PRAGMA journal_mode = WAL")
    # A kill loses nothing that was committed; a power cut may lose the last seconds, and never the file.
    connection.execute("PRAGMA synchronous = NORMAL")
    if not tables:
        connection.executescript(SCHEMA)
