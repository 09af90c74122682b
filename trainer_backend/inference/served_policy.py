"""One policy behind the gateway: its engine, and how messages become its tokens and back."""

from collections.abc import Mapping

from transformers import PreTrainedTokenizerFast

from shared_schemas.base import did_you_mean
from trainer_backend.errors import UnknownModel
from trainer_backend.inference.chat_check import tool_format_in_use
from trainer_backend.inference.drift import ConversationFigures
from trainer_backend.inference.protocol import FrozenEngine
from trainer_backend.inference.rendering import ChatRenderer


class ServedPolicy:
    """A policy with its engine, renderer and tool-call format. Raises what the latter two raise."""

    def __init__(self, engine: FrozenEngine, tokenizer: PreTrainedTokenizerFast) -> None:
        self.engine = engine
        self.renderer = ChatRenderer(tokenizer)
        self.figures = ConversationFigures()
        self.tool_format = tool_format_in_use(tokenizer)


def find_policy(name: str, policies: Mapping[str, ServedPolicy]) -> ServedPolicy:
    """Return the policy of this name, or raise UnknownModel."""
    if name not in policies:
        raise UnknownModel(f"model is {name!r:.200}{did_you_mean(name, policies)}", where="model")
    return policies[name]
