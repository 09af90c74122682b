"""Posted jobs: parsing of their JSON or TOML, validation, and the operator's bounds.

A client with the service's key may train, but not read the operator's files, run its own code, send the
operator's keys to another host, or choose an address to listen on. Error messages never repeat a key.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from shared_schemas.base import Body, did_you_mean
from shared_schemas.json_text import NUL, read_json
from shared_schemas.plain_text import decode_text
from trainer_backend.collect.endpoints import hosts_of_fixed_policies, hosts_to_call
from trainer_backend.errors import ApiError, JobError, TrainerError, UnknownMediaType
from trainer_backend.job.layers import Places, anchor
from trainer_backend.job.load import LoadedJob, dump_job, join_findings, parse_job, read_table
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.rollout_table import WarmupTable
from trainer_backend.job.schema import JobConfig, JobTable
from trainer_backend.job.tables import TASK_APP_SETTINGS, ServicesTable
from trainer_backend.jobs.settings import Bounds
from trainer_backend.rundir.new_job import refuse_missing_parts
from trainer_backend.sinks import SinksTable

WHERE = "the posted job"
copy_table = partial(read_table, places=Places([WHERE]))
# Keys whose values are paths of code. The code may be in the operator's folders, but not where runs write.
CODE_PATHS = frozenset({"services.task_plugins", "multi_turn.interaction_config_path"})
_WANDB_KEY, _SPACE_KEY = "WANDB_API_KEY", "HF_TOKEN"
_MOST_TAGS, _LONGEST_TAG = 32, 200
_MOST_PROCESSES = 8  # of one kind, on one machine
# Maximum nesting of tables and lists, which is limited because parsers and writers of TOML are recursive.
_DEEPEST = 32
_TOO_DEEP = f"holds tables or lists in one another, more than {_DEEPEST} deep"
# The most keys and list items of a document. In a text, the _DIVIDERS are counted instead (slightly more).
MOST_VALUES, _DIVIDERS = 50_000, ".,=[{\n"
_TOO_MANY = f"a job holds at most {MOST_VALUES} keys, items of lists and lines"
# Maximum depth at which files in a folder of data or checkpoints are read.
_FOLDERS = 3
_LONGEST_PATH = 4_096  # Linux
_WHOLE_NUMBERS = range(-(2**63), 2**63)  # TOML's range; dump_job cannot write other numbers


def parse_document(text: str) -> dict[str, Any]:
    """Parse a TOML text of at most MOST_VALUES values. Call it in the check process: it may take long."""
    if sum(map(text.count, _DIVIDERS)) > MOST_VALUES:
        raise JobError(f"{WHERE}: {_TOO_MANY}")
    try:
        document = tomli.loads(text)
    except RecursionError as error:
        raise JobError(f"{WHERE}: a value {_TOO_DEEP}") from error
    except ValueError as error:
        raise JobError(f"{WHERE}: not valid TOML: {error}") from error
    refuse_unwritable(document)
    return document


def refuse_unwritable(document: Mapping[str, Any]) -> None:
    """Raise JobError if a document is too deep or too large, or holds a value that TOML cannot represent."""
    values, rest = len(document), [(name, 0, [name, table]) for name, table in document.items()]
    for name, depth, items in rest:  # the loop appends to the list
        for item in items:
            if isinstance(item, int) and item not in _WHOLE_NUMBERS:
                raise JobError(f"{WHERE}: {name[:80]} holds a whole number of more than 64 bits")
            if isinstance(item, str) and "\0" in item:
                raise JobError(f"{WHERE}: {name[:80]!r} holds {NUL}")
            if isinstance(item, Mapping | list):
                values += len(item)
                if depth == _DEEPEST:
                    raise JobError(f"{WHERE}: {name[:80]} {_TOO_DEEP}")
                if values > MOST_VALUES:
                    raise JobError(f"{WHERE}: {_TOO_MANY}")
                inside = [*item, *item.values()] if isinstance(item, Mapping) else item
                rest.append((name, depth + 1, inside))


def validate_job(
    document: Mapping[str, Any], bounds: Bounds, tags: Mapping[str, Any] | None = None
) -> tuple[LoadedJob, dict[str, str]]:
    """Fill in the operator's addresses, then validate a posted document; return the job and its tags.

    A relative path is looked up in the folders of --allow-root in order, then in the service's working
    directory. The request's `tags` override tags of the same name in the table [tags].
    """
    refuse_unwritable(document)
    own = {name: dict(value) if isinstance(value, Mapping) else value for name, value in document.items()}
    all_tags = _tags({**copy_table(own, "tags"), **(tags or {})})
    own.pop("tags", None)
    if "task_api_key" in copy_table(own, "services"):
        raise JobError(
            f"{WHERE}: services.task_api_key is a key, and a posted job may hold none: the service has its "
            "own for its task apps (ENVIRONMENT_API_KEY)"
        )
    _fill_in(own, bounds)
    draft = parse_job(own, where=WHERE).config
    for key, path in list_paths(draft):
        if len(str(path)) > _LONGEST_PATH:
            raise JobError(f"{WHERE}: {key} is a path of more than {_LONGEST_PATH} characters")
    # If a path with `..` were looked up, the folder it is found in would reveal whether another file exists.
    if not any(".." in path.parts for _, path in list_paths(draft)):
        for folder in (*bounds.roots, Path()):
            anchor(own, folder)
    loaded = parse_job(own, where=WHERE)
    findings = list(_find_forbidden(loaded.config, bounds))
    if findings:
        raise join_findings((f"{WHERE}: {finding}" for finding in findings), len(findings))
    refuse_missing_parts(loaded)
    return loaded, all_tags


def list_paths(config: JobConfig) -> Iterator[tuple[str, Path]]:
    """Yield each path in a job with its key. job.runs_dir is left out, because the service sets it."""
    for table_name in type(config).model_fields:
        section = getattr(config, table_name)
        for table in section if isinstance(section, tuple) else (section,):  # several, as [[rollout_only]]
            for name in type(table).model_fields if table is not None else ():
                value = getattr(table, name)
                for item in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(item, Path) and (table_name, name) != ("job", "runs_dir"):
                        yield f"{table_name}.{name}", item


def _fill_in(document: dict[str, Any], bounds: Bounds) -> None:
    """Fill in the operator's addresses, run folder and plug-ins where the job has no value or the default.

    A default counts as no value, because a run's job.toml and `turnwise check --all` write all defaults.
    """
    services = copy_table(document, "services")
    if services.get("gateway_host") == ServicesTable().gateway_host:
        del services["gateway_host"]
    # A job that sets the number or the files of its own task apps starts them itself.
    starts_own = services.get("task_apps", ServicesTable().task_apps) != ServicesTable().task_apps
    starts_own |= bool(services.get("task_plugins"))
    starts_own |= bool(copy_table(document, "multi_turn").get("interaction_config_path"))
    if bounds.default_urls and not services.get("task_url") and not starts_own:
        services["task_url"] = list(bounds.default_urls)
    services.setdefault("gateway_host", bounds.gateway_host)
    document["services"] = services
    job = copy_table(document, "job")
    if job.get("runs_dir") in (None, str(JobTable().runs_dir)):
        job["runs_dir"] = str(bounds.data_dir)
    own = [str(file) for file in bounds.plugins]
    # Checked before parsing, which runs the plug-ins in this process.
    if job.get("trainer_plugins", own) not in (own, []):
        raise JobError(
            f"{WHERE}: job.trainer_plugins names code, which the service's operator chooses (--plugins); "
            f"leave it out. Every job has {', '.join(own) or 'none'}"
        )
    if own:
        job["trainer_plugins"] = own
    # The digests may come from another run; this job uses the current files.
    job.pop("trainer_plugins_sha256", None)
    document["job"] = job


def _find_forbidden(config: JobConfig, bounds: Bounds) -> Iterator[str]:
    """Yield a sentence for each value in a valid job that the operator does not allow in posted jobs."""
    if config.job.runs_dir.resolve() != bounds.data_dir:
        yield f"job.runs_dir is the service's own to choose ({bounds.data_dir}); leave it out"
    if config.services.gateway_host != bounds.gateway_host:
        yield "services.gateway_host is the service's own to choose (--gateway-host); leave it out"
    # These settings import modules and start programs.
    settings = [f"services.{name}" for name in TASK_APP_SETTINGS if getattr(config.services, name)]
    for key in settings:
        yield (
            f"{key} is for jobs of `turnwise train`; for those of this service its operator sets "
            f"TURNWISE_{key.partition('.')[2].upper()} in the service's environment; leave it out"
        )
    for key, path in list_paths(config):
        if key == "job.trainer_plugins" or key in settings:  # set by the operator, or refused above
            continue
        roots = ", ".join(map(str, _roots(key, bounds)))
        if not may_name(key, path, bounds):
            yield f"{key} names a file outside of what posted jobs may read: {roots} (--allow-root)"
        elif (link := _find_link_out(path, key, bounds)) is not None:
            yield (
                f"{key} holds a link, {link.name!r}, that leads outside of what posted jobs may read: "
                f"{roots} (--allow-root)"
            )
    counts = {
        "services.gateways": config.services.gateways,
        "learner.nproc_per_node": config.learner.nproc_per_node,
    }
    for key, count in counts.items():
        if count > _MOST_PROCESSES:
            yield f"{key} is {count}; a posted job may have {_MOST_PROCESSES}, since each is a process"
    for url in config.services.task_url:
        if not_allowed := refuse_task_app(url, bounds):
            yield f"services.task_url {not_allowed}"
    yield from _foreign_cluster(config, bounds)
    name = config.model.name
    if name is not None and not any(fnmatchcase(name, pattern) for pattern in bounds.models):
        allowed = ", ".join(bounds.models) or "none"
        yield (
            "model.name names a model of the hub that posted jobs may not have fetched "
            f"(--allow-model: {allowed})"
        )
    yield from _foreign_keys(config.warmup, config.rollout_only, config.sinks, bounds)
    # Loading weights into a server could stop it for others, and to start a server is to run any program.
    if config.inference.engine == "vllm":
        yield (
            "inference.engine = 'vllm' is for jobs of `turnwise train`; a posted job may start and control "
            "no vLLM server"
        )
    for host in (*hosts_to_call(config.warmup), *hosts_of_fixed_policies(config.rollout_only)):
        if bounds.inference_hosts.isdisjoint({host.lower(), host.rpartition(":")[0].lower()}):
            yield (
                "the inference_url of warmup.policy_config or rollout_only names a server that posted jobs "
                "may not ask (--allow-inference-host)"
            )


def refuse_task_app(url: str, bounds: Bounds) -> str | None:
    """Return why the service's key may not be sent to a task app, even on loopback; None if it may."""
    if url.rstrip("/") in bounds.task_urls:
        return None
    allowed = ", ".join(sorted(bounds.task_urls)) or "none"
    return (
        "names a task app that the service's key may not be sent to "
        f"(TASK_URL or --allow-task-url: {allowed})"
    )


