"""Pure: the policy of a legacy request in words of ours: config keys, the correlation id of its trace."""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from pydantic import SecretStr, TypeAdapter, ValidationError

from shared_schemas.rollouts import InferenceKey
from task_app.dialects.one_call.request import LegacyRollout
from task_app.errors import InvalidRequest, clipped

Warn = Callable[[str], None]

MODEL = "openai"
# What such requests leave out means this there, and is shown in the reply's `pipeline_metadata`.
DEFAULTS = {"max_tokens": 512, "tool_choice": "required"}
CORRELATION_KEYS = ("trace_correlation_id", "trace")
CORRELATION_QUERY = ("cid", "trace_correlation_id", "trace")
PICTURES = ("use_vision", "image_only_mode")
_KEY: TypeAdapter[SecretStr] = TypeAdapter(InferenceKey)


def policy_config(own: Mapping[str, Any], name: str, body: LegacyRollout, warn: Warn) -> dict[str, Any]:
    """The plug-in's config, from which its own checks refuse what is wrong or missing."""
    config = {key: value for key, value in own.items() if key not in CORRELATION_KEYS}
    if not name:
        for key in config:
            warn(f"policy.config.{key} is ignored; a policy that lives keeps its own config")
        return {}
    if name != MODEL:
        return config
    config = _think(_tokens(config), warn)
    for key in PICTURES:
        if config.pop(key, False):
            warn(f"policy.config.{key} is ignored; prompts are text")
    if config.pop("use_tools", True) is False:
        warn("policy.config.use_tools is ignored; actions are read from tool calls alone")
    config.setdefault("ask_token_ids", body.record.logprobs)
    return DEFAULTS | _correlated(config, body, warn)


def take_inference_key(own: dict[str, Any], body: LegacyRollout, warn: Warn) -> SecretStr | None:
    """The model server's key: `inference_key`, or `api_key` or the bearer of `extra_headers` in the config.

    The latter two are taken out of `own`, which the reply shows.

    Raises:
        InvalidRequest: two of them differ, or one is no key.
    """
    keys = {"inference_key": body.policy.inference_key} if body.policy.inference_key is not None else {}
    if (key := own.pop("api_key", None)) is not None:
        keys["config.api_key"] = _key(key, where="policy.config.api_key")
    headers, where = own.pop("extra_headers", None), "policy.config.extra_headers"
    if not isinstance(headers, dict | None):
        raise InvalidRequest(f"{where} is no object", where=where)
    for name, value in (headers or {}).items():
        if name.lower() == "authorization" and isinstance(value, str) and value[:7].lower() == "bearer ":
            keys["config.extra_headers"] = _key(value[7:].strip(), where=where)
        else:
            warn(f"{where}.{clipped(name)} is ignored; Authorization: Bearer is the one that is sent")
    if len(set(keys.values())) > 1:
        first, second, *_ = keys
        raise InvalidRequest(
            f"policy.{second} holds another key than policy.{first}", where=f"policy.{second}"
        )
    return next(iter(keys.values()), None)


def _key(value: Any, *, where: str) -> SecretStr:
    try:
        return _KEY.validate_python(value)
    except ValidationError:  # chained to nothing: it shows what it read
        raise InvalidRequest(f"{where} holds no key that fits a header", where=where) from None


def correlation_id(body: LegacyRollout) -> str | None:
    """From policy.config, else from the query of its inference_url."""
    for key in CORRELATION_KEYS:
        value = body.policy.config.get(key)
        if isinstance(value, str) and value:
            return value
    url = body.policy.config.get("inference_url")
    query = dict(parse_qsl(_query(url))) if isinstance(url, str) else {}
    return next((query[key] for key in CORRELATION_QUERY if query.get(key)), None)


def _correlated(config: dict[str, Any], body: LegacyRollout, warn: Warn) -> dict[str, Any]:
    """A training client finds its trace by `cid` in the address: it is added when it is known."""
    found, url = correlation_id(body), config.get("inference_url")
    if body.mode != "rl" or not isinstance(url, str):
        return config
    if found is None:
        warn("mode is rl, but no trace_correlation_id is given; none was invented")
        return config
    if not set(CORRELATION_QUERY) & dict(parse_qsl(_query(url))).keys():
        parts = urlsplit(url)
        query = "&".join(filter(None, [parts.query, urlencode({"cid": found})]))
        warn("cid was added to the query of policy.config.inference_url")
        return config | {"inference_url": urlunsplit(parts._replace(query=query))}
    return config


def _query(url: str) -> str:
    try:
        return urlsplit(url).query
    except ValueError:
        return ""  # the policy's own check refuses the address, with its reason


def _tokens(config: dict[str, Any]) -> dict[str, Any]:
    """`max_completion_tokens` is the newer name of `max_tokens`; both may stand there if they agree."""
    newer = config.pop("max_completion_tokens", None)
    if newer is None:
        return config
    if config.setdefault("max_tokens", newer) != newer:
        raise InvalidRequest(
            "policy.config.max_tokens and max_completion_tokens differ; give one of them",
            where="policy.config.max_completion_tokens",
        )
    return {"max_tokens_name": "max_completion_tokens"} | config


def _think(config: dict[str, Any], warn: Warn) -> dict[str, Any]:
    """thinking_mode and thinking_budget go where vLLM's chat templates read them."""
    mode, budget = config.pop("thinking_mode", None), config.pop("thinking_budget", None)
    if mode not in (None, "think", "no_think"):
        raise InvalidRequest(
            "policy.config.thinking_mode is unknown; known: no_think, think",
            where="policy.config.thinking_mode",
        )
    told = {"enable_thinking": None if mode is None else mode == "think", "thinking_budget": budget}
    told = {name: value for name, value in told.items() if value is not None}
    if not told:
        return config
    extra = config.get("extra_body", {})
    if not isinstance(extra, dict) or not isinstance(extra.get("chat_template_kwargs", {}), dict):
        return config
    kwargs = told | extra.get("chat_template_kwargs", {})
    return config | {"extra_body": extra | {"chat_template_kwargs": kwargs}}
