"""The store as a supervisor needs it: whose turn it is, and what becomes of jobs. Each question has a
deadline, and whoever waits for news of a job is told of each change."""

from collections.abc import Callable

from trainer_backend.store import jobs
from trainer_backend.store.database import Store
from trainer_backend.store.jobs import Changes
from trainer_backend.store.rows import ACTIVE, JobRow, JobState
from trainer_backend.supervising.line import Line
from trainer_backend.supervising.news import News
from trainer_backend.supervising.outcomes import Ending, Outcome, outcome_of, stays, without_process
from trainer_backend.supervising.slots import Rules

_MOST_ACTIVE = 1000


class Books:
    """Of the jobs of one home.

    Raises (every method):
        StoreUnavailable: the store did not answer in time; what was asked for may be done later all the same.
        UnknownJob: somebody else has deleted the job.
    """

    def __init__(self, store: Store, home: str, news: News, rules: Rules, line: Line) -> None:
        self._store, self._home, self._news, self._rules, self._line = store, home, news, rules, line

    async def jobs_in(self, *states: JobState) -> tuple[JobRow, ...]:
        """Oldest first."""
        page = await self._line.ask(
            jobs.find, self._store, states=states, home=self._home, origin="api", limit=_MOST_ACTIVE
        )
        return page.items[::-1]

    async def job(self, job_id: str) -> JobRow:
        return await self._line.ask(jobs.get, self._store, job_id)

    async def claim(self) -> JobRow | None:
        """The next job, which is running from now on; None: none waits."""
        claimed = await self._line.ask(jobs.claim, self._store, self._home)
        if claimed is not None:
            self._news.tell(claimed.id)
        return claimed

    async def change(self, job_id: str, decide: Callable[[JobRow], Changes | None]) -> JobRow:
        """The job afterwards."""
        row = await self._line.ask(jobs.change, self._store, job_id, decide)
        self._news.tell(job_id)
        return row

    async def end_without_process(self, job_id: str) -> None:
        """It was to end, and there is nothing to wait for."""
        await self.change(job_id, lambda job: without_process(job, self._store.clock()))

    async def fail(self, job_id: str, code: str, told: str) -> None:
        def decide(job: JobRow) -> Changes:
            return {"state": "failed", "ended": self._store.clock(), "code": code, "detail": told}

        await self.change(job_id, decide)

    async def settle(self, job_id: str, ending: Ending, *, closing: bool) -> tuple[JobRow, float | None]:
        """Bring a job to what its process, or the attempt to start one, has come to.

        Args:
            closing: the service stops, and with it its jobs.

        Returns:
            The job afterwards, and how long to wait before it is started again; None: not at all.
        """
        outcome = Outcome({})

        def decide(job: JobRow) -> Changes | None:
            nonlocal outcome
            if job.state not in ACTIVE:  # written down already, by a change whose answer was late
                return None
            if closing and stays(job, ending.exit_code):
                return None
            rules, now = self._rules, self._store.clock()
            outcome = outcome_of(
                job, ending, restarts=rules.restarts, first_wait_s=rules.first_wait_s, now=now
            )
            return outcome.changes

        row = await self.change(job_id, decide)
        return row, outcome.restart_in_s
