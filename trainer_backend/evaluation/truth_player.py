"""Pairs of continuations of a stored decision, which measure what it was truly worth (`core.truth`)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared_schemas.replay import ReplayRequest, ReplayTurn, words_of
from shared_schemas.rollouts import Rollout, RolloutRequest, Start
from shared_schemas.trajectory import StepData, StopReason, Trajectory
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.collector import Collector
from trainer_backend.collect.plan import Continuation, Planner
from trainer_backend.collect.wire import ReplayDeparts, TaskAppLost
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.truth import TrueAdvantage, mean_difference
from trainer_backend.credit.rewards import Rewards
from trainer_backend.errors import TaskAppError
from trainer_backend.rundir.truth_file import TruthSetting

_ATTEMPTS = 2  # of a replay; at two task apps where there are two


@dataclass(frozen=True, slots=True)
class StoredDecision:
    """A stored decision to measure; its rollout carries decision rewards, also if it was played without."""

    rollout: Rollout
    step: StepData

    @property
    def key(self) -> tuple[str, int]:
        return self.rollout.rollout_id, self.step.turn

    @property
    def episode(self) -> Trajectory:
        assert self.rollout.trajectory is not None, "only finished rollouts are measured"
        return self.rollout.trajectory

    @property
    def goes_on(self) -> bool:
        """Whether the stored episode has a decision after this one."""
        return self.step.turn < len(self.episode.steps)

    def cut_after(self, step: StepData) -> Rollout:
        """The rollout up to this decision, with `step` in its place."""
        before = self.episode.steps[: self.step.turn - 1]
        episode = self.episode.model_copy(update={"steps": (*before, step)})
        return self.rollout.model_copy(update={"trajectory": episode})


class _Side(NamedTuple):
    """One side of a pair: what was done at the decision, and where that led.

    Attributes:
        episode: in which it was done; it ended with it where there is no moment after it.
        moment: the snapshot after it.
    """

    step: StepData
    episode: Trajectory
    moment: str | None


@dataclass(frozen=True, slots=True)
class ContinuationPlayer:
    """Plays on from before and after a decision."""

    planner: Planner
    collector: Collector
    apps: TaskApps
    rewards: Rewards
    setting: TruthSetting

    async def truth(self, item: StoredDecision) -> TrueAdvantage | None:
        """The measured truth of a decision; None where fewer than two of its pairs were played.

        Raises:
            TaskAppError: its episode goes otherwise when it is replayed, or shows another prompt.
        """
        moments = await self._moments(item)
        if moments is None:
            return None
        before, after = moments
        count = self.setting.continuations
        firsts = await self._collect([self._first(item, before, k) for k in range(count)])
        for episode in firsts.values():
            _refuse_other_prompt(episode.steps[0], item)
        others = {
            k: _Side(episode.steps[0], episode, episode.final_snapshot)
            for k, episode in firsts.items()
            if not _is_same(episode.steps[0], item.step)
        }
        stored = _Side(item.step, item.episode, after)
        own = await self._played_on(item, "own", dict.fromkeys(others, stored))
        other = await self._played_on(item, "other", others)
        returns = {k: (self._return(item, own[k]), self._return(item, other[k])) for k in own.keys() & other}
        same = len(firsts) - len(others)
        if same + len(returns) < 2:
            return None
        differences = [mine - its for mine, its in returns.values()]
        advantage, error = mean_difference([*differences, *([0.0] * same)])
        values = [mine for mine, _ in returns.values()]
        return TrueAdvantage(
            rollout_id=item.rollout.rollout_id,
            turn=item.step.turn,
            reward=self.rewards.earned_by(item.rollout, {}).rewards_T[item.step.turn - 1],
            advantage=advantage,
            error=error,
            action_value=math.fsum(values) / len(values) if values else None,
            pairs=same + len(returns),
            failed=count - same - len(returns),
            others=len(returns),
            decisions=len(firsts) + sum(len(e.steps) - 1 for e in (*own.values(), *other.values())),
        )

    async def _played_on(
        self, item: StoredDecision, name: str, sides: Mapping[int, _Side]
    ) -> dict[int, Trajectory]:
        """By pair, the episode from the decision on, where it could be played."""
        requests = [
            self._rest(item, f"{self._group(item)}-{name}", k, side)
            for k, side in sides.items()
            if side.moment is not None
        ]
        rests = await self._collect(requests)
        return {
            k: _joined(side.step, rests[k].steps if side.moment else (), rests.get(k, side.episode))
            for k, side in sides.items()
            if side.moment is None or k in rests
        }

    async def _moments(self, item: StoredDecision) -> tuple[str, str | None] | None:
        """Snapshots before the decision, and after it if the episode went on, by a replay of the episode.

        None where no task app of two can be reached for it.
        """
        turn = item.step.turn
        origin = self.planner.source.of_group(item.rollout.group_id, item.episode.seed)
        env = self.planner.players.env(origin)
        record = ReplayRequest(
            env_name=env.env_name,
            config=env.config,
            seed=item.episode.seed,
            turns=tuple(map(ReplayTurn.of, item.episode.steps[:turn])),
            snapshots=(turn - 1, turn) if item.goes_on else (turn - 1,),
        )
        members = [app.client for app in self.apps.members if app.fault is None]
        for client in (*members, *members)[:_ATTEMPTS]:
            try:
                snapshots = await client.snapshots(record)
            except TaskAppLost:
                continue
            except ReplayDeparts as error:
                raise _played_elsewhere(item, error.detail) from error
            return snapshots[turn - 1], snapshots.get(turn)
        return None

    def _first(self, item: StoredDecision, before: str, k: int) -> RolloutRequest:
        """The policy's new choice before the decision: one decision, and the moment after it."""
        done = item.step.turn - 1
        start = Start(snapshot=before, parent_rollout_id=item.rollout.rollout_id, parent_turn=done)
        is_last = item.step.turn >= self.planner.players.max_decisions
        what = Continuation(
            f"{self._group(item)}-first",
            k,
            ("truth first", *self._seed_parts(item, k)),
            max_decisions=1,
            snapshot_turns=() if is_last else (2,),
        )
        return self.planner.continuation(item.rollout, start, what)

    def _rest(self, item: StoredDecision, group: str, k: int, side: _Side) -> RolloutRequest:
        """What comes after one side of pair k; both sides draw the same."""
        draws = derived_seed("truth draws", *self._seed_parts(item, k))
        start = Start(
            snapshot=side.moment,
            draws_seed=draws if self.setting.fresh_draws else None,
            parent_rollout_id=item.rollout.rollout_id,
            parent_turn=item.step.turn,
        )
        seed_parts = ("truth", *self._seed_parts(item, k))
        what = Continuation(group, k, seed_parts, max_decisions=self.setting.horizon)
        return self.planner.continuation(item.cut_after(side.step), start, what)

    def _return(self, item: StoredDecision, episode: Trajectory) -> float:
        """The discounted return of an episode from the decision on."""
        rollout = item.rollout.model_copy(update={"trajectory": episode})
        earned = self.rewards.earned_by(rollout, {}, decisions_done=item.step.turn - 1)
        return discounted_returns(earned.rewards_T, self.setting.gamma)[0]

    async def _collect(self, requests: Sequence[RolloutRequest]) -> dict[int, Trajectory]:
        """By pair, those that were played. What ran out of time has lost what would have come."""
        collection = await self.collector.collect(requests)
        if requests:
            await self.collector.ack(self.planner.run_id, collection.all)
        return {
            item.sibling: item.trajectory
            for item in collection.rollouts
            if item.trajectory is not None and item.trajectory.stop_reason is not StopReason.DEADLINE
        }

    def _group(self, item: StoredDecision) -> str:
        _, _, place = item.rollout.rollout_id.partition("/")  # without the run that stored it
        return f"{self.planner.run_id}/{place.replace(':', '.')}/{item.step.turn}"

    def _seed_parts(self, item: StoredDecision, k: int) -> tuple[int | str, ...]:
        return self.setting.seed, item.rollout.group_id, item.rollout.sibling, item.step.turn, k


