"""Builds the arguments of a reward function, and writes its result into the trajectory; no I/O."""

from collections.abc import Sequence
from typing import Any

from shared_schemas.evaluate_result import EvaluateResult, StepOutput
from shared_schemas.json_text import encodable_json
from shared_schemas.messages import Message
from shared_schemas.plain_text import encodable
from shared_schemas.trajectory import RewardPart, StepData, Trajectory, UserReward
from task_app.errors import RewardFunctionFailed, clipped


def build_arguments(
    trajectory: Trajectory, messages: Sequence[Message], ground_truth: Any, *, rollout_id: str
) -> dict[str, Any]:
    """Return the keyword arguments of a reward function for one episode, as JSON values.

    messages: every decision's prompt, answer and tool results, in order.
    ground_truth: the right answer from the task; None if the task has none.
    environment_outcome_reward: the episode's score by the environment's own definition.
    env_rewards: [T][S] reward of each env step of each decision.
    """
    return {
        "messages": [message.model_dump(mode="json") for message in messages],
        "ground_truth": ground_truth,
        "rollout_id": rollout_id,
        "env_name": trajectory.env_name,
        "seed": trajectory.seed,
        "stop_reason": str(trajectory.stop_reason),
        "environment_outcome_reward": trajectory.outcome_reward,
        "env_rewards": [list(step.env_rewards or ()) for step in trajectory.steps],
    }


def with_user_reward(
    trajectory: Trajectory, result: EvaluateResult, *, name: str, rollout_id: str
) -> Trajectory:
    """Return the trajectory with the result's score as outcome reward and its base rewards in the steps.

    The environment's own outcome reward moves to `user_reward`, so that only one outcome counts.

    Raises:
        RewardFunctionFailed: the result reports an error, or that its score is not valid.
    """
    if result.error is not None or not result.is_score_valid:
        why = clipped(result.error or result.reason or "no reason given", 300)
        failure = "reports an error" if result.error is not None else "says that its score is not valid"
        raise RewardFunctionFailed(encodable(f"reward function {name!r} {failure}: {why}"))
    result = EvaluateResult.model_validate(encodable_json(result.model_dump()))
    steps, warnings = align_data_for_rl_processing(result, trajectory.steps, rollout_id)
    update = {
        "steps": tuple(steps),
        "outcome_reward": result.score,
        "outcome_definition": f"score of the reward function {name!r}",
        "user_reward": UserReward(
            reward_function=name,
            result=result,
            environment_outcome_reward=trajectory.outcome_reward,
            environment_outcome_definition=trajectory.outcome_definition,
        ),
        "warnings": (*trajectory.warnings, *warnings),
    }
    return trajectory.model_copy(update=update)


_MAX_INDICES = 5


def align_data_for_rl_processing(
    current_eval_result: EvaluateResult, current_step_data_list: Sequence[StepData], rollout_id: str
) -> tuple[list[StepData], list[str]]:
    """Put the base_reward of every step_output on the step that its step_index names.

        step_index = t = turn - 1 = StepData.assistant_turn_index ("2" is 2)

    If two outputs name the same step, the last one counts. A step without an output keeps base_reward None.
    Each base_reward is also appended to the step's reward parts, with the source "user"; in modes that use
    reward parts, `reward_vector` adds it.

    Args:
        current_eval_result: if its step_outputs are None, the steps are returned unchanged.
        current_step_data_list: [T] decisions of the episode, in order.
        rollout_id: the id with which each warning begins.

    Returns:
        [T] the steps, and a warning for each kind of mismatch: repeated, unknown or missing steps.

    Source: the function with this name in 2-rollout-worker-and-gigpo.md. That function returns only the
    steps, and does not report unknown and repeated indices. DESIGN.md 4.3.
    """
    outputs = current_eval_result.step_outputs
    if outputs is None:
        return list(current_step_data_list), []
    rewards_by_t, twice, unknown = _collect_rewards(outputs, len(current_step_data_list))
    steps = list(current_step_data_list)
    for t, reward in rewards_by_t.items():
        parts = (*steps[t].reward_parts, RewardPart(source="user", value=reward))
        steps[t] = steps[t].model_copy(update={"base_reward": reward, "reward_parts": parts})
    missing = [t for t in range(len(steps)) if t not in rewards_by_t]
    there = f"this episode has 0..{len(steps) - 1}"
    misfits = (
        (twice, "step_outputs name a step more than once, and the last one counts"),
        (unknown, f"step_outputs name steps that are not there ({there}), and are not used"),
        (missing, "steps have no step_output, and no base_reward"),
    )
    return steps, [f"{rollout_id}: {sentence}: {_list_names(which)}" for which, sentence in misfits if which]


def _collect_rewards(
    outputs: Sequence[StepOutput], count: int
) -> tuple[dict[int, float], list[int], list[int | str]]:
    """Return the base_reward of each t, the t that occur twice, and the indices that name no step."""
    rewards_by_t: dict[int, float] = {}
    twice: list[int] = []
    unknown: list[int | str] = []
    for output in outputs:
        index = output.step_index
        t = int(index) if isinstance(index, int) or (index.isascii() and index.isdigit()) else -1
        if not 0 <= t < count:
            unknown.append(output.step_index)
            continue
        if t in rewards_by_t and t not in twice:
            twice.append(t)
        rewards_by_t[t] = output.base_reward
    return rewards_by_t, twice, unknown


def _list_names(which: Sequence[int | str]) -> str:
    names = ", ".join(repr(one)[:40] for one in which[:_MAX_INDICES])
    return f"{names} and {len(which) - _MAX_INDICES} more" if len(which) > _MAX_INDICES else names
