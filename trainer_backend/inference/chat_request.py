"""Read the body of POST /v1/chat/completions. Unsupported keys are refused instead of ignored."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field

from shared_schemas.base import Body
from shared_schemas.chat import RESPONSE_FORMAT
from shared_schemas.tool_choice import ToolChoice, chosen_tools, read_tool_choice
from shared_schemas.trajectory import TokenLimit
from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.chat_form import DEVELOPER, check_message, check_tool
from trainer_backend.inference.request_body import NEUTRAL, SamplingRequest, read_request

MOST_CHOICES = 64
# Keys that client libraries send by default. `turnwise serve` ignores them, so that any client works.
OF_LIBRARIES = frozenset({RESPONSE_FORMAT, "parallel_tool_calls"})


def _strings(value: object) -> object:
    """Convert the value of `stop`, a string or a list of strings, to a tuple; "" and [] give ()."""
    if value == "":
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


class StreamOptions(Body):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class ChatRequest(SamplingRequest):
    """The body of a request for a chat completion.

    If `tool_choice` forces a call, the gateway ends the prompt with the beginning of the call.
    """

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **NEUTRAL,
        RESPONSE_FORMAT: ({"type": "text"},),
        "parallel_tool_calls": (True,),
        "functions": ([],),
        "function_call": ("auto", "none"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
    }

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=20_000)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=1000)
    tool_choice: Any = None
    max_completion_tokens: TokenLimit | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...],
        Field(max_length=4),
        BeforeValidator(_strings),
    ] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_model_length: TokenLimit | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @cached_property
    def choice(self) -> ToolChoice:
        """Return the parsed `tool_choice`. Raise ValueError if `tool_choice` is invalid."""
        return ToolChoice() if self.tool_choice is None else read_tool_choice(self.tool_choice)

    @cached_property
    def active_tools(self) -> list[dict[str, Any]]:
        """Return the tools that `tool_choice` permits. Raise ValueError if `tool_choice` is invalid."""
        tools = self.tools or []
        names = [str(tool["function"]["name"]) for tool in tools]
        return [tools[place] for place in chosen_tools(self.choice, names)]

    @property
    def forces_call(self) -> bool:
        return self.choice.mode == "required"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class TokenizeRequest(ChatRequest):
    """The body of POST /tokenize, in the form in which vLLM accepts messages."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **ChatRequest.neutral,
        "add_special_tokens": (False,),
        "return_token_strs": (False,),
    }


def read_chat_request(
    body: bytes, leaves_out: Collection[str] = (), kind: type[ChatRequest] = ChatRequest
) -> ChatRequest:
    """Parse the body of a request to an instance of `kind`. Raise BadChatRequest if the body is invalid.

    Keys in `leaves_out` are ignored: they are neither read nor refused.
    """
    request = read_request(kind, body, leaves_out)
    for place, message in enumerate(request.messages):
        check_message(message, where=f"messages.{place}")
        if message.get("role") == DEVELOPER:
            message["role"] = "system"
    for place, tool in enumerate(request.tools or ()):
        check_tool(tool, where=f"tools.{place}")
    try:
        _ = request.active_tools
    except ValueError as error:
        raise BadChatRequest(str(error), where="tool_choice") from error
    if request.top_logprobs and not request.logprobs:
        raise BadChatRequest(
            f"top_logprobs is {request.top_logprobs} without logprobs",
            where="top_logprobs",
            hint="Set logprobs to true.",
        )
    if request.top_logprobs and request.processed_logprobs:
        raise BadChatRequest(
            "top_logprobs are those before truncation, and processed_logprobs asks for those after it",
            where="top_logprobs",
            hint="Leave one of the two out.",
        )
    if request.stream_options is not None and not request.stream:
        raise BadChatRequest(
            "stream_options say how to stream, and stream is not true", where="stream_options"
        )
    return request
