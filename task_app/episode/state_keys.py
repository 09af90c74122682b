"""State keys name states, so that estimators can compare decisions that were made in the same state.

A key is a digest of everything that the policy could see, in canonical form: stable across processes and
machines, unlike `hash()`. Its text begins with its function's version, so keys of two versions never meet.
In a conversation the policy sees the whole prompt with its own earlier answers: equal questions after
different answers are different states (DESIGN.md 4.7).
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared_schemas.messages import Message
from shared_schemas.state_keys import DEFAULT
from task_app.episode.prompts import Prompt
from task_app.errors import UnknownName
from task_app.protocols import Observation


@dataclass(frozen=True, slots=True)
class StateKey:
    """A kind of state key.

    Attributes:
        of: what counts of an observation, as plain JSON-able values; equal values are the same state.
        version: raised whenever `of` gives other values for the same observation.
        past: earlier observations of the episode that count too; None: all of them.
    """

    of: Callable[[Observation], Any]
    version: int = 1
    past: int | None = 0


@dataclass(frozen=True, slots=True)
class PromptKey:
    """A kind of state key of a conversation: of the messages that the policy was shown, call ids left out.

    Attributes:
        observations: how many of the last ones count, with the answers between them; an observation is all
            that was said between two answers. None: the whole prompt.
        past: None: all prompts before this one count too.
    """

    observations: int | None = None
    version: int = 2  # 1 was that of the observation's text, which is the question for all of an episode
    past: int | None = 0


def _text(observation: Observation) -> str:
    return observation.text


# The keys that every environment has; shared_schemas/state_keys.py says what each compares.
STATE_KEYS: Mapping[str, StateKey] = {
    "text": StateKey(_text),
    "text_last_2": StateKey(_text, past=1),
    "text_last_3": StateKey(_text, past=2),
    "text_history": StateKey(_text, past=None),
}
PROMPT_KEYS: Mapping[str, PromptKey] = {
    "text": PromptKey(),
    "text_last_2": PromptKey(2),
    "text_last_3": PromptKey(3),
    "text_history": PromptKey(past=None),
}
Chosen = Mapping[str, StateKey | PromptKey]


class EpisodeStateKeys:
    """Makes the keys of one episode's decisions, in order; each call reads only what is new.

    Args:
        chosen: by the name under which a key is asked for.
    """

    def __init__(self, chosen: Chosen) -> None:
        self._chosen = chosen
        self._recent = {name: deque[bytes](maxlen=(key.past or 0) + 1) for name, key in chosen.items()}
        self._reads_prompts = any(isinstance(key, PromptKey) for key in chosen.values())
        # Of each message of the last prompt: its digest, and whether it is an answer of the policy.
        self._shown: list[tuple[bytes, bool]] = []

    def next(self, observation: Observation, prompt: Prompt) -> dict[str, str]:
        """Return the keys of the next decision's state, by name."""
        if self._reads_prompts:
            self._shown = self._shown[: prompt.reused]
            for place, message in prompt.changed.items():
                self._shown[place] = _entry(message)
            self._shown.extend(map(_entry, prompt.new))
        return {name: self._next(name, key, observation) for name, key in self._chosen.items()}

    def _next(self, name: str, key: StateKey | PromptKey, observation: Observation) -> str:
        own = (
            self._of_prompt(key) if isinstance(key, PromptKey) else _digest([_canonical(key.of(observation))])
        )
        recent = self._recent[name]
        if key.past is None and recent:
            own = _digest([recent[-1], own])  # a running digest: the whole history in 16 bytes
        recent.append(own)
        whole = own if len(recent) == 1 else _digest(list(recent))
        return f"{key.version}:{whole.hex()}"

    def _of_prompt(self, key: PromptKey) -> bytes:
        answers = [place for place, (_, is_answer) in enumerate(self._shown) if is_answer]
        count = key.observations
        first = 0 if count is None or count > len(answers) else answers[-count] + 1
        return _digest([digest for digest, _ in self._shown[first:]])


def keys_by_name(
    of_environment: Mapping[str, StateKey], *, conversation: bool
) -> dict[str, StateKey | PromptKey]:
    """Return an environment's keys: its own, the keys that every environment has, and "default".

    "default" is the first of the environment's own, or its text.

    Args:
        conversation: the policy sees prompts that grow, so the keys of every environment read those.
    """
    of_all: Chosen = PROMPT_KEYS if conversation else STATE_KEYS
    return {DEFAULT: next(iter(of_environment.values()), of_all["text"]), **of_all, **of_environment}


def chosen_keys(
    names: Sequence[str], known: Mapping[str, StateKey | PromptKey], *, where: str
) -> dict[str, StateKey | PromptKey]:
    """The keys of those names."""
    for index, name in enumerate(names):
        if name not in known:
            raise UnknownName("state key", name, known, where=f"{where}.{index}")
    return {name: known[name] for name in names}


def _entry(message: Message) -> tuple[bytes, bool]:
    """A message as a policy reads it, without ids of calls: some servers draw them, and they say nothing."""
    told = message.model_dump(mode="json", exclude={"tool_call_id"}, exclude_none=True)
    for call in told.get("tool_calls", ()):
        del call["id"]
    return _digest([_canonical(told)]), message.role == "assistant"


def _canonical(value: Any) -> bytes:
    """One text for equal values: sorted names, no spaces. 1, 1.0 and true stay three values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(parts: Sequence[bytes]) -> bytes:
    """Of the parts, each behind its length: ["ab", "c"] and ["a", "bc"] differ."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
