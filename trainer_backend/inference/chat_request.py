"""The body of POST /v1/chat/completions: what we read of it, and what we refuse rather than ignore."""

from typing import Annotated, Any

from pydantic import Field, ValidationError

from shared_schemas.base import OpenBody
from shared_schemas.trajectory import Sampling
from trainer_backend.errors import BadChatRequest

Finite = Annotated[float, Field(allow_inf_nan=False)]


class ChatRequest(OpenBody):
    """OpenAI's names. Unknown keys pass, unless they would change the sampling.

    `tool_choice` "none" hides the tools; any other value is a wish that sampling does not enforce.
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
    n: int | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []

    def sampling(self, *, max_tokens: int) -> Sampling:
        # Constructed without a second validation: the fields above carry the same bounds.
        return Sampling.model_construct(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            # OpenAI's seed may be negative, ours may not.
            seed=None if self.seed is None else self.seed % 2**63,
            max_tokens=max_tokens,
        )


# Key -> the values that ask for nothing. Anything else would be ignored in silence, so it is refused.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "stream": (None, False),
    "stop": (None, [], ""),
    "top_logprobs": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
}


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
        value = extra[name] if name in extra else getattr(request, name, None)
        if value not in neutral:
            raise BadChatRequest(
                f"{name} = {value!r:.80} is not offered here", where=name, hint=f"Leave {name} out."
            )
    return request
