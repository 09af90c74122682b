"""Pictures of an episode: played again by a task app when somebody looks at it, all of its turns at once."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from shared_schemas.rollouts import Rollout
from trainer_backend.collect.environment_client import NoPictures
from trainer_backend.collect.sources import row_of
from trainer_backend.dashboard.stored import Kept
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.jobfile.services_table import ServicesTable
from trainer_backend.report.replay import FrameSource, played_frames
from trainer_backend.rundir.layout import open_run

_KEPT = 12  # episodes; a frame is some three kilobytes, and an episode has fifty


def can_be_drawn(rollout: Rollout) -> bool:
    """Whether a task app could play it again: a world of a seed, of an environment that has pictures."""
    episode = rollout.trajectory
    return bool(
        episode
        and episode.achievements_counts
        and episode.parent_rollout_id is None
        and row_of(rollout.group_id) is None
    )


class Frames:
    """Draws episodes, one at a time, and keeps the last few.

    Args:
        source: draws the turns of an episode; by default a task app that is started for it does.
    """

    def __init__(self, source: FrameSource = played_frames) -> None:
        self._source = source
        self._kept: Kept[Mapping[int, bytes] | str] = Kept(_KEPT)
        self._one_at_a_time = asyncio.Lock()

    def known(self, run_dir: Path, rollout: Rollout) -> Mapping[int, bytes] | str | None:
        """What `of` has at once, or the sentence that says why there are none; None: it would play."""
        return self._kept.known((str(run_dir), rollout.rollout_id))

    async def of(self, run_dir: Path, rollout: Rollout) -> Mapping[int, bytes]:
        """By turn a PNG of what the game showed after it; turn 0 is the start.

        Only the replay has a thread: who waits for one holds none of those that make the other pages.

        Raises:
            NoPictures: nothing is drawn there, or the replay departs from the record; it is not played again.
            TrainerError: no task app.
        """
        key = (str(run_dir), rollout.rollout_id)
        async with self._one_at_a_time:  # a page asks for several frames at once, and they are one replay
            found = await asyncio.to_thread(self._kept.get, key, lambda: self._drawn(run_dir, rollout))
        if isinstance(found, str):
            raise NoPictures(found)
        return found

    def _drawn(self, run_dir: Path, rollout: Rollout) -> Mapping[int, bytes] | str:
        episode = rollout.trajectory
        if episode is None:
            return {}
        turns = range(len(episode.steps) + 1)
        job = _by_itself(open_run(run_dir).job())
        try:
            return {frame.turn: frame.png for frame in self._source(job, episode, turns)}
        except NoPictures as error:
            return str(error)


def _by_itself(job: JobConfig) -> JobConfig:
    """With a task app of its own that knows what comes with it, and nothing else.

    Looking at a run must neither run the code that its job names nor send a key to a host that it names.
    """
    talking = job.multi_turn.model_copy(update={"interaction_config_path": None})
    return job.model_copy(update={"services": ServicesTable(), "multi_turn": talking})
