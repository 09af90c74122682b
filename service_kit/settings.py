"""Reads the settings of services from the command line and from environment variables.

The settings of a service are the fields of a frozen pydantic class, with defaults, bounds and descriptions.
A field that is annotated with a `Flag` can be set by a command-line option, and a field that is annotated
with a `Variable` can be set by an environment variable. The operator cannot set other fields. A command-line
option takes precedence over the environment variable, and the variable takes precedence over the default.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, Signature
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin

from pydantic import ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from service_kit.errors import SettingsError
from service_kit.keys import key_from_environ
from shared_schemas.base import Body, did_you_mean

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings

VARIABLE_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class Flag:
    """Annotates a field that can be set by a command-line option."""

    name: str | None = None
    """The option, such as `--allow-root` or `--jobs/--no-jobs`; None means the field's name with hyphens."""


@dataclass(frozen=True, slots=True)
class Variable:
    """Annotates a field that can be set by an environment variable of this name."""

    name: str

    def read(self, environ: Mapping[str, str]) -> Any:
        return environ.get(self.name)


class Key(Variable):
    """Annotates a field that contains an API key.

    The environment variable `name` contains the key, or `<name>_FILE` the path of a file with the key.
    """

    def read(self, environ: Mapping[str, str]) -> Any:
        return key_from_environ(environ, self.name)


class SettingsTable(Body):
    """Base class of the classes that declare settings."""

    model_config = ConfigDict(validate_default=True, defer_build=True)

    prefix: ClassVar[str] = ""
    """If not empty, each field without `Flag` and `Variable` can be set by an environment variable.

    The variable's name is this prefix, followed by the field's name in capitals.
    """


class LogSettings(SettingsTable):
    """The level and the format of a process's log."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], Variable("TURNWISE_LOG_LEVEL")
    ] = Field(default="info", description="the lowest level that is logged")
    log_format: Annotated[Literal["text", "json"], Variable("TURNWISE_LOG_FORMAT")] = Field(
        default="text", description="text for people; json for collectors, with one object a line"
    )


# Types of settings that the services declare with different defaults.
HeaderSeconds = Annotated[
    float, Field(gt=0, le=3_600, description="from the start of a connection to complete headers")
]
HeaderBytes = Annotated[int, Field(ge=1_024, le=1 << 24, description="of a request line and its headers")]
BodySeconds = Annotated[float, Field(gt=0, le=3_600, description="for a body to arrive")]
Port = Annotated[int, Flag(), Field(ge=0, le=65_535, description="0 takes a free port")]


class ConnectionSettings(SettingsTable):
    """Limits of a server's connections."""

    max_connections: int = Field(
        default=4_096, ge=1, le=1_000_000, description="fewer if the process may open only few files"
    )
    max_header_bytes: HeaderBytes = 32_768
    max_header_s: HeaderSeconds = 15.0
    max_body_s: BodySeconds = 30.0


class ServiceSettings(LogSettings, ConnectionSettings):
    """Settings that both services, the task app and the trainer, have in common."""

    host: Annotated[str, Flag()] = Field(
        default="127.0.0.1",
        description="address of this machine to listen on; beyond loopback it needs a key",
    )
    port: Port = 0
    max_body_bytes: int = Field(default=1 << 20, ge=1_024, le=1 << 30)


Table = TypeVar("Table", bound=SettingsTable)


def find_variables(table: type[SettingsTable]) -> dict[str, Variable]:
    """Return the environment variables of `table`, each under the name of the field that it sets."""
    found = {}
    for name, field in table.model_fields.items():
        variable = _find_marker(field, Variable)
        if variable is None and table.prefix and _find_marker(field, Flag) is None:
            variable = Variable(table.prefix + name.upper())
        if variable is not None:
            found[name] = variable
    return found


