"""A job TOML with a comment for every key, made from the job schema. Pure."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from trainer_backend.init_job.choices import COMMON, Values
from trainer_backend.jobfile.docs import alternatives, meaning, quoted, table_model
from trainer_backend.jobfile.schema import JobConfig

_WIDTH = 100
_HEAD = """\
# A job of Turnwise, as `turnwise init` writes it. A key behind # has its default; to set it, take the # away.
# `turnwise check FILE` prints the job with every default; docs/configuration.md describes the other keys.
"""


def job_text(values: Values) -> str:
    """The file: every table, with the keys of `values` set and the other common ones commented out."""
    return _HEAD + "".join(_table(name, field, values) for name, field in JobConfig.model_fields.items())


def _table(name: str, field: FieldInfo, values: Values) -> str:
    model, given = table_model(field), values.get(name, {})
    shown = [key for key in model.model_fields if key in given or key in COMMON.get(name, model.model_fields)]
    # A table whose absence means something must not be there with nothing in it.
    header = f"[{name}]" if given or field.default not in (None, ()) else f"#[{name}]"
    return (
        "\n".join(
            ["", header, *(line for key in shown for line in _key(name, model.model_fields[key], key, given))]
        )
        + "\n"
    )


def _key(table: str, field: FieldInfo, key: str, given: Mapping[str, Any]) -> Iterator[str]:
    names = [] if field.annotation is bool else alternatives(f"{table}.{key}", field)
    told = "; ".join(filter(None, (meaning(field), quoted(names))))
    yield from textwrap.wrap(told, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    if key in given:
        yield f"{key} = {toml_value(given[key])}"
        return
    default = field.get_default(call_default_factory=True)
    yield f"#{key} =" if default in (None, PydanticUndefined) else f"#{key} = {toml_value(default)}"


def toml_value(value: Any) -> str:
    """A value on one line, tables inline."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_name(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    plain = value if isinstance(value, bool | int | float) else str(value)
    return tomli_w.dumps({"x": plain}).removeprefix("x = ").rstrip("\n")


def _name(key: str) -> str:
    """As TOML writes a key: quoted where it must be."""
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")
