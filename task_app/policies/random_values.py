"""Random values of a JSON Schema: drawn part by part, and judged as a whole where a draw may miss.

The schema of a tool may be anything that its author wrote, so nothing here raises: a keyword with a value
that no schema may have counts as absent, and so does a `$ref` that leads nowhere. Patterns and formats of
strings are not drawn.
"""

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator


Schema = Any  # an object or a boolean, or what its author took for one

# Bounds for numbers that set none, and the text of strings.
_NUMBERS = (0, 9)
_TEXT = "text"
# Larger values that a schema demands are not drawn: they would fill the memory.
_LONGEST_TEXT, _LONGEST_LIST = 10_000, 1_000
# Of a whole value, of an item unlike the others, and parts of a value: schemas may refer to themselves.
_TRIES, _ITEM_TRIES, _PARTS = 30, 30, 2_000
# Levels: below the first, objects have what they must have, lists as few items as they may, and a choice
# avoids references; below the second, all is null.
_SMALL_FROM, _DEEPEST = 6, 60
# Keywords that a draw always fits.
_DRAWN = frozenset(
    {"type", "properties", "required", "items", "enum", "const", "minItems", "maxItems", "minimum", "maximum"}
    | {"exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "additionalProperties", "anyOf"}
    | {"$ref", "$defs", "$schema", "title", "description", "default", "examples"}
)
_KEYS_OF_KINDS = {
    "object": {"properties", "required", "additionalProperties", "patternProperties", "minProperties"},
    "array": {"items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}


def random_object(schema: Schema, source: random.Random, *, longest: int) -> dict[str, Any]:
    """An object that the schema describes, or the last one that was drawn where no draw fits.

    The first draw is the plain one: uniform over enums, with all properties, lists at their longest. Further
    ones, with fewer properties and items, follow where it does not fit.

    Lists are `longest` items long, if their schema allows it.
    """
    whole = {**schema, "type": "object"} if isinstance(schema, Mapping) else {"type": "object"}
    value: dict[str, Any] = {}
    for attempt in range(_TRIES):
        drawn = _Draws(whole, source, longest, varies=attempt > 0).value(whole)
        value = drawn if isinstance(drawn, dict) else {}
        if not _may_miss(whole) or _fits(value, whole):
            break
    return value


class _Draws:
    """One draw of a schema; one that `varies` may leave out optional properties, and have shorter lists."""

    def __init__(self, root: Schema, source: random.Random, longest: int, *, varies: bool) -> None:
        self._root, self._source, self._longest, self._varies = root, source, longest, varies
        self._parts_left = _PARTS

    def value(self, schema: Schema, depth: int = 0) -> Any:
        self._parts_left -= 1
        if self._parts_left < 0 or depth > _DEEPEST:
            return None
        schema = self._join(schema, set(), is_deep=depth >= _SMALL_FROM)
        if "const" in schema:
            return schema["const"]
        if listed := _list(schema, "enum"):
            return self._source.choice(listed)
        kind = self._kind(schema, is_deep=depth >= _SMALL_FROM)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._items(schema, depth)
        if kind == "boolean":
            return self._source.random() < 0.5
        if kind in ("integer", "number"):
            return self._number(schema, is_whole=kind == "integer")
        return None if kind == "null" else self._text(schema)

    def _join(self, schema: Schema, references: set[str], *, is_deep: bool) -> dict[str, Any]:
        """The schema with its references, all of `allOf`, and one branch of each choice merged into it."""
        if not isinstance(schema, Mapping):
            return {}
        joined, others = dict(schema), list(_list(schema, "allOf"))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in references:
            references.add(reference)
            others.append(_resolve(reference, self._root))
        for key in ("anyOf", "oneOf"):
            branches = [branch for branch in _list(schema, key) if branch is not False]
            plain = [branch for branch in branches if "$ref" not in json.dumps(branch, default=str)]
            if branches:
                others.append(self._source.choice(plain if is_deep and plain else branches))
        if "if" in schema:
            then = {"allOf": [schema["if"], schema.get("then", True)]}
            others.append(self._source.choice([then, schema.get("else", True)]))
        for other in others:
            part = self._join(other, references, is_deep=is_deep)
            merged = {
                "properties": {**_table(joined, "properties"), **_table(part, "properties")},
                "required": [*_list(joined, "required"), *_list(part, "required")],
            }
            joined |= part | {key: value for key, value in merged.items() if value}
        return joined

    def _kind(self, schema: Mapping[str, Any], *, is_deep: bool) -> Any:
        kind = schema.get("type")
        if kinds := _list(schema, "type"):
            return "null" if is_deep and "null" in kinds else self._source.choice(kinds)
        if isinstance(kind, str):
            return kind
        return next((name for name, keys in _KEYS_OF_KINDS.items() if keys & schema.keys()), "string")

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = _table(schema, "properties")
        required = [name for name in _list(schema, "required") if isinstance(name, str)]
        share = 0.0 if depth >= _SMALL_FROM else self._source.choice((0.0, 0.5, 1.0)) if self._varies else 1.0
        optional = [name for name in properties if share == 1.0 or self._source.random() < share]
        others = schema.get("additionalProperties", True)
        names = [name for name in properties if name in required or name in optional]
        names += [name for name in dict.fromkeys(required) if name not in properties]
        least = min(int(_number_in(schema, "minProperties") or 0), _LONGEST_LIST)
        names += [f"{_TEXT}_{number}" for number in range(least - len(names))]
        return {name: self.value(properties.get(name, others), depth + 1) for name in names}

    def _items(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first, others = _list(schema, "prefixItems"), schema.get("items", True)
        copies = min(int(_number_in(schema, "minContains") or 1), _LONGEST_LIST)
        contained = [schema["contains"]] * copies if "contains" in schema else []
        least = min(int(_number_in(schema, "minItems") or 0), _LONGEST_LIST)
        length = max(self._longest, len(first), least)
        if (most := _number_in(schema, "maxItems")) is not None:
            length = max(min(length, int(most)), least)
        if depth >= _SMALL_FROM:
            length = least
        elif self._varies:
            length = self._source.randint(least, length)
        parts = [*first, *contained, *[others] * length][: max(length, len(contained))]
        items: list[Any] = []
        for part in parts:
            item = self.value(part, depth + 1)
            for _ in range(_ITEM_TRIES if schema.get("uniqueItems") is True else 0):
                if item not in items:
                    break
                item = self.value(part, depth + 1)
            items.append(item)
        return items

    def _number(self, schema: Mapping[str, Any], *, is_whole: bool) -> int | float:
        low, high = _bounds(schema, inside=1 if is_whole else 0)
        step = _number_in(schema, "multipleOf")
        if step is not None and step > 0 and math.isfinite(low / step) and math.isfinite(high / step):
            first, last = math.ceil(low / step), math.floor(high / step)
            multiple = self._source.randint(first, max(first, last)) * step
            return int(multiple) if is_whole else multiple
        if is_whole:
            first = math.ceil(low)
            return self._source.randint(first, max(first, math.floor(high)))
        return self._source.uniform(low, high)

    def _text(self, schema: Mapping[str, Any]) -> str:
        least = min(int(_number_in(schema, "minLength") or 0), _LONGEST_TEXT)
        most = _number_in(schema, "maxLength")
        if self._varies:
            letters = self._source.choices("abcdefghijklmnopqrstuvwxyz", k=max(least, len(_TEXT)))
            return "".join(letters)[: None if most is None else int(most)]
        return _TEXT[: len(_TEXT) if most is None else int(most)].ljust(least, ".")


def _bounds(schema: Mapping[str, Any], *, inside: int) -> tuple[float, float]:
    """Bounds of a number; `inside` is the distance from an exclusive one. A lone one gives a width of 9."""
    low, above = _number_in(schema, "minimum"), _number_in(schema, "exclusiveMinimum")
    high, below = _number_in(schema, "maximum"), _number_in(schema, "exclusiveMaximum")
    lows = [bound for bound in (low, None if above is None else above + inside) if bound is not None]
    highs = [bound for bound in (high, None if below is None else below - inside) if bound is not None]
    width = _NUMBERS[1] - _NUMBERS[0]
    if not lows:
        lows = [min(_NUMBERS[0], min(highs) - width) if highs else _NUMBERS[0]]
    first = max(lows)
    return first, max(first, min(highs) if highs else first + width)


def _number_in(schema: Mapping[str, Any], key: str) -> int | float | None:
    """The finite number of a keyword, or None."""
    value = schema.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e15:
        return None
    return value


def _table(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def _list(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = schema.get(key)
    return value if isinstance(value, list | tuple) else ()


def _resolve(reference: str, root: Schema) -> Schema:
    """The schema at a reference within the document; True, which allows anything, if there is none."""
    part = root
    for name in unquote(reference.removeprefix("#")).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(part, Mapping) or name not in part:
            return True
        part = part[name]
    return part if reference.startswith("#") else True


def _may_miss(schema: Schema) -> bool:
    """Whether a draw may be no value of the schema."""
    if not isinstance(schema, Mapping):
        return schema is False
    if not schema.keys() <= _DRAWN:
        return True
    parts = [
        *_table(schema, "properties").values(),
        *_table(schema, "$defs").values(),
        *_list(schema, "anyOf"),
    ]
    return any(map(_may_miss, [*parts, schema.get("items", True)]))


def _fits(value: Any, schema: Schema) -> bool:
    """Whether the value fits the schema; a schema that cannot be applied accepts every value."""
    from jsonschema.exceptions import UnknownType
    from referencing.exceptions import Unresolvable

    try:
        validator = _validator(json.dumps(schema))
        return validator is None or validator.is_valid(value)
    except (TypeError, ValueError, RecursionError, Unresolvable, UnknownType, re.error):
        return True


@lru_cache(64)
def _validator(schema: str) -> "Draft202012Validator | None":
    """The validator of a schema, which fetches no other document; None for an invalid schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from referencing import Registry

    document = json.loads(schema)
    try:
        Draft202012Validator.check_schema(document)
    except SchemaError:
        return None
    return Draft202012Validator(document, registry=Registry())
