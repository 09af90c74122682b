"""Bodies of POST /replay, by which a task app replays a recorded episode for pictures and snapshots."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from shared_schemas.base import Body
from shared_schemas.messages import ToolCall
from shared_schemas.rollouts import Name, Seed, Start
from shared_schemas.trajectory import StepData

# The default: 9 cells of Crafter with textures of 16 pixels, so that pictures are not scaled.
FRAME_SIDE = 144
MOST_SNAPSHOTS = 16
# At least 18 pixels, so that a cell of Crafter has more than one pixel. Large frames would take memory,
# because a request holds all its frames at once.
FrameSide = Annotated[int, Field(ge=18, le=288, description="pixels")]
FrameTurn = Annotated[int, Field(ge=0, le=10_000, strict=True)]


def read_words(action: Mapping[str, Any]) -> str | None:
    """Return the content of a text action that the environment executed; None for any other action."""
    is_said = action.get("type") == "text" and "invalid_reason" not in action
    return str(action.get("content") or "") if is_said else None


class ReplayTurn(Body):
    """One recorded decision: the action to replay, and its effects, for comparison with the replay."""

    tool_calls: tuple[ToolCall, ...] = ()
    text: str | None = Field(default=None, description="the words, where the environment takes words")
    invalid_reason: str | None = Field(default=None, description="why there was nothing to execute")
    terminate: bool = Field(default=False, description="the policy ended the episode; nothing was executed")
    executed_actions: tuple[str, ...] = ()
    env_rewards: tuple[float, ...] | None = None
    result: str | None = Field(default=None, description="step_info.tool_result; null: not compared")

    @classmethod
    def of(cls, step: StepData) -> "ReplayTurn":
        action = step.action_taken
        return cls(
            tool_calls=step.tool_calls,
            text=read_words(action),
            invalid_reason=step.step_info.invalid_reason,
            terminate=action.get("type") == "terminate",
            executed_actions=step.step_info.executed_actions,
            env_rewards=step.env_rewards,
        )


class ReplayRequest(Body):
    """Body of POST /replay."""

    env_name: Name
    config: dict[str, Any] = Field(default_factory=dict)
    seed: Seed
    start: Start | None = Field(
        default=None, description="where the episode began, if that was a snapshot; null: the seed's world"
    )
    turns: tuple[ReplayTurn, ...] = Field(
        default=(), max_length=10_000, description="the decisions of the episode, from its start"
    )
    frames: tuple[FrameTurn, ...] = Field(
        default=(), description="turns to draw the environment after; 0 is the start of the episode"
    )
    snapshots: tuple[FrameTurn, ...] = Field(
        default=(),
        max_length=MOST_SNAPSHOTS,
        description="turns to take a snapshot of the environment after, from which rollouts can start",
    )
    side: FrameSide = FRAME_SIDE

    @field_validator("frames", "snapshots")
    @classmethod
    def _turns_of_the_episode(cls, turns: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        # `turns` is missing here if it was invalid itself.
        if "turns" in info.data and max(turns, default=0) > (last := len(info.data["turns"])):
            raise ValueError(f"there is no turn {max(turns)}; the episode has 0 (its start) to {last}")
        return turns

    @model_validator(mode="after")
    def _something_to_do(self) -> "ReplayRequest":
        if not self.frames and not self.snapshots:
            raise ValueError("name turns in frames, in snapshots, or in both")
        return self


class ReplayFrame(Body):
    """The picture of the environment after a turn."""

    turn: FrameTurn
    png: str = Field(description="a PNG file in base64")


class ReplaySnapshot(Body):
    """A snapshot of the environment after a turn."""

    turn: FrameTurn
    snapshot: str = Field(description="as from POST /env/snapshot; a rollout can start from it")


class ReplayReply(Body):
    """Reply of POST /replay; frames and snapshots are in the order of their turns."""

    frames: tuple[ReplayFrame, ...] = ()
    snapshots: tuple[ReplaySnapshot, ...] = ()
