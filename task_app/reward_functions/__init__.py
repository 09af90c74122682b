"""Reward functions of users: how to write one (`reward_function` and its results), and where it runs.

    from task_app.reward_functions import EvaluateResult, Message, StepOutput, reward_function

A function runs in child processes of the service: `process` is the service's side, `child` the child's, and
`pool` distributes the calls. `alignment` puts the results on the trajectory. docs/plugins.md has an example.
"""

from shared_schemas.evaluate_result import EvaluateResult, MetricResult, StepOutput
from shared_schemas.messages import Message
from task_app.reward_functions.decorator import reward_function

__all__ = ["EvaluateResult", "Message", "MetricResult", "StepOutput", "reward_function"]
