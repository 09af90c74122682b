"""The watcher copies metrics and rollouts from run directories into the store, and announces changes of jobs.

It creates a job row for each run of `turnwise train`, and sets the row's state from the run's lock file and
state.json. What changes while the store does not answer is stored later.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import prometheus_client
import structlog
import tomli

from shared_schemas.plain_text import read_text
from trainer_backend.errors import RunDirectoryError, TrainerError
from trainer_backend.jobs.data_dir import DataDir
from trainer_backend.jobs.settings import STORE_S
from trainer_backend.jobs.slots import Line
from trainer_backend.jobs.states import changes_for_external
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.spool import LEDGER_FILE
from trainer_backend.rundir.state import FINAL, LOG_FILE, STATE_FILE, RunStatus, read_status
from trainer_backend.store import jobs
from trainer_backend.store.database import JobConflict, Store, StoreUnavailable, UnknownJob
from trainer_backend.store.jobs import Changes
from trainer_backend.store.rows import ACTIVE, Job
from trainer_backend.store.sync import sync_run


class News:
    """Tells tasks of one event loop, such as open event streams, that a job has changed.

    A task calls `count` before it reads the job, and passes the count to `wait`. It then misses no change.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self.closed = False

    def count(self, job_id: str) -> int:
        """Return how often a job has changed so far, for the next `wait`."""
        return self._counts[job_id]

    def tell(self, job_id: str) -> None:
        self._counts[job_id] += 1
        self._wake()

    def close(self) -> None:
        """Let every `wait` return."""
        self.closed = True
        self._wake()

    async def wait(self, job_id: str, count: int, *, at_most_s: float) -> bool:
        """Wait at most `at_most_s` seconds until a job has changed since `count`; return whether it has."""
        try:
            async with asyncio.timeout(at_most_s):
                while self._counts[job_id] == count and not self.closed:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return self._counts[job_id] != count

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


log = structlog.get_logger("trainer")

# Files that change during a run: those that the store indexes, and those that pages read directly.
_SYNC_FILES = ("metrics.jsonl", LEDGER_FILE, "rollouts", "checkpoints")
_PAGE_FILES = (LOG_FILE, STATE_FILE)
# If these change, an unreadable run directory is tried again; it may have been an unfinished copy.
_IDENTITY_FILES = ("run.json", "job.toml")

_PAGE = 500
_FIND_S = 10.0  # between two looks at all runs


