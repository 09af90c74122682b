"""The curriculum: a pool of snapshots of the run's own games, at which groups of later games start.

`curriculum/iteration_j.jsonl` has a line for each snapshot that iteration j added, and a line for each
finished game of iteration j that began at a snapshot. The pool of iteration k is built from the files of
iterations up to k - 1 - `max_staleness`. A resumed run reads the same files, so it makes the same plan.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shared_schemas.rollouts import Rollout, RolloutRequest
from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.moments import Wanted, replay_all
from trainer_backend.collect.plan import Planner
from trainer_backend.core.metric import Metric, Row
from trainer_backend.core.starts import (
    Achieved,
    Candidate,
    CurriculumKeys,
    Moment,
    Pool,
    Starts,
    candidates,
    find_cells,
    kept,
)
from trainer_backend.plugins import start_rule
from trainer_backend.rundir.files import each_line, replace_lines
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.spool import plan_id

Gain = tuple[str, bool]


METRICS = (
    Row(
        Metric("starts/share", "share of the finished games that began at a snapshot", "starts", "share"),
        Metric("starts/gain", "of these the share that added an achievement, or something to the outcome",
               "starts", "gained"),
        when="only with `[curriculum]`",
        note="Metrics of whole episodes (`episode/*`, `decision/*`, `stop/*`, means of `mixture/*`) leave "
        "these games out; counts of steps, time and failures hold all",
    ),
    Row(
        Metric("starts/pool", "snapshots that are kept after the iteration"),
        Metric("starts/pool_mib", "what they take, in MiB"),
        Metric("starts/cells", "how many rarest achievements they have"),
        Metric("starts/*/kept", "how many of them came after that number of achievements", "starts_pool"),
    ),
    Row(
        Metric("time/starts_s",
               "seconds to choose snapshots of the iteration's games, and to play these again up to them"),
        when="only with `[curriculum]`",
    ),
)  # fmt: skip


@dataclass(slots=True)
class Curriculum:
    """Manages a run's pool of snapshots: `keep` adds snapshots, `starts` returns those to start from."""

    keys: CurriculumKeys
    planner: Planner
    apps: TaskApps
    directory: RunDirectory
    tell: Callable[[str], None]
    reseedable: bool
    """Whether the environment can draw other random numbers after it restores a snapshot."""
    _pool: Pool = field(default_factory=Pool)
    _folded: int = 0

    def starts(self, iteration: int) -> Starts:
        """Return the snapshots at which groups of an iteration may start."""
        seed = self.planner.players.seed
        pool = self._pool_after(iteration - 1 - self.planner.table.max_staleness)
        return Starts(self.keys, start_rule(self.keys.rule), pool, seed, self.reseedable)

    async def keep(
        self, iteration: int, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]
    ) -> dict[str, float]:
        """Add snapshots of an iteration's games to the pool and to a file. Return metrics of the pool."""
        started = time.monotonic()
        asked = {plan_id(request.rollout_id): request for request in requests}
        games = {plan_id(item.rollout_id): item for item in rollouts if item.trajectory is not None}
        gains = [
            _gain(asked[plan], item.trajectory) for plan, item in games.items() if _is_start(asked[plan])
        ]
        moments = await self._moments(iteration, asked, games)
        rows: list[Mapping[str, Any]] = [asdict(item) for item in moments]
        rows += [{"from": key, "gained": gained} for key, gained in gains]
        path = self.directory.curriculum_file(iteration)
        path.parent.mkdir(exist_ok=True)
        replace_lines(path, rows, durable=True)
        if iteration <= self._folded:  # a second call, because the update rejected some rollouts
            self._pool, self._folded = Pool(), 0
        pool = self._pool_after(iteration)
        metrics = {
            "starts/share": len(gains) / max(len(games), 1),
            "starts/pool": float(len(pool.moments)),
            "starts/pool_mib": pool.mib,
            "starts/cells": float(len({*find_cells(pool.moments)})),
            "time/starts_s": time.monotonic() - started,
        }
        if gains:
            metrics["starts/gain"] = sum(gained for _, gained in gains) / len(gains)
        # Counted by the number of achievements, because almost every snapshot has a different set of them.
        depths = Counter(len(moment.achieved) for moment in pool.moments)
        return metrics | {f"starts/{depth:02d}/kept": float(depths[depth]) for depth in sorted(depths)}

    async def _moments(
        self, iteration: int, asked: Mapping[str, RolloutRequest], games: Mapping[str, Rollout]
    ) -> list[Moment]:
        """Choose moments of an iteration's games, and replay the games on task apps to take snapshots."""
        seed = self.planner.players.seed
        found = [
            one
            for plan, item in games.items()
            for one in candidates(plan, _by_decision(item), seed, done=self._done(asked[plan]))
        ]
        by_game: dict[str, list[Candidate]] = {}
        for one in kept(found, seed):
            by_game.setdefault(one.plan, []).append(one)
        plans = sorted(by_game)
        wanted = [
            Wanted(
                games[plan],
                [one.own_turn for one in by_game[plan]],
                asked[plan].start if _is_start(asked[plan]) else None,
            )
            for plan in plans
        ]
        moments = []
        for plan, snapshots in zip(plans, await replay_all(self.apps, self.planner, wanted), strict=True):
            item = games[plan]
            if snapshots is None:
                self.tell(
                    f"iteration {iteration}: no task app plays {item.rollout_id} again for its snapshots"
                )
                continue
            moments += [
                self._moment(item, asked[plan], one, snapshots[one.own_turn])
                for one in sorted(by_game[plan], key=lambda one: one.turn)
            ]
        return moments

    def _moment(self, item: Rollout, request: RolloutRequest, one: Candidate, snapshot: str) -> Moment:
        players, episode = self.planner.players, item.trajectory
        assert episode is not None, "it was played"
        own = sum(step.step_info.invalid_reason is not None for step in episode.steps[: one.own_turn])
        return Moment(
            key=_key(item.rollout_id, one.turn),
            iteration=item.iteration,
            rollout_id=item.rollout_id,
            group_id=item.group_id,
            seed=episode.seed,
            turn=one.turn,
            invalid=players.rollout.max_invalid_decisions - request.limits.max_invalid_decisions + own,
            achieved=one.achieved,
            snapshot=snapshot,
        )

    def _done(self, request: RolloutRequest) -> int:
        """Return how many decisions of the game came before the rollout's first decision."""
        return self.planner.players.max_decisions - request.limits.max_decisions

    def _pool_after(self, iteration: int) -> Pool:
        """Build the pool from the files of all iterations up to this one."""
        if iteration < self._folded:
            self._pool, self._folded = Pool(), 0
        for number in range(self._folded + 1, iteration + 1):
            self._pool = self._pool.after(*_read(self.directory.curriculum_file(number)), self.keys)
            self._folded = number
        return self._pool


