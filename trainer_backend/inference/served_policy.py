"""One policy behind the gateway: its engine, and how messages become its tokens and back."""

from transformers import PreTrainedTokenizerFast

from trainer_backend.inference.figures import ConversationFigures
from trainer_backend.inference.protocol import InferenceEngine
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.tool_parsing import tool_format_in_use


class ServedPolicy:
    """Raises what `ChatRenderer` and `tool_format_in_use` raise."""

    def __init__(self, engine: InferenceEngine, tokenizer: PreTrainedTokenizerFast) -> None:
        self.engine = engine
        self.renderer = ChatRenderer(tokenizer)
        self.figures = ConversationFigures()
        self.tool_format = tool_format_in_use(tokenizer)
