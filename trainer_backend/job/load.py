"""Loads a job's TOML into a frozen JobConfig.

An error names the file and the key, and says what was found and what was probably meant.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard, get_args

import tomli_w
from pydantic import BaseModel, SecretStr, ValidationError

from shared_schemas.base import closest, did_you_mean
from shared_schemas.json_text import without_nulls
from trainer_backend.errors import JobError
from trainer_backend.job.foreign_keys import DROPPED, FOREIGN_TABLES, find_our_key, find_why_needless
from trainer_backend.job.layers import (
    REWARD_HOMES,
    REWARD_KEYS,
    Layer,
    Places,
    anchor,
    merge,
    read_layers,
    text_that_names_its_job,
    without,
)
from trainer_backend.job.plug_table import find_refused_keys, find_unread_tables, own_table, own_tables
from trainer_backend.job.rule import Finding
from trainer_backend.job.rules import check_rules, not_read_rules
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import table_model
from trainer_backend.operator_plugins import load_packages, load_plugins, refuse_changed
from trainer_backend.plugins import BOARDS, BUILT_IN, ESTIMATORS, LOSSES, READ_BY, refuse_unknown

# Maximum number of findings in one error. A finding is costly, because its key is compared with all keys.
MOST_FINDINGS = 20
_LONGEST_LINE = 4_000
# Maximum number of characters of a key, and of a value, in a finding.
_LONGEST_NAME, _LONGEST_VALUE = 100, 200


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A valid job, the warnings about it, and the places (files or --set) that its keys came from."""

    config: JobConfig
    warnings: tuple[str, ...]
    places: Places = field(compare=False)
    left_out: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The keys that were left out of the job, each with a warning. A key is left out if a later layer chooses
    an estimator, a loss or another plug-in that does not read the key."""


def load_job(
    paths: Path | Sequence[Path], overrides: Sequence[str] = (), *, runs_plugins: bool = True
) -> LoadedJob:
    """Read a job's files, apply the overrides, and validate the result.

    Args:
        paths: one TOML file or several; later files override earlier ones, as in `job.layers`.
        overrides: texts of the form `table.key=value`. The value is in TOML; a bare word counts as a string.
        runs_plugins: False: run none of the job's code. Then any name is accepted for an estimator, or for
            anything else that plug-ins can define, and the keys of an unknown name are not checked.

    Raises:
        JobError: the job is not valid.
    """
    document, places = merge(
        read_layers([paths] if isinstance(paths, Path) else paths), overrides, JobConfig.model_fields
    )
    anchor(document, Path())
    if isinstance(paths, Path) and (paths.parent / "run.json").exists():  # the stored job of a run
        document = without(document, DROPPED)
    return _parse(document, places, runs_plugins=runs_plugins)


def parse_job(
    document: Mapping[str, Any], *, where: str, overrides: Sequence[str] = (), runs_plugins: bool = True
) -> LoadedJob:
    """Validate a parsed TOML document as `load_job` does. Errors begin with `where`, the document's name."""
    return _parse(
        *merge([Layer(where, document)], overrides, JobConfig.model_fields), runs_plugins=runs_plugins
    )


def _validate(document: Mapping[str, Any], places: Places, *, runs_plugins: bool) -> JobConfig:
    """Build the config of a document. Each key is checked by itself; rules between keys are checked later."""
    tables = {name: value for name, value in document.items() if name not in FOREIGN_TABLES}
    nulls = [*_nulls_in_lists(tables, "")]
    if nulls:
        sentence = "is null, and a job is stored as TOML, which has no null in a list: leave it out"
        raise join_findings((f"{places.of(key)}: {place} {sentence}" for key, place in nulls), len(nulls))
    if runs_plugins:
        load_packages()
        tables = _with_plugins(tables, places)
    tables = _with_values_of_papers(_gather_reward_switches(tables, places), places)
    tables = _with_own_tables(tables)
    services = tables.get("services")
    if isinstance(services, dict) and isinstance(services.get("task_url"), str):
        tables["services"] = {**services, "task_url": [services["task_url"]]}
    try:
        return JobConfig.model_validate(tables, context={"looks_only": not runs_plugins})
    except ValidationError as error:
        findings = [*_findings(error, tables)]
        lines = (
            f"{places.of(*_homes_of_key('.'.join(path)))}: {_explain_one(item, path, JobConfig)}"
            for item, path in findings
        )
        raise join_findings(lines, len(findings)) from error