def without_past(item: Rollout) -> Rollout:
    """Return the rollout with only the outcome reward earned since the snapshot at which it began.

    The reward of an operator's function is not reduced, because it covers only the rollout's own decisions.
    """
    episode = item.trajectory
    if episode is None or not episode.is_continued or episode.user_reward is not None:
        return item
    own = {"outcome_reward": episode.outcome_reward - episode.outcome_before}
    return item.model_copy(update={"trajectory": episode.model_copy(update=own)})


def _is_start(request: RolloutRequest) -> bool:
    return request.start.snapshot is not None


def _key(rollout_id: str, turn: int) -> str:
    return f"{plan_id(rollout_id)}:{turn}"


def _achieved(counts: Mapping[str, int]) -> Achieved:
    return tuple(sorted(name for name, count in counts.items() if count > 0))


def _by_decision(item: Rollout) -> list[Achieved]:
    """Return, for each decision of a rollout, the achievements that were unlocked before it."""
    assert item.trajectory is not None, "it was played"
    return [_achieved(step.observation_data.achievements_counts) for step in item.trajectory.steps]


def _gain(request: RolloutRequest, episode: Trajectory | None) -> Gain:
    """Return the key of the snapshot at which a rollout began, and whether the rollout gained anything.

    It gained something if it unlocked an achievement or earned outcome reward.
    """
    start = request.start
    assert episode is not None and start.parent_rollout_id is not None and start.parent_turn is not None
    before = _achieved(episode.steps[0].observation_data.achievements_counts)
    gained = _achieved(episode.achievements_counts) != before or episode.outcome_reward > 0
    return _key(start.parent_rollout_id, start.parent_turn), gained


def _read(path: Path) -> tuple[list[Moment], list[Gain]]:
    """Read an iteration's snapshots and gains; empty if there is no file, as without [curriculum]."""
    moments, gains = [], []
    for row in each_line(path):
        if "from" in row:
            gains.append((str(row["from"]), bool(row["gained"])))
        else:
            moments.append(Moment(**row | {"achieved": tuple(row["achieved"])}))
    return moments, gains
