"""What a posted job may be: valid as any job, and within what the operator has allowed.

Whoever may post jobs may train; he may not read the operator's files, run code of his own, send the
operator's keys to a host of his choice, or listen where he likes. Errors never repeat a key.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import tomli
from pydantic import BeforeValidator

from shared_schemas.json_text import NUL
from trainer_backend.api.settings import Bounds
from trainer_backend.api.toml_lines import MOST_VALUES, is_too_much, statements
from trainer_backend.errors import JobError
from trainer_backend.job import LoadedJob, joined_findings, parse_job, refuse_what_is_missing
from trainer_backend.jobfile.layers import anchor
from trainer_backend.jobfile.schema import JobConfig, JobTable
from trainer_backend.jobfile.services_table import ServicesTable
from trainer_backend.services.endpoints import hosts_of_fixed_policies, hosts_to_call

WHERE = "the posted job"
# Code comes with them: they are taken from the operator's folders, and not from what runs have written.
CODE_PATHS = frozenset({"services.task_plugins", "multi_turn.interaction_config_path"})
_WANDB_KEY = "WANDB_API_KEY"
_MOST_TAGS, _LONGEST_TAG = 32, 200
# Tables and lists in one another; the schema needs a few. What reads and writes TOML calls itself for each.
_DEEPEST = 32
_TOO_MANY = f"a job holds at most {MOST_VALUES} keys, items of lists and lines"
# How deep a folder of data, or a run with its checkpoints, holds files that are read.
_FOLDERS = 3
_LONGEST_PATH = 4_096  # Linux
_WHOLE_NUMBERS = range(-(2**63), 2**63)  # TOML's own; longer ones cannot be written down again


@dataclass(frozen=True, slots=True)
class Posted:
    """A job that may run.

    Attributes:
        tags: what [tags] says, and whoever posted it.
    """

    loaded: LoadedJob
    tags: Mapping[str, str]


def document_of(text: str) -> dict[str, Any]:
    """
    Raises:
        JobError: no TOML, with the line; or more of it than a job has.
    """
    if is_too_much(text):
        raise JobError(f"{WHERE}: {_TOO_MANY}")
    for statement in statements(text):
        if statement.depth > _DEEPEST:
            raise JobError(f"{WHERE}: {_too_deep(statement.name.partition('.')[0][:80] or 'a value')}")
    try:
        return tomli.loads(text)
    except RecursionError as error:
        raise JobError(f"{WHERE}: {_too_deep('a value')}") from error
    except ValueError as error:
        raise JobError(f"{WHERE}: not valid TOML: {error}") from error


def refuse_unwritable(document: Mapping[str, Any]) -> None:
    """Before anything walks through a document: what is too deep, too long a number, or too much for that.

    Raises:
        JobError: with the table that holds it.
    """
    values = 0
    for name, table in document.items():
        level, depth = [table], 0
        while level:
            values += len(level)
            if values > MOST_VALUES:
                raise JobError(f"{WHERE}: {_TOO_MANY}")
            if any(isinstance(item, int) and item not in _WHOLE_NUMBERS for item in level):
                raise JobError(f"{WHERE}: {name[:80]} holds a whole number of more than 64 bits")
            if any(isinstance(item, str) and "\0" in item for item in (name, *level, *_keys_of(level))):
                raise JobError(f"{WHERE}: {name[:80]!r} holds {NUL}")
            holding = [item for item in level if isinstance(item, Mapping | list)]
            if holding and depth == _DEEPEST:
                raise JobError(f"{WHERE}: {_too_deep(name[:80])}")
            level, depth = [inner for item in holding for inner in _inside(item)], depth + 1


def _keys_of(level: Iterable[Any]) -> Iterator[str]:
    return (key for item in level if isinstance(item, Mapping) for key in item)


def _inside(value: Mapping[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value


def _too_deep(what: str) -> str:
    return f"{what} holds tables or lists in one another, more than {_DEEPEST} deep"


def posted_job(document: Mapping[str, Any], bounds: Bounds, tags: Mapping[str, Any] | None = None) -> Posted:
    """Validate a posted document, with the operator's addresses put where it names none.

    A relative path is one from the first root that has such a file, or from the service's own folder.

    Raises:
        JobError: it is wrong, or names what it may not; a line for each finding.
    """
    refuse_unwritable(document)
    own = {name: dict(value) if isinstance(value, Mapping) else value for name, value in document.items()}
    found_tags = _tags({**_table(own.pop("tags", {}), "tags"), **(tags or {})})
    _refuse_key(own)
    _fill_in(own, bounds)
    as_written = parse_job(own, where=WHERE).config
    for key, path in paths_of(as_written):
        if len(str(path)) > _LONGEST_PATH:
            raise JobError(f"{WHERE}: {key} is a path of more than {_LONGEST_PATH} characters")
    # A way up could lead to any file, and where it was found would tell that it is there.
    if not any(".." in path.parts for _, path in paths_of(as_written)):
        for folder in (*bounds.roots, Path()):
            anchor(own, folder)
    loaded = parse_job(own, where=WHERE)
    refused = list(_outside(loaded.config, bounds))
    if refused:
        raise joined_findings((f"{WHERE}: {told}" for told in refused), len(refused))
    refuse_what_is_missing(loaded.config, where=WHERE)
    return Posted(loaded, found_tags)


def paths_of(config: JobConfig) -> Iterator[tuple[str, Path]]:
    """Every path that a job names, by its key; not job.runs_dir, which the service sets."""
    for table_name in type(config).model_fields:
        found = getattr(config, table_name)
        for table in found if isinstance(found, tuple) else (found,):  # several, as [[rollout_only]]
            for name in type(table).model_fields if table is not None else ():
                value = getattr(table, name)
                for item in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(item, Path) and (table_name, name) != ("job", "runs_dir"):
                        yield f"{table_name}.{name}", item


def _refuse_key(document: Mapping[str, Any]) -> None:
    if "task_api_key" in _table(document.get("services", {}), "services"):
        raise JobError(
            f"{WHERE}: services.task_api_key is a key, and a posted job may hold none: the service has its "
            "own for its task apps (ENVIRONMENT_API_KEY)"
        )


def _fill_in(document: dict[str, Any], bounds: Bounds) -> None:
    """The operator's addresses and folder, where the job names none.

    A default counts as none: the job that a run or `turnwise check` writes down gives every key.
    """
    services = _table(document.get("services", {}), "services")
    if services.get("gateway_host") == ServicesTable().gateway_host:
        del services["gateway_host"]
    if bounds.given_urls and not services.get("task_url"):
        services["task_url"] = list(bounds.given_urls)
    services.setdefault("gateway_host", bounds.gateway_host)
    document["services"] = services
    job = _table(document.get("job", {}), "job")
    if job.get("runs_dir") in (None, str(JobTable().runs_dir)):
        job["runs_dir"] = str(bounds.data_dir)
    document["job"] = job


def _outside(config: JobConfig, bounds: Bounds) -> Iterator[str]:
    """What a valid job names and may not, a sentence each."""
    if config.job.runs_dir.resolve() != bounds.data_dir:
        yield f"job.runs_dir is the service's own to choose ({bounds.data_dir}); leave it out"
    if config.services.gateway_host != bounds.gateway_host:
        yield "services.gateway_host is the service's own to choose (--gateway-host); leave it out"
    for key, path in paths_of(config):
        roots = ", ".join(map(str, _roots(key, bounds)))
        if not _is_allowed(key, path, bounds):
            yield f"{key} names a file outside of what posted jobs may read: {roots} (--allow-root)"
        elif (link := _link_out_of(path, key, bounds)) is not None:
            yield (
                f"{key} holds a link, {link.name!r}, that leads outside of what posted jobs may read: "
                f"{roots} (--allow-root)"
            )
    for url in config.services.task_url:
        # On this machine too: the operator's key for task apps goes to whoever listens there.
        if url.rstrip("/") not in bounds.task_urls:
            allowed = ", ".join(sorted(bounds.task_urls)) or "none"
            yield (
                "services.task_url names a task app that the service's key may not be sent to "
                f"(TASK_URL or --allow-task-url: {allowed})"
            )
    name = config.model.name
    if name is not None and not any(fnmatchcase(name, pattern) for pattern in bounds.models):
        allowed = ", ".join(bounds.models) or "none"
        yield (
            "model.name names a model of the hub that posted jobs may not have fetched "
            f"(--allow-model: {allowed})"
        )
    yield from _foreign_keys(config, bounds)


def _foreign_keys(config: JobConfig, bounds: Bounds) -> Iterator[str]:
    """Keys that would be used, and hosts that would be asked."""
    named = [("warmup", config.warmup.api_key_env)] if config.warmup is not None else []
    named += [("rollout_only", table.api_key_env) for table in config.rollout_only]
    for home, variable in named:
        if variable is not None and variable not in bounds.key_variables:
            yield f"{home}.api_key_env names a variable that posted jobs may not read (--allow-key-variable)"
    for host in (*hosts_to_call(config.warmup), *hosts_of_fixed_policies(config.fixed_policies)):
        if host.lower() not in bounds.inference_hosts and _without_port(host) not in bounds.inference_hosts:
            yield (
                "the inference_url of warmup.policy_config or rollout_only names a server that posted jobs "
                "may not ask (--allow-inference-host)"
            )
    wandb = config.sinks.wandb
    if wandb is not None and wandb.mode != "offline" and _WANDB_KEY not in bounds.key_variables:
        yield (
            f'sinks.wandb would use the service\'s account: take mode = "offline", or allow {_WANDB_KEY} '
            "(--allow-key-variable)"
        )


def _is_allowed(key: str, path: Path, bounds: Bounds) -> bool:
    real = path.resolve()  # of links too: what is read is where they lead
    if key in CODE_PATHS and real.is_relative_to(bounds.data_dir):
        return False
    return any(real.is_relative_to(root) for root in _roots(key, bounds))


def _link_out_of(folder: Path, key: str, bounds: Bounds, depth: int = _FOLDERS) -> Path | None:
    """A link in a folder, or in folders in it, that leads where the job may not read."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink() and not _is_allowed(key, path, bounds):
                    return path
                inside = depth and entry.is_dir() and _link_out_of(path, key, bounds, depth - 1)
                if inside:
                    return inside
    except OSError:  # a file; or what nobody can read, this job neither
        pass
    return None


