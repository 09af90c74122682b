"""Pure: derives facts from jobs, such as the keys that differ from their defaults or between jobs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import tomli_w
from pydantic_core import PydanticUndefined

from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import table_model
from trainer_backend.pages.figures import NONE, duration
from trainer_backend.store.rows import ENDED, Job, parse_tables

ABSENT = "absent"
# Keys that the operator sets (jobs/posted.py).
_OF_THE_SERVICE = frozenset({"job.runs_dir", "services.gateway_host"})


def chosen_keys(job: Job) -> list[tuple[str, str, str]]:
    """Return (key, value, default) for every key of a job whose value is not its default."""
    keys = [(key, _text(value), _default(*key.split(".", 1))) for key, value in _values(job.config).items()]
    return [(key, value, default) for key, value, default in keys if value != default]


def differing_keys(configs: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return (key, values) for every key that differs between jobs; `values` has the value in each job.

    `configs` contains each job as TOML. The value in a job without the key is ABSENT.
    """
    jobs = [dict(_leaves(_values(config))) for config in configs]
    rows = {key: [job.get(key, ABSENT) for job in jobs] for job in jobs for key in job}
    return [(key, values) for key, values in rows.items() if len(set(values)) > 1]


# Keys that may differ between jobs of one setting: name, seed, folder and host.
NO_SETTINGS = frozenset({"job.name", "job.seed", "job.runs_dir", "services.gateway_host"})


def group_seeds(configs: Sequence[str]) -> list[list[int]]:
    """Group jobs that differ only in seed, name, folder or host. Return a list of job indices per group.

    `configs` contains each job as TOML. If the jobs of a group all have the same seed, each becomes a group
    of its own.
    """
    jobs = [dict(_leaves(_values(config))) for config in configs]
    groups: dict[frozenset[tuple[str, str]], list[int]] = {}
    for number, keys in enumerate(jobs):
        setting = frozenset(leaf for leaf in keys.items() if leaf[0] not in NO_SETTINGS)
        groups.setdefault(setting, []).append(number)
    parts: list[list[int]] = []
    for group in groups.values():
        several = len({jobs[at].get("job.seed") for at in group}) > 1
        parts += [group] if several else [[at] for at in group]
    return sorted(parts)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value (as text) of each key whose value is not a table.

    A dotted name is, for example, `rollout.env_config.text`.
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, _text(value)


def to_begin_from(job: Job) -> str:
    """Return TOML from which a user can begin a similar job: the keys that are not at their defaults.

    Keys that the service sets are left out.
    """
    known = parse_tables(job.config)
    # Keep [[rollout_only]] as it is written, and optional tables such as [warmup] even without keys.
    lists = {table: content for table, content in known.items() if isinstance(content, list)}
    fields = JobConfig.model_fields
    tables: dict[str, dict[str, Any]] = {
        table: {}
        for table, content in known.items()
        if isinstance(content, dict) and table in fields and fields[table].default is None
    }
    for key, value in _values(job.config).items():
        table, _, name = key.partition(".")
        if table not in lists and key not in _OF_THE_SERVICE and _text(value) != _default(table, name):
            tables.setdefault(table, {})[name] = value
    order = list(fields)
    return tomli_w.dumps(dict(sorted((tables | lists).items(), key=lambda one: order.index(one[0]))))


def _values(config: str) -> dict[str, Any]:
    """Return the values of a job by `table.key`. Tables that this version does not know are left out."""
    return {
        # In a list of tables, such as [[rollout_only]], values have the key `table.name.key`.
        f"{table}.{key}" if keys is content else f"{table}.{keys.get('name')}.{key}": value
        for table, content in parse_tables(config).items()
        if table in JobConfig.model_fields
        for keys in (content if isinstance(content, list) else [content])
        if isinstance(keys, dict)
        for key, value in keys.items()
    }


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _default(table: str, key: str) -> str:
    """Return the default of a key as text, or NONE if the key has no default.

    For a list of tables, such as [[rollout_only]], `key` begins with the name of a table: `name.key`.
    """
    content = JobConfig.model_fields.get(table)
    field = table_model(content).model_fields.get(key.rpartition(".")[2]) if content is not None else None
    default: Any = PydanticUndefined if field is None else field.get_default(call_default_factory=True)
    if default is PydanticUndefined or default is None:
        return NONE
    return _text(default)


def time_taken(job: Job) -> str:
    """Return the duration of a job as text. It is empty if the job never started or has not ended."""
    if job.started is None or job.ended is None or job.state not in ENDED:
        return ""
    return duration(max(job.ended - job.started, timedelta()).total_seconds())


def name_folder(job: Job) -> str:
    """Return the name of the run directory, or the job's id if there is no run directory yet."""
    return (job.run_dir or job.id).rstrip("/").rpartition("/")[2]
