"""Pure: an episode as a reward function is given it, and the trajectory with what it said."""

from collections.abc import Sequence
from typing import Any

from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.json_text import encodable, encodable_json
from shared_schemas.messages import Message
from shared_schemas.trajectory import Trajectory, UserReward
from task_app.errors import RewardFunctionFailed, clipped
from task_app.reward_functions.alignment import align_data_for_rl_processing


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