def _foreign_cluster(config: JobConfig, bounds: Bounds) -> Iterator[str]:
    """Yield a sentence if the job uses an external learner or a Ray cluster that the operator does not allow.

    The learner would be sent one of the operator's keys, and Ray would start processes.
    """
    if config.cluster is None or config.cluster.launcher == "local":
        return
    key, address = "learner.url", config.learner.url
    if config.cluster.launcher == "ray":
        key, address = "cluster.ray_address", config.cluster.ray_address
    if address not in bounds.clusters:
        allowed = ", ".join(sorted(bounds.clusters)) or "none"
        yield f"{key} is {address!r}, where posted jobs may start nothing (--allow-cluster: {allowed})"


def _foreign_keys(
    warmup: WarmupTable | None, fixed: Sequence[RolloutOnlyTable], sinks: SinksTable, bounds: Bounds
) -> Iterator[str]:
    """Yield a sentence for each of the operator's keys that the job would use without permission."""
    variables = [("warmup", warmup.api_key_env)] if warmup is not None else []
    variables += [("rollout_only", table.api_key_env) for table in fixed]
    for home, variable in variables:
        if variable is not None and variable not in bounds.key_variables:
            yield f"{home}.api_key_env names a variable that posted jobs may not read (--allow-key-variable)"
    wandb = sinks.wandb
    if wandb is not None and wandb.mode != "offline" and _WANDB_KEY not in bounds.key_variables:
        yield (
            f'sinks.wandb would use the service\'s account: take mode = "offline", or allow {_WANDB_KEY} '
            "(--allow-key-variable)"
        )
    if sinks.trackio is not None and sinks.trackio.space_id and _SPACE_KEY not in bounds.key_variables:
        yield (
            "sinks.trackio.space_id would use the service's account: leave it out, or allow "
            f"{_SPACE_KEY} (--allow-key-variable)"
        )


