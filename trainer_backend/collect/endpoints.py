"""Reads the addresses of remote OpenAI-compatible servers, and their API keys from environment variables."""

import os
from collections.abc import Mapping, Sequence
from urllib.parse import SplitResult, urlsplit

from pydantic import SecretStr

from service_kit.settings import VARIABLE_NAME
from shared_schemas.urls import PORTS, is_loopback
from trainer_backend.collect.plan import Inference
from trainer_backend.errors import JobError
from trainer_backend.job.addresses import http_parts
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.rollout_table import WarmupTable

OPENAI_HOST = "api.openai.com"
OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"
_LONGEST_KEY = 500  # shared_schemas.rollouts.InferenceKey


def endpoint(
    model: str | None,
    url: str | None,
    key_variable: str | None,
    environ: Mapping[str, str] = os.environ,
) -> Inference:
    """Return the model server that these flags of `turnwise eval` name.

    If `key_variable` is None, OPENAI_API_KEY is used for https://api.openai.com; other servers get no key.

    Args:
        model: value of --model.
        url: value of --inference-url.
        key_variable: value of --api-key-env.

    Raises:
        JobError: a flag is missing or invalid.
    """
    if not model or not url:
        flag, missing = ("--model", "--inference-url") if model else ("--inference-url", "--model")
        if not model and not url:
            flag, missing = "--api-key-env", "--model and --inference-url"
        raise JobError(f"{flag} needs {missing}: a model's name, and the server that answers for it")
    parts = _split(url, where="--inference-url")
    if key_variable is None and (parts.hostname, parts.scheme) == (OPENAI_HOST, "https"):
        key_variable = OPENAI_KEY_VARIABLE
    if key_variable is None:
        return Inference(url, model, None)
    return Inference(url, model, key_from(key_variable, where="--api-key-env", environ=environ))


def key_from(variable: str, *, where: str, environ: Mapping[str, str] = os.environ) -> SecretStr:
    """Read an API key from an environment variable.

    Args:
        where: the flag or TOML key that names the variable, for error messages.

    Raises:
        JobError: `variable` is not the name of a variable, or the variable contains no valid key.
    """
    if not VARIABLE_NAME.fullmatch(variable):
        raise JobError(
            f"{where} takes the name of an environment variable, in capitals, such as {OPENAI_KEY_VARIABLE}; "
            "the given value is no such name, and is not repeated here in case it is the key itself"
        )
    key = environ.get(variable, "").strip()
    if not key:
        raise JobError(f"{where}: the environment variable {variable} is not set, or empty")
    if not (key.isascii() and key.isprintable() and len(key) <= _LONGEST_KEY):
        raise JobError(
            f"{where}: the environment variable {variable} holds no key: a key is at most {_LONGEST_KEY} "
            "printable ASCII characters on one line"
        )
    return SecretStr(key)


def warmup_key(table: WarmupTable | None) -> SecretStr | None:
    """Return the API key of the warm-up teacher's server, or None if `warmup.api_key_env` is not set."""
    if table is None or table.api_key_env is None:
        return None
    return key_from(table.api_key_env, where="warmup.api_key_env")


def hosts_to_call(warmup: WarmupTable | None, player: Inference | None = None) -> list[str]:
    """List the model servers that the job's own task app may call: those of the teacher and of `player`."""
    hosts = [inference_host(player.url, where="--inference-url")] if player else []
    url = warmup.policy_config.get("inference_url") if warmup else None
    if isinstance(url, str):
        hosts.append(inference_host(url, where="warmup.policy_config.inference_url"))
    return hosts


def hosts_of_fixed_policies(tables: Sequence[RolloutOnlyTable]) -> list[str]:
    """List the remote model servers of fixed policies, which the job's own gateway calls."""
    return [
        inference_host(table.inference_url, where=f"[rollout_only] {table.name!r}: inference_url")
        for table in tables
        if table.inference_url is not None
    ]


def inference_host(url: str, *, where: str) -> str:
    """Return an inference URL as `host:port`, the form of the entries of a task app's allow-list."""
    parts = _split(url, where=where)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or PORTS[parts.scheme]}"


def sends_key_in_the_open(url: str, *, has_key: bool) -> bool:
    """Return whether a key for this URL would travel unencrypted to another machine."""
    parts = urlsplit(url)
    return has_key and parts.scheme == "http" and not is_loopback(parts.hostname or "")


def _split(url: str, *, where: str) -> SplitResult:
    try:
        return http_parts(url)
    except ValueError as error:
        raise JobError(f"{where} {error}") from error