def _parse(document: Mapping[str, Any], places: Places, *, runs_plugins: bool) -> LoadedJob:
    config = _validate(document, places, runs_plugins=runs_plugins)
    warnings = [*places.idle]
    for name in sorted(FOREIGN_TABLES.keys() & document.keys()):
        ours = f"; here it is {FOREIGN_TABLES[name]}" if FOREIGN_TABLES[name] else ""
        warnings.append(f"[{name}] is for other backends and is not read{ours}")
    # Whether a name in the job may be defined by code that was not run: the job's own files, or a package.
    is_foreign = not runs_plugins and (
        bool(config.job.trainer_plugins)
        or any(name not in BUILT_IN[key] for key, name in _names_in(config, BUILT_IN))
    )
    unknown = []
    for key, name in () if is_foreign else _names_in(config, BOARDS):
        try:
            refuse_unknown(key, name)
        except JobError as error:
            unknown.append(f"{places.of(key)}: {error}")
    knows_plugs = not (is_foreign or unknown)
    homes = {name: getattr(config, name) for name in READ_BY.values()} if knows_plugs else {}
    own = [*find_unread_tables(homes)] if knows_plugs else []
    unread = [
        (board, key, sentence)
        for rule in (not_read_rules(config) if knows_plugs else ())
        for (key, board), sentence, _ in rule.findings(config)
    ]
    left_out = {
        key: f"{places.of(key)}: {sentence}. It is left out, since {places.of(board)} comes later"
        for board, key, sentence in (*unread, *own)
        if places.is_above(board, key)
    }
    if left_out:
        rest = _parse(without(document, left_out), places.without(left_out), runs_plugins=runs_plugins)
        return replace(
            rest, warnings=(*left_out.values(), *rest.warnings), left_out={**left_out, **rest.left_out}
        )
    own_keys = find_refused_keys(homes) if knows_plugs else ()
    found = check_rules(config, "refusal", "not read", knows_plugs=knows_plugs)
    faults = [
        *unknown,
        *(f"{places.of(key)}: {sentence}" for key, sentence in (*own_keys, *(each[1:] for each in own))),
        *(f"{_locate(finding, places)}: {finding.sentence}" for finding in found),
    ]
    if faults:
        raise join_findings(faults, len(faults))
    told = (finding.sentence for finding in check_rules(config, "advice", knows_plugs=knows_plugs))
    return LoadedJob(config, (*warnings, *told), places)


