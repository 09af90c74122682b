"""Pure: an episode as a reward function gets it, and the trajectory with the rewards that it returned."""

from collections.abc import Sequence
from typing import Any

from shared_schemas.evaluate_result import EvaluateResult, StepOutput
from shared_schemas.json_text import encodable, encodable_json
from shared_schemas.messages import Message
from shared_schemas.rewards import RewardPart
from shared_schemas.trajectory import StepData, Trajectory, UserReward
from task_app.errors import RewardFunctionFailed, clipped


def episode_of(
    trajectory: Trajectory, messages: Sequence[Message], ground_truth: Any, *, rollout_id: str
) -> dict[str, Any]:
    """The keyword arguments of a reward function for one episode, as JSON.

    messages: every decision's prompt, answer and tool results, in order.
    ground_truth: what the task says is right; None where it says nothing.
    environment_outcome_reward: the episode's score by the environment's own definition.
    env_rewards: [T][S] what each env step of each decision paid.
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


def rewarded(trajectory: Trajectory, result: EvaluateResult, *, name: str, rollout_id: str) -> Trajectory:
    """The episode with the score as its outcome and the base rewards on its steps.

    The environment's own outcome moves to `user_reward`, so that nothing is lost and nothing counts twice.

    Raises:
        RewardFunctionFailed: the function says itself that this is no reward.
    """
    if result.error is not None or not result.is_score_valid:
        why = clipped(result.error or result.reason or "no reason given", 300)
        told = "reports an error" if result.error is not None else "says that its score is not valid"
        raise RewardFunctionFailed(encodable(f"reward function {name!r} {told}: {why}"))
    result = EvaluateResult.model_validate(encodable_json(result.model_dump()))
    steps, warnings = align_data_for_rl_processing(result, trajectory.steps, rollout_id)
    said = UserReward(
        reward_function=name,
        result=result,
        environment_outcome_reward=trajectory.outcome_reward,
        environment_outcome_definition=trajectory.outcome_definition,
    )
    return trajectory.model_copy(
        update={
            "steps": tuple(steps),
            "outcome_reward": result.score,
            "outcome_definition": f"score of the reward function {name!r}",
            "user_reward": said,
            "warnings": (*trajectory.warnings, *warnings),
        }
    )


_NAMED = 5


def align_data_for_rl_processing(
    current_eval_result: EvaluateResult, current_step_data_list: Sequence[StepData], rollout_id: str
) -> tuple[list[StepData], list[str]]:
    """Put the base_reward of every step_output on the step that its step_index names.

        step_index = t = turn - 1 = StepData.assistant_turn_index ("2" is 2)

    Of two outputs for one step the last one counts; a step without one keeps base_reward None. A base_reward
    is a reward part of its decision too, of source "user" (core.rewards adds it where the mode does).

    Args:
        current_eval_result: of this episode; without step_outputs nothing changes.
        current_step_data_list: [T] its decisions, in order.
        rollout_id: named in the warnings.

    Returns:
        [T] the steps, and a sentence for each kind of misfit: named twice, not there, left out.

    Source: the aligner of the library that source 2 belongs to, whose name this is; there unmatched and
    duplicate indices are silent, and the steps alone are returned. DESIGN.md 4.3.
    """
    outputs = current_eval_result.step_outputs
    if outputs is None:
        return list(current_step_data_list), []
    found, twice, odd = _by_step(outputs, len(current_step_data_list))
    steps = [
        _with_base_reward(step, found[t]) if t in found else step
        for t, step in enumerate(current_step_data_list)
    ]
    left_out = [t for t in range(len(steps)) if t not in found]
    there = f"this episode has 0..{len(steps) - 1}"
    told = (
        (twice, "step_outputs name a step more than once, and the last one counts"),
        (odd, f"step_outputs name steps that are not there ({there}), and are not used"),
        (left_out, "steps have no step_output, and no base_reward"),
    )
    return steps, [f"{rollout_id}: {sentence}: {_listed(which)}" for which, sentence in told if which]


def _by_step(
    outputs: Sequence[StepOutput], count: int
) -> tuple[dict[int, float], list[int], list[int | str]]:
    """base_reward by t; the t that came again; the indices that are no t."""
    found: dict[int, float] = {}
    twice: list[int] = []
    odd: list[int | str] = []
    for output in outputs:
        t = _decision_of(output.step_index)
        if t is None or not 0 <= t < count:
            odd.append(output.step_index)
            continue
        if t in found and t not in twice:
            twice.append(t)
        found[t] = output.base_reward
    return found, twice, odd


def _decision_of(step_index: int | str) -> int | None:
    if isinstance(step_index, int):
        return step_index
    return int(step_index) if step_index.isascii() and step_index.isdigit() else None


def _with_base_reward(step: StepData, base_reward: float) -> StepData:
    part = RewardPart(source="user", value=base_reward)
    return step.model_copy(update={"base_reward": base_reward, "reward_parts": (*step.reward_parts, part)})


def _listed(which: Sequence[int | str]) -> str:
    shown = ", ".join(repr(one)[:40] for one in which[:_NAMED])
    return f"{shown} and {len(which) - _NAMED} more" if len(which) > _NAMED else shown
