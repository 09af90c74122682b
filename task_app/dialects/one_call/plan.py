"""Reads the body of POST /rollout into a plan. Performs no I/O.

The task apps that defined this API cut, changed or ignored parts of a request silently. Here, the plan's
`warnings` contain a sentence about each such part.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from pydantic import SecretStr, TypeAdapter, ValidationError

from shared_schemas.rollouts import InferenceKey
from task_app.dialects.one_call.request import LegacyRollout, Stepwise, agree_on_stepwise, read_stepwise
from task_app.errors import InvalidRequest, clipped
from task_app.plugins import PlugBoards
from task_app.routes.wire import MOST_UNKNOWN
from task_app.sessions.switches import KEY as STEP_REWARDS
from task_app.sessions.switches import agree_on_step_rewards, take_step_rewards
from task_app.settings import Settings

Warn = Callable[[str], None]

MODEL = "openai"
# Defaults of this dialect, shown in the reply's `pipeline_metadata`.
DEFAULTS = {"max_tokens": 512, "tool_choice": "required"}
CORRELATION_KEYS = ("trace_correlation_id", "trace")
CORRELATION_QUERY = ("cid", "trace_correlation_id", "trace")
PICTURES = ("use_vision", "image_only_mode")
_KEY: TypeAdapter[SecretStr] = TypeAdapter(InferenceKey)


def policy_config(own: Mapping[str, Any], name: str, body: LegacyRollout, warn: Warn) -> dict[str, Any]:
    """Return the config for the policy plug-in. Without a `name`, it is empty: a living policy keeps its own.

    `own` is the policy's config in the request, completed with defaults from the settings.
    """
    config = {key: value for key, value in own.items() if key not in CORRELATION_KEYS}
    if not name:
        for key in config:
            warn(f"policy.config.{key} is ignored; a living policy keeps its own config")
        return {}
    if name != MODEL:
        return config
    config = _move_thinking_keys(_unify_token_limit(config), warn)
    for key in PICTURES:
        if config.pop(key, False):
            warn(f"policy.config.{key} is ignored; prompts are text")
    if config.pop("use_tools", True) is False:
        warn("policy.config.use_tools is ignored; actions are read from tool calls alone")
    config.setdefault("ask_token_ids", body.record.logprobs)
    return DEFAULTS | _with_correlation(config, body, warn)


def take_inference_key(own: dict[str, Any], body: LegacyRollout, warn: Warn) -> SecretStr | None:
    """Return the API key of the model's server, or None if the request contains no key.

    The key may be the policy's `inference_key`, the config's `api_key`, or a bearer token in the config's
    `extra_headers`; if several are given, they must be equal. `api_key` and `extra_headers` are removed from
    the config `own`, because the reply shows the config.
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
            warn(f"{where}.{clipped(name)} is ignored; only Authorization: Bearer is sent")
    if len(set(keys.values())) > 1:
        first, second, *_ = keys
        raise InvalidRequest(
            f"policy.{second} holds another key than policy.{first}", where=f"policy.{second}"
        )
    return next(iter(keys.values()), None)


def _key(value: Any, *, where: str) -> SecretStr:
    try:
        return _KEY.validate_python(value)
    except ValidationError:  # not chained, because it contains the key
        raise InvalidRequest(f"{where} holds no key that fits a header", where=where) from None


def correlation_id(body: LegacyRollout) -> str | None:
    """Return the id in policy.config by which a training client finds its trace.

    The id is a key of the config, or a parameter in the query of its inference_url.
    """
    for key in CORRELATION_KEYS:
        value = body.policy.config.get(key)
        if isinstance(value, str) and value:
            return value
    url = body.policy.config.get("inference_url")
    query = dict(parse_qsl(_query(url))) if isinstance(url, str) else {}
    return next((query[key] for key in CORRELATION_QUERY if query.get(key)), None)