def _roots(key: str, bounds: Bounds) -> tuple[Path, ...]:
    return bounds.roots if key in CODE_PATHS else (*bounds.roots, bounds.data_dir)


def _without_port(host: str) -> str:
    return host.rpartition(":")[0].lower()


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise JobError(f"{WHERE}: {name} is {type(value).__name__}, but it is a table; write [{name}]")
    return dict(value)


def _few(tags: Any) -> Any:
    if isinstance(tags, Mapping) and len(tags) > _MOST_TAGS:
        raise ValueError(f"{len(tags)} tags; at most {_MOST_TAGS}")
    return tags


# Counted before each is looked at.
Tags = Annotated[dict[str, str | int | float | bool], BeforeValidator(_few)]


def _tags(found: Mapping[str, Any]) -> dict[str, str]:
    """What a person sorts jobs by; numbers and truths as text."""
    if len(found) > _MOST_TAGS:
        raise JobError(f"{WHERE}: [tags] holds {len(found)} tags; at most {_MOST_TAGS}")
    for name, value in found.items():
        if isinstance(value, bool | int | float | str) and len(name) + len(str(value)) <= _LONGEST_TAG:
            continue
        raise JobError(
            f"{WHERE}: tags.{name[:40]} is no text, number or truth of at most {_LONGEST_TAG} characters"
        )
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in found.items()
    }
