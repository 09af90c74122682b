"""All names that the published sources define, in one package; docs/sources.md has the source of each name.

    from turnwise import RLRolloutWorker, TaskDefinitionModel

The first access to a name imports the name's module, not those of the other names. No name needs torch. The
names of the task app and of shared_schemas do not import the trainer. The imports below are for type
checkers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared_schemas.evaluate_result import EvaluateResult as EvaluateResult
    from shared_schemas.evaluate_result import MetricResult as MetricResult
    from shared_schemas.evaluate_result import StepOutput as StepOutput
    from shared_schemas.messages import Message as Message
    from shared_schemas.task_definition import TaskDefinitionModel as TaskDefinitionModel
    from shared_schemas.trajectory import StepData as StepData
    from task_app.episode.worker import RLRolloutWorker as RLRolloutWorker
    from task_app.interactions.gsm8k import Gsm8kInteraction as Gsm8kInteraction
    from task_app.policies.openai import OpenAIAgentPolicy as OpenAIAgentPolicy
    from task_app.policies.openai_config import OpenAIConfig as OpenAIConfig
    from task_app.protocols import AgentPolicy as AgentPolicy
    from task_app.protocols import BaseInteraction as BaseInteraction
    from task_app.reward_functions.alignment import (
        align_data_for_rl_processing as align_data_for_rl_processing,
    )
    from task_app.reward_functions.decorator import reward_function as reward_function
    from trainer_backend.core.advantages.gigpo import (
        system_apply_gigpo_to_batch_steps as system_apply_gigpo_to_batch_steps,
    )
    from trainer_backend.core.allocation import ConstantSchedule as ConstantSchedule
    from trainer_backend.core.allocation import ExponentialSchedule as ExponentialSchedule
    from trainer_backend.core.allocation import LinearSchedule as LinearSchedule
    from trainer_backend.core.allocation import RolloutAllocationSchedule as RolloutAllocationSchedule
    from trainer_backend.core.allocation import StepSchedule as StepSchedule

_HOMES = {
    "shared_schemas.evaluate_result": ("EvaluateResult", "MetricResult", "StepOutput"),
    "shared_schemas.messages": ("Message",),
    "shared_schemas.task_definition": ("TaskDefinitionModel",),
    "shared_schemas.trajectory": ("StepData",),
    "task_app.episode.worker": ("RLRolloutWorker",),
    "task_app.interactions.gsm8k": ("Gsm8kInteraction",),
    "task_app.policies.openai": ("OpenAIAgentPolicy",),
    "task_app.policies.openai_config": ("OpenAIConfig",),
    "task_app.protocols": ("AgentPolicy", "BaseInteraction"),
    "task_app.reward_functions.alignment": ("align_data_for_rl_processing",),
    "task_app.reward_functions.decorator": ("reward_function",),
    "trainer_backend.core.advantages.gigpo": ("system_apply_gigpo_to_batch_steps",),
    "trainer_backend.core.allocation": (
        "ConstantSchedule",
        "ExponentialSchedule",
        "LinearSchedule",
        "RolloutAllocationSchedule",
        "StepSchedule",
    ),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    """Import a name from its module on first access (PEP 562), and store it as an attribute here."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return __all__
