"""Plays pairs of continuations of a stored decision, which measure its true advantage (`core.truth`)."""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared_schemas.chat import CONTEXT_LENGTH_EXCEEDED
from shared_schemas.replay import read_words
from shared_schemas.rollouts import Rollout, RolloutRequest, Start
from shared_schemas.trajectory import StepData, StopReason, Trajectory
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.moments import played_elsewhere, snapshots_at
from trainer_backend.collect.plan import Planner
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.truth import (
    CHOICES,
    Stratum,
    TrueAdvantage,
    choice_strata,
    departures,
    mean_difference,
)
from trainer_backend.credit.rewards import Rewards
from trainer_backend.rundir.truth_file import TruthSetting

# Tool calls of a decision, its text, why it was refused (or None), and the ending that it caused (or None).
Choice = tuple[tuple[tuple[str, str], ...], str | None, str | None, StopReason | None]
_ENDS = (StopReason.TERMINATE_ACTION, StopReason.TERMINATION_REGEX)


@dataclass(frozen=True, slots=True)
class StoredDecision:
    """A stored decision to measure. Its rollout has decision rewards, which `with_records` may have added."""

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
        """Return the rollout up to this decision, with `step` in place of the stored decision."""
        before = self.episode.steps[: self.step.turn - 1]
        episode = self.episode.model_copy(update={"steps": (*before, step)})
        return self.rollout.model_copy(update={"trajectory": episode})


class _Side(NamedTuple):
    """The start of one of a pair's two continuations: a decision and the snapshot after it."""

    step: StepData
    episode: Trajectory
    """The episode that contains `step`: the stored episode, or one that was played to sample `step`."""
    moment: str | None
    """The snapshot after the decision; None if the episode ended there."""

    @property
    def choice(self) -> Choice:
        """Return what the policy chose, in a form in which equal choices are equal."""
        calls = tuple((call.function.name, call.function.arguments) for call in self.step.tool_calls)
        step = self.step
        end = step.stop_reason if step.stop_reason in _ENDS else None
        return calls, read_words(step.action_taken), step.step_info.invalid_reason, end


class _Played(NamedTuple):
    episodes: dict[int, Trajectory]
    """The finished episodes, by the sibling number of their request."""
    too_long: set[int]
    """Sibling numbers of the requests whose first prompt is longer than the model's context."""