class Watcher:
    """Watches run directories. Start `run` as a task, and cancel the task at the end.

    Args:
        look_s: seconds between two looks at the active runs.
        tidies: whether to delete files that [retention] does not keep.
        answer_s: seconds in which the store must answer.
    """

    def __init__(
        self,
        store: Store,
        data: DataDir,
        news: News,
        *,
        look_s: float = 1.0,
        tidies: bool = True,
        answer_s: float = STORE_S,
    ) -> None:
        self._store, self._data, self._news = store, data, news
        self._look_s, self._answer_s = look_s, answer_s
        self._tidies = tidies
        self._thread = ThreadPoolExecutor(1, "watcher")
        self._line = Line("watcher-asks", store.shown, answer_s)
        self._sync_prints: dict[str, tuple[int, ...]] = {}
        self._page_prints: dict[str, tuple[int, ...]] = {}
        self._unread: set[str] = set()
        self._bad_runs: dict[Path, tuple[int, ...]] = {}
        # One sync per run at a time; the supervisor also syncs a run when its process ends.
        self._sync_locks: dict[str, threading.Lock] = {}
        self.store_up = True
        self.registry = prometheus_client.CollectorRegistry(auto_describe=False)
        """Counters for /metrics, including those of the supervisor."""
        counter = partial(prometheus_client.Counter, registry=self.registry)
        self._syncs = counter("turnwise_trainer_syncs", "Run directories that were brought into the store.")
        self._sync_seconds = counter("turnwise_trainer_sync_seconds", "Seconds that this took.")
        self._failures = counter("turnwise_trainer_sync_failures", "Run directories that could not be read.")

    @property
    def threads(self) -> tuple[ThreadPoolExecutor, ...]:
        """The threads that must end before the store is closed."""
        return self._thread, self._line.thread

    async def run(self) -> None:
        last_search_s = -_FIND_S
        while True:
            now_s = asyncio.get_running_loop().time()
            everything = now_s - last_search_s >= _FIND_S
            try:
                for job_id in await self._one_look(everything=everything):
                    self._news.tell(job_id)
                last_search_s = now_s if everything else last_search_s
                self.note_store(None)
            except StoreUnavailable as error:
                self.note_store(error)
            except Exception:
                log.exception("look_failed")
            await asyncio.sleep(self._look_s)

    async def _one_look(self, *, everything: bool) -> list[str]:
        """Call `look` on a thread, without a deadline, because the first sync of a large run takes minutes.

        Until it returns, a second thread checks every `answer_s` seconds whether the store answers.
        """
        loop = asyncio.get_running_loop()
        look = loop.run_in_executor(self._thread, partial(self.look, everything=everything))
        try:
            while not (await asyncio.wait({look}, timeout=self._answer_s))[0]:
                try:
                    await self._line.ask(jobs.find, self._store, limit=1)
                    self.note_store(None)
                except StoreUnavailable as error:
                    self.note_store(error)
            return look.result()
        finally:
            look.cancel()

    def note_store(self, error: StoreUnavailable | None) -> None:
        """Record whether the store answers (`error` is None), and log each change."""
        if self.store_up and error is not None:
            log.warning("store_away", detail=str(error))
        if not self.store_up and error is None:
            log.info("store_back")
        self.store_up = error is None

    def look(self, *, everything: bool) -> list[str]:
        """Look at the active runs once, and return the ids of jobs that have changed. Call it on a thread.

        With `everything`, look also at inactive and new runs, and try again to read unreadable runs.
        """
        rows = self._rows(everything=everything)
        if everything:
            rows += self._find({row.run_dir for row in rows})
            for job_id in tuple(self._unread):
                self._sync_prints.pop(job_id, None)
        return [row.id for row in rows if self._boundary(row)]

    def sync(self, row: Job) -> None:
        """Copy one run into the store now, even if its files have not changed. Log and count errors."""
        if row.run_dir is not None:
            self._sync(row, Path(row.run_dir), _fingerprint(Path(row.run_dir), _SYNC_FILES))

    def _rows(self, *, everything: bool) -> list[Job]:
        find = partial(
            jobs.find, self._store, states=() if everything else ACTIVE, home=self._data.home, limit=_PAGE
        )
        page = find()
        rows = [*page.items]
        while page.cursor is not None:
            page = find(cursor=page.cursor)
            rows += page.items
        return rows

    def _boundary(self, row: Job) -> bool:
        """Return whether a job has changed. Log an unforeseen error; it does not affect other jobs."""
        try:
            return self._has_news(row)
        except StoreUnavailable:
            raise
        except Exception:
            self._failures.inc()
            log.exception("look_failed", job=row.id)
            return False

    def _has_news(self, row: Job) -> bool:
        if row.run_dir is None:
            return False
        path = Path(row.run_dir)
        news = row.origin == "cli" and self._follow(row, path)
        stored, shown = _fingerprint(path, _SYNC_FILES), _fingerprint(path, _PAGE_FILES)
        if stored and self._sync_prints.get(row.id) != stored:
            self._sync(row, path, stored)
            news = True
        if self._page_prints.get(row.id) != shown:
            self._page_prints[row.id] = shown
            news = True
        return news

    def _sync(self, row: Job, path: Path, stored: tuple[int, ...]) -> None:
        started = time.monotonic()
        with self._sync_locks.setdefault(row.id, threading.Lock()):
            try:
                sync_run(self._store, row.id, open_run(path), tidies=self._tidies)
                self._unread.discard(row.id)
            except UnknownJob:
                pass  # deleted meanwhile
            except StoreUnavailable:
                raise
            except Exception as error:  # unforeseen ones too: a damaged file, or one deleted meanwhile
                self._unread.add(row.id)
                self._failures.inc()
                unforeseen = not isinstance(error, TrainerError)
                log.warning("sync_failed", job=row.id, detail=str(error), exc_info=unforeseen)
        self._sync_prints[row.id] = stored
        self._syncs.inc()
        self._sync_seconds.inc(time.monotonic() - started)

    def _follow(self, row: Job, path: Path) -> bool:
        """Update the row of a run of `turnwise train`; return whether the row changed."""
        status = read_status(path)
        now = self._store.clock()
        start, end = min(now, _time_written(path / "run.json", now)), min(now, _end(status, path, now))

        def decide(job: Job) -> Changes | None:
            return changes_for_external(job, status, start=start, end=end)

        if decide(row) is None:  # without a query, because there may be hundreds of old runs
            return False
        try:
            return jobs.change(self._store, row.id, decide).version != row.version
        except UnknownJob:
            return False

    def _find(self, paths: Collection[str | None]) -> list[Job]:
        """Create a job row for every run directory that is not in `paths`; return the new rows."""
        rows = []
        for path in self._data.runs():
            fingerprint = _fingerprint(path, _IDENTITY_FILES)
            if str(path) in paths or self._bad_runs.get(path) == fingerprint:
                continue
            try:
                rows.append(jobs.create(self._store, _external_job(path, self._data.home))[0])
            except JobConflict:
                continue  # another service was quicker
            except StoreUnavailable:
                raise
            except Exception as error:
                self._bad_runs[path] = fingerprint
                unforeseen = not isinstance(error, TrainerError)
                log.warning("run_not_shown", run=str(path), detail=str(error), exc_info=unforeseen)
        return rows


def _external_job(path: Path, home: str) -> Job:
    """Return a new row for a run of `turnwise train`. A job.toml of another version is accepted too."""
    run = open_run(path)
    try:
        text = read_text(path / "job.toml")
        name = tomli.loads(text)["job"]["name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{path}/job.toml cannot be read: {error}") from error
    return Job(
        name=str(name),
        config=text,
        home=home,
        origin="cli",
        state="paused",
        run_dir=str(path),
        run_id=run.run_id,
    )


def _end(status: RunStatus, path: Path, now: datetime) -> datetime:
    """Return when a run reached its final state, or else when its state.json was last written."""
    if status.state is not None and status.state.state in FINAL:
        with suppress(ValueError):
            return datetime.fromisoformat(status.state.since).astimezone(UTC)
    return _time_written(path / STATE_FILE, now)


def _time_written(path: Path, now: datetime) -> datetime:
    """Return the time when a file was last written, or `now` if the file does not exist."""
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError:
        return now


def _fingerprint(path: Path, names: Iterable[str]) -> tuple[int, ...]:
    """Return a value that changes when one of these files is written; empty if none exists."""
    values: list[int] = []
    for name in names:
        try:
            stat = (path / name).stat()
        except OSError:
            continue
        values += [stat.st_mtime_ns, stat.st_size]
    return tuple(values)