def _with_correlation(config: dict[str, Any], body: LegacyRollout, warn: Warn) -> dict[str, Any]:
    """Return the config with the correlation id as parameter `cid` of its inference URL, if mode is "rl"."""
    correlation, url = correlation_id(body), config.get("inference_url")
    if body.mode != "rl" or not isinstance(url, str):
        return config
    if correlation is None:
        warn("mode is rl, but no trace_correlation_id is given; none was invented")
        return config
    if not set(CORRELATION_QUERY) & dict(parse_qsl(_query(url))).keys():
        parts = urlsplit(url)
        query = "&".join(filter(None, [parts.query, urlencode({"cid": correlation})]))
        warn("cid was added to the query of policy.config.inference_url")
        return config | {"inference_url": urlunsplit(parts._replace(query=query))}
    return config


def _query(url: str) -> str:
    try:
        return urlsplit(url).query
    except ValueError:
        return ""  # the policy's own check refuses the URL


def _unify_token_limit(config: dict[str, Any]) -> dict[str, Any]:
    """Rename `max_completion_tokens` to the older `max_tokens`; if both are given, they must be equal."""
    newer = config.pop("max_completion_tokens", None)
    if newer is None:
        return config
    if config.setdefault("max_tokens", newer) != newer:
        raise InvalidRequest(
            "policy.config.max_tokens and max_completion_tokens differ; give one of them",
            where="policy.config.max_completion_tokens",
        )
    return {"max_tokens_name": "max_completion_tokens"} | config


def _move_thinking_keys(config: dict[str, Any], warn: Warn) -> dict[str, Any]:
    """Move thinking_mode and thinking_budget to `chat_template_kwargs`, which vLLM's chat templates read."""
    mode, budget = config.pop("thinking_mode", None), config.pop("thinking_budget", None)
    if mode not in (None, "think", "no_think"):
        raise InvalidRequest(
            "policy.config.thinking_mode is unknown; known: no_think, think",
            where="policy.config.thinking_mode",
        )
    values = {"enable_thinking": None if mode is None else mode == "think", "thinking_budget": budget}
    values = {name: value for name, value in values.items() if value is not None}
    if not values:
        return config
    extra = config.get("extra_body", {})
    if not isinstance(extra, dict) or not isinstance(extra.get("chat_template_kwargs", {}), dict):
        return config
    kwargs = values | extra.get("chat_template_kwargs", {})
    return config | {"extra_body": extra | {"chat_template_kwargs": kwargs}}


DEFAULT_DECISIONS = 20
MOST_DECISIONS = 10_000
AGENT, ENV = frozenset({"agent", "policy", "model"}), frozenset({"env", "environment", "step"})


@dataclass(frozen=True, slots=True)
class LegacyPlan:
    """The rollout to play, as read from a request.

    `env_name` or `policy_name` is empty if the request names a living environment or policy by its id.
    """

    body: LegacyRollout = field(repr=False)
    """The request; its config may contain a key."""
    env_name: str
    env_config: Mapping[str, Any]
    seed: int
    policy_name: str
    policy_config: Mapping[str, Any]
    inference_key: SecretStr | None
    stepwise: Stepwise | None
    decisions: int
    warnings: tuple[str, ...]
    correlation_id: str | None


def plan_rollout(body: LegacyRollout, boards: PlugBoards, settings: Settings) -> LegacyPlan:
    warnings: list[str] = []
    warn = warnings.append
    parts = {
        "": body,
        "env.": body.env,
        "policy.": body.policy,
        "record.": body.record,
        "safety.": body.safety,
    }
    for prefix, part in parts.items():
        for name in part.model_extra or ():
            warn(f"{prefix}{clipped(name)} is ignored; this task app does not know it")
    if body.branch is not None:
        warn("branch is ignored; POST /branch makes branches")
    own_env, max_decisions = _take_env_params(body.env.config)
    ids_and_names = {
        "policy": (body.policy.policy_id, body.policy.policy_name),
        "env": (body.env.env_id, body.env.env_name),
    }
    for kind, (living, new) in ids_and_names.items():
        if (living is None) == (new is None):
            detail = f"{kind} names one of {kind}_id (a living one) and {kind}_name (a new one)"
            raise InvalidRequest(detail, where=kind)
    own_name = body.policy.policy_name
    name = "" if own_name is None else boards.policy_name(own_name, where="policy.")
    own_policy = dict(body.policy.config)
    if name:
        own_policy = {**boards.policies[name].defaults(settings), **own_policy}
    max_calls = own_policy.pop("max_llm_calls", None)
    stepwise = _take_switches(body, own_policy, own_env, warn)
    own_name = body.env.env_name
    env_name = "" if own_name is None else boards.environment_name(own_name, where="env.")
    seed = _choose_seed(body, warn)
    inference_key = take_inference_key(own_policy, body, warn)
    decisions = _count_decisions(body, max_decisions, max_calls, warn)
    env_config = _read_env_config(own_env, env_name, boards, warn)
    config = policy_config(own_policy, name, body, warn)
    if name:
        fields = boards.policies[name].config.model_fields
        config = drop_unknown(config, fields, where="policy.config", warn=warn)
    return LegacyPlan(
        body=body,
        env_name=env_name,
        env_config=env_config,
        seed=seed,
        policy_name=name,
        policy_config=config,
        inference_key=inference_key,
        stepwise=stepwise,
        decisions=decisions,
        warnings=tuple(warnings),
        correlation_id=correlation_id(body),
    )


