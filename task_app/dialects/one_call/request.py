"""The body of POST /rollout, an API of older Crafter task apps, and the translation of older tool calls.

Unknown keys in the body are allowed, because clients that we do not control define its shape.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from shared_schemas.base import did_you_mean
from shared_schemas.messages import ToolSpec
from shared_schemas.rewards import CONSISTENT_STRATEGIES, StepRewardKeys, StepRewards
from shared_schemas.rollouts import Id, InferenceKey, Name, Seed
from task_app.complaints import validated
from task_app.episode.actions import name_and_arguments
from task_app.errors import InvalidRequest
from task_app.routes.wire import EnvId, ForeignBody
from task_app.sessions.switches import agree_on_step_rewards

MAX_TIME_S = 86_400.0


class LegacyEnv(ForeignBody):
    env_id: EnvId | None = Field(default=None, description="a living environment, which goes on")
    env_name: Name | None = Field(default=None, description="or a new one for this rollout")
    config: dict[str, Any] = Field(
        default_factory=dict, description="also env_params.max_steps_per_episode and step_rewards"
    )
    seed: Seed | None = Field(default=None, description="by default derived from run_id, with a warning")


class LegacyPolicy(ForeignBody):
    policy_id: EnvId | None = Field(default=None, description="a living policy")
    policy_name: Name | None = Field(
        default=None, description="or a new one for this rollout; `crafter` means `openai`"
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="also step_rewards, max_llm_calls, trace_correlation_id"
    )
    inference_key: InferenceKey | None = Field(default=None, description="for config.inference_url alone")
    output_mode: Literal["tool_calls"] = "tool_calls"


class LegacyRecord(ForeignBody):
    trajectories: bool = True
    logprobs: bool = Field(default=False, description="exact tokens and their log-probs in every step")
    value: bool = False
    return_trace: bool = False
    trace_format: Literal["compact", "full", "structured"] = "compact"


class LegacySafety(ForeignBody):
    max_ops: int = Field(default=100_000, ge=1, le=10_000_000)
    max_time_s: float = Field(default=3_600.0, gt=0.0, le=MAX_TIME_S, description="also while queued")


class LegacyRollout(ForeignBody):
    """A request to play one rollout. The reply contains the trajectories of all its episodes."""

    run_id: Id
    env: LegacyEnv
    policy: LegacyPolicy
    ops: tuple[str | dict[str, Any], ...] = Field(
        description='["agent", "env"] * N means N decisions; also {"type": "agent"}'
    )
    record: LegacyRecord = LegacyRecord()
    on_done: Literal["reset", "terminate"] = Field(
        default="reset", description="reset: play further episodes of the same world while ops are left"
    )
    safety: LegacySafety = LegacySafety()
    branch: dict[str, Any] | None = Field(default=None, description="never executed, with a warning")
    training: StepRewardKeys | None = Field(
        default=None, description="step_rewards by their names in a job's [training], if no config has them"
    )
    rollout: Any = Field(default=None, description="a table that may hold them under these names too")
    mode: Literal["rl", "eval"] | None = None
    training_session_id: str | None = Field(default=None, max_length=500)
    synth_base_url: str | None = Field(default=None, max_length=2_000)


# The reward in a `stepwise` block is the trainer's reward r_t of the decision, without `reward_parts`. With
# the strategy `per_achievement`, the sum of the weights of the decision's achievements replaces the delta in
# r_t. An achievement is then rewarded at most `k_limits` times per episode (default 1, no limit if <= 0).
# Older task apps added a hidden bonus for resources; it is left out here.
CONSISTENT, PER_ACHIEVEMENT = "consistent", "per_achievement"
STRATEGIES = {
    **dict.fromkeys(CONSISTENT_STRATEGIES, CONSISTENT),
    **dict.fromkeys(
        (PER_ACHIEVEMENT, "complex", "per-achievement", "perachievement", "achievement_weighted"),
        PER_ACHIEVEMENT,
    ),
}


class Stepwise(StepRewards):
    """The table `step_rewards` of this route: the reward switches of all routes, and three more fields."""

    strategy: str = Field(default=CONSISTENT, max_length=100)
    weights: dict[str, float] = Field(default_factory=dict)
    k_limits: dict[str, int] = Field(default_factory=dict)


# Keys of `step_rewards` in which clients send null to get the default.
_MAY_BE_NULL = frozenset({"indicator_lambda", "strategy", "weights", "k_limits"})


def read_stepwise(raw: Any, *, where: str) -> Stepwise:
    """Read the table `step_rewards` of a config; if the strategy is an alias, replace it by its main name."""
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{where} is no object", where=where)
    given = {name: value for name, value in raw.items() if value is not None or name not in _MAY_BE_NULL}
    stepwise = validated(Stepwise, given, where=where)
    strategy = STRATEGIES.get(stepwise.strategy.strip().lower())
    if strategy is None:
        raise InvalidRequest(
            f"unknown strategy {stepwise.strategy!r}{did_you_mean(stepwise.strategy, STRATEGIES)}",
            where=f"{where}.strategy",
        )
    return stepwise.model_copy(update={"strategy": strategy})


def agree_on_stepwise(by_place: Mapping[str, StepRewards]) -> Stepwise:
    """Return the reward switches, which must be equal at all paths. `Stepwise`'s own fields get defaults."""
    return Stepwise(**agree_on_step_rewards(by_place).model_dump())


