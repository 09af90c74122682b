"""Pure: the messages of a decision's prompt as the model saw them, and what it had deleted or cut before."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shared_schemas.messages import Message, ToolCall
from shared_schemas.trajectory import StepData, Trajectory

# kept: as in the prompt before. new: not shown before. edited: another text stood there once.
State = Literal["kept", "new", "edited"]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: its arguments are the JSON that the model wrote."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message of a prompt.

    Attributes:
        msg_id: its number in the history, from 0.
        text, calls: as they are shown to the model.
        was, was_calls: what stood there before the first edit; of an edited one alone.
        deleted: nothing of it is shown but that it was there.
        edited_at: the turn whose prompt showed it edited for the first time.
    """

    msg_id: int
    role: str
    text: str
    calls: tuple[Call, ...]
    state: State
    was: str = ""
    was_calls: tuple[Call, ...] = ()
    deleted: bool = False
    edited_at: int | None = None


def prompt_of(episode: Trajectory, turn: int) -> list[MessageView]:
    """Every message of the prompt of a decision, by its turn from 1, in the order that the model saw them."""
    walk = _Walk()
    for step in episode.steps[:turn]:
        walk.go_on(step)
    shown, first, since, new_from = list(walk.shown), dict(walk.first), dict(walk.since), walk.new_from
    for step in episode.steps[turn:]:
        walk.go_on(step)
    # What is deleted in the end, and was edited last as it is seen here, is deleted here.
    gone = {
        msg_id
        for msg_id in first
        if msg_id in episode.deleted_msg_ids and walk.shown[msg_id : msg_id + 1] == shown[msg_id : msg_id + 1]
    }
    return [
        _view(
            index, message, first.get(index), since.get(index), new=index >= new_from, deleted=index in gone
        )
        for index, message in enumerate(shown)
    ]


class _Walk:
    """The prompts of an episode, one decision after the other.

    Attributes:
        shown: the prompt as it is now.
        first: by msg_id, what stood there before the first edit; since: from which turn on it is edited.
        new_from: where the messages begin that the prompt before did not have.
    """

    def __init__(self) -> None:
        self.shown: list[Message] = []
        self.first: dict[int, Message] = {}
        self.since: dict[int, int] = {}
        self.new_from = 0

    def go_on(self, step: StepData) -> None:
        """To the prompt of this decision."""
        seen = step.observation_data
        del self.shown[seen.messages_reused :]
        for msg_id in [one for one in self.first if one >= seen.messages_reused]:
            self._forget(msg_id)  # another message will stand at that place
        for msg_id, message in seen.changed.items():
            original = self.first.setdefault(msg_id, self.shown[msg_id])
            self.shown[msg_id] = message
            self.since.setdefault(msg_id, step.turn)
            if message == original:  # an edit was taken back
                self._forget(msg_id)
        self.shown.extend(seen.messages)
        self.new_from = seen.messages_reused

    def _forget(self, msg_id: int) -> None:
        del self.first[msg_id], self.since[msg_id]


def _view(
    msg_id: int, message: Message, was: Message | None, edited_at: int | None, *, new: bool, deleted: bool
) -> MessageView:
    state: State = "new" if new else "kept" if was is None else "edited"
    text, calls = message.content or "", calls_of(message.tool_calls or ())
    if was is None:
        return MessageView(msg_id, message.role, text, calls, state)
    return MessageView(
        msg_id, message.role, text, calls, state, was.content or "", calls_of(was.tool_calls or ()),
        deleted, edited_at,
    )  # fmt: skip


def calls_of(calls: Sequence[ToolCall]) -> tuple[Call, ...]:
    """Of a message, or of a decision."""
    return tuple(Call(call.function.name, call.function.arguments) for call in calls)