def may_name(key: str, path: Path, bounds: Bounds) -> bool:
    """Return whether `key` of a posted job may name this path. Code may not be in the data directory."""
    real = path.resolve()  # the target of links, which is the file that is read
    if key in CODE_PATHS and real.is_relative_to(bounds.data_dir):
        return False
    return any(real.is_relative_to(root) for root in _roots(key, bounds))


def _find_link_out(folder: Path, key: str, bounds: Bounds, depth: int = _FOLDERS) -> Path | None:
    """Return a link in a folder or its subfolders whose target the job may not read, or None."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink() and not may_name(key, path, bounds):
                    return path
                inside = depth and entry.is_dir() and _find_link_out(path, key, bounds, depth - 1)
                if inside:
                    return inside
    except OSError:  # a file, or a folder that the job cannot read either
        pass
    return None


def _roots(key: str, bounds: Bounds) -> tuple[Path, ...]:
    return bounds.roots if key in CODE_PATHS else (*bounds.roots, bounds.data_dir)


def _few(tags: Any) -> Any:
    if isinstance(tags, Mapping) and len(tags) > _MOST_TAGS:
        raise ValueError(f"{len(tags)} tags; at most {_MOST_TAGS}")
    return tags


# The number of tags is checked before their types.
Tags = Annotated[dict[str, str | int | float | bool], BeforeValidator(_few)]


def _tags(tags: Mapping[str, Any]) -> dict[str, str]:
    """Check tags and convert their values to text."""
    if len(tags) > _MOST_TAGS:
        raise JobError(f"{WHERE}: [tags] holds {len(tags)} tags; at most {_MOST_TAGS}")
    for name, value in tags.items():
        if isinstance(value, bool | int | float | str) and len(name) + len(str(value)) <= _LONGEST_TAG:
            continue
        raise JobError(
            f"{WHERE}: tags.{name[:40]} is no text, number or truth of at most {_LONGEST_TAG} characters"
        )
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in tags.items()
    }


_JSON = "application/json"
_FORM = "application/x-www-form-urlencoded"  # the default of curl -d
_TOML = frozenset({"", "application/toml", "application/x-toml", "application/octet-stream", _FORM})


class PostedJob(Body):
    """A job as JSON: its tables, or its TOML as one text."""

    config: dict[str, Any] | None = Field(default=None, description="the tables of the TOML")
    toml: str | None = Field(default=None, description="or the TOML itself")
    tags: Tags = Field(default_factory=dict, description="in addition to [tags]")

    @model_validator(mode="after")
    def _one_of_two(self) -> "PostedJob":
        if (self.config is None) == (self.toml is None):
            raise ValueError("exactly one of 'config' and 'toml' must be given")
        return self


class Finding(Body):
    """A problem in a job's text; `line` counts from 1 and is null where unknown."""

    severity: Literal["error", "warning"]
    text: str
    line: int | None = Field(default=None, ge=1)


