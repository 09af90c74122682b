"""Detect the tool-call format of a model."""

from transformers import PreTrainedTokenizerFast

from shared_schemas.base import did_you_mean
from trainer_backend.errors import ModelFolderError
from trainer_backend.models.tokenizer import TOOL_CALL_FORMAT_KEY
from trainer_backend.plugins import TOOL_FORMATS
from trainer_backend.tool_formats.calls import ParsedReply, ToolFormat

# Parsers never raise or rewrite: for an unreadable call they return the whole text, with the reason.


def tool_format_in_use(tokenizer: PreTrainedTokenizerFast) -> ToolFormat:
    """Return the model's tool-call format, or TEXT (every answer is plain text) if it is unknown."""
    name = detect_tool_format(tokenizer)
    return TEXT if name is None else TOOL_FORMATS[name]


# The format of models whose tool-call format is unknown.
TEXT = ToolFormat(lambda text, tools: ParsedReply(text), markers=(), openers=())


def detect_tool_format(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return the name of the format that tokenizer_config.json sets.

    If the file sets none, return the first format with a marker in the chat template; None if there is none.
    """
    setting = tokenizer.init_kwargs.get(TOOL_CALL_FORMAT_KEY)
    if setting is not None and setting not in TOOL_FORMATS:
        raise ModelFolderError(
            f"{TOOL_CALL_FORMAT_KEY} is {setting!r}{did_you_mean(str(setting), TOOL_FORMATS)}",
            where="tokenizer_config.json",
        )
    # Some models have a separate template for conversations with tools.
    template = str(tokenizer.chat_template)
    matches = (name for name, form in TOOL_FORMATS.items() if any(m in template for m in form.markers))
    return str(setting) if setting is not None else next(matches, None)
