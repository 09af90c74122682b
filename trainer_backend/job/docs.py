"""Prints docs/configuration.md from the job's schema: `python -m trainer_backend.job.docs`.

A test compares the file with this output, so that the page describes every key.
"""

import ast
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from inspect import getsource
from itertools import pairwise
from textwrap import dedent
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shared_schemas.state_keys import OF_ENVIRONMENT, OF_EVERY_ENVIRONMENT
from trainer_backend.core.advantages.episodes import EstimatorPlug
from trainer_backend.core.keys import Table
from trainer_backend.core.losses import LossPlug
from trainer_backend.job.foreign_keys import FOREIGN_TABLES, SYSTEMS
from trainer_backend.job.plug_table import own_tables
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import table_model
from trainer_backend.plugins import BOARDS

_HEAD = """\
# The job TOML

Made by `python -m trainer_backend.job.docs > docs/configuration.md`; do not edit by hand.

- **Look up**: `turnwise check JOB.toml` prints what a job changes, and with `--all` every key. Only
  `[model]` is required. An unknown key is an error with a suggestion.
- **Absent tables**: no `[warmup]`, no warm-up; without `[data]` the environment makes its own worlds;
  without `[rollout_only]` the actor samples everything. Several fixed policies are several
  `[[rollout_only]]`.
- **Override**: `--set table.key=value`. A later file overrides an earlier one key by key, and `--set` all of
  them.
- **Remove**: `--set 'warmup={}'` removes a table, `--set 'training.kl_coef={}'` a key, which then has its
  default.
- **Choices**: where a later file or `--set` chooses another estimator, loss, critic, aggregation or
  schedule, keys of earlier files that it does not read are left out with a warning; in one file they are
  errors.
- **Paths** start at the folder of their file if something is there; otherwise, as with `--set`, at the
  working directory, as `job.runs_dir` always does. A run stores absolute paths.
"""


def configuration_markdown() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for name, field in JobConfig.model_fields.items():
        yield from _table(name, table_model(field))
        for plug, kind, keys in own_tables(table_model(field)):
            yield from _table(f"{name}.{plug}", kind, keys)
    yield from _paper_values()
    yield "## State keys\n"
    yield "Names for `algorithm.state_hashing_function` and `rollout.state_keys`: which states are the same."
    yield "A plug-in's environment may have more."
    yield ""
    yield "| key | of | two states are the same where these are equal |"
    yield "|---|---|---|"
    for env_name, described in (("every environment", OF_EVERY_ENVIRONMENT), *OF_ENVIRONMENT.items()):
        for key, description in described.items():
            yield f"| `{key}` | {env_name} | {description} |"
    yield ""
    yield f"Tables of other backends, accepted with a warning, not read: {quoted(sorted(FOREIGN_TABLES))}"
    *others, last = SYSTEMS
    yield (
        f"\nAn error about a key of {', '.join(others)} or {last}, in a file or in `--set`, suggests ours, "
        "or says why there is none; `trainer_backend/job/foreign_keys.py` has the list."
    )


def _paper_values() -> Iterator[str]:
    """Yield Markdown that lists the values from the papers of estimators and losses.

    If a job omits a key, the key has the value from the paper of the job's estimator or loss.
    """
    yield "## Values of papers\n"
    yield (
        "A key that the chosen name does not read is refused where it is set, and the error says which names "
        "read it. These names have the values of their papers where the job has none:\n"
    )
    for board in ("algorithm.advantage", "algorithm.loss"):
        for name, plug in BOARDS[board].items():
            if isinstance(plug, LossPlug | EstimatorPlug) and plug.values:
                values = ", ".join(f"`{key} = {value}`" for key, value in plug.values.items())
                yield f"- `{board} = {name}`: {values}"
    yield ""


def _table(name: str, model: type[BaseModel], only: Collection[str] | None = None) -> Iterator[str]:
    yield f"## [{name}]\n"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key, field in model.model_fields.items():
        if only is not None and key not in only:
            continue
        cells = (f"`{key}`", _type(f"{name}.{key}", field), _default(field), meaning(model, key))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def alternatives(dotted: str, field: FieldInfo) -> list[str]:
    """Return the values that a key allows: the names in its registry, or the words of its type.

    The result is empty if the allowed values cannot be listed, as for a number or a path.
    """
    if dotted in BOARDS:
        return list(BOARDS[dotted])
    if field.annotation is bool:
        return ["true", "false"]
    options = [item for item in get_args(field.annotation) if item is not type(None)]
    if len(options) == 1 and get_origin(options[0]) is Literal:  # ... | None
        options = list(get_args(options[0]))
    return options if all(isinstance(item, str) for item in options) else []


def quoted(words: Sequence[str]) -> str:
    """Return the words as Markdown code, separated by commas."""
    return ", ".join(f"`{word}`" for word in words)


def _type(dotted: str, field: FieldInfo) -> str:
    words = alternatives(dotted, field)
    if words and field.annotation is not bool:
        return quoted(words)
    options = [item for item in get_args(field.annotation) if item is not type(None)]
    annotation: Any = options[0] if type(None) in get_args(field.annotation) else field.annotation
    if hasattr(annotation, "__metadata__"):  # Annotated[str, ...] | None is shown as str
        annotation = get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    if annotation is SecretStr:
        return "str"
    if not get_args(annotation):
        return str(getattr(annotation, "__name__", annotation))
    if bool in options:  # a boolean key that also takes a number
        return " or ".join(getattr(item, "__origin__", item).__name__ for item in options)
    if get_origin(annotation) is not tuple:
        return "table"
    inner = get_args(annotation)[0]
    bare = get_args(inner)[0] if get_args(inner) else inner  # Annotated[int, ...] is shown as int
    return f"list of {bare.__name__}"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "`{}`"
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "absent"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{list(field.default) if isinstance(field.default, tuple) else field.default}`"


def meaning(model: type[BaseModel], key: str) -> str:
    """Return the description of a key, followed by its bounds in parentheses."""
    field, bounds = model.model_fields[key], []
    for item in field.metadata:
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if getattr(item, attribute, None) is not None:
                bounds.append(f"{sign} {getattr(item, attribute)}")
    description = field.description or _sentences(model).get(key, "")
    return description + (f" ({', '.join(bounds)})" if bounds else "")


@cache
def _sentences(model: type[BaseModel]) -> dict[str, str]:
    """Return the text below each field of a class and of its base classes, by the name of the field."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, Table):
            (tree,) = ast.parse(dedent(getsource(kind))).body
            for field, line in pairwise(tree.body):  # type: ignore[attr-defined]
                match field, line:
                    case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(
                        value=ast.Constant(value=str(text))
                    ):
                        found[key] = " ".join(text.split())
    return found


if __name__ == "__main__":
    print(configuration_markdown(), end="")