def drop_unknown(
    config: Mapping[str, Any], fields: Mapping[str, Any], *, where: str, warn: Warn
) -> dict[str, Any]:
    """Return `config` without the keys that are not in `fields`; warn about each.

    Raise InvalidRequest if an unknown key looks like a misspelled field, or if too many keys are unknown.
    """
    unknown = len(config.keys() - fields.keys())
    if unknown > MOST_UNKNOWN:
        raise InvalidRequest(
            f"{where} has {unknown} unknown keys; at most {MOST_UNKNOWN} are read over", where=where
        )
    rest = {}
    for name, value in config.items():
        if name in fields:
            rest[name] = value
            continue
        close = get_close_matches(name, fields, n=1, cutoff=0.85)
        place = f"{where}.{clipped(name)}"
        if close:
            raise InvalidRequest(f"{place}: unknown key. Did you mean {close[0]!r}?", where=place)
        warn(f"{place} is ignored; known: {', '.join(sorted(fields))}")
    return rest


def _take_env_params(config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Split env.config: return the environment's own keys, and the limit on the number of decisions."""
    rest = dict(config)
    params = rest.pop("env_params", None)
    where = "env.config.env_params"
    if not isinstance(params, dict | None):
        raise InvalidRequest(f"{where} is no object", where=where)
    place = f"{where}.max_steps_per_episode"
    unknown = [name for name in params or () if name != "max_steps_per_episode"]
    if unknown:
        place = f"{where}.{clipped(unknown[0])}"
        raise InvalidRequest(f"{place}: unknown key; known: max_steps_per_episode", where=place)
    return rest, _read_limit((params or {}).get("max_steps_per_episode"), DEFAULT_DECISIONS, where=place)


def _read_limit(value: Any, default: int, *, where: str) -> int:
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= MOST_DECISIONS:
        allowed = f"a whole number of decisions, 1 to {MOST_DECISIONS}"
        raise InvalidRequest(f"{where} is {clipped(repr(value))}; allowed: {allowed}", where=where)
    return value


def _take_switches(
    body: LegacyRollout, policy: dict[str, Any], env: dict[str, Any], warn: Warn
) -> Stepwise | None:
    """Return the request's reward switches, and remove them from the configs `policy` and `env`.

    Switches in the policy's config take precedence, then those in the environment's config, then those in the
    body's `training` and `rollout`. Return None if the request contains no switches.
    """
    _, tables = take_step_rewards({}, where="", training=body.training, rollout=body.rollout)
    places = {
        "policy.config.step_rewards": _take_config_switches(policy, where="policy.config"),
        "env.config.step_rewards": _take_config_switches(env, where="env.config"),
        "training": agree_on_stepwise(tables) if tables else None,
    }
    by_place = {place: stepwise for place, stepwise in places.items() if stepwise is not None}
    first, *others = list(by_place) or [""]
    for place in others:
        if by_place[place] != by_place[first]:
            warn(f"{place} differs from {first}, which is used")
    return by_place.get(first)


def _take_config_switches(config: dict[str, Any], *, where: str) -> Stepwise | None:
    """Remove the reward switches from a config and return them.

    The switches are in the table `step_rewards`, or in `training` or `rollout`, as in a job file. If several
    of these tables exist, their switches must be equal.
    """
    raw = config.pop(STEP_REWARDS, None)
    stepwise = read_stepwise(raw, where=f"{where}.{STEP_REWARDS}") if raw else None
    rest, switches = take_step_rewards(config, where=where)
    for name in config.keys() - rest.keys():
        del config[name]
    if stepwise is None:
        return agree_on_stepwise(switches) if switches else None
    agree_on_step_rewards({f"{where}.{STEP_REWARDS}": stepwise, **switches})
    return stepwise


def _read_env_config(own: dict[str, Any], name: str, boards: PlugBoards, warn: Warn) -> dict[str, Any]:
    if not name:
        for key in own:
            warn(f"env.config.{clipped(key)} is ignored; a living environment keeps its own config")
        return {}
    fields = boards.environment_plugin(name).config.model_fields
    if "difficulty" in own and "difficulty" not in fields:
        del own["difficulty"]
        warn("env.config.difficulty is ignored; worlds differ by their seed alone")
    return drop_unknown(own, fields, where="env.config", warn=warn)


def _choose_seed(body: LegacyRollout, warn: Warn) -> int:
    """Return the world's seed; 0 for a living environment. A missing seed is derived from the run_id."""
    if body.env.env_id is not None:
        if body.env.seed is not None:
            warn("env.seed is ignored; a living environment goes on from its state (POST /env/reset)")
        return 0
    if body.env.seed is not None:
        return body.env.seed
    seed = int(hashlib.sha256(body.run_id.encode()).hexdigest()[:8], 16) % (2**31 - 1)
    warn(f"env.seed is missing; {seed} was derived from run_id")
    return seed


def _count_decisions(body: LegacyRollout, max_decisions: int, max_calls: Any, warn: Warn) -> int:
    """Return the number of decisions to play.

    Each pair of an agent op and an env op in `ops` is one decision. The smallest limit bounds their number.
    """
    pairs = _count_pairs(body, warn)
    calls = "policy.config.max_llm_calls"
    bounds = {
        "env.config.env_params.max_steps_per_episode": max_decisions,
        calls: _read_limit(max_calls, MOST_DECISIONS, where=calls),
        "safety.max_ops (two a decision)": body.safety.max_ops // 2,
    }
    if body.safety.max_ops < 2:
        raise InvalidRequest("safety.max_ops is 1; a decision takes 2 ops", where="safety.max_ops")
    least = min(bounds, key=lambda name: bounds[name])
    if pairs > bounds[least]:
        warn(f"ops holds {pairs} decisions; cut to {bounds[least]} by {least}")
    return min(pairs, bounds[least])


def _count_pairs(body: LegacyRollout, warn: Warn) -> int:
    """Return the number of agent ops in `ops` that are followed by an env op."""
    pairs, has_agent, unpaired = 0, False, 0
    for index, op in enumerate(body.ops):
        if _read_op(op, index) == "agent":
            unpaired += has_agent
            has_agent = True
        elif has_agent:
            pairs, has_agent = pairs + 1, False
        else:
            unpaired += 1
    unpaired += has_agent
    if not pairs:
        raise InvalidRequest('ops holds no decision; ["agent", "env"] * N means N decisions', where="ops")
    if unpaired:
        warn(f"{unpaired} of {len(body.ops)} ops are not executed; a decision is an agent op, then an env op")
    return pairs


def _read_op(op: str | dict[str, Any], index: int) -> str:
    """Return the kind of an op: "agent" or "env"."""
    name = op if isinstance(op, str) else op.get("type", op.get("op"))
    if isinstance(name, str):
        word = name.strip().lower()
        if word in AGENT:
            return "agent"
        if word in ENV:
            return "env"
    raise InvalidRequest(
        f"ops.{index} is {clipped(repr(name))}; known: {', '.join(sorted(AGENT | ENV))}", where=f"ops.{index}"
    )