class Checked(Body):
    """The findings in a job's text. `ok`: none of the findings is an error, so the job can be posted."""

    ok: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Resolution:
    name: str
    toml: str
    """The job with every default filled in."""
    tags: Mapping[str, str]
    warnings: tuple[str, ...]
    """Likely mistakes in the job."""


def resolve(
    content: bytes | Mapping[str, Any], media_type: str, tags: Mapping[str, Any], bounds: Bounds
) -> Resolution:
    """Parse and validate a posted job.

    `content` is a request's body with the Content-Type `media_type`, or the tables of a job. `tags` override
    the job's own tags of the same name.
    """
    if isinstance(content, bytes):
        content, own_tags = _read(content, media_type.partition(";")[0].strip().lower())
        tags = {**own_tags, **tags}
    job, all_tags = validate_job(content, bounds, tags)
    return Resolution(job.config.job.name, dump_job(job.config), all_tags, tuple(job.warnings))


def check(content: bytes, bounds: Bounds) -> Checked:
    """Check the TOML of a job as POST /jobs would, without storing or starting anything."""
    text = decode_body(content)
    try:
        document = parse_document(text)
    except JobError as error:
        cause, last = error.__cause__, text.count("\n", 0, -1) + 1
        line = min(cause.lineno, last) if isinstance(cause, tomli.TOMLDecodeError) else None
        sentence = str(error).removeprefix(f"{WHERE}: ")
        return Checked(ok=False, findings=(Finding(severity="error", text=sentence, line=line),))
    ok = True
    sentences: tuple[str, ...] = ()
    try:
        sentences = validate_job(document, bounds)[0].warnings
    except TrainerError as error:
        ok, lines_told = False, filter(None, str(error).splitlines())
        sentences = tuple(line.removeprefix(f"{WHERE}: ") for line in lines_told)
    lines = list_lines(text) if sentences else {}
    severity: Literal["error", "warning"] = "warning" if ok else "error"
    found = (Finding(severity=severity, text=one, line=find_line(one, lines)) for one in sentences)
    return Checked(ok=ok, findings=tuple(found))


