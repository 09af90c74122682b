"""One policy behind the gateway: its engine, and how messages become its tokens and back."""

from transformers import PreTrainedTokenizerFast

from trainer_backend.inference.protocol import InferenceEngine
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.tool_formats.reading import ToolParser
from trainer_backend.inference.tool_parsing import tool_parser_of


class ServedPolicy:
    """Raises what `ChatRenderer` and `tool_parser_of` raise."""

    def __init__(self, engine: InferenceEngine, tokenizer: PreTrainedTokenizerFast) -> None:
        self.engine = engine
        self.renderer = ChatRenderer(tokenizer)
        self.parse: ToolParser = tool_parser_of(tokenizer)
