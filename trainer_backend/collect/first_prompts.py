"""Counts the tokens of data set rows before a run, and reports rows whose first prompt is too long.

This is possible only in the environment `dialogue`, where the first prompt consists of the messages of the
row, without tools. In other environments the task app makes the first prompt. There, a rollout whose first
prompt is too long is lost during the run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from shared_schemas.messages import Message, dialogue_opening
from trainer_backend.collect.plan import Planner, Players
from trainer_backend.collect.sources import Rows
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.prompt_lengths import FindLong, LongPrompt
from trainer_backend.data.rows import Row
from trainer_backend.errors import DataError

# Limits of a batch of rows that is tokenized at once. They bound the memory, and the time until `tell` can
# stop the check.
_BATCH_ROWS, _BATCH_CHARACTERS = 1_000, 2_000_000
_MOST_NAMED = 10

Messages = Sequence[dict[str, Any]]


class Room(NamedTuple):
    """The number of tokens that a first prompt may have: `limit` - `answer`.

    `limit` applies to prompt and answer together, and `answer` is the length of the longest allowed answer.
    `limit_key` and `answer_key` are the job's TOML keys that set these two numbers.
    """

    limit: int
    limit_key: str
    answer: int
    answer_key: str

    @classmethod
    def of(cls, players: Players) -> Self:
        """Read `limit` and `answer` from the job. If several settings apply, the lowest counts."""
        table, rollout = players.multi_turn, players.rollout
        limits = [(table.max_model_length, "multi_turn.max_model_length")] if table.enable else []
        if (length := players.servers[ACTOR].max_model_len) is not None:
            limits.append((length, "inference.max_model_len"))
        answers = [(rollout.max_tokens, "rollout.max_tokens")]
        if table.max_episode_tokens is not None:
            answers.append((table.max_episode_tokens, "multi_turn.max_episode_tokens"))
        return cls(*_lowest(limits), *_lowest(answers))

    @property
    def tokens(self) -> int:
        return self.limit - self.answer

    def __str__(self) -> str:
        answer = f"{self.answer_key} {self.answer:,}"
        return f"{self.tokens:,} tokens fit: {self.limit_key} {self.limit:,} less {answer}"


def _lowest(numbers: Sequence[tuple[int, str]]) -> tuple[int, str]:
    lowest, _ = min(numbers)
    return lowest, " and ".join(key for number, key in numbers if number == lowest)


class _Part(NamedTuple):
    """The training or the held-out rows; messages name them by their TOML `key` and their `kind`."""

    rows: Sequence[Row]
    key: str
    kind: str


@dataclass(frozen=True, slots=True)
class FirstPrompts:
    parts: tuple[_Part, ...]
    system: str
    """The system message that precedes the prompt of a row, if the prompt is a plain text."""
    room: Room

    @classmethod
    def of(cls, planner: Planner) -> Self | None:
        """Take the rows of a job; return None if the job has no rows or their first prompts are unknown."""
        source, players = planner.source, planner.players
        rollout, system = players.rollout, players.rollout.env_config.get("system", "")
        is_known = rollout.env_name == "dialogue" and rollout.policy_name == "openai"
        has_tools = players.multi_turn.statelm_enabled
        if not isinstance(source, Rows) or not is_known or has_tools or not isinstance(system, str):
            return None
        data, table = source.data, source.table
        held_out_key = "data.path" if table.evaluation_path is None else "data.evaluation_path"
        held_out = _Part(data.evaluation, held_out_key, "held-out")
        return cls((_Part(data.training, "data.path", "training"), held_out), system, Room.of(players))

    def report(
        self, find_long: FindLong, tell: Callable[[int, int], None] = lambda done, total: None
    ) -> list[str]:
        """Count the tokens of all first prompts, and return lines of text about the rows that do not fit.

        There is at most one line about training rows and one about held-out rows.

        Args:
            find_long: finds, in a list of prompts, those that have more than a given number of tokens.
            tell: called before each batch of rows, with the number of measured rows and the total. It may
                raise an exception to stop.

        Raises:
            DataError: none of the training rows, or none of the held-out rows, fits.
        """
        lines, done, total = [], 0, sum(len(part.rows) for part in self.parts)
        for part in self.parts:
            long: list[tuple[Row, LongPrompt]] = []
            for batch in _batches(part.rows):
                tell(done, total)
                prompts = [self._messages(row) for row in batch]
                long += [(batch[item.place], item) for item in find_long(prompts, self.room.tokens)]
                done += len(batch)
            if long:
                lines.append(self._line(part, long))
        return lines

    def _messages(self, row: Row) -> Messages:
        prompt = row.prompt if isinstance(row.prompt, str) else tuple(map(Message.model_validate, row.prompt))
        return [message.model_dump(exclude_none=True) for message in dialogue_opening(prompt, self.system)]

    def _line(self, part: _Part, long: Sequence[tuple[Row, LongPrompt]]) -> str:
        count = len(part.rows)
        named = [_named(row, item) for row, item in long[:_MOST_NAMED]]
        more = f" and {len(long) - _MOST_NAMED:,} more" if len(long) > _MOST_NAMED else ""
        rows = f"{len(long):,} of {count:,} {part.kind} rows"
        text = f"do not fit the model: {', '.join(named)}{more}; {self.room}"
        if len(long) == count:
            raise DataError(f"{rows} {text}", where=part.key, hint="Take shorter rows, or change these keys.")
        return f"{part.key}: {rows} {text}; their rollouts will be lost (context_length_exceeded)"


def _named(row: Row, long: LongPrompt) -> str:
    where = f"{row.where}, " if row.where else ""
    return f"{row.id} ({where}{'at least ' * long.is_bound}{long.tokens:,} tokens)"


def _batches(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        prompt = row.prompt
        characters += len(prompt) if isinstance(prompt, str) else sum(len(part["content"]) for part in prompt)
        if len(batch) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
