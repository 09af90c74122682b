"""Writes the HTTP reference of both services as Markdown, from their OpenAPI documents.

`make site` puts both into the site; docs/http.md and docs/operations.md are the guides.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from service_kit.settings import read_settings
from task_app import app as task_app
from task_app.settings import Settings as TaskAppSettings
from trainer_backend.jobs.app import create_app
from trainer_backend.jobs.check_process import CheckProcess
from trainer_backend.jobs.server import open_service
from trainer_backend.jobs.settings import Settings

Schema = Mapping[str, Any]


def describe_task_app() -> Schema:
    """Return the task app's OpenAPI document; start nothing."""
    return dict(task_app.create_app(TaskAppSettings(api_keys=("none",))).openapi())


def describe_trainer() -> Schema:
    """Return the trainer service's OpenAPI document; start nothing."""
    checks = CheckProcess()
    with TemporaryDirectory() as folder:
        settings = read_settings(Settings, {}, data_dir=Path(folder))
        with open_service(settings, checks) as service:
            found = dict(create_app(service).openapi())
    checks.close()
    return found


DOCUMENTS = {"task-app": describe_task_app, "trainer": describe_trainer}


def write_reference(document: Schema) -> str:
    """Return the reference as Markdown: the operations by tag, then the types that they name."""
    return "\n".join([*_operations(document), *_types(document)]) + "\n"


def _operations(document: Schema) -> Iterator[str]:
    yield f"# {document['info']['title']}: routes and types\n"
    yield "Made from `/openapi.json`. Errors are of the type [Problem](#problem).\n"
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines = by_tag.setdefault(", ".join(operation.get("tags", ["service"])), [])
            lines += _operation(f"{method.upper()} {path}", operation)
    for tag, lines in by_tag.items():
        yield f"## Routes: {tag}\n"
        yield from lines


def _operation(label: str, operation: Schema) -> Iterator[str]:
    yield f"### `{label}`\n"
    yield f"{operation.get('description', operation.get('summary', ''))}\n"
    rows = [
        f"| `{one['name']}` | {one['in']} | {_meaning(one.get('schema', {}), one)} |"
        for one in operation.get("parameters", ())
    ]
    if rows:
        yield "\n".join(["| parameter | in | type | meaning |", "|---|---|---|---|", *rows]) + "\n"
    if "requestBody" in operation:
        yield f"Body: {_content(operation['requestBody'])}\n"
    for status, reply in operation["responses"].items():
        if status.startswith("2"):
            yield f"Reply {status}: {_content(reply)}\n"
    refusals = [status for status in operation["responses"] if status[0] in "45"]
    yield f"Errors: {', '.join(refusals)}\n"


def _content(part: Schema) -> str:
    found = [
        f"{_type(one.get('schema', {}))} (`{kind}`)" if one.get("schema") else f"`{kind}`"
        for kind, one in part.get("content", {}).items()
    ]
    return " or ".join(found) or "nothing"


def _types(document: Schema) -> Iterator[str]:
    yield "## Types\n"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f"### {name}\n"
        if schema.get("description"):
            yield f"{schema['description']}\n"
        required = schema.get("required", ())
        rows = [
            f"| `{field}`{'' if field in required else ' (optional)'} | {_meaning(one, one)} |"
            for field, one in schema.get("properties", {}).items()
        ]
        if rows:
            yield "\n".join(["| field | type | meaning |", "|---|---|---|", *rows]) + "\n"
        else:
            yield f"{_type(schema)}\n"


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(_type(one) for one in schema[several])
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    default = f" = `{schema['default']}`" if schema.get("default") not in (None, "", [], {}) else ""
    return f"{schema.get('type', 'any')}{default}".replace("|", "\\|")


def _meaning(schema: Schema, described: Schema) -> str:
    """Return two table cells: the type, and the text of the description."""
    return f"{_type(schema)} | {_line(described.get('description'))}"


def _line(text: str | None) -> str:
    """Return the text on one line, for a table cell."""
    return " ".join((text or "").split()).replace("|", "\\|")
