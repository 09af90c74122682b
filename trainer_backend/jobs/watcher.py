"""Brings what run directories say into the store, and tells those who wait for news of a run.

Runs of `turnwise train` are found here and get a row of their own; what state they are in, their lock and
state.json say. A store that is away costs nothing: the next look finds what there is.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import tomli

from trainer_backend.errors import RunDirectoryError, TrainerError
from trainer_backend.jobs.data_dir import DataDir
from trainer_backend.jobs.slots import ANSWER_S, Line
from trainer_backend.jobs.states import changes_for_found
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.spool import LEDGER_FILE
from trainer_backend.rundir.state import LOG_FILE, STATE_FILE, watch
from trainer_backend.store import jobs
from trainer_backend.store.database import JobConflict, Store, StoreUnavailable, UnknownJob
from trainer_backend.store.jobs import Changes, NewJob
from trainer_backend.store.rows import ACTIVE, JobRow
from trainer_backend.store.sync import sync_run

# Who waits for something new of a job: pages that are open, until it is told here that there is.


class News:
    """News of jobs in one event loop. A waiter says what it has seen, so it misses nothing."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self.closed = False

    def seen(self, job_id: str) -> int:
        """What there is by now; to be given to the next `wait`."""
        return self._counts[job_id]

    def tell(self, job_id: str) -> None:
        """There is something new of this job."""
        self._counts[job_id] += 1
        self._wake()

    def close(self) -> None:
        """The service ends: nobody waits any longer."""
        self.closed = True
        self._wake()

    async def wait(self, job_id: str, seen: int, *, at_most_s: float) -> bool:
        """Whether there was something newer than `seen` within that time."""
        try:
            async with asyncio.timeout(at_most_s):
                while self._counts[job_id] == seen and not self.closed:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return self._counts[job_id] != seen

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


log = structlog.get_logger("trainer")

# What grows or is replaced while a run goes on: what the store keeps of it, and what is read where it is.
_STORED = ("metrics.jsonl", LEDGER_FILE, "rollouts", "checkpoints")
_SHOWN = (LOG_FILE, STATE_FILE)
# What tells that a directory that could not be shown is another one now: it may be being copied in.
_NAMING = ("run.json", "job.toml")

_PAGE = 500


@dataclass(slots=True)
class Looked:
    """So far, for /metrics."""

    syncs: int = 0
    sync_s: float = 0.0
    failures: int = 0
    store_up: bool = True


