"""Converts rows of public data sets to the fields that episodes need. Pure.

Public layouts use different columns for the same part:

    part            columns in order of preference
    prompt          prompt, raw_prompt; question; query, interaction_kwargs.query
    ground truth    ground_truth, reward_model.ground_truth (verl), reward_spec.ground_truth (SkyRL);
                    interaction_kwargs.ground_truth; answer
    interaction     interaction_kwargs, extra_info.interaction_kwargs
    document        document_content
    id              id

Columns separated by a comma must agree if both are present. A column after a semicolon counts only if all
before it are absent. A null value counts as absent, because Parquet stores absent values as null.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from pydantic import JsonValue, TypeAdapter, ValidationError

from shared_schemas.base import shown
from shared_schemas.documents import MAX_ANSWER_CHARS, MAX_DOCUMENT_CHARS, MAX_QUESTION_CHARS
from shared_schemas.json_text import without_nulls
from shared_schemas.messages import refuse_no_opening
from shared_schemas.numbers import join_thousands
from shared_schemas.rollouts import GroundTruth, InteractionSpec
from trainer_backend.errors import DataError

# In the public layout of GSM8K, the answer is a whole solution, in which the result follows this mark.
ANSWER_MARK = "####"
_LONGEST_ID = 100
# 64 bits: two of a million different rows share a digest with a probability of 3e-8.
_DIGEST_BYTES = 8
_INTERACTION = ("interaction_kwargs", "extra_info.interaction_kwargs")
TRUTH_COLUMNS = ("ground_truth", "reward_model.ground_truth", "reward_spec.ground_truth")
_TRUTH: TypeAdapter[JsonValue] = TypeAdapter(GroundTruth)


@dataclass(frozen=True, slots=True)
class Row:
    """One task of a data set. All siblings of a group play the same row."""

    id: str
    """The column `id`. Without this column, `data.dataset.read_split` makes the id from the row's content."""
    prompt: str | tuple[Mapping[str, str], ...]
    """The user's text, or the opening messages `{role, content}`, the last of which is from the user."""
    document: str | None = None
    """A text that the environment stores outside the prompt. The prompt of such a row is one question about
    the text, and its ground_truth is the answer as text, or a list of accepted answers."""
    ground_truth: JsonValue = None
    """The correct answer, by which the episode is scored; the policy never sees it."""
    interaction: InteractionSpec | None = None
    """The interaction, which simulates the user, and its arguments."""
    where: str = field(default="", compare=False)
    """The row's file and line, for messages."""

    @property
    def question(self) -> str:
        """The user's last message before the policy answers."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    def task_digest(self) -> str:
        """Return a digest of the prompt's texts and the document, as 16 hexadecimal digits."""
        prompt = self.prompt
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        return _digest(texts, self.document)

    def content_digest(self) -> str:
        """Return a digest of all fields except `id` and `where`, which do not change the episode."""
        interaction = None if self.interaction is None else self.interaction.model_dump(mode="json")
        return _digest(self.prompt, self.document, self.ground_truth, interaction)


def _digest(*parts: object) -> str:
    text = json.dumps(parts, sort_keys=True)
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


class ParsedRow(NamedTuple):
    row: Row
    used: Mapping[str, str]
    """The column from which each part of the row was read, as a dotted path, by part."""
    unread: tuple[str, ...] = ()
    """Names of the columns that are not null and were not read."""


def parse_row(columns: Mapping[str, Any], *, where: str, default_id: str | None = None) -> ParsedRow:
    """Parse a row from its columns.

    `where` is the row's file and line; every error begins with it. A row without an id gets `default_id` as
    its id, or the digest of its content if `default_id` is None.
    """
    reader = _Columns({name: without_nulls(value) for name, value in columns.items()}, where)
    interaction = reader.pick("interaction", *_INTERACTION)
    row = Row(
        id=_id(reader) or default_id or "",
        prompt=_prompt(reader),
        document=_document(reader),
        ground_truth=_ground_truth(reader, interaction),
        interaction=_interaction(reader, interaction),
        where=where,
    )
    if row.document is not None:
        row = replace(row, prompt=_one_question(reader, row), ground_truth=_document_answer(reader, row))
    row = row if row.id else replace(row, id=row.content_digest())
    return ParsedRow(row, reader.used, reader.unread)


class _Columns:
    """Reads the columns of one row, and records which of them were read."""

    def __init__(self, columns: Mapping[str, Any], where: str) -> None:
        self._columns, self._where = columns, where
        self.used: dict[str, str] = {}
        self._read: set[str] = set()

    def pick(self, what: str, *places: str) -> Any:
        """Return the value of the first column in `places` that is present, or None; record it as `what`.

        The columns are dotted paths. Raises DataError if two of them are present and differ.
        """
        values = {place: self._at(place) for place in places}
        present = [place for place, value in values.items() if value is not None]
        for other in present[1:]:
            if values[other] != values[present[0]]:
                raise self.error(f"{present[0]} and {other} are both there and differ; keep one of them")
        if not present:
            return None
        self.used.setdefault(what, present[0])
        return values[present[0]]

    def error(self, message: str) -> DataError:
        return DataError(message, where=self._where)

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