_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*+(?:\.[A-Za-z0-9_-]++)*+")
# The most characters that list_lines parses, repetitions included. Further keys get no line number.
_MOST_CHARACTERS = 2 << 20


def find_line(message: str, lines: Mapping[str, int]) -> int | None:
    """Return the line of the first known key that a message names. For an unknown key, its table counts."""
    for dotted in _DOTTED.findall(message):
        name = dotted
        while name and name not in lines:
            name = name.rpartition(".")[0]
        if name:
            return lines[name]
    return None


def list_lines(text: str) -> dict[str, int]:
    """Return the first line of each dotted key and each table of a valid TOML text, counted from 1.

    Lines are joined until they parse as a statement: a header, or a key with its value. To save time, a
    further line is joined without parsing unless it can close a list, a table or a string.
    """
    lines: dict[str, int] = {}
    table, statement, begin, characters = "", "", 1, 0
    for number, row in enumerate(text.split("\n"), 1):
        statement += f"{row}\n"
        if number > begin and not any(mark in row for mark in ("]", "}", '"""', "'''")):
            continue
        characters += len(statement)
        if characters > _MOST_CHARACTERS:
            break
        try:
            names = [*_names(tomli.loads(statement))]
        except (ValueError, RecursionError):
            continue
        is_header = statement.lstrip().startswith("[")
        for name in names:
            lines.setdefault(name if is_header or not table else f"{table}.{name}", begin)
        if is_header:
            table = names[-1]
        statement, begin = "", number + 1
    return lines


def _names(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a document. A table comes before the keys in it."""
    for key, value in table.items():
        yield f"{prefix}{key}"
        inner = value[0] if value == [{}] else value  # a header [[…]]
        if isinstance(inner, Mapping):
            yield from _names(inner, f"{prefix}{key}.")


def decode_body(body: bytes) -> str:
    try:
        return decode_text(body)
    except ValueError as error:
        raise ApiError(str(error), where="body") from error


def _read(body: bytes, media_type: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Parse a request's body; return the tables of the job, and the tags that a JSON body adds."""
    if media_type == _JSON:
        try:
            job = PostedJob.model_validate(read_json(body))
        except ValidationError as error:
            finding = error.errors(include_url=False)[0]
            told = describe_fault(finding, finding["loc"], PostedJob.model_fields)
            raise ApiError(told, where="body") from error
        except ValueError as error:
            raise ApiError(str(error), where="body") from error
        tables = job.config if job.toml is None else parse_document(decode_body(job.toml.encode()))
        return tables or {}, job.tags
    if media_type not in _TOML and not media_type.startswith("text/"):
        raise UnknownMediaType(
            f"Content-Type is {media_type[:80]!r}; known: application/toml, text/plain, application/json",
            where="header Content-Type",
        )
    try:
        return parse_document(decode_body(body)), {}
    except JobError as error:
        if media_type != _FORM:
            raise
        raise JobError(error.detail, hint="curl -d drops line ends; send --data-binary @job.toml.") from error


def describe_fault(finding: Mapping[str, Any], path: Sequence[object], known: Collection[str]) -> str:
    """Describe a pydantic error at `path`. For an unknown key, suggest a similar one from `known`."""
    name = ".".join(map(str, path))[:80]
    if finding["type"] == "extra_forbidden":
        return f"{name!r} is not known here{did_you_mean(str(path[-1]), known) if known else ''}"
    message = finding["msg"].removeprefix("Value error, ")
    return f"{name}: {message}" if name else message
