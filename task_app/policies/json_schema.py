"""The part of JSON Schema that random play needs, pure: whether a value fits a schema, and schemas in one.

Schemas come from tools that anybody wrote, so a keyword with a value that no schema may have counts as
absent, and so does a `$ref` that leads nowhere. Formats and keywords about unevaluated parts are not checked.

Source: json-schema.org, draft 2020-12; `items` as a list, `additionalItems`, `definitions` and `dependencies`
    of older drafts are read too.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

# What stands at the place of a schema: an object or a boolean, or what its author took for one.
Schema = Any

KINDS = ("string", "integer", "number", "boolean", "null", "array", "object")
# Where `both` puts the patterns of two schemas.
PATTERNS = "x-turnwise-patterns"
REFERENCES = ("$ref", "$dynamicRef")
# Keywords with schemas for the value itself.
JOINS = frozenset({*REFERENCES, "allOf", "anyOf", "oneOf", "not", "if"})
_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains")
_TABLES = ("properties", "patternProperties")
_BOTH = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames")


class TooMuch(Exception):
    """A schema needs more steps than a call may take."""


class Steps:
    """Counts what a call costs: schemas can refer to themselves, and two of them can do so in each other."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, steps: int = 1) -> None:
        """Count steps.

        Raises:
            TooMuch: there were not as many left.
        """
        self._left -= steps
        if self._left < 0:
            raise TooMuch


def number(schema: Mapping[str, Any], key: str) -> int | float | None:
    """The finite number of a keyword, or None."""
    value = schema.get(key)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def count(schema: Mapping[str, Any], key: str) -> int | None:
    """The whole number from 0 of a keyword, or None."""
    value = number(schema, key)
    return int(value) if value is not None and value >= 0 and value == int(value) else None


