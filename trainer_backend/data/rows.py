"""A row of a data set: from the columns that public data sets have, to what an episode needs. Pure.

Several layouts name the same thing, and all of them are read as they stand:

    what            columns, the first that is there
    prompt          prompt, raw_prompt; question; query, interaction_kwargs.query
    ground truth    ground_truth, reward_model.ground_truth; interaction_kwargs.ground_truth; answer
    interaction     interaction_kwargs, extra_info.interaction_kwargs
    document        document_content
    id              id

Of names that a comma parts, two that are both there must hold the same; a semicolon parts ranks. A key that
is null counts as absent, since Parquet cannot tell the two apart.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pydantic import JsonValue, TypeAdapter, ValidationError

from shared_schemas.base import shown
from shared_schemas.documents import MAX_ANSWER_CHARS, MAX_DOCUMENT_CHARS, MAX_QUESTION_CHARS
from shared_schemas.messages import refuse_no_opening
from shared_schemas.rollouts import GroundTruth, InteractionSpec
from trainer_backend.errors import DataError

# In the public layout of GSM8K the answer is a whole solution, and its result stands after this.
ANSWER_MARK = "####"
_THOUSANDS = re.compile(r"-?\$?\d{1,3}(,\d{3})+(\.\d+)?")
_LONGEST_ID = 100
_INTERACTION = ("interaction_kwargs", "extra_info.interaction_kwargs")
_TRUTH: TypeAdapter[JsonValue] = TypeAdapter(GroundTruth)


@dataclass(frozen=True, slots=True)
class Row:
    """One thing to do: siblings of a group share it.

    Attributes:
        id: names it wherever it is told of, and decides its place in every order.
        prompt: what the user says, or the messages that the episode opens with, `{role, content}` each; the
            last of them is the user's.
        document: what the environment holds outside the prompt. Such a row asks one question, in a text, and
            its ground_truth is the answer as text, or a list of those that count.
        ground_truth: what the episode is scored by; the policy never sees it.
        interaction: who answers as the user, and what it is told.
    """

    id: str
    prompt: str | tuple[Mapping[str, str], ...]
    document: str | None = None
    ground_truth: JsonValue = None
    interaction: InteractionSpec | None = None

    @property
    def question(self) -> str:
        """What the user says last before the policy answers."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


class Parsed(NamedTuple):
    """A row, and where it comes from.

    Attributes:
        used: the columns that it was read from, dotted, by what they became.
        unread: columns that hold something that nothing looked at.
    """

    row: Row
    used: Mapping[str, str]
    unread: tuple[str, ...] = ()


def parse_row(columns: Mapping[str, Any], *, where: str, default_id: str) -> Parsed:
    """A row from its columns.

    Args:
        where: file and row, the beginning of every error.
        default_id: of a data set without a column `id`.
    """
    found = _Columns({name: _without_nulls(value) for name, value in columns.items()}, where)
    interaction = found.one_of("interaction", *_INTERACTION)
    row = Row(
        id=_id(found, default_id),
        prompt=_prompt(found),
        document=_document(found),
        ground_truth=_ground_truth(found, interaction),
        interaction=_interaction(found, interaction),
    )
    if row.document is not None:
        row = replace(row, prompt=_one_question(found, row), ground_truth=_accepted(found, row))
    return Parsed(row, found.used, found.unread)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


class _Columns:
    """The columns of one row, and which of them were asked for and found."""

    def __init__(self, columns: Mapping[str, Any], where: str) -> None:
        self._columns, self._where = columns, where
        self.used: dict[str, str] = {}
        self._read: set[str] = set()

    def one_of(self, what: str, *places: str) -> Any:
        """The value of the first of these places that has one; None where none has."""
        values = {place: self._at(place) for place in places}
        there = [place for place, value in values.items() if value is not None]
        for other in there[1:]:
            if values[other] != values[there[0]]:
                raise self.error(f"{there[0]} and {other} are both there and differ; keep one of them")
        if not there:
            return None
        self.used.setdefault(what, there[0])
        return values[there[0]]

    def error(self, told: str) -> DataError:
        return DataError(told, where=self._where)

    @property
    def names(self) -> str:
        return ", ".join(sorted(name for name, value in self._columns.items() if value is not None)) or "none"

    @property
    def unread(self) -> tuple[str, ...]:
        return tuple(
            name for name, value in self._columns.items() if value is not None and name not in self._read
        )

    def _at(self, place: str) -> Any:
        value: Any = self._columns
        for key in place.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            self._read.add(place.partition(".")[0])
        return value


def _id(found: _Columns, default: str) -> str:
    value = found.one_of("id", "id")
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise found.error(f"id is {shown(value)}; it is a string or a whole number")
    text = str(value)
    if not text.strip() or len(text) > _LONGEST_ID or not text.isprintable():
        raise found.error(f"id is {shown(text)}; it has 1 to {_LONGEST_ID} printable characters")
    return text