def _refuse_other_prompt(step: StepData, item: StoredDecision) -> None:
    """Refuse another text of the same state: the policy would choose by what it never saw."""
    if step.observation_data.messages != item.step.observation_data.messages:
        raise _played_elsewhere(item, f"the prompt of decision {item.step.turn} is another one")


def _played_elsewhere(item: StoredDecision, told: str) -> TaskAppError:
    return TaskAppError(
        f"{told}: rollout {item.rollout.rollout_id!r} was played in another environment than the task app "
        "has, or in another version of it",
        hint="Start the task app of the version that the run was trained with.",
    )


def _is_same(step: StepData, stored: StepData) -> bool:
    """Whether the policy chose as stored: the same calls or words, or the same reason why there are none."""
    one, other = (
        (
            [(call.function.name, call.function.arguments) for call in item.tool_calls],
            words_of(item.action_taken),
            item.step_info.invalid_reason,
            item.action_taken.get("type") == "terminate",
        )
        for item in (step, stored)
    )
    return one == other


def _joined(step: StepData, rest: Sequence[StepData], ending: Trajectory) -> Trajectory:
    """The episode that begins with a decision, goes on with others, and ends like `ending`."""
    steps = tuple(_at_turn(one, turn) for turn, one in enumerate((step, *rest), start=1))
    return ending.model_copy(update={"steps": steps})


def _at_turn(step: StepData, turn: int) -> StepData:
    """The decision as the `turn`-th of an episode, its record of rewards too."""
    metadata = step.metadata
    if (rewards := metadata.decision_rewards) is not None:
        metadata = metadata.model_copy(update={"decision_rewards": rewards.model_copy(update={"turn": turn})})
    return step.model_copy(update={"turn": turn, "metadata": metadata})
