"""What a supervisor remembers of the jobs that run: lost with the service, and not missed by the next one."""

import math
from dataclasses import dataclass

from trainer_backend.rundir.state import RunState
from trainer_backend.supervising.outcomes import Ending, is_crash
from trainer_backend.supervising.processes import JobProcess


@dataclass(frozen=True, slots=True)
class Rules:
    """
    Attributes:
        max_jobs: that run at a time.
        restarts: of a job that crashes, with no iteration in between.
        first_wait_s: before the first of them; each next one waits twice as long. Long enough that a disk
            that is full, or a descriptor that is missing, for a moment costs no job all of its restarts.
        grace_s: for a process to save what is finished and end.
        held_s: for a run directory that somebody trains in to be let go: that of a killed service needs a
            moment, a person's may need hours.
        round_s: between two rounds where nothing happens.
    """

    max_jobs: int = 1
    restarts: int = 3
    grace_s: float = 100.0
    held_s: float = 60.0
    round_s: float = 1.0
    first_wait_s: float = 5.0


@dataclass(slots=True)
class Figures:
    """What was done so far, for /metrics."""

    started: int = 0
    restarts: int = 0
    killed: int = 0
    store_failures: int = 0
    faults: int = 0


@dataclass(slots=True)
class Slot:
    """A place that a running job takes up, also between a crash and the next start. Times: the loop's clock.

    Attributes:
        counted: the next start is in the job's `attempt` already: it was claimed with it.
        ending: how its process ended, until that is written down.
        crashes: with no iteration in between; `iteration`: that was finished by the last of them.
    """

    process: JobProcess | None = None
    counted: bool = False
    ending: Ending | None = None
    not_before_s: float = 0.0
    held_until_s: float = math.inf
    crashes: int = 0
    iteration: int = 0

    @property
    def lives(self) -> bool:
        """Whether it has a process that has not ended."""
        return self.process is not None and self.process.exit_code is None

    def may_wait(self, now_s: float, held_s: float) -> bool:
        """Whether to wait, still, for who holds the run directory."""
        if math.isinf(self.held_until_s):
            self.held_until_s = now_s + held_s
        return now_s < self.held_until_s

    def ended(
        self, exit_code: int, state: RunState | None, said: str | None = None, code: str | None = None
    ) -> Ending:
        """How it ended; counted once, however often this is asked."""
        if self.ending is None:
            reached = state.iteration if state is not None else 0
            if reached > self.iteration:
                self.crashes, self.iteration = 0, reached
            self.crashes += is_crash(exit_code)
            self.ending = Ending(exit_code, state, self.crashes, said, code)
        return self.ending

    def wait_for_restart(self, until_s: float) -> None:
        """Its process is gone, and the next is to be started then."""
        self.process, self.ending, self.not_before_s = None, None, until_s