@dataclass(slots=True)
class ContinuationPlayer:
    planner: Planner
    dispatcher: Dispatcher
    apps: TaskApps
    rewards: Rewards
    setting: TruthSetting
    lost_decisions: int = 0
    """Number of decisions played for measurements that failed. A lost continuation counts as one decision."""

    async def truth(self, item: StoredDecision) -> TrueAdvantage | None:
        """Measure the true advantage of a decision; return None if too few pairs could be played.

        Raises:
            TaskAppError: the replayed episode, or the decision's prompt in it, differs from the stored one.
        """
        moments = await self._moments(item)
        if moments is None:
            return None
        before, after = moments
        sides = await self._choices(item, before)
        if not sides:
            self.lost_decisions += CHOICES * self.setting.continuations
            return None
        seed = derived_seed("truth choices", *self._seed_parts(item, 0))
        strata = choice_strata([side.choice for side in sides], self.setting.continuations, seed)
        stored = _Side(item.step, item.episode, after)
        pairs = [n for stratum in strata for n in stratum.members]
        others = {n: sides[n] for n in pairs if sides[n].choice != stored.choice}
        own, other = await self._played_on(item, dict.fromkeys(others, stored), others)
        returns = {n: (self._return(item, own[n]), self._return(item, other[n])) for n in own.keys() & other}
        differences = {n: 0.0 for n in pairs if n not in others}
        differences |= {n: mine - its for n, (mine, its) in returns.items()}
        parts = [part for stratum in strata for part in _without_lost(stratum, others, differences)]
        played = len(sides) + sum(len(e.steps) - 1 for e in (*own.values(), *other.values()))
        if len(differences) < 2 or not all(values for _, values in parts):
            self.lost_decisions += played + 2 * len(others) - len(own) - len(other)
            return None
        advantage, error = mean_difference(parts, len(sides))
        values = [mine for mine, _ in returns.values()]
        return TrueAdvantage(
            rollout_id=item.rollout.rollout_id,
            turn=item.step.turn,
            reward=self.rewards.earned_by(item.rollout, {}).rewards_T[item.step.turn - 1],
            advantage=advantage,
            error=error,
            action_value=math.fsum(values) / len(values) if values else None,
            pairs=len(differences),
            failed=self.setting.continuations - len(differences),
            others=len(returns),
            decisions=played,
            departures=departures(parts, len(sides)),
        )

    async def _choices(self, item: StoredDecision, before: str) -> list[_Side]:
        """Let the policy decide again several times in the state before the decision."""
        count = CHOICES * self.setting.continuations
        firsts = (await self._collect([self._first(item, before, n) for n in range(count)])).episodes
        for episode in firsts.values():
            # If the same state gives another prompt now, the choices are not comparable with the stored one.
            if episode.steps[0].observation_data.messages != item.step.observation_data.messages:
                told = f"the prompt of decision {item.step.turn} is another one"
                raise played_elsewhere(item.rollout.rollout_id, told)
        return [_Side(firsts[n].steps[0], firsts[n], firsts[n].final_snapshot) for n in sorted(firsts)]

    async def _played_on(
        self, item: StoredDecision, own: Mapping[int, _Side], other: Mapping[int, _Side]
    ) -> tuple[dict[int, Trajectory], dict[int, Trajectory]]:
        """Continue both sides of each pair. Return the continued episodes of both sides, by pair.

        Pairs whose continuation was lost are missing from the result.
        """
        sides = {2 * n + place: both[n] for place, both in enumerate((own, other)) for n in both}
        rests, too_long = await self._collect(
            [self._rest(item, number, side) for number, side in sides.items() if side.moment is not None]
        )
        # Not for the stored decision: its episode did continue, so its return after such an end is unknown.
        ended = {n: side for n, side in sides.items() if n in too_long and side.episode is not item.episode}
        episodes = {
            number: _joined(
                side.step, rests[number].steps if side.moment else (), rests.get(number, side.episode)
            )
            for number, side in sides.items()
            if side.moment is None or number in rests
        } | {
            # The next prompt does not fit the model, which ends the episode.
            n: _joined(side.step, (), side.episode).model_copy(
                update={"stop_reason": StopReason.CONTEXT_LENGTH}
            )
            for n, side in ended.items()
        }
        first, second = ({n // 2: e for n, e in episodes.items() if n % 2 == place} for place in (0, 1))
        return first, second

    async def _moments(self, item: StoredDecision) -> tuple[str, str | None] | None:
        """Replay the episode, and return the snapshots before and after the decision.

        The second is None if the decision was the last one. Return None if no task app answered in two
        attempts.
        """
        turn = item.step.turn
        turns = (turn - 1, turn) if item.goes_on else (turn - 1,)
        snapshots = await snapshots_at(self.apps, self.planner, item.rollout, turns)
        return None if snapshots is None else (snapshots[turn - 1], snapshots.get(turn))

    def _first(self, item: StoredDecision, before: str, number: int) -> RolloutRequest:
        """Return a request to decide again: from `before`, play one decision and take a snapshot after it."""
        done = item.step.turn - 1
        start = Start(snapshot=before, parent_rollout_id=item.rollout.rollout_id, parent_turn=done)
        is_last = item.step.turn >= self.planner.players.max_decisions
        return self.planner.continuation(
            item.rollout, start, f"{self._group(item)}-first", number,
            seed_parts=("truth first", *self._seed_parts(item, number)),
            max_decisions=1,
            snapshot_turns=() if is_last else (2,),
        )  # fmt: skip

    def _rest(self, item: StoredDecision, number: int, side: _Side) -> RolloutRequest:
        """Return a request to continue a side. Numbers 2k and 2k + 1 are a pair, and have the same seeds."""
        k = number // 2
        draws = derived_seed("truth draws", *self._seed_parts(item, k))
        start = Start(
            snapshot=side.moment,
            draws_seed=draws if self.setting.fresh_draws else None,
            parent_rollout_id=item.rollout.rollout_id,
            parent_turn=item.step.turn,
        )
        return self.planner.continuation(
            item.cut_after(side.step), start, f"{self._group(item)}-rest", number,
            seed_parts=("truth", *self._seed_parts(item, k)),
            max_decisions=self.setting.horizon,
        )  # fmt: skip

    def _return(self, item: StoredDecision, episode: Trajectory) -> float:
        """Compute the discounted return of an episode from the decision on."""
        rollout = item.rollout.model_copy(update={"trajectory": episode})
        earned = self.rewards.earned_by(rollout, {}, decisions_done=item.step.turn - 1)
        return discounted_returns(earned.rewards_T, self.setting.gamma)[0]

    async def _collect(self, requests: Sequence[RolloutRequest]) -> _Played:
        """Play the requests. Drop episodes that a deadline ended, because their returns are incomplete."""
        batch = await self.dispatcher.collect(requests)
        if requests:
            await self.dispatcher.ack(self.planner.run_id, batch.all)
        episodes = {
            item.sibling: item.trajectory
            for item in batch.rollouts
            if item.trajectory is not None and item.trajectory.stop_reason is not StopReason.DEADLINE
        }
        failures = ((item.sibling, item.failure) for item in batch.failed)
        return _Played(
            episodes, {sibling for sibling, why in failures if why and why.code == CONTEXT_LENGTH_EXCEEDED}
        )

    def _group(self, item: StoredDecision) -> str:
        _, _, place = item.rollout.rollout_id.partition("/")  # without the run that stored it
        return f"{self.planner.run_id}/{place.replace(':', '.')}/{item.step.turn}"

    def _seed_parts(self, item: StoredDecision, k: int) -> tuple[int | str, ...]:
        return self.setting.seed, item.rollout.group_id, item.rollout.sibling, item.step.turn, k


def _without_lost(
    stratum: Stratum, others: Container[int], differences: Mapping[int, float]
) -> list[tuple[float, list[float]]]:
    """Return [(share, differences of pairs)] of a stratum; two such parts if some of its pairs were lost.

    Only pairs in `others`, whose choice differs from the stored one, are played and can be lost. If any is
    lost, these pairs become a separate part with their share of the stratum. In one part, the weight of lost
    pairs would pass to pairs with the stored choice, whose difference is 0.
    """
    share, members = stratum
    kept = [differences[n] for n in members if n in differences]
    if len(kept) == len(members):
        return [(share, kept)]
    played = [n for n in members if n in others]
    parts = (played, [n for n in members if n not in others])
    return [
        (share * len(part) / len(members), [differences[n] for n in part if n in differences])
        for part in parts
        if part
    ]


def _joined(step: StepData, rest: Sequence[StepData], ending: Trajectory) -> Trajectory:
    """Return an episode made of the decision `step` and the decisions `rest`; it ends like `ending`."""
    steps = tuple(_at_turn(one, turn) for turn, one in enumerate((step, *rest), start=1))
    return ending.model_copy(update={"steps": steps})


def _at_turn(step: StepData, turn: int) -> StepData:
    """Return a copy of the decision with the given turn, also in its record of rewards."""
    metadata = step.metadata
    if (rewards := metadata.decision_rewards) is not None:
        metadata = metadata.model_copy(update={"decision_rewards": rewards.model_copy(update={"turn": turn})})
    return step.model_copy(update={"turn": turn, "metadata": metadata})
