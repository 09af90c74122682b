"""The checkpoints of a run: when one is saved, which of them is the best, and which may go."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from service_kit.tasks import racing
from trainer_backend.evaluation.best import Outcomes, find_best, read_outcomes
from trainer_backend.job.schema import EvaluationTable
from trainer_backend.job.training_table import TrainingTable
from trainer_backend.parts import Learner, Progress
from trainer_backend.rundir.checkpoint_paths import (
    BestMark,
    best_mark,
    is_whole,
    link_best,
    mark_best,
    prune_checkpoints,
)
from trainer_backend.rundir.layout import RunDirectory

Result = TypeVar("Result")


class Saving:
    """The checkpoints of one run.

    One is written while the next iteration's rollouts are collected: nothing changes the learner's weights
    then, so no copy of them is needed. A caller that is about to use the learner waits for `settled`.
    """

    def __init__(
        self, training: TrainingTable, evaluation: EvaluationTable, directory: RunDirectory, learner: Learner
    ) -> None:
        self._training, self._evaluation = training, evaluation
        self.directory, self.learner = directory, learner
        self._spent_s = 0.0
        self._writing: asyncio.Task[None] | None = None
        self._written = -1  # the iteration that `_writing` is of
        self._waiting: list[Callable[[], None]] = []

    @property
    def last_iteration(self) -> int:
        return self._training.iterations

    def folder(self, iteration: int) -> Path:
        return self.directory.checkpoints / f"iteration_{iteration}"

    def is_saved(self, iteration: int) -> bool:
        return is_whole(self.folder(iteration))

    def will_be_saved(self, iteration: int) -> bool:
        """Whether its checkpoint is on disk, or is being written."""
        return self.is_saved(iteration) or (self._writing is not None and self._written == iteration)

    def evaluation_due(self, progress: Progress) -> bool:
        """Whether the evaluation after this iteration is still to be played."""
        if not self._evaluates(progress.iteration):
            return False
        rows = self.directory.metrics()
        return not any(row["kind"] == "evaluation" and row["iteration"] == progress.iteration for row in rows)

    def due(self, iteration: int) -> bool:
        """Whether this iteration gets a checkpoint, if only until the next one."""
        every = self._training.recovery_every
        return self._stays(iteration) or (every > 0 and iteration % every == 0)

    async def save(self, progress: Progress) -> None:
        """Begin to write this iteration's checkpoint, unless it is on disk; first wait for the one before."""
        await self.settled()
        if not self.is_saved(progress.iteration):
            self._written = progress.iteration
            self._writing = asyncio.ensure_future(self._write_in_background(progress))

    async def settled(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and raise its error."""
        if (writing := self._writing) is None:
            return
        try:
            # Not cancelled with its waiter: its thread would continue to write.
            await asyncio.shield(writing)
        finally:
            if writing.done():
                self._writing = None

    async def while_written(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`, and end it where the checkpoint that is being written fails: raise its error."""
        if (writing := self._writing) is None:
            return await work
        async with racing(work, writing) as (task, _):
            if writing.done():
                await self.settled()
            return cast(Result, await task)

    async def end(self) -> BaseException | None:
        """Wait for the checkpoint that is being written, and return its error: a run ends by another one.

        Its thread must not rename and remove folders of a run whose lock is free.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        await asyncio.wait((writing,))
        return writing.exception()

    def once_written(self, call: Callable[[], None]) -> None:
        """Call this now, or once the checkpoint that is being written is on disk."""
        if self._writing is None or self._writing.done():
            call()
        else:
            self._waiting.append(call)

    def write(self, progress: Progress) -> None:
        """As `save`, on this thread; then remove what only the last checkpoint needed."""
        started = time.monotonic()
        self.learner.save(self.folder(progress.iteration), progress)
        link_best(self.directory.checkpoints)
        self.directory.remove_spools(progress.iteration)
        prune_checkpoints(self.directory.checkpoints, self._training.keep_checkpoints, stays=self._stays)
        self._spent_s += time.monotonic() - started

    async def _write_in_background(self, progress: Progress) -> None:
        await asyncio.to_thread(self.write, progress)
        while self._waiting:
            self._waiting[0]()
            del self._waiting[0]

    def take_seconds(self) -> float:
        """Return the seconds that saving took since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def mark_best(self) -> Mapping[int, str]:
        """Point at the checkpoint with the best evaluation; see `find_best`, whose notes it returns.

        The mark is derived from rows and folders each time, so the next start repairs a mark that a kill left
        behind. A mark whose row is lost stands until an evaluation is better.
        """
        rows = [row for row in self.directory.metrics() if row["kind"] == "evaluation"]
        most = self._training.max_lost_share
        best, notes = find_best(rows, self._outcomes, most=most)
        if best is not None and not self.is_saved(best["iteration"]):  # its folder was deleted by hand
            saved = [row for row in rows if self.is_saved(row["iteration"])]
            best, notes = find_best(saved, self._outcomes, most=most)
        found = [] if best is None else [best]
        marks = [BestMark(self.folder(row["iteration"]), row["eval/outcome_reward"]) for row in found]
        standing = best_mark(self.directory.checkpoints)
        if standing is not None and standing.folder not in [self.folder(row["iteration"]) for row in rows]:
            marks.insert(0, standing)
        if marks:
            mark_best(max(marks, key=lambda mark: mark.score))
        else:
            link_best(self.directory.checkpoints)
        return notes

    def _outcomes(self, iteration: int) -> Outcomes:
        return read_outcomes(self.directory.rollouts_file(f"evaluation_{iteration}"))

    def _stays(self, iteration: int) -> bool:
        """Whether `keep_checkpoints` counts its checkpoint; others are only there for a resume."""
        return iteration % self._training.checkpoint_every == 0 or self._evaluates(iteration)

    def _evaluates(self, iteration: int) -> bool:
        return iteration == self.last_iteration or iteration % self._evaluation.every_n_iters == 0
