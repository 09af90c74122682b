"""A plug-in for `--plugins` of the task app: an environment that does nothing, to time a request alone."""

from collections.abc import Sequence

from shared_schemas.base import Body
from shared_schemas.messages import FunctionSpec, Message, ToolSpec
from task_app.plugins import EnvironmentPlugin
from task_app.protocols import DecisionOutcome, Observation, PastDecision, ToolRequest

_OBSERVATION = Observation("nothing", {})


class NullConfig(Body):
    pass


class NullEnvironment:
    name = "null"
    outcome_definition = "nothing"
    quick_step = True

    def __init__(self, config: NullConfig) -> None:
        pass

    def reset(self, seed: int) -> Observation:
        return _OBSERVATION

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        return DecisionOutcome(_OBSERVATION, (0.0,), executed_actions=("noop",))

    def tools(self) -> tuple[ToolSpec, ...]:
        return (ToolSpec(function=FunctionSpec(name="noop")),)

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        return (Message(role="user", content=observation.text),)

    def outcome_reward(self) -> float:
        return 0.0


ENVIRONMENTS = {"null": EnvironmentPlugin(NullConfig, NullEnvironment)}
