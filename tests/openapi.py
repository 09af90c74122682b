"""An OpenAPI document as tests read it: what its operations reply, and whether an answer is one of these."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import httpx
import jsonschema_rs

# A reply of these kinds is a text or a picture, and has no further type.
# Statuses without a body.
_NO_BODY = ("204", "304")
_PLAIN_KINDS = ("text/", "image/", "application/toml", "application/openmetrics-text")


class Document:
    """The document of a service."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self._patterns = [
            (method.upper(), re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))), operation)
            for path, item in document["paths"].items()
            for method, operation in item.items()
        ]
        self._validator = cache(self._new_validator)

    def operations(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """`GET /path` and the operation."""
        for path, item in self.document["paths"].items():
            for method, operation in item.items():
                yield f"{method.upper()} {path}", operation

    def untyped_replies(self) -> Iterator[str]:
        """Each reply that declares no content, or JSON that is no model."""
        for label, operation in self.operations():
            for status, reply in operation["responses"].items():
                content = reply.get("content", {})
                if not content and status not in _NO_BODY:
                    yield f"{label} {status} declares nothing"
                for kind, media in content.items():
                    if not kind.startswith(_PLAIN_KINDS) and not self._is_model(media.get("schema", {})):
                        yield f"{label} {status} is {kind} of the schema {media.get('schema')}"

    def _is_model(self, schema: Mapping[str, Any]) -> bool:
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/components/schemas/")
            return bool(self.document["components"]["schemas"][name].get("properties"))
        if "anyOf" in schema:
            return all(self._is_model(one) for one in schema["anyOf"])
        return schema.get("type") == "array" and self._is_model(schema.get("items", {}))

    async def check(self, answer: httpx.Response) -> None:
        """Hold an answer against what its operation declares; a hook of httpx's clients.

        Raises:
            AssertionError: the operation declares no such answer.
            jsonschema_rs.ValidationError: it declares other JSON.
        """
        method, path = answer.request.method, answer.request.url.path
        operation = self._find(method, path)
        if operation is None:
            return
        reply = operation["responses"].get(str(answer.status_code))
        assert reply is not None, f"{method} {path} declares no {answer.status_code}"
        kind = answer.headers.get("content-type", "").partition(";")[0]
        assert kind in reply.get("content", {"": None}), f"{method} {path} declares no {kind}"
        if kind.endswith("json"):
            await answer.aread()
            self._validator(operation["operationId"], str(answer.status_code), kind).validate(answer.json())

    def _find(self, method: str, path: str) -> dict[str, Any] | None:
        """The operation; the first one that fits, as in the router."""
        fitting = (
            one for known, pattern, one in self._patterns if known == method and pattern.fullmatch(path)
        )
        return next(fitting, None)

    def _new_validator(self, operation_id: str, status: str, kind: str) -> jsonschema_rs.Validator:
        (operation,) = (one for _, one in self.operations() if one["operationId"] == operation_id)
        schema = operation["responses"][status]["content"][kind]["schema"]
        return jsonschema_rs.Draft202012Validator({**schema, "components": self.document["components"]})
