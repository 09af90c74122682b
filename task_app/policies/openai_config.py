"""The settings of a policy that asks an OpenAI-compatible server, and the check of its URL."""

from collections.abc import Collection
from typing import Any, Literal, Self
from urllib.parse import urlunsplit

from pydantic import Field, field_validator, model_validator

from shared_schemas.trajectory import PLAIN_SAMPLING, Sampling, SamplingKeys, TokenLimit
from shared_schemas.urls import split_http
from task_app.errors import InvalidRequest, check_host

# Keys that the policy sets itself. extra_body may not set them, so that the recorded settings are true.
SET_BY_THE_POLICY = frozenset(
    {
        *Sampling.model_fields, "model", "messages", "tools", "tool_choice", "max_completion_tokens",
        "max_model_length", "n", "stream", "return_token_ids", "processed_logprobs", "logprobs",
    }
)  # fmt: skip
# Keys of extra_body that change the sampling distribution: penalties, and keys that mask tokens.
OTHER_DISTRIBUTION = frozenset(
    {
        *PLAIN_SAMPLING, "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "ignore_eos",
        "use_beam_search", "response_format", "structured_outputs", "guided_json", "guided_regex",
        "guided_choice", "guided_grammar", "logits_processors", "vllm_xargs",
    }
)  # fmt: skip


class OpenAIConfig(SamplingKeys):
    """Settings of a language-model policy."""

    inference_url: str = Field(min_length=1, max_length=2_000)
    model: str = Field(min_length=1, max_length=500)
    max_tokens: TokenLimit = 64
    max_model_length: int | None = Field(
        default=None, ge=1, le=100_000_000, description="limit of a prompt and its max_tokens together"
    )
    seed: int | None = Field(default=None, ge=0, strict=True, description="makes a seed for each decision")
    tool_choice: Literal["auto", "required", "none"] = "auto"
    ask_token_ids: bool = Field(
        default=True, description="false for servers other than our gateway, which speak plain OpenAI"
    )
    exact_tokens: Literal["turnwise", "vllm"] = Field(
        default="turnwise",
        description="how the server sends token ids, if asked: our gateway continues the ids of the "
        "conversation; any other server must send all ids and log-probs in each reply",
    )
    processed_logprobs: bool = Field(default=False, description="log-probs after truncation")
    logprobs: bool = Field(
        default=False, description="ask for OpenAI's log-probs of each token; a server may refuse that"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="sent if not empty, for servers that pass them to the chat template"
    )
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = Field(
        default="max_tokens", description="the server's name for it; OpenAI's reasoning models use the latter"
    )
    leave_out: tuple[Literal["temperature", "top_p", "seed", "tool_choice"], ...] = Field(
        default=(), description="keys that the server refuses; its own defaults then apply"
    )
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="further keys of the request, such as reasoning_effort"
    )
    request_timeout_s: float = Field(default=120.0, gt=0.0, le=3_600.0)
    max_attempts: int = Field(default=5, ge=1, le=100)
    retry_budget_s: float = Field(default=60.0, ge=0.0, le=3_600.0, description="no retry begins after this")

    @field_validator("extra_body")
    @classmethod
    def _check_extra_body(cls, extra: dict[str, Any]) -> dict[str, Any]:
        keys = sorted(SET_BY_THE_POLICY & extra.keys())
        if keys:
            raise ValueError(f"{keys[0]!r} is set by the policy itself, and has a key or flag of its own")
        return extra

    @model_validator(mode="after")
    def _check_distribution(self) -> Self:
        if self.exact_tokens != "vllm":
            return self
        if self.tool_choice == "required":
            raise ValueError(
                "tool_choice: 'required' makes the server sample under a grammar, which the record would not "
                "show; use 'auto'"
            )
        keys = sorted(OTHER_DISTRIBUTION & self.extra_body.keys())
        if keys:
            raise ValueError(
                f"extra_body: {keys[0]!r} would change the sampling in a way that the record does not show"
            )
        return self

    @property
    def asks_gateway_of_ours(self) -> bool:
        """Whether the server is our gateway, which is asked for exact tokens and accepts additional keys."""
        return self.ask_token_ids and self.exact_tokens == "turnwise"


CHAT_PATH = "/v1/chat/completions"
# Errors name this key of the policy's config.
_WHERE = "inference_url"


def chat_completions_url(inference_url: str, *, allowed_hosts: Collection[str] | None) -> str:
    """Return the chat-completions URL for an OpenAI-compatible base URL, and keep the base URL's query.

        http://h:1            -> http://h:1/v1/chat/completions
        http://h:1/v1         -> http://h:1/v1/chat/completions
        http://h:1/v1/chat    -> http://h:1/v1/chat/completions
        http://h:1/x?cid=7    -> http://h:1/x/v1/chat/completions?cid=7

    An entry of `allowed_hosts` is `host` (any port) or `host:port`; None allows any host.
    """
    parts = split_http(inference_url)
    if parts is None:
        raise InvalidRequest(
            "inference_url is no http or https URL with a host",
            where=_WHERE,
            hint="for example http://127.0.0.1:8100/v1",
        )
    if "@" in parts.netloc:
        raise InvalidRequest(
            "inference_url may not hold a user name or password", where=_WHERE, hint="use inference_key"
        )
    if allowed_hosts is not None:
        hint = "the operator extends it with TURNWISE_ALLOWED_INFERENCE_HOSTS=host[:port],..."
        check_host("inference", parts, allowed_hosts, where=_WHERE, hint=hint)
    base = parts.path.rstrip("/")
    endings = {"/chat/completions": "", "/chat": "/completions", "/v1": "/chat/completions"}
    rest = next((rest for ending, rest in endings.items() if base.endswith(ending)), CHAT_PATH)
    return urlunsplit((parts.scheme, parts.netloc, base + rest, parts.query, ""))
