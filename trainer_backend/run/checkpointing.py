"""The checkpoints of a run: when to save one, which one is the best, and which ones to delete."""

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
    """Saves the checkpoints of a run, marks the best one, and deletes old ones.

    A checkpoint is written while the next iteration's rollouts are collected. The learner's weights do not
    change in that time, so they are not copied. Await `settled` before you use the learner.
    """

    def __init__(
        self, training: TrainingTable, evaluation: EvaluationTable, directory: RunDirectory, learner: Learner
    ) -> None:
        self._training, self._evaluation = training, evaluation
        self.directory, self.learner = directory, learner
        self._spent_s = 0.0
        self._writing: asyncio.Task[None] | None = None
        self._written = -1  # the iteration whose checkpoint `_writing` writes
        self._waiting: list[Callable[[], None]] = []

    @property
    def last_iteration(self) -> int:
        return self._training.iterations

    def folder(self, iteration: int) -> Path:
        return self.directory.checkpoints / f"iteration_{iteration}"

    def is_saved(self, iteration: int) -> bool:
        return is_whole(self.folder(iteration))

    def will_be_saved(self, iteration: int) -> bool:
        """Return whether the iteration's checkpoint is on disk or is being written."""
        return self.is_saved(iteration) or (self._writing is not None and self._written == iteration)

    def evaluation_due(self, progress: Progress) -> bool:
        """Return whether the evaluation after this iteration must still be played."""
        if not self._evaluates(progress.iteration):
            return False
        rows = self.directory.metrics()
        return not any(row["kind"] == "evaluation" and row["iteration"] == progress.iteration for row in rows)

    def due(self, iteration: int) -> bool:
        """Return whether to save a checkpoint after this iteration, if only because of `recovery_every`."""
        every = self._training.recovery_every
        return self._stays(iteration) or (every > 0 and iteration % every == 0)

    async def save(self, progress: Progress) -> None:
        """Wait for the previous checkpoint. Then begin to write one for `progress`, unless it exists."""
        await self.settled()
        if not self.is_saved(progress.iteration):
            self._written = progress.iteration
            self._writing = asyncio.ensure_future(self._write_in_background(progress))

    async def settled(self) -> None:
        """Wait for the checkpoint that is being written, if any. If writing it fails, raise the error."""
        if (writing := self._writing) is None:
            return
        try:
            # Not cancelled together with the waiter, because the thread would continue to write.
            await asyncio.shield(writing)
        finally:
            if writing.done():
                self._writing = None

    async def while_written(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`. If writing the current checkpoint fails first, cancel `work` and raise that error."""
        if (writing := self._writing) is None:
            return await work
        async with racing(work, writing) as (task, _):
            if writing.done():
                await self.settled()
            return cast(Result, await task)

    async def end(self) -> BaseException | None:
        """Wait for the checkpoint that is being written; return the error if writing failed, or None.

        Call it before the run's lock is released: the writing thread renames and removes folders.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        await asyncio.wait((writing,))
        return writing.exception()

    def once_written(self, call: Callable[[], None]) -> None:
        """Call `call` once the checkpoint that is being written is on disk, or now if there is none."""
        if self._writing is None or self._writing.done():
            call()
        else:
            self._waiting.append(call)

    def write(self, progress: Progress) -> None:
        """Write the checkpoint on this thread; then delete older checkpoints and spools."""
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
        """Return the seconds spent on saving since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def mark_best(self) -> Mapping[int, str]:
        """Mark the checkpoint with the best evaluation; return notes of `find_best` by iteration.

        Each call derives the mark from metrics and folders, so the next start repairs a mark that a kill left
        wrong. If the metrics of the marked evaluation are lost, the mark stays until an evaluation is better.
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
        """Return False for a checkpoint that is written only because of `recovery_every`, otherwise True."""
        return iteration % self._training.checkpoint_every == 0 or self._evaluates(iteration)

    def _evaluates(self, iteration: int) -> bool:
        return iteration == self.last_iteration or iteration % self._evaluation.every_n_iters == 0