def table(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object of a keyword, or an empty one."""
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def parts(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The list of a keyword, or an empty one."""
    value = schema.get(key)
    return value if isinstance(value, list | tuple) else ()


def kinds(schema: Mapping[str, Any]) -> Sequence[Any]:
    """The types that a schema allows, as they are written; none: it does not say."""
    value = schema.get("type")
    return [value] if isinstance(value, str) else parts(schema, "type")


def patterns(schema: Mapping[str, Any]) -> list[str]:
    """The regular expressions that must occur in a string; of a schema of `both` there may be several."""
    listed = parts(schema, PATTERNS) or [schema.get("pattern")]
    return [text for text in listed if isinstance(text, str)]


def names(schema: Mapping[str, Any]) -> list[str]:
    """The properties that an object must have."""
    return [name for name in parts(schema, "required") if isinstance(name, str)]


def leading(schema: Mapping[str, Any]) -> tuple[Sequence[Any], Schema]:
    """The schemas of the first items, and that of the others."""
    if isinstance(schema.get("items"), list | tuple):
        return schema["items"], schema.get("additionalItems", True)
    return parts(schema, "prefixItems"), schema.get("items", True)


def needed_with(schema: Mapping[str, Any], present: Iterable[str]) -> list[Schema]:
    """What an object with these properties must satisfy too."""
    needed: list[Schema] = []
    for name in present:
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            if name in table(schema, key):
                part = schema[key][name]
                needed.append({"required": part} if isinstance(part, list | tuple) else part)
    return needed


def property_schemas(schema: Mapping[str, Any], name: str) -> list[Schema]:
    """All that is said of a property."""
    own = [table(schema, "properties")[name]] if name in table(schema, "properties") else []
    own += [part for text, part in table(schema, "patternProperties").items() if matches(text, name)]
    return own or [schema.get("additionalProperties", True)]


@lru_cache(512)
def expression(text: str) -> re.Pattern[str] | None:
    """The regular expression, or None where Python reads it otherwise, as `\\p{L}`."""
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return None


def matches(text: Any, value: str) -> bool:
    """Whether a pattern occurs in a value; one that cannot be read matches all."""
    pattern = expression(text) if isinstance(text, str) else None
    return pattern is None or pattern.search(value) is not None


def identity(value: Any) -> str:
    """A text that equal values of JSON share: 1 and 1.0 are equal, and 1 and true are not."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value == int(value) else value
    if isinstance(value, Mapping):
        return {str(name): _whole(item) for name, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list | tuple) else value


def resolve(reference: Any, root: Schema) -> Schema:
    """The schema that a reference within the document names; True, which says nothing, if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    if reference != "#" and not reference.startswith("#/"):
        return _anchored(reference[1:], root)
    part = root
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdecimal() and len(name) < 6 and int(name) < len(part):
            part = part[int(name)]
        else:
            return True
    return part


def _anchored(anchor: str, root: Schema) -> Schema:
    for key in ("$defs", "definitions"):
        for part in table(root, key).values() if isinstance(root, Mapping) else ():
            if isinstance(part, Mapping) and anchor in (part.get("$anchor"), part.get("$dynamicAnchor")):
                return part
    return True


def both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that says what both say, as far as a draw can use it; `fits` judges what is drawn."""
    result = dict(one)
    for key, value in other.items():
        if key not in result:
            result[key] = value
        elif key in _LOWER or key in _UPPER:
            bounds = [bound for bound in (number(one, key), number(other, key)) if bound is not None]
            result[key] = (max if key in _LOWER else min)(bounds, default=None)
        elif key in _TABLES:
            result[key] = _union(table(one, key), table(other, key))
        elif key in _BOTH:
            result[key] = {"allOf": [one[key], value]}
        elif key == "required":
            result[key] = [*dict.fromkeys([*names(one), *names(other)])]
        elif key == "type":
            result[key] = [kind for kind in kinds(one) if _allows(kinds(other), kind)] or [
                kind for kind in kinds(other) if _allows(kinds(one), kind)
            ]
        elif key == "enum":
            known = {identity(item) for item in parts(other, key)}
            result[key] = [item for item in parts(one, key) if identity(item) in known]
        elif key == "multipleOf":
            result[key] = _common_multiple(number(one, key), number(other, key))
        elif key == "pattern":
            result[PATTERNS] = [*patterns(one), *patterns(other)]
        elif key == "uniqueItems":
            result[key] = one[key] is True or value is True
    return result


def _union(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    shared = {name: {"allOf": [one[name], other[name]]} for name in one.keys() & other.keys()}
    return {name: shared.get(name, part) for name, part in {**one, **other}.items()}


def _allows(listed: Sequence[Any], kind: Any) -> bool:
    return kind in listed or (kind == "integer" and "number" in listed)


def _common_multiple(one: int | float | None, other: int | float | None) -> int | float | None:
    if not one or not other:
        return one or other
    first, second = Fraction(str(one)), Fraction(str(other))
    common = Fraction(
        math.lcm(first.numerator, second.numerator), math.gcd(first.denominator, second.denominator)
    )
    return int(common) if common.denominator == 1 else float(common)


class Validator:
    """Says whether values fit the schemas of one document.

    Args:
        root: the document, for `$ref`.
        steps: of the call.
    """

    def __init__(self, root: Schema, steps: Steps) -> None:
        self._root, self._steps = root, steps

    def fits(self, value: Any, schema: Schema) -> bool:
        self._steps.take()
        if not isinstance(schema, Mapping):
            return schema is not False
        return (
            self._is_of_a_kind(value, schema)
            and _is_listed(value, schema)
            and self._fits_its_kind(value, schema)
            and (JOINS.isdisjoint(schema) or self._fits_parts(value, schema))
        )

    def _is_of_a_kind(self, value: Any, schema: Mapping[str, Any]) -> bool:
        allowed = kinds(schema)
        return "type" not in schema or any(is_kind(value, kind) for kind in allowed)

    def _fits_parts(self, value: Any, schema: Mapping[str, Any]) -> bool:
        """Check the keywords that hold schemas for the value itself."""
        for key in REFERENCES:
            if key in schema and not self.fits(value, resolve(schema[key], self._root)):
                return False
        if not all(self.fits(value, part) for part in parts(schema, "allOf")):
            return False
        either = parts(schema, "anyOf")
        if either and not any(self.fits(value, part) for part in either):
            return False
        one = parts(schema, "oneOf")
        if one and sum(self.fits(value, part) for part in one) != 1:
            return False
        if "not" in schema and self.fits(value, schema["not"]):
            return False
        if "if" not in schema:
            return True
        return self.fits(value, schema.get("then" if self.fits(value, schema["if"]) else "else", True))

    def _fits_its_kind(self, value: Any, schema: Mapping[str, Any]) -> bool:
        if isinstance(value, str):
            return _is_within(len(value), schema, "Length") and matches(schema.get("pattern"), value)
        if isinstance(value, bool) or value is None:
            return True
        if isinstance(value, int | float):
            return is_in_bounds(value, schema)
        if isinstance(value, list):
            return self._fits_list(value, schema)
        return not isinstance(value, Mapping) or self._fits_object(value, schema)

    def _fits_list(self, items: Sequence[Any], schema: Mapping[str, Any]) -> bool:
        first, others = leading(schema)
        if not _is_within(len(items), schema, "Items"):
            return False
        if schema.get("uniqueItems") is True and len({*map(identity, items)}) < len(items):
            return False
        if "contains" in schema:
            found = sum(self.fits(item, schema["contains"]) for item in items)
            least, most = count(schema, "minContains"), count(schema, "maxContains")
            if found < (1 if least is None else least) or (most is not None and found > most):
                return False
        return all(
            self.fits(item, first[index] if index < len(first) else others)
            for index, item in enumerate(items)
        )

    def _fits_object(self, value: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
        if not _is_within(len(value), schema, "Properties") or not value.keys() >= {*names(schema)}:
            return False
        if "propertyNames" in schema and not all(self.fits(name, schema["propertyNames"]) for name in value):
            return False
        return all(self.fits(value, part) for part in needed_with(schema, value)) and all(
            self.fits(item, part) for name, item in value.items() for part in property_schemas(schema, name)
        )


def is_kind(value: Any, kind: object) -> bool:
    """Whether a value is of a type of JSON Schema."""
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == math.floor(value))
    kinds_of = {str: "string", list: "array", dict: "object", type(None): "null"}
    return kind == kinds_of.get(type(value), "")


def is_in_bounds(value: int | float, schema: Mapping[str, Any]) -> bool:
    """Whether a number keeps to the bounds and to multipleOf."""
    low, above = number(schema, "minimum"), number(schema, "exclusiveMinimum")
    high, below = number(schema, "maximum"), number(schema, "exclusiveMaximum")
    if (low is not None and value < low) or (high is not None and value > high):
        return False
    if (above is not None and value <= above) or (below is not None and value >= below):
        return False
    step = number(schema, "multipleOf")
    if not step or step < 0:
        return True
    # As validators do it, in floats where the schema has one: 0.3 is then no multiple of 0.1.
    try:
        return value % step == 0 if isinstance(step, int) else float(value / step).is_integer()
    except OverflowError:
        return (Fraction(value) / Fraction(step)).denominator == 1


def _is_within(size: int, schema: Mapping[str, Any], what: str) -> bool:
    least, most = count(schema, f"min{what}"), count(schema, f"max{what}")
    return (least is None or size >= least) and (most is None or size <= most)


def _is_listed(value: Any, schema: Mapping[str, Any]) -> bool:
    if "const" in schema and not _is_same(value, schema["const"]):
        return False
    listed = schema.get("enum")
    return not isinstance(listed, list | tuple) or any(_is_same(value, item) for item in listed)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    return identity(one) == identity(other)