INTERACT = "interact"


def legacy_calls(action: Mapping[str, Any], tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the tool calls of `action`, translated from the forms of older clients of Crafter task apps.

    `action` contains either `tool_calls`, a list of calls, or `actions`. These forms are translated:

        {"tool": "interact", "args": {"action": 5}}          a call with an index into the tool's list of
                                                             choices, or with the name of a choice
        {"tool": "interact", "args": {"actions": ["do"]}}    a call with several choices
        {"tool": "do"}                                       a call with a choice as the tool's name
        {"actions": ["do", "noop"]}                          an action that names no tool

    They require an environment with exactly one tool, which has a list of named choices as an argument. Other
    calls are returned unchanged, and the environment checks them.

    Raises:
        ValueError: `tool_calls` is no list of objects, both keys are missing, or `actions` is given and the
            environment has no such tool.
    """
    chooser = _find_chooser(tools)
    if "tool_calls" in action:
        calls = action["tool_calls"]
        if not isinstance(calls, list | tuple) or not all(isinstance(call, dict) for call in calls):
            raise ValueError("action.tool_calls is no list of objects")
        return [_translate(call, chooser) for call in calls]
    if "actions" not in action:
        raise ValueError("action holds neither tool_calls nor actions")
    if chooser is None:
        raise ValueError("this environment's tools take no list of actions; send action.tool_calls")
    return [_choose(action["actions"], chooser)]


Chooser = tuple[str, str, list[str]]


def _find_chooser(tools: Sequence[ToolSpec]) -> Chooser | None:
    """Return name, list argument and choices of the only tool; None if it has no list of named choices."""
    if len(tools) != 1:
        return None
    function = tools[0].function
    properties = function.parameters.get("properties")
    for argument, schema in properties.items() if isinstance(properties, dict) else ():
        items = schema.get("items") if isinstance(schema, dict) else None
        choices = items.get("enum") if isinstance(items, dict) else None
        if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
            return function.name, argument, choices
    return None


def _translate(call: dict[str, Any], chooser: Chooser | None) -> dict[str, Any]:
    name, args = name_and_arguments(call)
    if chooser is None or not isinstance(name, str) or name == chooser[0]:
        return call
    if name in chooser[2]:
        return _choose([name], chooser)
    if name == INTERACT and isinstance(args, dict):
        if "actions" in args:
            return _choose(args["actions"], chooser)
        if "action" in args:
            return _choose([args["action"]], chooser)
    return call


def _choose(actions: Any, chooser: Chooser) -> dict[str, Any]:
    """Return a call of the tool with these actions. An index is replaced by the choice at that index."""
    name, argument, choices = chooser
    items = actions if isinstance(actions, list | tuple) else [actions]
    names = [choices[one] if type(one) is int and 0 <= one < len(choices) else one for one in items]
    return {"tool": name, "args": {argument: names}}
