"""Makes state keys, by which advantage estimators find decisions that were made in the same state.

A state key is a digest of the policy's observation, which is first written in a canonical form. Unlike the
result of `hash()`, the key is the same in every process. A key begins with the version of its kind, so that
keys of different versions are never equal. In a conversation the policy also sees its own earlier answers, so
equal questions after different answers are different states (DESIGN.md 4.7).
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from shared_schemas.messages import Message
from shared_schemas.state_keys import DEFAULT, TEXT_LAST_N, is_state_key, read_last_n
from task_app.episode.prompts import Prompt
from task_app.errors import UnknownName
from task_app.protocols import Observation


@dataclass(frozen=True, slots=True)
class StateKey:
    """A kind of state key: defines which part of an observation is compared, and how many observations.

    of: returns the part of an observation that is compared, as JSON-able values.
    version: must be increased whenever `of` begins to return another value for any observation.
    past: number of earlier observations that are compared, too; None: all earlier observations.
    """

    of: Callable[[Observation], Any]
    version: int = 1
    past: int | None = 0


@dataclass(frozen=True, slots=True)
class PromptKey:
    """A kind of state key for conversations: compares the messages of prompts, except ids of tool calls."""

    observations: int | None = None
    """How many of the prompt's last observations are compared, with the policy's answers between them; None:
    the whole prompt. An observation here consists of all messages between two answers of the policy."""
    version: int = 2  # version 1 was a digest of the question only
    past: int | None = 0
    """0: only this prompt is compared. None: all earlier prompts are compared, too."""


# Keys that every environment has; shared_schemas/state_keys.py describes them. `select_keys` sets the n of
# text_last_n.
STATE_KEYS: Mapping[str, StateKey] = {
    "text": StateKey(attrgetter("text")),
    TEXT_LAST_N: StateKey(attrgetter("text")),
    "text_history": StateKey(attrgetter("text"), past=None),
}
PROMPT_KEYS: Mapping[str, PromptKey] = {
    "text": PromptKey(),
    TEXT_LAST_N: PromptKey(1),
    "text_history": PromptKey(past=None),
}
KeyKinds = Mapping[str, StateKey | PromptKey]


class EpisodeStateKeys:
    """Makes the state keys of one episode; `next` must be called for each decision, in order.

    A call digests only the messages that are new or changed since the previous prompt.
    """

    def __init__(self, kinds: KeyKinds) -> None:
        self._kinds = kinds
        self._recent = {name: deque[bytes](maxlen=(key.past or 0) + 1) for name, key in kinds.items()}
        self._reads_prompts = any(isinstance(key, PromptKey) for key in kinds.values())
        # Digest of each message of the last prompt, and whether the policy wrote it.
        self._messages: list[tuple[bytes, bool]] = []

    def next(self, observation: Observation, prompt: Prompt) -> dict[str, str]:
        """Return the keys of the state before the next decision, by the name of their kind."""
        if self._reads_prompts:
            self._messages = self._messages[: prompt.reused]
            for place, message in prompt.changed.items():
                self._messages[place] = _digest_message(message)
            self._messages.extend(map(_digest_message, prompt.new))
        return {name: self._make_key(name, key, observation) for name, key in self._kinds.items()}

    def _make_key(self, name: str, key: StateKey | PromptKey, observation: Observation) -> str:
        if isinstance(key, PromptKey):
            answers = [place for place, (_, is_answer) in enumerate(self._messages) if is_answer]
            count = key.observations
            first = 0 if count is None or count > len(answers) else answers[-count] + 1
            digest = _digest([digest for digest, _ in self._messages[first:]])
        else:
            digest = _digest([_canonical(key.of(observation))])
        recent = self._recent[name]
        if key.past is None and recent:
            digest = _digest([recent[-1], digest])  # a running digest of the whole history
        recent.append(digest)
        whole = digest if len(recent) == 1 else _digest(list(recent))
        return f"{key.version}:{whole.hex()}"


def keys_by_name(
    of_environment: Mapping[str, StateKey], *, conversation: bool
) -> dict[str, StateKey | PromptKey]:
    """Return the kinds of keys that a request can name: "default", general kinds, and the environment's own.

    The general kinds are PROMPT_KEYS in a conversation, and STATE_KEYS elsewhere. "default" is the first of
    the environment's own kinds, or the general kind "text" if the environment has none.
    """
    of_all: KeyKinds = PROMPT_KEYS if conversation else STATE_KEYS
    return {DEFAULT: next(iter(of_environment.values()), of_all["text"]), **of_all, **of_environment}


def select_keys(
    names: Sequence[str], known: Mapping[str, StateKey | PromptKey], *, where: str
) -> dict[str, StateKey | PromptKey]:
    keys: dict[str, StateKey | PromptKey] = {}
    for index, name in enumerate(names):
        if not is_state_key(name, known):
            raise UnknownName("state key", name, known, where=f"{where}.{index}")
        if name in known:
            keys[name] = known[name]
            continue
        kind, n = known[TEXT_LAST_N], read_last_n(name) or 1
        keys[name] = (
            replace(kind, observations=n) if isinstance(kind, PromptKey) else replace(kind, past=n - 1)
        )
    return keys


def _digest_message(message: Message) -> tuple[bytes, bool]:
    """Return the digest of a message, and whether the policy wrote this message.

    The ids of tool calls are left out of the digest, because they may be random.
    """
    data = message.model_dump(mode="json", exclude={"tool_call_id"}, exclude_none=True)
    for call in data.get("tool_calls", ()):
        del call["id"]
    return _digest([_canonical(data)]), message.role == "assistant"


def _canonical(value: Any) -> bytes:
    """Write a value as JSON so that equal values give equal bytes. 1, 1.0 and true give different bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(parts: Sequence[bytes]) -> bytes:
    """Return the digest of the parts and their lengths, which differs for ["ab", "c"] and ["a", "bc"]."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
