"""The body of POST /v1/chat/completions: what we read of it, and what we refuse rather than ignore."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from shared_schemas.base import Body, OpenBody
from shared_schemas.trajectory import Sampling
from trainer_backend.core.seeds import derived_seed
from trainer_backend.errors import BadChatRequest

MOST_CHOICES = 64
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _strings(value: object) -> object:
    """`stop` is a string or a list of them; null, "" and [] ask for nothing."""
    if value is None or value == "":
        return ()
    return (value,) if isinstance(value, str) else value


def null_is(default: object) -> BeforeValidator:
    """OpenAI's clients may send null for what they leave open."""
    return BeforeValidator(lambda value: default if value is None else value)


class StreamOptions(Body):
    include_usage: Annotated[bool, null_is(False)] = False


class ChatRequest(OpenBody):
    """OpenAI's names. Unknown keys pass, unless they would change the sampling.

    `tool_choice` is "auto", or "none", which hides the tools. One that forces a call is refused: sampling
    does not enforce it.
    """

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=100_000)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=1000)
    tool_choice: Any = None
    temperature: Annotated[Finite, Field(ge=0.0)] | None = None
    top_p: Annotated[Finite, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), null_is(1)] = 1
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...],
        Field(max_length=4),
        BeforeValidator(_strings),
    ] = ()
    stream: Annotated[bool, null_is(False)] = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[bool, null_is(False)] = False
    top_logprobs: Annotated[int, Field(ge=0, le=20), null_is(0)] = 0
    return_token_ids: bool | None = None
    processed_logprobs: Annotated[bool, null_is(False)] = False
    max_model_length: Annotated[int, Field(ge=1)] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, *, max_tokens: int, choice: int = 0) -> Sampling:
        """How the choice is sampled: the first with the seed that was given, the others with their own."""
        # OpenAI's seed may be negative, ours may not.
        seed = None if self.seed is None else self.seed % 2**63
        # Constructed without a second validation: the fields above carry the same bounds.
        return Sampling.model_construct(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            seed=derived_seed("choice", seed, choice) if seed is not None and choice else seed,
            max_tokens=max_tokens,
        )


# Key -> the values that ask for nothing. Anything else would be ignored in silence, so it is refused.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    "include_stop_str_in_output": (None, False),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
}

_TOOL_CHOICES = (None, "auto", "none")


def read_chat_request(body: bytes) -> ChatRequest:
    """Parse and check a body.

    Raises:
        BadChatRequest: no JSON, a wrong type or range, or an option that this server does not have.
    """
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise BadChatRequest(first["msg"], where=where) from error
    extra = request.model_extra or {}
    for name, neutral in NEUTRAL.items():
        if extra.get(name) not in neutral:
            raise BadChatRequest(
                f"{name} = {extra[name]!r:.80} is not offered here", where=name, hint=f"Leave {name} out."
            )
    if request.tool_choice not in _TOOL_CHOICES:
        raise BadChatRequest(
            f"tool_choice = {request.tool_choice!r:.80} is not offered here: no call is forced",
            where="tool_choice",
            hint="'auto' lets the model choose, 'none' hides the tools.",
        )
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
