"""[model] of a job: which model is trained, and how it is spoken to."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trainer_backend.jobfile.table import Table

# One or two parts; a path would begin with / or . or ~ or have more of them.
HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)


class ModelTable(Table):
    """[model]"""

    preset: str | None = Field(default=None, description="a small model built from its config")
    path: Path | None = Field(default=None, description="a local Hugging Face folder")
    name: str | None = Field(
        default=None,
        description="a model of the Hugging Face hub, such as `Qwen/Qwen3-0.6B`, or of its cache",
    )
    revision: str | None = Field(
        default=None, min_length=1, description="of `name`: a branch, tag or commit; absent: main"
    )
    tool_call_format: str | None = Field(
        default=None, description="how the model writes tool calls; absent: what its chat template shows"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="passed to the chat template, such as `enable_thinking = false`"
    )
    vocab_size: int = Field(
        default=1024,
        ge=300,
        le=65536,
        description="of the tokenizer that a preset trains on the job's prompts",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        default="auto", description="where it is trained and served; auto takes cuda, then mps, then cpu"
    )

    @property
    def source(self) -> str:
        """What it is called where a person reads it: the preset, the folder, or the name and its revision."""
        name = f"{self.name} at {self.revision}" if self.revision else self.name
        return str(self.preset or self.path or name)

    @field_validator("name")
    @classmethod
    def _is_a_hub_name(cls, name: str | None) -> str | None:
        if name is not None and not HUB_NAME.fullmatch(name):
            raise ValueError(
                "a model of the hub is named as 'Qwen/Qwen3-0.6B' is; for a folder, did you mean model.path?"
            )
        return name

    @model_validator(mode="after")
    def _one_source(self) -> "ModelTable":
        given = [key for key in ("preset", "path", "name") if getattr(self, key) is not None]
        if len(given) != 1:
            found = f", found {' and '.join(given)}" if given else ""
            raise ValueError(f"exactly one of 'preset', 'path' and 'name' must be given{found}")
        if self.revision is not None and self.name is None:
            raise ValueError("'revision' is of a model of the hub; it needs 'name'")
        if self.preset is not None and (self.tool_call_format or self.chat_template_kwargs):
            raise ValueError(
                "'preset' has its own chat template and tool-call format; 'tool_call_format' and "
                "'chat_template_kwargs' are for 'path' and 'name'"
            )
        return self
