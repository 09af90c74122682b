"""Parse the keys that chat and text completions have in common, and refuse unsupported keys."""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from shared_schemas.base import OpenBody, did_you_mean, is_among, with_optional
from shared_schemas.chat import without_nulls
from shared_schemas.plain_text import decode_text, without_mark
from shared_schemas.trajectory import MOST_TOKENS, PLAIN_SAMPLING, Sampling, TokenLimit
from trainer_backend.core.seeds import derived_seed
from trainer_backend.errors import BadChatRequest

_BRANCH = re.compile(r"list\[|constrained-")
_OPTIONS = tuple(Sampling.model_fields)
Request = TypeVar("Request", bound="SamplingRequest")


# Keys that the gateway does not support, each with the accepted values, which would have no effect.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **{name: (value,) for name, value in PLAIN_SAMPLING.items()},
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
# Keys for the caller's own records; the gateway never reads their values.
BYSTANDERS = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)


@with_optional(Sampling)
class SamplingRequest(OpenBody):
    """A request body with the options of `Sampling`, under OpenAI's names and with bounds.

    `neutral` maps each key that has no effect here to the only values that are accepted for the key.
    """

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **NEUTRAL,
        "n": (1,),
        "best_of": (1,),
        "stream": (False,),
        "stream_options": (),
        "echo": (False,),
        "stop": ("", []),
        "suffix": ("",),
    }

    # Strict: a text or `true` in place of a number is a mistake of the caller.
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str
    # vLLM's -1 is our 0, and OpenAI's seed may be negative.
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    max_tokens: TokenLimit | None = None
    return_token_ids: bool | None = None
    processed_logprobs: bool = False
    common_draws: bool = False

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the keys of this request that would have an effect at other servers, but have none here."""
        known = [(name, value) for name, value in (self.model_extra or {}).items() if name in self.neutral]
        return tuple([name for name, value in known if not is_among(value, self.neutral[name])])

    def sampling(self, *, max_tokens: int, choice: int = 0) -> Sampling:
        """Return the sampling options of one choice.

        Choice 0 uses the seed of the request; any other choice uses a seed that is derived from it.
        """
        seed = None if self.seed is None else self.seed % 2**63
        given = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        changed = {
            "top_k": max(self.top_k or 0, 0),
            "seed": derived_seed("choice", seed, choice) if seed is not None and choice else seed,
            "max_tokens": max_tokens,
        }
        # No second validation: the fields above have the same bounds.
        return Sampling.model_construct(**(given | changed))


def read_request(kind: type[Request], body: bytes, leaves_out: Collection[str] = ()) -> Request:
    """Parse and check a request body.

    A key with the value null counts as absent. Keys in `leaves_out` are ignored.

    Raises:
        BadChatRequest: the body is invalid, or has a key or a value that is not supported.
    """
    try:
        request = kind.model_validate_json(_without_nulls(without_mark(body)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        message = first["msg"]
        if first["type"] == "json_invalid":
            try:
                decode_text(body)
            except ValueError as fault:
                message = str(fault)
        # The location without the names that pydantic gives to the branches of a union.
        where = ".".join(str(part) for part in first["loc"] if not _BRANCH.match(str(part)))
        raise BadChatRequest(message, where=where or "body") from error
    for name, value in (request.model_extra or {}).items():
        if name not in leaves_out:
            _refuse_unread(name, value, kind)
    return request


def _without_nulls(body: bytes) -> bytes:
    """Return the body without keys whose value is null.

    To save time, a body that does not contain the word `null`, such as a rollout's, is not parsed.
    """
    if b"null" not in body:
        return body
    try:
        return to_json(without_nulls(from_json(body)))
    except ValueError:  # no JSON; `read_request` says where
        return body


def _refuse_unread(name: str, value: Any, kind: type[SamplingRequest]) -> None:
    if name in BYSTANDERS:
        return
    if name in kind.neutral:
        if not is_among(value, kind.neutral[name]):
            raise BadChatRequest(
                f"{name} = {value!r:.80} is not offered here", where=name, hint=f"Leave {name} out."
            )
        return
    keys = kind.model_fields.keys() | kind.neutral.keys() | BYSTANDERS
    raise BadChatRequest(f"unknown key {name[:80]!r}{did_you_mean(name[:80], keys)}", where=name[:80])
