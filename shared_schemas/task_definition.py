"""The definition of one episode for RLRolloutWorker, with the names of source 2 (docs/sources.md).

A rollout request contains the same information in `env`, `limits` and `ground_truth`. Keys of published task
definitions that have no effect here are refused with a hint. Source: 2-rollout-worker-and-gigpo.md, Tasks 2.1
and 2.3; the fields are those of reward-kit.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from shared_schemas.base import did_you_mean
from shared_schemas.messages import Message
from shared_schemas.rollouts import Decisions, GroundTruth, LimitKeys, Name, RolloutLimits, RolloutRequest

_TOOLS = "tools are the environment's, and an environment is a plug-in of the operator"
_OPENING = "give the opening of an episode as messages"
_ONE = "a request is one episode; a job has training.group_size"
# Published names that have no effect here, and hints on what to use instead.
OTHER_PLACES = {
    "poc_max_turns": "give max_episode_steps",
    "tools_module_path": _TOOLS,
    "tool_paths": _TOOLS,
    "resource_server": "environments live in the task app; name one of them in resource_type",
    "reward_function_path": "a rollout request names one of the operator's in reward_function, never a path",
    "evaluation_criteria": "an episode is scored by its environment, or by a reward function of the operator",
    "initial_user_prompt": _OPENING,
    "goal_description": _OPENING,
    "dataset_path": "a request is one episode; a job lists its worlds in rollout.seeds",
    "num_rollouts": _ONE,
    "num_rollouts_per_sample": _ONE,
}


class TaskDefinitionModel(LimitKeys):
    """A task. The policy sees neither `ground_truth` nor `name` and `description`, which are for people.

    `max_episode_steps` counts decisions. `ground_truth` is the third value that `run_episode` returns.
    """

    name: str = Field(default="", max_length=200)
    description: str = Field(default="", max_length=10_000)
    resource_type: Name = Field(description="the environment, by its name on the task app's plug board")
    base_resource_config: dict[str, Any] = Field(default_factory=dict, description="its config")
    messages: tuple[Message, ...] = Field(
        default=(),
        description="begin each prompt, and replace the environment's system message if they have one; an "
        "environment whose config has a prompt opens with these alone",
    )
    max_episode_steps: Decisions = 50
    ground_truth: GroundTruth = Field(default=None, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_foreign_words(cls, value: Any) -> Any:
        words = OTHER_PLACES.keys() & value.keys() if isinstance(value, Mapping) else ()
        for word in sorted(words):
            raise ValueError(
                f"{word!r} of a published task definition is not read here; {OTHER_PLACES[word]}"
            )
        for word in value.keys() - cls.model_fields.keys() if isinstance(value, Mapping) else ():
            raise ValueError(f"unknown key {word!r}{did_you_mean(str(word), cls.model_fields)}")
        return value

    @classmethod
    def of_request(cls, request: RolloutRequest) -> "TaskDefinitionModel":
        return cls(
            resource_type=request.env.env_name,
            base_resource_config=request.env.config,
            max_episode_steps=request.limits.max_decisions,
            ground_truth=request.ground_truth,
            **request.limits.dump_limits(),
        )

    @property
    def limits(self) -> RolloutLimits:
        """The limits in the form of a rollout request."""
        return RolloutLimits(max_decisions=self.max_episode_steps, **self.dump_limits())
