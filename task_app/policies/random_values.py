"""Draws random values for a JSON Schema, and validates each value that may not fit.

The author of a tool may write any schema, so no schema makes this module raise. A keyword with an invalid
value counts as absent, and so does a `$ref` without a target. `pattern` and `format` do not affect how
strings are drawn.
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


Schema = Any  # an object or a boolean; if its author made a mistake, any other value

# Bounds of numbers whose schema has none, and the text of drawn strings.
_NUMBERS = (0, 9)
_TEXT = "text"
# Longer values are not drawn even if the schema demands them: they would fill the memory.
_LONGEST_TEXT, _LONGEST_LIST = 10_000, 1_000
# Limits: draws of a whole value; further draws of an item that must be unique; nested values of a value.
# Schemas may refer to themselves, so without a limit a value could be infinite.
_TRIES, _ITEM_TRIES, _PARTS = 30, 30, 2_000
# From depth `_SMALL_FROM` on, objects have only required properties, lists have the fewest items allowed, and
# `anyOf` and `oneOf` avoid branches with references. Values deeper than `_DEEPEST` are null.
_SMALL_FROM, _DEEPEST = 6, 60
# A draw always fits a schema that has only these keywords.
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
    """Return a random object that fits the schema; if no draw fits, return the last draw.

    The first draw chooses uniformly from enums, sets all properties, and makes lists of `longest` items, or
    of the nearest allowed length. If it does not fit, further draws may have fewer properties and items.
    """
    whole = {**schema, "type": "object"} if isinstance(schema, Mapping) else {"type": "object"}
    value: dict[str, Any] = {}
    for attempt in range(_TRIES):
        drawn = _Draw(whole, source, longest, varies=attempt > 0).draw_value(whole)
        value = drawn if isinstance(drawn, dict) else {}
        if not _may_not_fit(whole) or _fits_schema(value, whole):
            break
    return value


class _Draw:
    """Draws one value for a schema; if `varies`, it may leave out optional properties and shorten lists."""

    def __init__(self, root: Schema, source: random.Random, longest: int, *, varies: bool) -> None:
        self._root, self._source, self._longest, self._varies = root, source, longest, varies
        self._parts_left = _PARTS

    def draw_value(self, schema: Schema, depth: int = 0) -> Any:
        self._parts_left -= 1
        if self._parts_left < 0 or depth > _DEEPEST:
            return None
        schema = self._merge_parts(schema, set(), is_deep=depth >= _SMALL_FROM)
        if "const" in schema:
            return schema["const"]
        if listed := _read_list(schema, "enum"):
            return self._source.choice(listed)
        kind = self._choose_kind(schema, is_deep=depth >= _SMALL_FROM)
        if kind == "object":
            return self._draw_object(schema, depth)
        if kind == "array":
            return self._draw_items(schema, depth)
        if kind == "boolean":
            return self._source.random() < 0.5
        if kind in ("integer", "number"):
            return self._draw_number(schema, is_whole=kind == "integer")
        return None if kind == "null" else self._draw_text(schema)

    def _merge_parts(self, schema: Schema, references: set[str], *, is_deep: bool) -> dict[str, Any]:
        """Return the schema merged with the target of `$ref`, all of `allOf`, and one branch of each choice.

        A choice is `anyOf`, `oneOf` or `if`. If `is_deep`, branches of `anyOf` and `oneOf` without a `$ref`
        are preferred, so that the value stays small. A reference in `references` is not followed again.
        """
        if not isinstance(schema, Mapping):
            return {}
        merged, others = dict(schema), list(_read_list(schema, "allOf"))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in references:
            references.add(reference)
            others.append(_resolve_reference(reference, self._root))
        for key in ("anyOf", "oneOf"):
            branches = [branch for branch in _read_list(schema, key) if branch is not False]
            plain = [branch for branch in branches if "$ref" not in json.dumps(branch, default=str)]
            if branches:
                others.append(self._source.choice(plain if is_deep and plain else branches))
        if "if" in schema:
            then = {"allOf": [schema["if"], schema.get("then", True)]}
            others.append(self._source.choice([then, schema.get("else", True)]))
        for other in others:
            part = self._merge_parts(other, references, is_deep=is_deep)
            both = {
                "properties": {**_read_table(merged, "properties"), **_read_table(part, "properties")},
                "required": [*_read_list(merged, "required"), *_read_list(part, "required")],
            }
            merged |= part | {key: value for key, value in both.items() if value}
        return merged

    def _choose_kind(self, schema: Mapping[str, Any], *, is_deep: bool) -> Any:
        kind = schema.get("type")
        if kinds := _read_list(schema, "type"):
            return "null" if is_deep and "null" in kinds else self._source.choice(kinds)
        if isinstance(kind, str):
            return kind
        return next((name for name, keys in _KEYS_OF_KINDS.items() if keys & schema.keys()), "string")

    def _draw_object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = _read_table(schema, "properties")
        required = [name for name in _read_list(schema, "required") if isinstance(name, str)]
        share = 0.0 if depth >= _SMALL_FROM else self._source.choice((0.0, 0.5, 1.0)) if self._varies else 1.0
        optional = [name for name in properties if share == 1.0 or self._source.random() < share]
        others = schema.get("additionalProperties", True)
        names = [name for name in properties if name in required or name in optional]
        names += [name for name in dict.fromkeys(required) if name not in properties]
        least = min(int(_read_number(schema, "minProperties") or 0), _LONGEST_LIST)
        names += [f"{_TEXT}_{number}" for number in range(least - len(names))]
        return {name: self.draw_value(properties.get(name, others), depth + 1) for name in names}

    def _draw_items(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first, others = _read_list(schema, "prefixItems"), schema.get("items", True)
        copies = min(int(_read_number(schema, "minContains") or 1), _LONGEST_LIST)
        contained = [schema["contains"]] * copies if "contains" in schema else []
        least = min(int(_read_number(schema, "minItems") or 0), _LONGEST_LIST)
        length = max(self._longest, len(first), least)
        if (most := _read_number(schema, "maxItems")) is not None:
            length = max(min(length, int(most)), least)
        if depth >= _SMALL_FROM:
            length = least
        elif self._varies:
            length = self._source.randint(least, length)
        parts = [*first, *contained, *[others] * length][: max(length, len(contained))]
        items: list[Any] = []
        for part in parts:
            item = self.draw_value(part, depth + 1)
            for _ in range(_ITEM_TRIES if schema.get("uniqueItems") is True else 0):
                if item not in items:
                    break
                item = self.draw_value(part, depth + 1)
            items.append(item)
        return items

    def _draw_number(self, schema: Mapping[str, Any], *, is_whole: bool) -> int | float:
        low, high = _find_bounds(schema, margin=1 if is_whole else 0)
        step = _read_number(schema, "multipleOf")
        if step is not None and step > 0 and math.isfinite(low / step) and math.isfinite(high / step):
            first, last = math.ceil(low / step), math.floor(high / step)
            multiple = self._source.randint(first, max(first, last)) * step
            return int(multiple) if is_whole else multiple
        if is_whole:
            first = math.ceil(low)
            return self._source.randint(first, max(first, math.floor(high)))
        return self._source.uniform(low, high)

    def _draw_text(self, schema: Mapping[str, Any]) -> str:
        least = min(int(_read_number(schema, "minLength") or 0), _LONGEST_TEXT)
        most = _read_number(schema, "maxLength")
        if self._varies:
            letters = self._source.choices("abcdefghijklmnopqrstuvwxyz", k=max(least, len(_TEXT)))
            return "".join(letters)[: None if most is None else int(most)]
        return _TEXT[: len(_TEXT) if most is None else int(most)].ljust(least, ".")


def _find_bounds(schema: Mapping[str, Any], *, margin: int) -> tuple[float, float]:
    """Return the smallest and the largest value to draw for a number.

    `margin` is the distance from an exclusive bound to the nearest value. If only a lower bound is given, the
    range is as wide as `_NUMBERS`. If only an upper bound is given, the range begins at the start of
    `_NUMBERS`, or below it so that the range is at least as wide as `_NUMBERS`.
    """
    low, above = _read_number(schema, "minimum"), _read_number(schema, "exclusiveMinimum")
    high, below = _read_number(schema, "maximum"), _read_number(schema, "exclusiveMaximum")
    lows = [bound for bound in (low, None if above is None else above + margin) if bound is not None]
    highs = [bound for bound in (high, None if below is None else below - margin) if bound is not None]
    width = _NUMBERS[1] - _NUMBERS[0]
    if not lows:
        lows = [min(_NUMBERS[0], min(highs) - width) if highs else _NUMBERS[0]]
    first = max(lows)
    return first, max(first, min(highs) if highs else first + width)


def _read_number(schema: Mapping[str, Any], key: str) -> int | float | None:
    """Return the number at a keyword; None if it is missing, very large, or not finite."""
    value = schema.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e15:
        return None
    return value


def _read_table(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def _read_list(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = schema.get(key)
    return value if isinstance(value, list | tuple) else ()


def _resolve_reference(reference: str, root: Schema) -> Schema:
    """Return the schema that a reference within `root` names; True (any value) if it does not exist."""
    part = root
    for name in unquote(reference.removeprefix("#")).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(part, Mapping) or name not in part:
            return True
        part = part[name]
    return part if reference.startswith("#") else True


def _may_not_fit(schema: Schema) -> bool:
    """Return whether a draw may violate the schema, so that it must be validated."""
    if not isinstance(schema, Mapping):
        return schema is False
    if not schema.keys() <= _DRAWN:
        return True
    parts = [
        *_read_table(schema, "properties").values(),
        *_read_table(schema, "$defs").values(),
        *_read_list(schema, "anyOf"),
    ]
    return any(map(_may_not_fit, [*parts, schema.get("items", True)]))


def _fits_schema(value: Any, schema: Schema) -> bool:
    """Return whether the value fits the schema; a schema that cannot be applied accepts every value."""
    from jsonschema.exceptions import UnknownType
    from referencing.exceptions import Unresolvable

    try:
        validator = _make_validator(json.dumps(schema))
        return validator is None or validator.is_valid(value)
    except (TypeError, ValueError, RecursionError, Unresolvable, UnknownType, re.error):
        return True


@lru_cache(64)
def _make_validator(schema: str) -> "Draft202012Validator | None":
    """Return a validator that never fetches other documents; None for an invalid schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from referencing import Registry

    document = json.loads(schema)
    try:
        Draft202012Validator.check_schema(document)
    except SchemaError:
        return None
    return Draft202012Validator(document, registry=Registry())