def _id(reader: _Columns) -> str | None:
    value = reader.pick("id", "id")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise reader.error(f"id is {shown(value)}; it is a string or a whole number")
    text = str(value)
    if not text.strip() or len(text) > _LONGEST_ID or not text.isprintable():
        raise reader.error(f"id is {shown(text)}; it has 1 to {_LONGEST_ID} printable characters")
    return text


def _prompt(reader: _Columns) -> str | tuple[Mapping[str, str], ...]:
    value = reader.pick("prompt", "prompt", "raw_prompt")
    if value is None:
        value = reader.pick("prompt", "question")
    if value is None:
        value = reader.pick("prompt", "query", *(f"{place}.query" for place in _INTERACTION))
    if value is None:
        raise reader.error(
            f"no prompt; it is in prompt, raw_prompt, question or query, and found were: {reader.names}"
        )
    name = reader.used["prompt"]
    try:
        refuse_no_opening(value, name)
    except ValueError as error:
        raise reader.error(str(error)) from error
    if isinstance(value, str):
        return value
    return tuple(_message(reader, f"{name}[{place}]", item) for place, item in enumerate(value))


def _message(reader: _Columns, name: str, value: Mapping[str, Any]) -> Mapping[str, str]:
    extra = sorted(value.keys() - {"role", "content"})
    if extra:
        raise reader.error(f"{name} has {extra[0]!r}; a message has role and content alone")
    return {"role": value["role"], "content": value["content"]}


def _document(reader: _Columns) -> str | None:
    value = reader.pick("document", "document_content")
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise reader.error(f"document_content is {shown(value)}; it is a text that is not empty")
    return None if value is None else _within(reader, "document_content", value, MAX_DOCUMENT_CHARS)


def _within(reader: _Columns, name: str, text: str, at_most: int) -> str:
    """Return the text; refuse it if it is longer than the task app accepts, before a run starts."""
    if len(text) > at_most:
        raise reader.error(f"{name} has {len(text):,} characters; at most {at_most:,} are taken")
    return text


def _one_question(reader: _Columns, row: Row) -> str:
    """Return the question that a row with a document asks; refuse a prompt of several messages."""
    if not isinstance(row.prompt, str) and len(row.prompt) > 1:
        raise reader.error(
            f"{reader.used['prompt']} begins with a message of {row.prompt[0]['role']!r}; with "
            "document_content it is one question: a text, or one message of the user"
        )
    return _within(reader, reader.used["prompt"], row.question, MAX_QUESTION_CHARS)


def _document_answer(reader: _Columns, row: Row) -> JsonValue:
    """Return the ground truth of a row with a document: the accepted answer, or a list of accepted answers.

    Numbers become text: 42 becomes "42". Other values are returned unchanged, and
    `truths.refuse_unmatchable` refuses them later.
    """
    truth = row.ground_truth
    answers = [_as_text(item) for item in (truth if isinstance(truth, list) else [truth])]
    for answer in answers:
        if isinstance(answer, str):
            _within(reader, "ground_truth", answer, MAX_ANSWER_CHARS)
    return answers if isinstance(truth, list) else answers[0]


def _as_text(answer: JsonValue) -> JsonValue:
    """Return a number as text, and any other value as it is."""
    return str(answer) if isinstance(answer, int | float) and not isinstance(answer, bool) else answer


def _ground_truth(reader: _Columns, interaction: Any) -> JsonValue:
    value = reader.pick("ground_truth", *TRUTH_COLUMNS)
    if value is None and isinstance(interaction, Mapping) and "ground_truth" in interaction:
        reader.used["ground_truth"] = f"{reader.used['interaction']}.ground_truth"
        value = interaction["ground_truth"]
    if value is None:
        value = reader.pick("ground_truth", "answer")
        if isinstance(value, str) and ANSWER_MARK in value:
            reader.used["ground_truth"] = f"answer after {ANSWER_MARK}"
            value = _result(reader, value)
    return _json(reader, reader.used.get("ground_truth", "ground_truth"), value)


def _result(reader: _Columns, answer: str) -> str:
    """Return the text after the mark: 42 for `21 * 2 = 42\\n#### 42`, and 1000 for `#### 1,000`."""
    result = answer.rpartition(ANSWER_MARK)[2].strip()
    if not result:
        raise reader.error(f"answer ends at its {ANSWER_MARK}; the result stands after it")
    return join_thousands(result)


def _interaction(reader: _Columns, value: Any) -> InteractionSpec | None:
    if value is None:
        return None
    name = reader.used["interaction"]
    if not isinstance(value, Mapping):
        raise reader.error(f"{name} is {shown(value)}; it is a table of keyword arguments")
    given_name = value.get("name")
    if given_name is not None and not isinstance(given_name, str):
        raise reader.error(f"{name}.name is {shown(given_name)}; it is a text")
    kwargs = {key: item for key, item in value.items() if key != "name"}
    try:
        return InteractionSpec(name=given_name, kwargs=kwargs)
    except ValidationError as error:
        raise reader.error(f"{name}: {_first(error)}") from error


def _json(reader: _Columns, name: str, value: Any) -> JsonValue:
    try:
        return _TRUTH.validate_python(value)
    except ValidationError as error:
        raise reader.error(f"{name} is {shown(value)}: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    """Return the field (if it is known) and the message of the first error: `kwargs: Input should be …`."""
    finding = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in finding["loc"] if part in {"name", "kwargs"})
    return f"{place}: " * bool(place) + finding["msg"].removeprefix("Value error, ")
