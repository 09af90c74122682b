"""Reward functions of users: the decorator and the result types to write one, and the code that runs it.

    from task_app.reward_functions import EvaluateResult, Message, StepOutput, reward_function

A function runs in child processes of the service: `child` is the program of a child process, `process`
starts and asks one child process, and `pool` distributes the calls. `alignment` writes the results into the
trajectory. docs/plugins.md contains an example.
"""

from shared_schemas.evaluate_result import EvaluateResult, MetricResult, StepOutput
from shared_schemas.messages import Message
from task_app.reward_functions.decorator import reward_function

__all__ = ["EvaluateResult", "Message", "MetricResult", "StepOutput", "reward_function"]
