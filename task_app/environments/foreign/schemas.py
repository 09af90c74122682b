"""Checks tool calls against the JSON Schemas of the tools of foreign environments.

jsonschema is imported when the first tool is made, because the import takes 5 % of a task app's start.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shared_schemas.messages import FunctionSpec, ToolSpec
from shared_schemas.plain_text import encodable
from task_app.environments.foreign.peer import ForeignFailed
from task_app.errors import clipped
from task_app.protocols import ToolRequest
from task_app.tools.toolbox import call_fault


def tool(name: str, description: str, parameters: Mapping[str, Any], *, of: str) -> ToolSpec:
    """Return a tool of the environment named `of`, whose schema refuses unlisted arguments by default.

    Unlisted arguments are refused because a server might ignore a misspelt argument, and the model would
    learn from the wrong call. Raises ForeignFailed if `parameters` is no valid JSON Schema.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    schema = {"type": "object", "properties": {}, "additionalProperties": False, **parameters}
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as exc:
        what = f"{of}: the schema of tool {clipped(name)!r} is none"
        place = ".".join(map(str, exc.absolute_path))
        found = clipped(f"{place}: {exc.message}" if place else exc.message, 200)
        raise ForeignFailed(f"{what}: {found}", unquoted=what) from exc
    except RecursionError as exc:
        raise ForeignFailed(f"{of}: the schema of tool {clipped(name)!r} has too many levels") from exc
    return ToolSpec(function=FunctionSpec(name=name, description=description, parameters=schema))


class Tools:
    def __init__(self, specs: Sequence[ToolSpec], *, of: str) -> None:
        from jsonschema import Draft202012Validator
        from referencing import Registry

        self.specs = tuple(specs)
        # With an empty registry, a `$ref` to a URL is not fetched.
        self._validators = {
            spec.function.name: Draft202012Validator(spec.function.parameters, registry=Registry())
            for spec in specs
        }
        if len(self._validators) < len(self.specs):
            raise ForeignFailed(f"{of}: two tools have one name; a model could call only one of them")

    def fault(self, call: ToolRequest) -> str | None:
        """Return why the call does not fit its tool's schema, in words for the model; None if it fits."""
        from jsonschema.exceptions import best_match
        from referencing.exceptions import Unresolvable

        if fault := call_fault(call, self._validators):
            return encodable(fault)
        try:
            error = best_match(self._validators[call.name].iter_errors(dict(call.arguments or {})))
        except Unresolvable as exc:
            raise ForeignFailed(
                f"the schema of tool {call.name!r} refers to what it does not define"
            ) from exc
        except (OverflowError, RecursionError) as exc:
            raise ForeignFailed(
                f"the schema of tool {call.name!r} cannot be applied: {type(exc).__name__}: {exc!s:.200}",
                unquoted=f"the schema of tool {call.name!r} cannot be applied: {type(exc).__name__}",
            ) from exc
        if error is None:
            return None
        place = "".join(f"{part}." for part in error.absolute_path)
        message = f"{place[:-1]}: {clipped(error.message, 200)}" if place else clipped(error.message, 200)
        return encodable(f"arguments of {call.name}: {message}")