class Watcher:
    """Of one event loop; `run` until it is cancelled.

    Args:
        look_s: between two looks at the runs that go on.
        find_s: between two looks at all of them.
        tidies: whether files that [retention] does not keep are removed; False for a service that only shows.
        answer_s: for the store to answer; a look that takes longer may be hanging, or syncing a large run.
    """

    def __init__(
        self,
        store: Store,
        data: DataDir,
        news: News,
        *,
        look_s: float = 1.0,
        find_s: float = 10.0,
        tidies: bool = True,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._store, self._data, self._news = store, data, news
        self._look_s, self._find_s, self._answer_s = look_s, find_s, answer_s
        self._tidies = tidies
        self._looking = ThreadPoolExecutor(1, "watcher")
        self._beside = Line("watcher-asks", store.shown, answer_s)
        self._stored: dict[str, tuple[int, ...]] = {}
        self._shown: dict[str, tuple[int, ...]] = {}
        self._unread: set[str] = set()
        self._refused: dict[Path, tuple[int, ...]] = {}
        # One at a time of each run: the supervisor has it synced when its process ends.
        self._syncing: dict[str, threading.Lock] = {}
        self.looked = Looked()

    @property
    def threads(self) -> tuple[ThreadPoolExecutor, ...]:
        """The threads that must end before the store is closed."""
        return self._looking, self._beside.thread

    async def run(self) -> None:
        """Look around until cancelled."""
        found_at_s = -self._find_s
        while True:
            now_s = asyncio.get_running_loop().time()
            everything = now_s - found_at_s >= self._find_s
            try:
                for job_id in await self._one_look(everything=everything):
                    self._news.tell(job_id)
                found_at_s = now_s if everything else found_at_s
                self.looked.store_up = True
            except StoreUnavailable as error:
                self._away(error)
            except Exception:
                log.exception("look_failed")
            await asyncio.sleep(self._look_s)

    async def _one_look(self, *, everything: bool) -> list[str]:
        """However long it takes: the first sync of a large run takes minutes. Whether it hangs behind the
        store is asked beside it."""
        loop = asyncio.get_running_loop()
        look = loop.run_in_executor(self._looking, partial(self.look, everything=everything))
        try:
            while not (await asyncio.wait({look}, timeout=self._answer_s))[0]:
                await self._ask_beside()
            return look.result()
        finally:
            look.cancel()

    async def _ask_beside(self) -> None:
        try:
            await self._beside.ask(jobs.find, self._store, limit=1)
        except StoreUnavailable as error:
            self._away(error)
        else:
            self.looked.store_up = True

    def _away(self, error: StoreUnavailable) -> None:
        self.looked.store_up = False
        log.warning("store_away", detail=str(error))

    def look(self, *, everything: bool) -> list[str]:
        """One look; the ids of jobs that have something new. On a thread.

        Args:
            everything: also at runs that do not go on, for new ones, and again at what could not be read.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        rows = self._rows(everything=everything)
        if everything:
            rows += self._find({row.run_dir for row in rows})
            for job_id in tuple(self._unread):
                self._stored.pop(job_id, None)
        return [row.id for row in rows if self._boundary(row)]

    def sync(self, row: JobRow) -> None:
        """Bring one run into the store now, whatever was seen of it before; a fault is logged and counted."""
        if row.run_dir is not None:
            self._sync(row, Path(row.run_dir), _fingerprint(Path(row.run_dir), _STORED))

    def _rows(self, *, everything: bool) -> list[JobRow]:
        states = () if everything else tuple(ACTIVE)
        rows: list[JobRow] = []
        cursor: str | None = None
        while True:
            page = jobs.find(self._store, states=states, home=self._data.home, cursor=cursor, limit=_PAGE)
            rows += page.items
            cursor = page.cursor
            if cursor is None:
                return rows

    def _boundary(self, row: JobRow) -> bool:
        """Whether there is something new of a job; what goes wrong with it, unforeseen, holds up no other."""
        try:
            return self._has_news(row)
        except StoreUnavailable:
            raise
        except Exception:
            self.looked.failures += 1
            log.exception("look_failed", job=row.id)
            return False

    def _has_news(self, row: JobRow) -> bool:
        if row.run_dir is None:
            return False
        path = Path(row.run_dir)
        news = row.origin == "cli" and self._follow(row, path)
        stored, shown = _fingerprint(path, _STORED), _fingerprint(path, _SHOWN)
        if stored and self._stored.get(row.id) != stored:
            self._sync(row, path, stored)
            news = True
        if self._shown.get(row.id) != shown:
            self._shown[row.id] = shown
            news = True
        return news

    def _sync(self, row: JobRow, path: Path, stored: tuple[int, ...]) -> None:
        started = time.monotonic()
        with self._syncing.setdefault(row.id, threading.Lock()):
            try:
                sync_run(self._store, row.id, open_run(path), tidies=self._tidies)
                self._unread.discard(row.id)
            except UnknownJob:
                pass  # deleted meanwhile
            except StoreUnavailable:
                raise
            except Exception as error:  # also unforeseen: a damaged file, one that was pruned meanwhile
                self._unread.add(row.id)
                self.looked.failures += 1
                unforeseen = not isinstance(error, TrainerError)
                log.warning("sync_failed", job=row.id, detail=str(error), exc_info=unforeseen)
        self._stored[row.id] = stored
        self.looked.syncs += 1
        self.looked.sync_s += time.monotonic() - started

    def _follow(self, row: JobRow, path: Path) -> bool:
        """Bring the row of a run that others train to what they left; whether that changed it."""
        watched = watch(path)
        now = self._store.clock()

        def decide(job: JobRow) -> Changes | None:
            return changes_for_found(job, watched, now)

        if decide(row) is None:  # without a question to the store: there may be hundreds of old runs
            return False
        try:
            return jobs.change(self._store, row.id, decide).version != row.version
        except UnknownJob:
            return False

    def _find(self, known: Collection[str | None]) -> list[JobRow]:
        """Give every run directory that has no row one."""
        found = []
        for path in self._data.runs():
            facts = _fingerprint(path, _NAMING)
            if str(path) in known or self._refused.get(path) == facts:
                continue
            try:
                found.append(jobs.create(self._store, _found_job(path, self._data.home))[0])
            except JobConflict:
                continue  # another service was quicker
            except StoreUnavailable:
                raise
            except Exception as error:
                self._refused[path] = facts
                unforeseen = not isinstance(error, TrainerError)
                log.warning("run_not_shown", run=str(path), detail=str(error), exc_info=unforeseen)
        return found


def _found_job(path: Path, home: str) -> NewJob:
    """Its job as it stands: an earlier version may have written it, with keys that this one does not know."""
    run = open_run(path)
    try:
        text = (path / "job.toml").read_text(encoding="utf-8")
        name = tomli.loads(text)["job"]["name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{path}/job.toml cannot be read: {error}") from error
    return NewJob(
        name=str(name),
        config=text,
        home=home,
        origin="cli",
        state="paused",
        run_dir=path,
        run_id=run.run_id,
    )


def _fingerprint(path: Path, names: Iterable[str]) -> tuple[int, ...]:
    """Return a value that changes when one of these files is written; empty where none of them exists."""
    found: list[int] = []
    for name in names:
        try:
            told = (path / name).stat()
        except OSError:
            continue
        found += [told.st_mtime_ns, told.st_size]
    return tuple(found)
