"""Which tool-call format a model writes, and so how its replies are read; the formats are in `tool_formats`.

Parsers are pure and never raise. A reply whose call cannot be read comes back as text, whole, with the
reason: nothing rewrites what was sampled, and the environment's next prompt can tell the model what was
wrong. Whether a tool exists and its arguments fit is the task app's business.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from shared_schemas.base import did_you_mean
from trainer_backend.errors import ModelFolderError
from trainer_backend.inference.tool_formats.reading import ParsedReply, ToolFormat
from trainer_backend.models.tokenizer import TOOL_CALL_FORMAT_KEY
from trainer_backend.plugins import TOOL_FORMATS


def tool_format_in_use(tokenizer: PreTrainedTokenizerFast) -> ToolFormat:
    """The model's format; everything is text where none is known.

    Raises:
        ModelFolderError: tokenizer_config.json names a format that is not known here.
    """
    name = tool_format_of(tokenizer)
    return TEXT if name is None else TOOL_FORMATS[name]


def parse_text(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """For models without a known tool-call format: everything is text."""
    return ParsedReply(text)


TEXT = ToolFormat(parse_text, marker="", openers=())


def tool_format_of(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The format that tokenizer_config.json names, else the first whose marker the chat template holds.

    Raises:
        ModelFolderError: as `tool_format_in_use`.
    """
    named = tokenizer.init_kwargs.get(TOOL_CALL_FORMAT_KEY)
    if named is not None and named not in TOOL_FORMATS:
        raise ModelFolderError(
            f"{TOOL_CALL_FORMAT_KEY} is {named!r}{did_you_mean(str(named), TOOL_FORMATS)}",
            where="tokenizer_config.json",
        )
    # Some models have a template of its own for conversations with tools.
    template = str(tokenizer.chat_template)
    found = (name for name, known in TOOL_FORMATS.items() if known.marker in template)
    return str(named) if named is not None else next(found, None)
