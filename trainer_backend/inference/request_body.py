"""The common part of both completion requests: sampling, and refused keys; no key is ignored in silence."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from shared_schemas.base import OpenBody, did_you_mean
from shared_schemas.plain_text import decode_text, without_mark
from shared_schemas.trajectory import MOST_TOKENS, PLAIN_SAMPLING, Sampling
from trainer_backend.core.seeds import derived_seed
from trainer_backend.errors import BadChatRequest

_BRANCH = re.compile(r"list\[|constrained-")
_OPTIONS = tuple(Sampling.model_fields)
Finite = Annotated[float, Field(allow_inf_nan=False)]
Request = TypeVar("Request", bound="SamplingRequest")


def null_is(default: object) -> BeforeValidator:
    """Replace null, which OpenAI's clients may send for absent fields, by the default."""
    return BeforeValidator(lambda value: default if value is None else value)


# Values without effect, by key. Other values would be ignored in silence, so they are refused.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **{name: (None, value) for name, value in PLAIN_SAMPLING.items()},
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    "include_stop_str_in_output": (None, False),
    "logit_bias": (None, {}),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
}
# Keys for the caller's own records; their values are never read here.
BYSTANDERS = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)


class SamplingRequest(OpenBody):
    """A request with OpenAI's names and a bound on every number.

    `neutral` lists known but unsupported keys.
    """

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **NEUTRAL,
        "n": (None, 1),
        "best_of": (None, 1),
        "stream": (None, False),
        "stream_options": (None,),
        "echo": (None, False),
        "stop": (None, "", []),
        "suffix": (None, ""),
    }

    # A number that is a text, or true, is a mistake of the caller's.
    model_config = ConfigDict(strict=True)

    model: str
    temperature: Annotated[Finite, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[Finite, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    return_token_ids: bool | None = None
    processed_logprobs: Annotated[bool, null_is(False)] = False
    common_draws: Annotated[bool, null_is(False)] = False

    def sampling(self, *, max_tokens: int, choice: int = 0) -> Sampling:
        """Return the sampling of a choice: the first has the request's seed, the others derived ones."""
        # OpenAI's seed may be negative, ours may not.
        seed = None if self.seed is None else self.seed % 2**63
        given = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        changed = {
            "top_k": max(self.top_k or 0, 0),
            "seed": derived_seed("choice", seed, choice) if seed is not None and choice else seed,
            "max_tokens": max_tokens,
        }
        # Without a second validation, since the fields above have the same bounds.
        return Sampling.model_construct(**(given | changed))


def read_request(kind: type[Request], body: bytes) -> Request:
    """Parse and check a body."""
    try:
        request = kind.model_validate_json(without_mark(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        message = _encoding_fault(body) if first["type"] == "json_invalid" else None
        raise BadChatRequest(message or first["msg"], where=_place(first["loc"])) from error
    for name, value in (request.model_extra or {}).items():
        _refuse_unread(name, value, kind)
    return request


def _encoding_fault(body: bytes) -> str | None:
    try:
        decode_text(body)
    except ValueError as error:
        return str(error)
    return None


def _place(loc: tuple[int | str, ...]) -> str:
    """The place as the caller wrote it, without pydantic's names of a union's branches."""
    return ".".join(str(part) for part in loc if not _BRANCH.match(str(part))) or "body"


def _refuse_unread(name: str, value: Any, kind: type[SamplingRequest]) -> None:
    if name in BYSTANDERS:
        return
    if name in kind.neutral:
        if value not in kind.neutral[name]:
            raise BadChatRequest(
                f"{name} = {value!r:.80} is not offered here", where=name, hint=f"Leave {name} out."
            )
        return
    keys = kind.model_fields.keys() | kind.neutral.keys() | BYSTANDERS
    raise BadChatRequest(f"unknown key {name[:80]!r}{did_you_mean(name[:80], keys)}", where=name[:80])