def _prompt(found: _Columns) -> str | tuple[Mapping[str, str], ...]:
    value = found.one_of("prompt", "prompt", "raw_prompt")
    if value is None:
        value = found.one_of("prompt", "question")
    if value is None:
        value = found.one_of("prompt", "query", *(f"{place}.query" for place in _INTERACTION))
    if value is None:
        raise found.error(
            f"no prompt; it is in prompt, raw_prompt, question or query, and found were: {found.names}"
        )
    name = found.used["prompt"]
    try:
        refuse_no_opening(value, name)
    except ValueError as error:
        raise found.error(str(error)) from error
    if isinstance(value, str):
        return value
    return tuple(_message(found, f"{name}[{place}]", item) for place, item in enumerate(value))


def _message(found: _Columns, name: str, value: Mapping[str, Any]) -> Mapping[str, str]:
    extra = sorted(value.keys() - {"role", "content"})
    if extra:
        raise found.error(f"{name} has {extra[0]!r}; a message has role and content alone")
    return {"role": value["role"], "content": value["content"]}


def _document(found: _Columns) -> str | None:
    value = found.one_of("document", "document_content")
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise found.error(f"document_content is {shown(value)}; it is a text that is not empty")
    return None if value is None else _fitting(found, "document_content", value, MAX_DOCUMENT_CHARS)


def _fitting(found: _Columns, name: str, text: str, at_most: int) -> str:
    """Refuse longer texts now: the task app would refuse them hours later, when they are played."""
    if len(text) > at_most:
        raise found.error(f"{name} has {len(text):,} characters; at most {at_most:,} are taken")
    return text


def _one_question(found: _Columns, row: Row) -> str:
    """Return the one question about a document, which the policy reads with tools."""
    if not isinstance(row.prompt, str) and len(row.prompt) > 1:
        raise found.error(
            f"{found.used['prompt']} begins with a message of {row.prompt[0]['role']!r}; beside "
            "document_content it is one question: a text, or one message of the user"
        )
    return _fitting(found, found.used["prompt"], row.question, MAX_QUESTION_CHARS)


def _accepted(found: _Columns, row: Row) -> JsonValue:
    """Beside a document: the answer as text, or the list of all that count; 42 becomes "42"."""
    truth = row.ground_truth
    texts = [_as_text(item) for item in (truth if isinstance(truth, list) else [truth])]
    if not texts or None in texts:
        raise found.error(
            f"ground_truth is {shown(truth)}; beside document_content it is the answer as text or number, "
            "or a list of all that count"
        )
    for text in texts:
        _fitting(found, "ground_truth", text or "", MAX_ANSWER_CHARS)
    return [*texts] if isinstance(truth, list) else texts[0]


def _as_text(answer: JsonValue) -> str | None:
    """None: it is neither a text nor a number."""
    return str(answer) if isinstance(answer, str | int | float) and not isinstance(answer, bool) else None


def _ground_truth(found: _Columns, interaction: Any) -> JsonValue:
    value = found.one_of("ground_truth", "ground_truth", "reward_model.ground_truth")
    if value is None and isinstance(interaction, Mapping) and "ground_truth" in interaction:
        found.used["ground_truth"] = f"{found.used['interaction']}.ground_truth"
        value = interaction["ground_truth"]
    if value is None:
        value = found.one_of("ground_truth", "answer")
        if isinstance(value, str) and ANSWER_MARK in value:
            found.used["ground_truth"] = f"answer after {ANSWER_MARK}"
            value = _result(found, value)
    return _json(found, found.used.get("ground_truth", "ground_truth"), value)


def _result(found: _Columns, answer: str) -> str:
    """`42` of `21 * 2 = 42\\n#### 42`; in numbers as GSM8K writes them, `1,000` is `1000`."""
    result = answer.rpartition(ANSWER_MARK)[2].strip()
    if not result:
        raise found.error(f"answer ends at its {ANSWER_MARK}; the result stands after it")
    return result.replace(",", "") if _THOUSANDS.fullmatch(result) else result


def _interaction(found: _Columns, value: Any) -> InteractionSpec | None:
    if value is None:
        return None
    name = found.used["interaction"]
    if not isinstance(value, Mapping):
        raise found.error(f"{name} is {shown(value)}; it is a table of keyword arguments")
    called = value.get("name")
    if called is not None and not isinstance(called, str):
        raise found.error(f"{name}.name is {shown(called)}; it is a text")
    kwargs = {key: item for key, item in value.items() if key != "name"}
    try:
        return InteractionSpec(name=called, kwargs=kwargs)
    except ValidationError as error:
        raise found.error(f"{name}: {_first(error)}") from error


def _json(found: _Columns, name: str, value: Any) -> JsonValue:
    try:
        return _TRUTH.validate_python(value)
    except ValidationError as error:
        raise found.error(f"{name} is {shown(value)}: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    """Where a value is wrong, and how: `tags.0: Input should be …`."""
    finding = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in finding["loc"] if part in {"name", "kwargs"})
    return f"{place}: " * bool(place) + finding["msg"].removeprefix("Value error, ")
