"""Makes a `Tool` from a Python function: schema from the signature, description from the docstring."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from shared_schemas.base import suggest_to_policy
from shared_schemas.messages import FunctionSpec, ToolSpec
from task_app.complaints import most_specific
from task_app.errors import clipped

_CONFIG = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
# An argument's schema that contains only these keys accepts every value.
_SAYS_NO_TYPE = frozenset({"description", "default"})


class ToolRefused(ValueError):
    """Raised by a tool that refuses a call; the message tells the model what to do instead."""


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A `Tool` (task_app.protocols) that calls a Python function or a bound method."""

    spec: ToolSpec
    _arguments: type[BaseModel]
    _function: Callable[..., str]

    def call(self, arguments: Mapping[str, Any]) -> str:
        try:
            parsed = self._arguments.model_validate(dict(arguments))
        except ValidationError as exc:
            raise ToolRefused(self._word_complaint(exc)) from exc
        return self._function(**{name: getattr(parsed, name) for name in self._arguments.model_fields})

    def _word_complaint(self, exc: ValidationError) -> str:
        """Return the most specific of pydantic's errors as a sentence that a model understands."""
        error = most_specific(exc.errors(include_url=False, include_context=False))
        name = self.spec.function.name
        place = clipped(".".join(map(str, error["loc"])))
        if error["type"] == "extra_forbidden":
            known = self._arguments.model_fields
            guess = suggest_to_policy(place, known) if known else "; it takes none"
            return f"{name} has no argument {place!r}{guess}"
        if error["type"] == "missing":
            return f"{name} needs the argument {place!r}"
        return f"the argument {place!r} of {name} is {clipped(repr(error['input']))}: {error['msg']}"


def function_tool(function: Callable[..., str]) -> FunctionTool:
    """Return a tool that calls `function` and has its name.

    Every parameter needs a type, which may be `Annotated[..., Field(description=..., ge=...)]`. The first
    paragraph of the docstring describes the tool to the model. The function must return a str and must not be
    async. Pass a bound method if the tool works on an object's state.

    Raises:
        TypeError: A parameter has no type, has a type that allows anything, or cannot be passed by name; or
            the function is async, is annotated with another return type than str, or has no docstring.
    """
    spec, arguments = _describe_function(getattr(function, "__func__", function))
    return FunctionTool(spec, arguments, function)


# The cache's key is the plain function, because each episode creates new bound methods. A schema takes a
# millisecond.
@lru_cache(maxsize=256)
def _describe_function(function: Callable[..., str]) -> tuple[ToolSpec, type[BaseModel]]:
    name = function.__name__
    _check_return_type(function)
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {name}: {parameter} cannot be given by name, as a model gives arguments")
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: the parameter {parameter.name!r} has no type; a schema needs one")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    arguments = create_model(name, __config__=_CONFIG, **fields)
    # The schema omits what a model need not read: titles, which repeat the names, and null values.
    schema = arguments.model_json_schema()
    schema.pop("title")
    for key in schema.keys() & {"properties", "$defs"}:
        schema[key] = {part_name: _simplify_schema(part) for part_name, part in schema[key].items()}
    for parameter_name, part in schema["properties"].items():
        if part.keys() <= _SAYS_NO_TYPE:
            raise TypeError(f"tool {name}: the type of {parameter_name!r} allows anything; say what is meant")
    description = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    if not description:
        raise TypeError(f"tool {name} has no docstring, from which a model learns what it does")
    function_spec = FunctionSpec(name=name, description=description, parameters=schema)
    return ToolSpec(function=function_spec), arguments


def _check_return_type(function: Callable[..., Any]) -> None:
    """Raise TypeError if the function is async or its annotated return type is not str.

    The check runs when a tool is made, so that no call of a model fails because of it.
    """
    name = function.__name__
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"tool {name} is async; a tool answers at once: make it a plain def")
    return_type = get_type_hints(function).get("return", str)
    if return_type is not str:
        kind = getattr(return_type, "__name__", return_type)
        raise TypeError(f"tool {name} is said to return {kind}; a model reads text: make it -> str")


def _simplify_schema(part: dict[str, Any]) -> dict[str, Any]:
    """Return one argument's schema without its title and without null.

    The schema of `X | None` becomes that of X, and a default of None is removed.
    """
    rest = {key: value for key, value in part.items() if key != "title"}
    if rest.get("default", ...) is None:
        del rest["default"]
    others = [one for one in rest.get("anyOf", ()) if one != {"type": "null"}]
    if len(others) == 1:
        del rest["anyOf"]
        return {**others[0], **rest}
    return rest
