"""Writes the files of `turnwise init` and `turnwise new env`, from the job's schema and templates."""

import ast
import keyword
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import tomli
import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from service_kit.plugin_file import find_entry_points
from shared_schemas.base import did_you_mean
from shared_schemas.rewards import StepRewardKeys
from trainer_backend.core.presets import PRESETS
from trainer_backend.errors import JobError
from trainer_backend.job.docs import alternatives, meaning, quoted
from trainer_backend.job.environments import environment_names
from trainer_backend.job.load import LoadedJob, load_job, parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import table_model
from trainer_backend.rundir.files import write_errors
from trainer_backend.terminal.environment_jobs import JOBS, Values, environment_job, union

# The keys that a new job shows, by table. A table that is not listed here shows every key.
COMMON: Mapping[str, tuple[str, ...]] = {
    "services": ("task_url", "task_plugins", "iteration_timeout_s"),
    "inference": ("max_running", "max_model_len"),
    "rollout": (
        "env_name", "env_config", "policy_config", "max_turns", "episodes_per_batch",
        "max_concurrent_rollouts", "seeds", "temperature", "max_tokens",
    ),
    "rollout_only": ("model_path", "temperature", "objective"),
    "rollout_allocation_schedule": ("alpha",),
    "data": ("path", "evaluation_split", "held_out_share", "interaction"),
    "training": (
        "iterations", "group_size", "learning_rate", "learning_rate_schedule", "learning_rate_rise",
        "learning_rate_final", "update_passes", "batch_decisions", "row_tokens", "micro_batch_tokens",
        "target_kl", "skip_flat_groups", "kl_coef", "entropy_coef", "checkpoint_every",
        *StepRewardKeys.model_fields,
    ),
}  # fmt: skip


_LONGEST_ENV = 100  # maximum number of characters of a refused name in a message


@dataclass(frozen=True, slots=True)
class Choices:
    """The user's choices for a new job: an environment, and a preset or a model (a folder, or a name)."""

    env: str = "crafter"
    preset: str | None = None
    model: str | None = None

    def values(self) -> Values:
        """Return the values that the job file sets, by table and key."""
        if self.preset and self.model:
            raise JobError(f"turnwise init: give --preset {self.preset} or --model {self.model}, not both")
        _refuse_unknown_environment(self.env)
        job = environment_job(self.env)
        if self.model:
            return union(_named(self.env), job.common, job.trained, job.of_files, _for_a_model(self.model))
        if job.fresh is None:
            raise JobError(
                f"turnwise init: no policy shows a fresh small model how to answer {self.env!r}; give a "
                "trained one, such as --model Qwen/Qwen3-0.6B"
            )
        model = {"model": {"preset": self.preset or "tiny-0.3m"}}
        return union(_named(self.env), job.common, job.fresh, job.of_files, model)


def _refuse_unknown_environment(env: str) -> None:
    """Raise JobError if an environment is not installed here and has no known prefix such as `gymnasium:`."""
    policies = find_entry_points("turnwise.policies").names
    teachers = {name.removesuffix("_teacher") for name in policies if name.endswith("_teacher")}
    known = {*JOBS, *environment_names(), *teachers}
    prefix, colon, rest = env.partition(":")
    kind = prefix + colon
    if (kind if rest else env) in known and not env.endswith(":"):
        return
    if colon and kind in known:
        raise JobError(f"turnwise init: --env is {env!r}; after the colon stands which one")
    # `gym:` is too different from `gymnasium:` for `did_you_mean`.
    begun = (name for name in sorted(known) if prefix and name.startswith(prefix.lower()))
    raise JobError(
        f"turnwise init: --env is {env[:_LONGEST_ENV]!r}{did_you_mean(next(begun, kind.lower()), known)}",
        hint="For one that only a task app has, write the job of another and set rollout.env_name",
    )


def _named(env: str) -> Values:
    """Return values of a job: the environment's name, and a name for the job that is made from it."""
    # gymnasium:ID and mcp:URL have characters that are not allowed in a run's name.
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", env) if ":" in env else env
    return {"job": {"name": name}, "rollout": {"env_name": env}}


def _for_a_model(model: str) -> Values:
    """Return values for a trained model, which reads and writes long texts and needs a low learning rate."""
    return {
        "model": {"path" if Path(model).is_dir() else "name": model},
        "inference": {"max_model_len": 8192, "threads": _cores()},
        "rollout": {"max_tokens": 512},
        "training": {
            "learning_rate": 1e-6, "row_tokens": 8192, "micro_batch_tokens": 8192, "threads": _cores(),
        },
    }  # fmt: skip


def _cores() -> int:
    """Return the number of usable cores here. The job contains this number, since results depend on it."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 256)


# The template of each file of the folder.
FILES = {
    "src/{name}/__init__.py": "environment.py.template",
    "test_{name}.py": "test.py.template",
    "job.toml": "job.toml.template",
    "pyproject.toml": "pyproject.toml.template",
}


def write_environment(name: str, parent: Path) -> list[Path]:
    """Write a package `parent/name` with a new environment; return its files in reading order."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name) or keyword.iskeyword(name):
        close = re.sub(r"\W+", "_", name.lower()).strip("_0123456789")
        is_name = close and close != name and not keyword.iskeyword(close)
        raise JobError(
            f"turnwise new env: {name!r} is no name for an environment; allowed are small letters, digits "
            f"and _, a letter first{f'. Did you mean {close!r}?' if is_name else ''}"
        )
    folder = parent / name
    if folder.exists():
        raise JobError(f"turnwise new env: {folder} is there already; nothing was written")
    _refuse_taken_name(name)
    texts = dict(_texts(name))
    for file, text in texts.items():
        if file.endswith(".py"):
            _refuse_clash(name, file, text)
    with write_errors(folder):
        return [_write(folder / file, text) for file, text in texts.items()]


