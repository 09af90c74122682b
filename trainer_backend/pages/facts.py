"""Pure: facts about a job: its keys that differ from their defaults, its row, and how jobs differ."""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import tomli_w
from pydantic_core import PydanticUndefined

from trainer_backend.job.docs import table_model
from trainer_backend.job.schema import JobConfig
from trainer_backend.pages.figures import NONE, duration
from trainer_backend.store.rows import ENDED, JobRow, tables_of

# Where runs lie and gateways listen is the operator's (jobs/posted.py).
_OF_THE_SERVICE = frozenset({"job.runs_dir", "services.gateway_host"})


def chosen_keys(job: JobRow) -> list[tuple[str, str, str]]:
    """(key, value, default) of every key that is not at its default."""
    found = []
    for key, value in _keys(job).items():
        default = _default(*key.split(".", 1))
        if value != default:
            found.append((key, value, default))
    return found


def differing_keys(runs: Sequence[JobRow]) -> list[tuple[str, list[str]]]:
    """Every key that is not the same in all runs, with its value in each."""
    each = [_keys(job) for job in runs]
    keys = dict.fromkeys(key for keys in each for key in keys)
    rows = [(key, [keys.get(key, NONE) for keys in each]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def to_begin_from(job: JobRow) -> str:
    """Return a TOML for another job like this one: its chosen keys, without those that the service sets."""
    tables: dict[str, dict[str, Any]] = {
        table: {}
        for table, keys in tables_of(job.config).items()
        if isinstance(keys, dict) and _is_a_choice(table)  # such as [warmup]: without it there is none
    }
    several = {table: found for table, found in tables_of(job.config).items() if isinstance(found, list)}
    for key, value in _values(job).items():
        table, _, name = key.partition(".")
        if table in several:  # [[rollout_only]], each as it was written
            continue
        if key not in _OF_THE_SERVICE and _told(value) != _default(table, name):
            tables.setdefault(table, {})[name] = value
    order = list(JobConfig.model_fields)
    found = tables | several
    return tomli_w.dumps({table: found[table] for table in sorted(found, key=order.index)})


def _is_a_choice(table: str) -> bool:
    """Whether a job may be without it."""
    known = JobConfig.model_fields.get(table)
    return known is not None and known.default is None


def _keys(job: JobRow) -> dict[str, str]:
    return {key: _told(value) for key, value in _values(job).items()}


def _values(job: JobRow) -> dict[str, Any]:
    """By `table.key`; of a version that knows other tables, without those."""
    known = {
        table: found for table, found in tables_of(job.config).items() if table in JobConfig.model_fields
    }
    return {
        f"{table}.{named}{key}": value
        for table, found in known.items()
        for named, keys in _each_table(found)
        for key, value in keys.items()
    }


def _each_table(found: Any) -> list[tuple[str, dict[str, Any]]]:
    """The table, or each of several by its name."""
    if isinstance(found, dict):
        return [("", found)]
    return [(f"{keys.get('name')}.", keys) for keys in found] if isinstance(found, list) else []


def _told(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _default(table: str, key: str) -> str:
    """As it would stand in a job; NONE where the key must be given, or is absent by itself.

    Args:
        key: of a table that may stand several times, after the name of one.
    """
    known = JobConfig.model_fields.get(table)
    field = table_model(known).model_fields.get(key.rpartition(".")[2]) if known is not None else None
    default: Any = PydanticUndefined if field is None else field.get_default(call_default_factory=True)
    if default is PydanticUndefined or default is None:
        return NONE
    return _told(default)


def took(job: JobRow) -> str:
    """From its start to its end; nothing before it has ended."""
    if job.started is None or job.ended is None or job.state not in ENDED:
        return ""
    return duration(max(job.ended - job.started, timedelta()).total_seconds())


def folder_of(job: JobRow) -> str:
    """The name of its run directory; of a job that has none yet its id."""
    return (job.run_dir or job.id).rstrip("/").rpartition("/")[2]


def end_of(path: str) -> str:
    """Of a path its last three parts: what stands before them is the same for many."""
    parts = path.split("/")
    return path if len(parts) <= 4 else "…/" + "/".join(parts[-3:])


def clipped(text: str, most: int) -> str:
    """At most so many characters; that something is left out is shown."""
    return text if len(text) <= most else text[: most - 1] + "…"
