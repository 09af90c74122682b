"""Reward functions of users: how one is written (`reward_function` and its results), and where it runs.

    from task_app.reward_functions import EvaluateResult, Message, StepOutput, reward_function

A function runs in child processes of the service (`process`, whose other end is `child`), as many episodes at
once as `pool` lets through; `rewarded` puts what it said on the trajectory. docs/plugins.md shows one.
"""

from shared_schemas.evaluate_result import EvaluateResult, MetricResult, StepOutput
from shared_schemas.messages import Message
from task_app.reward_functions.decorator import reward_function

__all__ = ["EvaluateResult", "Message", "MetricResult", "StepOutput", "reward_function"]
