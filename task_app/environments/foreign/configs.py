"""Defines the keys of an environment's `config` for each kind of third-party environment."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from shared_schemas.base import Body

SYSTEM = "You act in an environment by calling its tools."
# Such a string cannot be a path or a dotted module name: an environment may open what a keyword names.
Word = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9 _-]*$")]
Keyword = Word | bool | int | float | None
Keywords = dict[str, Keyword | list[Keyword]]
_WORDS = "strings of letters, digits, ' ', '_' and '-'"
ActionName = Annotated[str, Field(min_length=1, max_length=100)]
Instructions = Annotated[str, Field(max_length=20_000)]


class GymnasiumConfig(Body):
    """Settings of a `gymnasium:` environment, and of the text that shows its observations."""

    kwargs: Keywords = Field(default_factory=dict, description=f"of the environment; {_WORDS}")
    action_names: tuple[ActionName, ...] = Field(
        default=(), description="of the values of a Discrete action space, in order"
    )
    text: Literal["numbers", "ansi"] = Field(
        default="numbers", description="ansi: what its render mode 'ansi' prints; it then has no frames"
    )
    instructions: Instructions | None = Field(
        default=None, description="the system message; by default the description in its docstring"
    )
    max_episode_steps: int | None = Field(
        default=None, ge=1, le=1_000_000, description="by default as registered"
    )

    @field_validator("action_names")
    @classmethod
    def _each_name_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} names two actions, and the second could never be taken")
        return names


class RemoteConfig(Body):
    """Settings that `mcp:` and `openenv:` environments have in common."""

    prompts: Literal["conversation", "fresh"] = Field(
        default="conversation", description="fresh: the last observation alone, for small contexts"
    )
    instructions: Instructions = Field(default=SYSTEM, description="the system message")


class McpConfig(RemoteConfig):
    """Settings of an `mcp:` environment, which offers the tools of an MCP server."""

    task: str = Field(default="", max_length=100_000, description="the first user message")
    tools: tuple[ActionName, ...] = Field(default=(), description="on offer; by default all but reset_tool")
    reset_tool: ActionName | None = Field(
        default=None, description="called with the seed at each reset; its text follows the task"
    )
    reward_key: ActionName = Field(
        default="reward", description="of a result's structuredContent, _meta, or text in JSON; 0 without it"
    )
    done_key: ActionName = Field(default="done", description="at the same places: true ends the episode")


class VerifiersConfig(Body):
    """Settings of a `verifiers:` environment: a taskset of the package `verifiers`."""

    taskset: Keywords = Field(default_factory=dict, description=f"keys of its own config; {_WORDS}")
    max_turns: int | None = Field(
        default=None, ge=1, le=10_000, description="answers of the model; the episode is then cut and scored"
    )


class TextArenaConfig(Body):
    """Settings of a `textarena:` environment: a game for one player."""

    game: Keywords = Field(
        default_factory=dict, description=f"keywords of the game, such as max_turns; {_WORDS}"
    )
    instructions: Instructions = Field(default="", description="the system message; the game tells its rules")


class ReasoningGymConfig(Body):
    """Settings of a `reasoning_gym:` environment: a data set of questions."""

    dataset: Keywords = Field(
        default_factory=dict, description=f"keys of its own config, but seed and size; {_WORDS}"
    )
    instructions: Instructions = Field(
        default="Think first, then give the final answer between <answer> and </answer>.",
        description="the system message",
    )

    @field_validator("dataset")
    @classmethod
    def _has_no_seed(cls, dataset: Keywords) -> Keywords:
        for key in ("seed", "size"):
            if key in dataset:
                raise ValueError(f"{key!r} is set for each episode: its seed has one question")
        return dataset


class OpenEnvConfig(RemoteConfig):
    """Settings of an `openenv:` environment, which an OpenEnv server plays."""

    reset: dict[str, JsonValue] = Field(
        default_factory=dict, description="further keywords of its reset; the seed is passed already"
    )