def text_to_send(paths: Sequence[Path], overrides: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the TOML text to send to a trainer service, and warnings, for example about omitted keys.

    A single file that sets job.name is sent unchanged. Otherwise the files and overrides are merged into one
    document. Paths stay as they are, unlike in `load_job`, because they are paths on the service's machine.
    Only the service checks the job, because its version may differ.
    """
    if len(paths) == 1 and not overrides and (text := text_that_names_its_job(paths[0])) is not None:
        return text, ()
    document, places = merge(read_layers(paths, anchors_paths=False), overrides, JobConfig.model_fields)
    try:
        left_out = _parse(document, places, runs_plugins=False).left_out
    except JobError:
        left_out = {}  # the service reports what is wrong
    return tomli_w.dumps(without(document, left_out)), (*places.idle, *left_out.values())


def join_findings(lines: Iterable[str], count: int) -> JobError:
    """Return one error that shows the first MOST_FINDINGS lines and says how many more there are.

    `count` is the number of all lines. If `lines` is a generator, only the lines that are shown are read from
    it, because each line is costly to compute.
    """
    shown = [line[:_LONGEST_LINE] for line in islice(lines, MOST_FINDINGS)]
    if count > len(shown):
        shown.append(f"and {count - len(shown)} more, which are not told")
    return JobError("\n".join(shown))


def dump_job(config: JobConfig) -> str:
    """Return the resolved job as TOML, without secrets. `load_job` reads the text back to an equal config."""
    tables = config.model_dump(mode="json", exclude={"services": {"task_api_key"}})
    if not config.rollout_only:
        del tables["rollout_only"]  # an empty list of tables would confuse readers
    return tomli_w.dumps(without_nulls(tables))


def _nulls_in_lists(
    value: Any, key: str, place: str = "", *, in_list: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the key and the exact place, such as `a.b` and `a.b[1].c[0]`, of each None inside a list.

    TOML cannot store such a None. A None outside of lists is not reported, because its key counts as absent.
    """
    if value is None and in_list:
        yield key, place
    elif isinstance(value, Mapping):
        for name, item in value.items():
            inner = f"{place}.{str(name)[:_LONGEST_NAME]}".lstrip(".")
            yield from _nulls_in_lists(item, key if "[" in place else inner, inner)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _nulls_in_lists(item, key, f"{place}[{index}]", in_list=True)


def _with_plugins(tables: Mapping[str, Any], places: Places) -> dict[str, Any]:
    """Run the files of job.trainer_plugins, so that the job can use what they define.

    Returns the tables with the SHA-256 of these files in [job].

    Raises:
        JobError: a file cannot be loaded, or has changed since the run began. In the second case no file has
            been run.
    """
    job = read_table(tables, "job", places)
    files, known = job.get("trainer_plugins"), job.get("trainer_plugins_sha256", [])
    files = [files] if isinstance(files, str) else files
    files = [] if files is None else files
    if not (_are_texts(files) and _are_texts(known)):
        return dict(tables)  # the schema reports the wrong type
    place, paths = places.of("job.trainer_plugins"), [Path(file) for file in files]
    try:
        # This comes before any file runs: a stored job may run only the code with which its run began.
        refuse_changed(paths, known, option="job.trainer_plugins", value=files)
        digests = load_plugins(paths)
    except JobError as error:
        raise JobError(f"{place}: {error}") from error
    if not files:
        return dict(tables)
    return {**tables, "job": {**job, "trainer_plugins": files, "trainer_plugins_sha256": digests}}


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _names_in(config: JobConfig, boards: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield those keys in `boards`, such as `algorithm.loss`, that the job has, with their values."""
    for key in boards:
        table, _, field = key.partition(".")
        name = getattr(getattr(config, table), field, None)  # a table may be absent
        if name is not None:
            yield key, name


def _homes_of_key(key: str) -> list[str]:
    """Return the dotted keys under which a document may set this key; a step-reward switch has three."""
    table, _, name = key.partition(".")
    is_switch = table == "training" and name in REWARD_KEYS
    return [f"{home}.{name}" for home in REWARD_HOMES] if is_switch else [key]


def _locate(finding: Finding, places: Places) -> str:
    """Return the places of the keys that a finding names, as one text for an error.

    If the finding says that its first key has no effect, only the place of this key is returned.
    """
    if finding.kind == "not read":
        return places.of(*_homes_of_key(finding.keys[0]))
    named = [key for key in finding.keys if key in finding.sentence] or finding.keys
    return places.of_all(home for key in named for home in _homes_of_key(key))


def _gather_reward_switches(tables: Mapping[str, Any], places: Places) -> dict[str, Any]:
    """Move the step-reward switches into [training] from the three tables that may contain them.

    Raises JobError if two tables give a switch different values, or if [training.rewards] has another key.

    Source: DESIGN.md 4.15.
    """
    result = dict(tables)
    training = read_table(result, "training", places)
    rewards = read_table(training, "rewards", places, inside="training.")
    training.pop("rewards", None)
    rollout = read_table(result, "rollout", places)
    homes = dict(zip(REWARD_HOMES, (training, rewards, rollout), strict=True))
    unknown = sorted(rewards.keys() - set(REWARD_KEYS))
    if unknown:
        key = f"training.rewards.{unknown[0]}"
        reason = f"{key[:_LONGEST_NAME]} is not a key{did_you_mean(unknown[0], REWARD_KEYS)}"
        raise JobError(f"{places.of(key)}: {reason}")
    for key in REWARD_KEYS:
        values_by_home = {home: table[key] for home, table in homes.items() if key in table}
        if len(set(map(repr, values_by_home.values()))) > 1:
            reason = ", ".join(f"{home}.{key} = {_shown(value)}" for home, value in values_by_home.items())
            place = places.of_all(f"{home}.{key}" for home in values_by_home)
            raise JobError(f"{place}: {key} is given twice with different values: {reason}")
        rollout.pop(key, None)
        if values_by_home:
            training[key] = next(iter(values_by_home.values()))
    if training or "training" in result:
        result["training"] = training
    if "rollout" in result:
        result["rollout"] = rollout
    return result


# Keys that a paper sets, each with a boolean key of the same table without which the key has no effect.
_SWITCHES = {"training.refill_rounds": "skip_flat_groups"}


def _with_values_of_papers(tables: Mapping[str, Any], places: Places) -> dict[str, Any]:
    """Fill in keys that the job omits with the values from the papers of its estimator and its loss.

    So the resolved job shows every value that takes effect. If a key has no effect because the job sets its
    boolean key in `_SWITCHES` to false, it is not filled in. Wrong tables and names are skipped here, because
    the validation reports them later.

    Raises:
        JobError: the two papers give different values to a key that the job omits.
    """
    result, algorithm = dict(tables), tables.get("algorithm")
    filled: dict[str, tuple[str, float | str]] = {}
    for board, plugs in (("advantage", ESTIMATORS), ("loss", LOSSES)):
        name = algorithm.get(board) if isinstance(algorithm, dict) else None
        plug = plugs.get(name) if isinstance(name, str) else None
        for dotted, value in plug.values.items() if plug is not None else ():
            table, _, key = dotted.partition(".")
            home = result.get(table, {})
            if isinstance(home, dict) and home.get(_SWITCHES.get(dotted)) is False:
                continue
            if dotted in filled and filled[dotted][1] != value:
                other, own = filled[dotted]
                raise JobError(
                    f"{places.of(f'algorithm.{board}')}: {dotted} is {value!r} in the paper of "
                    f"algorithm.{board} = {name!r}, and {own!r} in that of {other}; set {dotted}"
                )
            if isinstance(home, dict) and key not in home:
                result[table] = {key: value, **home}
                filled[dotted] = f"algorithm.{board} = {name!r}", value
    return result


def _with_own_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Add an empty table `[TABLE.NAME]` for each chosen plug-in NAME that has keys of its own.

    So the resolved job shows these keys with their defaults.
    """
    result = dict(tables)
    for board, home in READ_BY.items():
        table, _, key = board.partition(".")
        choice = result.get(table, {})
        model, field = table_model(JobConfig.model_fields[home]), JobConfig.model_fields[table]
        usual = table_model(field).model_fields[key].default
        name = choice.get(key, usual) if isinstance(choice, dict) else None
        there = result.get(home, {} if JobConfig.model_fields[home].default is not None else None)
        if isinstance(name, str) and isinstance(there, dict) and own_table(model, name) is not None:
            if name in model.model_fields:
                raise JobError(
                    f"{board} = {name!r} has keys of its own, and [{home}] has a key of that name: rename it"
                )
            result[home] = {name: {}, **there}
    return result


def read_table(tables: Mapping[str, Any], name: str, places: Places, *, inside: str = "") -> dict[str, Any]:
    """Return a copy of a table, or an empty dict if the table is absent.

    Raises JobError if the value is not a table. The error puts `inside`, as in `training.`, before its name.
    """
    table = tables.get(name, {})
    if not isinstance(table, dict):
        key = f"{inside}{name}"
        raise JobError(f"{places.of(key)}: {key} is {_shown(table)}, but it is a table; write [{key}]")
    return dict(table)


def _findings(error: ValidationError, document: Mapping[str, Any]) -> Iterator[tuple[Any, list[str]]]:
    """Yield each error item of pydantic with the path of its key in the TOML file.

    A table of another system, such as verl's `actor_rollout_ref`, yields one finding for each of its keys, so
    that each key gets its own suggestion.
    """
    items = error.errors(include_url=False, include_context=True)
    # Unknown keys come before the missing ones that were probably meant.
    for item in sorted(items, key=lambda item: item["type"] == "missing"):
        path = _document_path(item["loc"], document)
        keys = [path]
        if item["type"] == "extra_forbidden" and isinstance(item["input"], dict):
            inside = [*_keys_in(path, item["input"])]
            is_elsewhere = any(_other_names(key) or find_why_needless(".".join(key)) for key in inside)
            keys = inside if is_elsewhere else keys
        yield from ((item, key) for key in keys)


def _keys_in(path: list[str], table: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the path of each key in a table, at any depth.

    If a table is empty, or if `find_our_key` finds a name of ours for it, yield the path of the table itself.
    """
    if not table or find_our_key(".".join(path)):
        yield path
        return
    for key, value in table.items():
        yield from _keys_in([*path, key], value) if isinstance(value, dict) else [[*path, key]]


def _other_names(path: Sequence[str]) -> list[str]:
    """Return our key that an unknown key probably stands for, as a list with at most one item.

    Either the unknown key ends with this key of ours, or it is another system's key for the same setting.
    """
    for start in range(1, len(path) - 1):
        home = _model_at(JobConfig, path[start:-1])
        if home is not None and path[-1] in home.model_fields:
            return [".".join(path[start:])]
    ours = find_our_key(".".join(path))
    if ours is None:
        return []
    home = _model_at(JobConfig, path[:-1]) if len(path) > 1 else None
    key = ours.rpartition(".")[2]
    if home is not None and key in home.model_fields:
        return [".".join([*path[:-1], key])]
    return [f"[{ours}]" if ours in JobConfig.model_fields else ours]


def _find_homes(name: str) -> list[str]:
    """Return `[name]` if a job has a table of that name, and each dotted key that ends with the name."""
    tables = {table: _model_at(JobConfig, [table]) for table in JobConfig.model_fields}
    models = {table: model for table, model in tables.items() if model}
    homes = [f"{table}.{name}" for table, model in models.items() if name in model.model_fields]
    homes += [
        f"{table}.{plug}.{name}"
        for table, model in models.items()
        for plug, _, own in own_tables(model)
        if name in own
    ]
    return [f"[{name}]"] * (name in tables) + homes


def _explain_unknown(path: Sequence[str], dotted: str, keys: Collection[str]) -> str:
    """Return a text that says what an unknown key may have meant, and which keys its table has."""
    others = _other_names(path)
    if why := find_why_needless(dotted):
        return f"{dotted} is not a key, and needs none: {why}; leave it out"
    if not others:
        others, close = _find_homes(path[-1]), closest(path[-1], keys)
        others.sort(key=lambda home: home.partition(".")[0] != path[0])
        if close and (len(path) > 1 or not others):  # a top-level key that a table has is no misspelt table
            others = [repr(close), *others]
    known = f"nown: {', '.join(sorted(keys))}" if keys else ""
    if others:
        return f"{dotted} is not a key. Did you mean {' or '.join(others)}?{known and f' K{known}'}"
    return f"{dotted} is not a key{f'; k{known}' if known else ', and no key here is like it: leave it out'}"


def _document_path(place: Sequence[int | str], document: Any) -> list[str]:
    """Return the path in the TOML document for the place (`loc`) of a pydantic error.

    pydantic sees a single [rollout_only] as a list with one table. Its index is left out, as in the TOML.
    """
    path = []
    for part in place:
        if isinstance(part, int) and isinstance(document, dict):
            continue
        path.append(str(part))
        inside = isinstance(document, dict) or (isinstance(document, list) and isinstance(part, int))
        document = document[part] if inside and (isinstance(part, int) or part in document) else None
    return path


def _explain_one(finding: Any, path: Sequence[str], model: type[BaseModel]) -> str:
    dotted = ".".join(part[:_LONGEST_NAME] for part in path) or "the job"
    kind, value = finding["type"], finding["input"]
    if kind == "extra_forbidden":
        table = _model_at(model, path[:-1])
        keys = [] if table is None else [*table.model_fields, *(plug for plug, _, _ in own_tables(table))]
        return _explain_unknown(path, dotted, keys)
    if kind == "missing":
        return f"{dotted} is required"
    if kind == "model_type" and not isinstance(value, dict):
        return f"{dotted} is {_shown(value)}, but it is a table; write [{dotted}]"
    if kind == "literal_error":
        allowed = finding["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return f"{dotted} is {_shown(value)}{did_you_mean(str(value), allowed)}"
    message = finding["msg"].removeprefix("Value error, ")
    if isinstance(value, dict | SecretStr) or _is_secret(model, path):
        return f"{dotted}: {message}" if path else message
    return f"{dotted} is {_shown(value)}: {message}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _is_secret(model: type[BaseModel], path: Sequence[str]) -> bool:
    """Return whether the key may contain a secret.

    Errors about such a key leave its value out, even if the value has the wrong type.
    """
    table = _model_at(model, path[:-1])
    field = table.model_fields.get(path[-1]) if table and path else None
    return field is not None and (
        not field.repr or SecretStr in (field.annotation, *get_args(field.annotation))
    )


def _model_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """Return the class of the table at `path` below `model`, or None if there is no such table."""
    for name in path:
        if name.isdecimal():  # an index in a list of tables
            continue
        field = model.model_fields.get(name)
        if field is None:
            own = own_table(model, name)
            if own is None:
                return None
            model = own
            continue
        options = (field.annotation, *get_args(field.annotation))
        models = [item for item in options if isinstance(item, type) and issubclass(item, BaseModel)]
        if not models:
            return None
        model = models[0]
    return model