def _refuse_taken_name(name: str) -> None:
    if name in environment_names():
        raise JobError(
            f"turnwise new env: {name!r} is an environment of Turnwise or of an installed package; "
            "choose another name"
        )
    if find_spec(name) is not None:
        raise JobError(
            f"turnwise new env: there is a module {name!r} already, and Python finds only one of that name"
        )


def _refuse_clash(name: str, file: str, text: str) -> None:
    """Raise JobError if the class of this name would hide an import of the file, as `body` hides `Body`."""
    try:
        bindings = Counter(_bindings(ast.parse(text)))
    except SyntaxError as error:  # `none` makes the class None
        raise JobError(f"turnwise new env: {name!r} makes a class that Python does not allow") from error
    twice = [binding for binding, count in bindings.items() if count > 1]
    if twice:
        raise JobError(
            f"turnwise new env: {name!r} makes the class {twice[0]}, and {file} uses this name already; "
            "choose another name"
        )


def _bindings(module: ast.Module) -> Iterator[str]:
    """Yield the names of a file's imports, assignments and classes."""
    for statement in module.body:
        match statement:
            case ast.Import(names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.Assign(targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.ClassDef(name):
                yield name


def _texts(name: str) -> Iterator[tuple[str, str]]:
    words = name.split("_")
    title = " ".join(words).capitalize()
    names = {"name": name, "Class": "".join(map(str.capitalize, words)), "title": title}
    folder = files("trainer_backend.terminal").joinpath("new_environment")
    for file, template in FILES.items():
        text = folder.joinpath(template).read_text(encoding="utf-8")
        yield file.format(name=name), Template(text).substitute(names)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


_WIDTH = 100
_HEAD = """\
# A job of Turnwise, as `turnwise init` writes it. A key behind # has its default; to set it, take the # away.
# `turnwise check FILE --all` prints it with every default; docs/configuration.md describes the other keys.
"""


def job_text(values: Values) -> str:
    """Return the text of a job that sets `values`; other common keys are commented out."""
    return _HEAD + "".join(_table(name, field, values) for name, field in JobConfig.model_fields.items())


def _table(name: str, field: FieldInfo, values: Values) -> str:
    model, values_here = table_model(field), values.get(name, {})
    keys = [
        key for key in model.model_fields if key in values_here or key in COMMON.get(name, model.model_fields)
    ]
    # An empty table differs from an absent one if the default is None, so its header is commented out.
    header = f"[{name}]" if values_here or field.default not in (None, ()) else f"#[{name}]"
    lines = (line for key in keys for line in _key(name, model, key, values_here))
    return "\n".join(["", header, *lines, ""])


def _key(table: str, model: type[BaseModel], key: str, values_here: Mapping[str, Any]) -> Iterator[str]:
    field = model.model_fields[key]
    names = [] if field.annotation is bool else alternatives(f"{table}.{key}", field)
    comment = "; ".join(filter(None, (meaning(model, key), quoted(names))))
    yield from textwrap.wrap(comment, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    if key in values_here:
        value, line = values_here[key], f"{key} = {toml_value(values_here[key])}"
        is_long = len(line) > _WIDTH and isinstance(value, Mapping)  # then each of its keys has a line
        inside = value.items() if is_long else ()
        yield from [f"{key}.{_name(inner)} = {toml_value(item)}" for inner, item in inside] or [line]
        return
    default = field.get_default(call_default_factory=True)
    yield f"#{key} =" if default in (None, PydanticUndefined) else f"#{key} = {toml_value(default)}"


def toml_value(value: Any) -> str:
    """Format a value as TOML on one line; tables become inline tables."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_name(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    plain = value if isinstance(value, bool | int | float) else str(value)
    return tomli_w.dumps({"x": plain}).removeprefix("x = ").rstrip("\n")


def _name(key: str) -> str:
    """Format a key as TOML, quoted if necessary."""
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def job_to_play(env: str, overrides: Sequence[str]) -> LoadedJob:
    """Return the job of `turnwise eval ENV`, which has the environment's default values.

    --policy or --model chooses the player. The job's own model is never loaded.
    """
    job = environment_job(env)
    values = union(_named(env), job.common, job.trained, _for_a_model("of/a-server"))
    values["model"] = {"preset": next(iter(PRESETS))}
    return parse_job(values, where=f"turnwise eval {env}", overrides=overrides)


def write_job(path: Path, choices: Choices) -> LoadedJob:
    """Write a job with the user's choices, and its example files; return the loaded job."""
    text = job_text(choices.values())
    parse_job(tomli.loads(text), where="turnwise init")
    with write_errors(path):
        examples = _examples(path.parent, choices.env)
        try:
            job_file = path.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise JobError(f"turnwise init: {path} is there already; nothing was written") from error
        with job_file:
            job_file.write(text)
        for file, example in examples.items():
            _write(file, example)
    return load_job(path)


def _examples(folder: Path, env: str) -> dict[Path, str]:
    """Return the texts, by path, of the example files that the environment's job needs and that do not exist.

    Raises JobError if a file exists with other content, because it must not be overwritten.
    """
    examples = {folder / name: make() for name, make in environment_job(env).files.items()}
    there = [file for file in examples if file.exists()]
    for file in there:
        if file.read_bytes() != examples[file].encode():
            raise JobError(
                f"turnwise init: {file} is there already, and is not the example that a job of {env} names; "
                "nothing was written"
            )
    return {file: example for file, example in examples.items() if file not in there}
