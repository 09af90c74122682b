"""thrifty.py: a reward function that divides the outcome by the number of answers."""

from task_app.reward_functions import EvaluateResult, StepOutput, reward_function


@reward_function
def thrifty(messages, ground_truth=None, *, environment_outcome_reward, **kwargs):
    answers = [message for message in messages if message.role == "assistant"]
    steps = [
        StepOutput(step_index=t, base_reward=0.0 if answer.tool_calls else -0.1)
        for t, answer in enumerate(answers)
    ]
    return EvaluateResult(
        score=environment_outcome_reward / len(answers),
        step_outputs=steps,
        reason=f"{len(answers)} guesses",
    )


REWARD_FUNCTIONS = {"thrifty": thrifty}
