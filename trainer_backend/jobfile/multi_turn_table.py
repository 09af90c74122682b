"""[multi_turn] of a job TOML: conversations, and who answers in them."""

from pathlib import Path

from pydantic import Field, model_validator

from shared_schemas.context_tools import PUBLISHED, ContextTools, refuse_without_editing
from shared_schemas.rollouts import MultiTurn
from trainer_backend.jobfile.table import Table


class MultiTurnTable(Table):
    """[multi_turn]"""

    enable: bool = Field(default=False, description="play conversations; the other keys need it")
    interaction_config_path: Path | None = Field(
        default=None,
        description="the YAML or TOML file of interactions, for the task app that the job starts "
        "(docs/plugins.md)",
    )
    max_user_turns: int | None = Field(
        default=None, ge=0, le=10_000, description="answers of the user in an episode; absent: any number"
    )
    max_assistant_turns: int | None = Field(
        default=None, ge=1, le=10_000, description="decisions in an episode; absent: rollout.max_turns"
    )
    max_episode_tokens: int | None = Field(
        default=None, ge=1, description="tokens that are sampled in an episode, all decisions together"
    )
    max_model_length: int = Field(
        default=8192,
        ge=32,
        description="prompt and answer together, in tokens",
    )
    context_length_penalty: float = Field(
        default=-1.0, le=0.0, description="reward of the last decision before a prompt that does not fit"
    )
    statelm_enabled: bool = Field(
        default=False,
        description="let the model edit its context (docs/conversations.md)",
    )
    context_tools: ContextTools = Field(
        default=PUBLISHED,
        min_length=1,
        description="what it edits it with (docs/conversations.md)",
    )

    def for_requests(self) -> MultiTurn:
        """The part that a task app is told with every rollout."""
        if not self.enable:
            return MultiTurn()
        return MultiTurn(
            statelm_enabled=self.statelm_enabled,
            context_tools=self.context_tools,
            max_user_turns=self.max_user_turns,
            max_episode_tokens=self.max_episode_tokens,
            context_length_penalty=self.context_length_penalty,
        )

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> "MultiTurnTable":
        # Not what is given, but what differs: the job that a run writes down gives every key.
        fields = type(self).model_fields
        given = [name for name in fields if getattr(self, name) != fields[name].default]
        if given and not self.enable:
            raise ValueError(
                f"multi_turn.{given[0]} is given, and multi_turn.enable is false: the run would ignore it"
            )
        refuse_without_editing(self.context_tools, statelm_enabled=self.statelm_enabled)
        return self
