"""Random values of a JSON Schema: draws that mostly fit, each one judged afterwards.

    draw: choose branches, join what they say, draw of the joined schema      (Draws)
    judge: json_schema.Validator

The first draw is the plain one: all properties, lists at their longest. Where it does not fit, as with `not`,
`oneOf` or two patterns, further draws leave optional properties out, vary lengths, and judge each part before
its whole.
"""

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any

from task_app.policies.json_schema import (
    JOINS,
    KINDS,
    REFERENCES,
    Schema,
    Steps,
    TooMuch,
    Validator,
    both,
    count,
    identity,
    kinds,
    leading,
    matches,
    names,
    needed_with,
    number,
    parts,
    patterns,
    property_schemas,
    resolve,
    table,
)
from task_app.policies.random_text import text_like

# Bounds for numbers that set none, and the text of strings that any text fits.
_NUMBERS = (0, 9)
_TEXT = "text"
# Values that a schema may demand beyond these are not drawn: they would fill the memory.
_LONGEST_TEXT, _LONGEST_LIST, _DEEPEST = 100_000, 10_000, 60
# Of a whole value, of a part of one, and of a call: an ordinary tool takes one draw and tens of steps.
_TRIES, _INNER_TRIES, _STEPS = 40, 8, 10_000
_SCALARS = frozenset({"string", "integer", "number", "boolean", "null"})
_KEYS_OF_KINDS = {
    "object": ("properties", "patternProperties", "additionalProperties", "required", "propertyNames",
               "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip
_FORMATS = {
    "date": "2024-02-29",
    "date-time": "2024-02-29T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "P1D",
    "email": "text@example.com",
    "idn-email": "text@example.com",
    "hostname": "example.com",
    "idn-hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/text",
    "uri-reference": "https://example.com/text",
    "iri": "https://example.com/text",
    "iri-reference": "https://example.com/text",
    "uri-template": "https://example.com/{text}",
    "uuid": "6ba7b810-9dad-41d1-80b4-00c04fd430c8",
    "json-pointer": "/text",
    "relative-json-pointer": "0/text",
    "regex": "text",
}


class Unsatisfied(Exception):
    """A draw has found no value of a schema; another branch may have one."""


def random_object(schema: Schema, source: random.Random, *, longest: int) -> dict[str, Any]:
    """An object that the schema describes, or the last one that was drawn where none of them fits.

    It never raises. A schema that no object fits gets an object that does not fit, and so do schemas whose
    values are deeper or longer than the bounds of this module, or so rare that the draws miss them.
    """
    draws = Draws(schema, source, longest=longest)
    whole = {"type": "object", **schema} if isinstance(schema, Mapping) else {"type": "object"}
    last: dict[str, Any] = {}
    with suppress(TooMuch, RecursionError):
        for attempt in range(_TRIES):
            with suppress(Unsatisfied):
                draws.is_careful = attempt > 0
                value = draws.value(whole)
                if isinstance(value, dict):
                    last = value
                    if draws.fits(value, whole):
                        break
    return last


class Draws:
    """Draws values of the parts of one schema.

    Attributes:
        is_careful: whether parts are judged and varied.
    """

    def __init__(self, root: Schema, source: random.Random, *, longest: int) -> None:
        steps = Steps(_STEPS)
        self._root, self._source, self._longest, self._steps = root, source, longest, steps
        self.fits = Validator(root, steps).fits
        self.is_careful = False
        self._depth = 0

    def value(self, schema: Schema, within: frozenset[str] = frozenset()) -> Any:
        """A value of a schema.

        Args:
            within: the references that led here; where one comes again, the value is kept small.

        Raises:
            Unsatisfied: none was found.
            TooMuch: the call has no steps left.
        """
        if self._depth == _DEEPEST:
            raise Unsatisfied
        self._depth += 1
        try:
            if not self.is_careful:
                return self._drawn(schema, within)
            for _ in range(_INNER_TRIES if self._depth > 1 else 1):
                with suppress(Unsatisfied):
                    value = self._drawn(schema, within)
                    if self._depth == 1 or self.fits(value, schema):
                        return value
            raise Unsatisfied
        finally:
            self._depth -= 1

    def _drawn(self, schema: Schema, within: frozenset[str]) -> Any:
        self._steps.take()
        if isinstance(schema, Mapping) and JOINS.isdisjoint(schema):  # as most are, and in a hurry
            return self._of_joined(schema, within, is_small=False)
        last = Unsatisfied()
        for joined, references in self._joined(schema, within):
            try:
                return self._of_joined(joined, within | references, is_small=bool(within & references))
            except Unsatisfied as error:
                last = error
        raise last

    def _joined(
        self, schema: Schema, within: frozenset[str]
    ) -> Iterator[tuple[dict[str, Any], frozenset[str]]]:
        """The schema with its references and branches in one, a way of choosing them after the other."""
        for _ in range(_INNER_TRIES):
            references: set[str] = set()
            has_choice = [False]
            with suppress(Unsatisfied):
                yield self._join(schema, within, references, has_choice), frozenset(references)
            if not has_choice[0]:
                return

    def _join(
        self, schema: Schema, within: frozenset[str], references: set[str], has_choice: list[bool]
    ) -> dict[str, Any]:
        self._steps.take()
        if not isinstance(schema, Mapping):
            if schema is False:
                raise Unsatisfied
            return {}
        joined = dict(schema)
        others: list[Schema] = []
        for key in REFERENCES:
            reference = schema.get(key)
            if isinstance(reference, str) and reference not in references:
                references.add(reference)
                others.append(resolve(reference, self._root))
        others += parts(schema, "allOf")
        for key in ("anyOf", "oneOf"):
            if branches := parts(schema, key):
                has_choice[0] |= len(branches) > 1
                others.append(self._branch(branches, is_small=bool(within)))
        if "if" in schema:
            has_choice[0] = True
            ways = [{"allOf": [schema["if"], schema.get("then", True)]}, schema.get("else", True)]
            others.append(self._source.choice(ways))
        for other in others:
            joined = both(joined, self._join(other, within, references, has_choice))
        return joined

    def _branch(self, branches: Sequence[Schema], *, is_small: bool) -> Schema:
        """One of them; within a schema that refers to itself one that ends it, if there is one."""
        if is_small:
            plain = [part for part in branches if "$ref" not in repr(part)]
            branches = plain if plain and self._source.random() < 0.8 else branches
        return self._source.choice(branches)

    def _of_joined(self, schema: Mapping[str, Any], within: frozenset[str], *, is_small: bool) -> Any:
        if "const" in schema:
            return schema["const"]
        listed = parts(schema, "enum")
        if self.is_careful and listed:
            listed = [item for item in listed if self.fits(item, schema)]
        if listed:
            return self._source.choice(listed)
        if "enum" in schema and isinstance(schema["enum"], list | tuple):
            raise Unsatisfied
        kind = self._kind(schema, is_small=is_small)
        if kind == "object":
            return self._object(schema, within, is_small=is_small)
        if kind == "array":
            return self._list(schema, within, is_small=is_small)
        if kind == "boolean":
            return self._source.random() < 0.5
        if kind == "null":
            return None
        if kind in ("integer", "number"):
            return self._number(schema, is_whole=kind == "integer")
        return self._text(schema)

    def _kind(self, schema: Mapping[str, Any], *, is_small: bool) -> Any:
        allowed = kinds(schema)
        if "type" in schema and not allowed:
            raise Unsatisfied
        if is_small:
            allowed = [kind for kind in allowed if kind in _SCALARS] or allowed
        if allowed:
            return allowed[0] if isinstance(schema["type"], str) else self._source.choice(allowed)
        if self.is_careful and self._source.random() < 0.5:
            return self._source.choice(KINDS)
        return next(
            (kind for kind, keys in _KEYS_OF_KINDS.items() if not schema.keys().isdisjoint(keys)), "string"
        )

    # ---- objects

    def _object(self, schema: Mapping[str, Any], within: frozenset[str], *, is_small: bool) -> dict[str, Any]:
        required = names(schema)
        optional = [name for name in table(schema, "properties") if name not in required]
        if is_small:
            optional = []
        elif self.is_careful:
            share = self._source.choice((0.0, 0.5, 1.0))
            optional = [name for name in optional if self._source.random() < share]
        order = [name for name in table(schema, "properties") if name in required or name in optional]
        order += [name for name in required if name not in order]
        most = count(schema, "maxProperties")
        for needed in needed_with(schema, order):
            if isinstance(needed, Mapping):
                order += [name for name in names(needed) if name not in order]
                schema = both(schema, needed)
        value: dict[str, Any] = {}
        for name in order:
            if name not in required and most is not None and len(value) + len(required) >= most:
                continue
            try:
                value[name] = self.value(_all(property_schemas(schema, name)), within)
            except Unsatisfied:
                if name in required:
                    raise
        self._fill(value, schema, within)
        return value

    def _fill(self, value: dict[str, Any], schema: Mapping[str, Any], within: frozenset[str]) -> None:
        """Add properties that no one names until there are minProperties."""
        least = count(schema, "minProperties") or 0
        if least > _LONGEST_LIST:
            raise Unsatisfied
        for _ in range(4 * least):
            if len(value) >= least:
                return
            name = self._new_name(schema, len(value))
            with suppress(Unsatisfied):
                if name not in value:
                    value[name] = self.value(_all(property_schemas(schema, name)), within)
        if len(value) < least:
            raise Unsatisfied

    def _new_name(self, schema: Mapping[str, Any], number_of_it: int) -> str:
        rules = [text for text in table(schema, "patternProperties") if isinstance(text, str)]
        if rules and (schema.get("additionalProperties") is False or self._source.random() < 0.5):
            return self._text({"pattern": self._source.choice(rules)})
        if "propertyNames" in schema:
            name = self.value({"allOf": [{"type": "string"}, schema["propertyNames"]]})
            return name if isinstance(name, str) else _TEXT
        return self._source.choice([f"{_TEXT}_{number_of_it}", *table(schema, "properties")])

    # ---- lists

    def _list(self, schema: Mapping[str, Any], within: frozenset[str], *, is_small: bool) -> list[Any]:
        first, others = leading(schema)
        least, most = count(schema, "minItems") or 0, count(schema, "maxItems")
        contained = count(schema, "minContains") if "minContains" in schema else 1
        contained = (contained or 0) if "contains" in schema else 0
        least = max(least, contained)
        if least > _LONGEST_LIST:
            raise Unsatisfied
        length = max(self._length(first, others, most), least)
        if is_small:
            length = least
        elif self.is_careful:
            length = self._source.randint(min(least, length), length)
        items: list[Any] = []
        for index in range(length):
            part = first[index] if index < len(first) else others
            if length - index <= contained:
                part = {"allOf": [part, schema["contains"]]}
            try:
                items.append(self._new_item(part, items, within, is_unique=schema.get("uniqueItems") is True))
            except Unsatisfied:
                if len(items) < least:
                    raise
                break
        return items

    def _length(self, first: Sequence[Schema], others: Schema, most: int | None) -> int:
        length = len(first) if first else self._longest
        if others is False:
            length = min(length, len(first))
        return length if most is None else min(length, most)

    def _new_item(
        self, part: Schema, items: Sequence[Any], within: frozenset[str], *, is_unique: bool
    ) -> Any:
        if not is_unique:
            return self.value(part, within)
        known = {identity(item) for item in items}
        was_careful = self.is_careful
        try:
            for _ in range(8 * len(items) + 8):
                item = self.value(part, within)
                if identity(item) not in known:
                    return item
                self.is_careful = True  # plain texts, and lists of them, are always the same
        finally:
            self.is_careful = was_careful
        raise Unsatisfied

    # ---- scalars

    def _number(self, schema: Mapping[str, Any], *, is_whole: bool) -> int | float:
        step = number(schema, "multipleOf")
        if step is None or step <= 0:
            step = 1 if is_whole else None
        if step is None:
            low, high = _bounds(schema)
            value = self._source.uniform(low, high)
            return value if math.isfinite(value) else self._source.choice((low, high))
        unit = Fraction(str(step))
        if is_whole:  # the least multiple that is whole
            unit = Fraction(unit.numerator)
        first, last = _multiples(schema, unit)
        if first > last:
            raise Unsatisfied
        multiple = self._source.randint(first, last) * unit
        return int(multiple) if multiple.denominator == 1 else float(multiple)

    def _text(self, schema: Mapping[str, Any]) -> str:
        least, most = count(schema, "minLength") or 0, count(schema, "maxLength")
        if least > _LONGEST_TEXT:
            raise Unsatisfied
        plain = _TEXT[: len(_TEXT) if most is None else most].ljust(least, ".")
        form = schema.get("format")
        if not all(matches(pattern, plain) for pattern in patterns(schema)):
            return self._like(patterns(schema), schema, least=least)
        if (
            isinstance(form, str)
            and form in _FORMATS
            and self.fits(_FORMATS[form], {**schema, "type": "string"})
        ):
            return _FORMATS[form]
        if not self.is_careful:
            return plain
        length = self._source.randint(least, max(least, 8 if most is None else min(most, least + 8)))
        return "".join(self._source.choices("abcdefghijklmnopqrstuvwxyz", k=length))

    def _like(self, rules: Sequence[str], schema: Mapping[str, Any], *, least: int) -> str:
        """A text in which all patterns occur: drawn of one of them, or of one after the other."""
        lengths = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
        for _ in range(4 * _INNER_TRIES):
            chosen = self._source.choice([[rule] for rule in rules] + [rules]) if len(rules) > 1 else rules
            text = "".join([text_like(rule, self._source, least=least) for rule in chosen])
            self._steps.take(1 + len(text) // 10)
            if all(matches(rule, text) for rule in rules) and self.fits(text, lengths):
                return text
        raise Unsatisfied


def _bounds(schema: Mapping[str, Any]) -> tuple[float, float]:
    """Bounds of a number that need not be whole. A lone bound gives a width of 9."""
    low = _extreme(schema, "minimum", "exclusiveMinimum", max)
    high = _extreme(schema, "maximum", "exclusiveMaximum", min)
    width = _NUMBERS[1] - _NUMBERS[0]
    if low is None:
        low = _NUMBERS[0] if high is None else min(_NUMBERS[0], high - width)
    high = low + width if high is None else high
    if low > high or abs(low) > sys.float_info.max or abs(high) > sys.float_info.max:
        raise Unsatisfied
    return float(low), float(high)


def _multiples(schema: Mapping[str, Any], unit: Fraction) -> tuple[int, int]:
    """The first and last multiple of a unit that the bounds allow. A lone bound allows 10."""
    lows, highs = [], []
    if (bound := number(schema, "minimum")) is not None:
        lows.append(math.ceil(Fraction(bound) / unit))
    if (bound := number(schema, "exclusiveMinimum")) is not None:
        lows.append(math.floor(Fraction(bound) / unit) + 1)
    if (bound := number(schema, "maximum")) is not None:
        highs.append(math.floor(Fraction(bound) / unit))
    if (bound := number(schema, "exclusiveMaximum")) is not None:
        highs.append(math.ceil(Fraction(bound) / unit) - 1)
    width = _NUMBERS[1] - _NUMBERS[0]
    if not lows:
        lows.append(min(_NUMBERS[0], min(highs) - width) if highs else _NUMBERS[0])
    first = max(lows)
    return first, min(highs) if highs else first + width


def _extreme(
    schema: Mapping[str, Any], one: str, other: str, choose: Callable[[list[int | float]], int | float]
) -> int | float | None:
    bounds = [bound for key in (one, other) if (bound := number(schema, key)) is not None]
    return choose(bounds) if bounds else None


def _all(schemas: Sequence[Schema]) -> Schema:
    """One schema that says what all of them say."""
    return schemas[0] if len(schemas) == 1 else {"allOf": [*schemas]}
