"""Pure: whether a finished rollout answers its own request, with numbers that can be summed."""

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json, to_json

from service_kit.replies import ReplyInvalid, read_reply, refuse_repeats
from shared_schemas.rollouts import Rollout, RolloutFailure, RolloutPage, RolloutRequest
from shared_schemas.trajectory import StepData, Trajectory

# The failure code of a rollout that is none of what was asked for.
WRONG_ROLLOUT = "wrong_rollout"
# Squares and sums of larger numbers leave the range of float32, in which the loss is computed.
_LARGEST = 1e15
_PLACE = ("run_id", "iteration", "group_id", "sibling", "attempt")


def checked(request: RolloutRequest, rollout: Rollout) -> Rollout:
    """The rollout, or its failure where it cannot be the answer to the request."""
    fault = _find_fault(request, rollout)
    if fault is None:
        return rollout
    detail = f"the task app sent another episode than was asked for, or a broken one: {fault}"
    failure = RolloutFailure(code=WRONG_ROLLOUT, detail=detail)
    return rollout.model_copy(update={"status": "failed", "trajectory": None, "failure": failure})


def read_each(content: bytes, part: str, fault: ReplyInvalid) -> RolloutPage:
    """Read a page that has a fault, rollout by rollout: those of a wrong form have failed.

    Raises:
        ReplyInvalid: the fault is of the page itself, not of a rollout.
    """
    if not fault.field.startswith("rollouts."):
        raise fault
    refuse_repeats(content, part)
    page = from_json(content)
    rollouts = page.pop("rollouts")
    empty = read_reply(RolloutPage, _written({**page, "rollouts": []}), part)
    read = [_read_one(one, f"{part}: rollouts.{place}", empty) for place, one in enumerate(rollouts)]
    return empty.model_copy(update={"rollouts": tuple(one for one in read if one is not None)})


def _read_one(one: Any, part: str, page: RolloutPage) -> Rollout | None:
    try:
        return read_reply(Rollout, _written(one), part)
    except ReplyInvalid as error:
        rollout_id = one.get("rollout_id") if isinstance(one, dict) else None
        if not isinstance(rollout_id, str):
            return None
        failure = RolloutFailure(code=WRONG_ROLLOUT, detail=str(error))
        return Rollout(
            rollout_id=rollout_id, run_id="", iteration=0, group_id="", sibling=0, attempt=0,
            instance_id=page.instance_id, status="failed", failure=failure,
        )  # fmt: skip


def _written(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="constants")


def _find_fault(request: RolloutRequest, rollout: Rollout) -> str | None:
    for name in _PLACE:
        found, asked = getattr(rollout, name), getattr(request, name)
        if found != asked:
            return f"its {name} is {found!r:.80}, and {asked!r} was asked for"
    episode, start = rollout.trajectory, request.start
    if episode is None:
        return "it has no trajectory"
    if start.seed is not None and episode.seed != start.seed:
        return f"it was played in the world of seed {episode.seed}; seed {start.seed} was asked for"
    if (episode.parent_rollout_id, episode.parent_turn) != (start.parent_rollout_id, start.parent_turn):
        return f"it continues {episode.parent_rollout_id!r:.80}; {start.parent_rollout_id!r} was asked for"
    turns = [step.turn for step in episode.steps]
    if turns != list(range(1, len(turns) + 1)):
        return f"the turns of its steps are {turns!r:.80}; they count from 1"
    # `not <=`, because NaN is neither larger nor smaller.
    found = next((item for item in _numbers(episode) if not abs(item[1]) <= _LARGEST), None)
    return None if found is None else f"its {found[0]} is {found[1]}, beyond +-{_LARGEST:g}"


def _numbers(episode: Trajectory) -> Iterator[tuple[str, float]]:
    """Every number that a reward, a metric or a loss is made of, with its place."""
    yield "outcome_reward", episode.outcome_reward
    yield "wall_s", episode.wall_s
    if episode.user_reward is not None:
        yield "environment_outcome_reward", episode.user_reward.environment_outcome_reward
        yield "score of the reward function", episode.user_reward.result.score
    for step in episode.steps:
        for name, value in _numbers_of_step(step):
            yield f"{name} at turn {step.turn}", value


def _numbers_of_step(step: StepData) -> Iterator[tuple[str, float]]:
    yield from (("env_reward", value) for value in step.env_rewards or ())
    yield from (("reward part", part.value) for part in step.reward_parts)
    for name in ("policy_value_estimate", "base_reward", "advantage", "return_to_go"):
        if (value := getattr(step, name)) is not None:
            yield name, value
    yield "reward_last_step", step.observation_data.reward_last_step
    if step.next_observation is not None:
        yield "reward_last_step", step.next_observation.reward_last_step
    info = step.step_info
    yield from (("time", value) for value in (info.policy_s, info.environment_s, info.interaction_s))
