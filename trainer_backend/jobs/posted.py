"""Posted jobs: their JSON or TOML is read, validated, and held to the bounds that the operator has set.

Whoever may post jobs may train; he may not read the operator's files, run code of his own, send the
operator's keys to a host of his choice, or listen where he likes. Errors never repeat a key.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from shared_schemas.base import Body, did_you_mean
from shared_schemas.json_text import NUL, read_json
from trainer_backend.collect.endpoints import hosts_of_fixed_policies, hosts_to_call
from trainer_backend.errors import ApiError, JobError, TrainerError, UnknownMediaType
from trainer_backend.job.layers import anchor
from trainer_backend.job.load import LoadedJob, dump_job, joined_findings, parse_job
from trainer_backend.job.schema import JobConfig, JobTable
from trainer_backend.job.tables import ServicesTable
from trainer_backend.jobs.settings import Bounds
from trainer_backend.rundir.new_job import refuse_what_is_missing

# Which keys a TOML text has, on which lines: read once, in time linear in the text. Pure.
#
# It is read before it is parsed, as the text of anybody: whatever is in it, no TOML at all, this reads on.
# What
# is a dotted key of a thousand parts to a parser is a thousand tables with their books.

_BLANK = re.compile(r"(?:[ \t\r\n]++|#[^\n]*+)*+")
# A part of a dotted key. All repetitions are possessive: none is tried again with less.
_PART = re.compile(r"[ \t]*+(?:([A-Za-z0-9_-]++)|\"((?:[^\"\\\n]++|\\.)*+)\"|'([^'\n]*+)')[ \t]*+")
# What divides a value, and the strings and comments in it, which nothing divides.
_MARK = re.compile(
    r'"""(?:[^"\\]++|\\.|"(?!""))*+(?:"{3,5}|\\?\Z)'
    r"|'''(?:[^']++|'(?!''))*+(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]++|\\[^\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+|[\n.,=\[\]{}]",
    re.DOTALL,
)
_AT_LINE = re.compile(r"\(at line (\d+), column \d+\)|\(at end of document\)")
_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*+(?:\.[A-Za-z0-9_-]++)*+")


# The most keys and list items of a document; in a text their dividers are counted, a little more.
MOST_VALUES, _DIVIDERS = 50_000, ".,=[{\n"


def is_too_much(text: str) -> bool:
    """Whether a text may hold more than any job does; then it is not read."""
    return sum(map(text.count, _DIVIDERS)) > MOST_VALUES


@dataclass(frozen=True, slots=True)
class Statement:
    """The header of a table, or a key with its value.

    Attributes:
        line: from 1.
        name: dotted, of a key with that of its table before it.
        depth: parts of its own key, or of the longest in its value.
    """

    line: int
    name: str
    depth: int


def statements(text: str) -> Iterator[Statement]:
    """In the order of the text."""
    table, line, counted, place = "", 1, 0, 0
    while (place := _end(_BLANK, text, place)) < len(text):
        line += text.count("\n", counted, place)
        counted = place
        header = text[place] == "["
        parts, place = _key(text, place + (2 if text.startswith("[[", place) else header))
        place, depth = _rest(text, place)
        name = ".".join(parts)
        if header:
            table = name
        elif table:
            name = f"{table}.{name}"
        yield Statement(line, name, max(depth, len(parts)))


def lines_of(text: str) -> dict[str, int]:
    """Map each dotted key and each table to its first line, from 1; empty for a text that is too long."""
    lines: dict[str, int] = {}
    for statement in () if is_too_much(text) else statements(text):
        if statement.name:
            lines.setdefault(statement.name, statement.line)
    return lines


def line_of(message: str, lines: Mapping[str, int], text: str) -> int | None:
    """Return the line that a message is about: the line it names, or the line of the first key it names.

    A missing key, or a key inside a value (an inline table), gets the line of the table or value around it.
    """
    if match := _AT_LINE.search(message):
        return int(match.group(1)) if match.group(1) else max(1, text.count("\n") + (text[-1:] != "\n"))
    for dotted in _DOTTED.findall(message):
        name = dotted
        while name and name not in lines:
            name = name.rpartition(".")[0]
        if name:
            return lines[name]
    return None


def _key(text: str, place: int) -> tuple[list[str], int]:
    """The parts of the dotted key that begins there, and where it ends."""
    parts: list[str] = []
    while match := _PART.match(text, place):
        parts.append(match[match.lastindex or 0])
        place = match.end()
        if not text.startswith(".", place):
            break
        place += 1
    return parts, place


def _rest(text: str, place: int) -> tuple[int, int]:
    """Where a statement ends, and how many parts the longest key in its value has."""
    inside = dots = most_dots = 0
    for match in _MARK.finditer(text, place):
        mark = match[0]
        if mark == ".":
            dots += 1
            most_dots = max(most_dots, dots)
        elif mark[0] in "\"'#":
            continue
        elif mark == "\n" and not inside:
            return match.end(), most_dots + 1
        else:
            dots = 0
            inside = max(0, inside + (mark in "[{") - (mark in "]}"))
    return len(text), most_dots + 1


def _end(pattern: re.Pattern[str], text: str, place: int) -> int:
    match = pattern.match(text, place)
    return match.end() if match else place


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
    """Refuse a document that is too deep or too large, or has too long a number, before anything walks it.

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

    A relative path starts at the first root that has such a file, or else at the service's own folder.

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
    refuse_what_is_missing(loaded.config, loaded.places)
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
    """Yield a finding for each of the operator's keys and each foreign host that the job would use."""
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


# Tags are counted before each one is checked.
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


# The text may come from anybody, so it is read in a process that can be ended (check_process.py).

_JSON = "application/json"
_TOML = frozenset({"", "application/toml", "application/x-toml", "application/octet-stream"})
# What curl -d sends when nobody says otherwise.
_FORM = "application/x-www-form-urlencoded"


class PostedJob(Body):
    """A job as JSON: its tables, or its TOML as one text."""

    config: dict[str, Any] | None = Field(default=None, description="the tables of the TOML")
    toml: str | None = Field(default=None, description="or the TOML itself")
    tags: Tags = Field(default_factory=dict, description="beside [tags]")

    @model_validator(mode="after")
    def _one_of_two(self) -> "PostedJob":
        if (self.config is None) == (self.toml is None):
            raise ValueError("exactly one of 'config' and 'toml' must be given")
        return self


class Finding(Body):
    """`line` from 1, where it is known."""

    severity: Literal["error", "warning"]
    text: str
    line: int | None = Field(default=None, ge=1)


class Checked(Body):
    """What was found in a job's text; without errors (`ok`) it can be posted."""

    ok: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Resolution:
    """A job that may run.

    Attributes:
        toml: with every default filled in.
        warnings: what may still be wrong with it.
    """

    name: str
    toml: str
    tags: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


def resolved(
    content: bytes | Mapping[str, Any], media_type: str, tags: Mapping[str, Any], bounds: Bounds
) -> Resolution:
    """
    Args:
        content: a body as it came, or the tables of a job.
        media_type: of a body: its Content-Type header, or nothing.
        tags: beside those of the job.

    Raises:
        JobError: no TOML, a job that is wrong, or one that names what it may not.
        ApiError: no JSON of the documented shape.
        UnknownMediaType: neither of the two.
    """
    if isinstance(content, bytes):
        tables, own_tags = _read(content, media_type.partition(";")[0].strip().lower())
        posted = posted_job(tables, bounds, {**own_tags, **tags})
    else:
        posted = posted_job(content, bounds, tags)
    config = posted.loaded.config
    return Resolution(
        config.job.name, dump_job(config), tuple(posted.tags.items()), tuple(posted.loaded.warnings)
    )


def checked(content: bytes, bounds: Bounds) -> Checked:
    """Read the TOML of a job as POST /jobs would; nothing is stored or started.

    Raises:
        ApiError: it is no text.
    """
    text = text_of(content)
    try:
        warnings = posted_job(document_of(text), bounds).loaded.warnings
    except TrainerError as error:
        lines = [line.removeprefix(f"{WHERE}: ") for line in str(error).splitlines()]
        return Checked(ok=False, findings=_findings("error", [line for line in lines if line], text))
    return Checked(ok=True, findings=_findings("warning", warnings, text))


def _findings(
    severity: Literal["error", "warning"], sentences: Sequence[str], text: str
) -> tuple[Finding, ...]:
    lines = lines_of(text)
    return tuple(
        Finding(severity=severity, text=sentence, line=line_of(sentence, lines, text))
        for sentence in sentences
    )


def text_of(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is no UTF-8 text: byte {error.start}", where="body") from error


def _read(body: bytes, media_type: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The tables of a job, and the tags that came beside them."""
    if media_type == _JSON:
        posted = _json_body(body)
        document = document_of(posted.toml) if posted.toml is not None else posted.config
        return document or {}, posted.tags
    if media_type in _TOML or media_type.startswith("text/"):
        return document_of(text_of(body)), {}
    if media_type == _FORM:
        try:
            return document_of(text_of(body)), {}
        except JobError as error:
            raise JobError(
                error.detail, hint="curl -d drops line ends; send --data-binary @job.toml."
            ) from error
    raise UnknownMediaType(
        f"Content-Type is {media_type[:80]!r}; known: application/toml, text/plain, application/json",
        where="header Content-Type",
    )


def _json_body(body: bytes) -> PostedJob:
    """
    Raises:
        ApiError: with the key that is wrong.
    """
    try:
        return PostedJob.model_validate(read_json(body))
    except ValueError as error:
        raise ApiError(_told(error), where="body") from error


def _told(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    finding = error.errors(include_url=False)[0]
    name = ".".join(map(str, finding["loc"]))[:80]
    if finding["type"] == "extra_forbidden":
        return f"{name!r} is not known here{did_you_mean(name, PostedJob.model_fields)}"
    message = finding["msg"].removeprefix("Value error, ")
    return f"{name}: {message}" if name else message