def read_settings(table: type[Table], environ: Mapping[str, str], **options: Any) -> Table:
    """Read the settings of the class `table` from environment variables and command-line options.

    An option takes precedence over an environment variable. If a setting is a list, the items of its option
    are instead appended to those of its variable or, if that is not set, of its default. An empty option or
    variable counts as not set, but the empty variable of a list sets an empty list.

    Args:
        environ: the environment variables.
        options: the values of the command-line options by field name.

    Raises:
        SettingsError: a value is invalid, or the name of a variable seems to be misspelt.
    """
    from pydantic_settings import EnvSettingsSource  # import late, because `--help` should be quick

    variables = find_variables(table)
    known = {variable.name for variable in variables.values()}
    for name in sorted(
        environ
    ):  # an unknown name may belong to another program, so refuse only a name that resembles a known one
        close = get_close_matches(name, known, n=1, cutoff=0.9)
        if table.prefix and name.startswith(table.prefix) and name not in known and close:
            raise SettingsError(f"{name} is unknown. Did you mean {close[0]!r}?")

    class Environment(EnvSettingsSource):
        def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
            return variables.get(field_name), field_name, False

        def prepare_field_value(
            self, field_name: str, field: FieldInfo, value: Variable | None, value_is_complex: bool
        ) -> Any:
            text = value and value.read(environ)
            if not isinstance(text, str):
                return text
            return split_list(text) if _is_list(field) else text.strip() or None

    values = Environment(
        cast("type[BaseSettings]", table)
    )()  # the cast is safe, because EnvSettingsSource uses only the fields of the class
    for name, value in ((name, value) for name, value in options.items() if value != ""):
        if name in variables and _is_list(field := table.model_fields[name]):
            value = tuple(dict.fromkeys([*values.get(name, field.default), *value]))
        values[name] = value
    try:
        return table.model_validate(values)
    except ValidationError as exc:
        raise _settings_error(table, exc, options) from exc


def split_list(text: str) -> tuple[str, ...]:
    """Split a text at commas, strip white space from the parts, and omit empty parts."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _settings_error(
    table: type[SettingsTable], exc: ValidationError, options: Mapping[str, Any]
) -> SettingsError:
    error = exc.errors(include_url=False)[0]
    name, value = str(error["loc"][0]), str(error["input"])
    field = table.model_fields[name]
    flag, variable = _find_marker(field, Flag), find_variables(table).get(name)
    places = [(flag and flag.name) or f"--{name.replace('_', '-')}"] if name in options else []
    if variable is not None and (not places or _is_list(field)):
        places.append(variable.name)
    found = "what may hold a password" if "@" in value else repr(value[:200])
    known = get_args(get_args(field.annotation)[0]) if _is_list(field) else get_args(field.annotation)
    is_unknown = error["type"] == "literal_error"
    end = did_you_mean(value[:40], known) if is_unknown else f": {error['msg'].removeprefix('Value error, ')}"
    return SettingsError(f"{' or '.join(places)} is {found}{end}")


def typer_option(table: type[SettingsTable], name: str) -> Any:
    from typer import Option

    field = table.model_fields[name]
    variable = find_variables(table).get(name)
    flag = _find_marker(field, Flag)
    limits = {
        option: getattr(found, key)
        for option, key in (("min", "ge"), ("max", "le"))
        for found in field.metadata
        if hasattr(found, key)
    }
    return Option(
        *([flag.name] if flag is not None and flag.name is not None else []),
        help=" ".join((field.description or "").split()),
        envvar=None if variable is None or _is_list(field) else variable.name,
        # Otherwise Typer would refuse an unreadable path itself; the service's own error is more helpful.
        readable=False,
        **limits,
    )


def make_signature(table: type[SettingsTable], *further: Parameter) -> Signature:
    """Return the signature of a Typer command that accepts the settings of `table` as options.

    Its parameters are Typer's context, an option for each field with a `Flag`, and `further`.
    """
    from typer import Context

    parameters = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=Context)]
    for name, field in table.model_fields.items():
        if _find_marker(field, Flag) is None:
            continue
        kind: Any = field.annotation
        default = field.default if field.default_factory is None else None
        if _is_list(field):
            item, default = get_args(kind)[0], None
            kind = GenericAlias(list, get_args(item)[0] if get_origin(item) is Annotated else item)
        kind = kind | None if default is None else kind
        annotation = Annotated[kind, typer_option(table, name)]
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return Signature([*parameters, *further])


def options_given(context: Any) -> dict[str, Any]:
    """Return the options of a Typer command that were given on the command line.

    Options whose values come from environment variables or defaults are omitted. `context` is the context
    that Typer passes to the command.
    """
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name: context.params[name] for name, source in sources.items() if source.name == "COMMANDLINE"}


Marker = TypeVar("Marker")


def _find_marker(field: FieldInfo, kind: type[Marker]) -> Marker | None:
    return next((found for found in field.metadata if isinstance(found, kind)), None)


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (tuple, frozenset)
