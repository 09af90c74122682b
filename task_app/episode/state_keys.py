"""State keys identify states, so that estimators can compare decisions of the same state.

A key is a digest of the policy's observation, written in canonical form. Unlike `hash()` it is the same in
every process. It begins with its function's version, so keys of two versions differ. In a conversation
the policy also sees its own earlier answers, so equal questions after different answers are different states
(DESIGN.md 4.7).
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
    """A kind of state key.

    of: returns the compared part of an observation as JSON-able values; equal values are the same state.
    version: raise it whenever the value of `of` changes for any observation.
    past: number of earlier observations that are compared too; None: all of them.
    """

    of: Callable[[Observation], Any]
    version: int = 1
    past: int | None = 0


@dataclass(frozen=True, slots=True)
class PromptKey:
    """A kind of state key for conversations, which compares the prompt's messages without call ids."""

    observations: int | None = None
    """Number of last observations that are compared, with the answers between them. An observation is all
    messages between two answers. None: the whole prompt."""
    version: int = 2  # version 1 was a digest of the question only
    past: int | None = 0
    """None: all earlier prompts are compared too."""


# Keys of every environment; shared_schemas/state_keys.py describes them. `select_keys` sets the n of
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
    """Makes the keys of one episode's decisions in order; each call reads only new messages."""

    def __init__(self, kinds: KeyKinds) -> None:
        self._kinds = kinds
        self._recent = {name: deque[bytes](maxlen=(key.past or 0) + 1) for name, key in kinds.items()}
        self._reads_prompts = any(isinstance(key, PromptKey) for key in kinds.values())
        # Digest of each message of the last prompt, and whether the policy wrote it.
        self._messages: list[tuple[bytes, bool]] = []

    def next(self, observation: Observation, prompt: Prompt) -> dict[str, str]:
        """Make the keys of the next decision's state, by name."""
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
    """Return the keys that can be requested: the environment's own, those of all environments, and "default".

    "default" is the first of the environment's own keys, or else its text. In a conversation, PROMPT_KEYS
    take the place of STATE_KEYS.
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
    """Return a message's digest without call ids, which may be random, and whether the policy wrote it."""
    data = message.model_dump(mode="json", exclude={"tool_call_id"}, exclude_none=True)
    for call in data.get("tool_calls", ()):
        del call["id"]
    return _digest([_canonical(data)]), message.role == "assistant"


def _canonical(value: Any) -> bytes:
    """Write equal values as equal text: sorted names, no spaces. 1, 1.0 and true stay different."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(parts: Sequence[bytes]) -> bytes:
    """Make a digest of the parts and their lengths, so that ["ab", "c"] and ["a", "bc"] differ."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
