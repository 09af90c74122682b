"""Adapts environments of other libraries and servers ("foreign" environments) to our `Environment`.

    ForeignEnvironment      builds a new prompt from the last observation for each decision
    └── ForeignConversation continues one conversation, in which each call has its own result

The library or server is called the *foreign side*. A call that does not fit its tool's schema is not sent to
the foreign side: it is a no-op, an env step of reward 0. If a reward or an observation contains a number that
is not finite, the episode fails, so that no policy learns from it.
"""

import json
import math
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shared_schemas.messages import Message, ToolSpec
from shared_schemas.plain_text import encodable
from task_app.environments.foreign.configs import SYSTEM, RemoteConfig
from task_app.environments.foreign.peer import Call, ForeignFailed, Peer, Shown, SpokenPeer
from task_app.environments.foreign.schemas import Tools
from task_app.errors import EpisodeOver, started
from task_app.past import past_messages, refuse_decision
from task_app.protocols import DecisionOutcome, Observation, PastDecision, ToolRequest
from task_app.tools.toolbox import MAX_RESULT_CHARS, truncate

NO_CALL = "no tool call; call one of the tools"
NOT_RUN = "error: not carried out: the episode had ended before"
NOTHING = "(nothing)"
NOOP = "noop"
# The longest time that `close` waits for a call that still runs in another thread.
_CLOSE_WAIT_S = 120.0


class ForeignEnvironment:
    """Plays episodes of a foreign environment, one at a time, through a `Peer`.

    Args:
        name: the `env_name` of requests, including its prefix, such as `gymnasium:FrozenLake-v1`.
        instructions: the system message, unless the foreign side of a ForeignConversation sends its own.
        is_secret: whether errors omit all words of the foreign side, because they may repeat a secret.
    """

    outcome_definition = "return: sum of the rewards of the env steps"
    # If true, one refused call refuses its whole decision, because later calls may depend on the refused one.
    _refuses_whole = True

    def __init__(self, name: str, peer: Peer, *, instructions: str = SYSTEM, is_secret: bool = False) -> None:
        self.name = name
        self._peer = peer
        self._instructions = instructions
        self._is_secret = is_secret
        self._lock = threading.Lock()
        self._tools: Tools | None = None
        self._is_open = self._runs = False
        self._return = 0.0
        self._shown: Observation | None = None
        self._achievements: frozenset[str] | None = None
        # Closes the peer when the environment is garbage-collected.
        weakref.finalize(self, peer.close).atexit = False

    def tools(self) -> tuple[ToolSpec, ...]:
        """Return the tools. If they are still unknown, connect to the foreign side to get them."""
        if self._tools is None:
            with self._lock, self._leave_on_failure():
                self._open()
                self._leave()
        assert self._tools is not None, "read at the opening"
        return self._tools.specs

    def reset(self, seed: int) -> Observation:
        with self._lock, self._leave_on_failure():
            self._runs, self._return, self._shown, self._achievements = False, 0.0, None, None
            self._open()
            observation = self._observe(self._peer.reset(seed))
            self._runs = True
            return observation

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        with self._lock, self._leave_on_failure():
            tools = self._require_running()
            faults = [tools.fault(call) for call in calls]
            reason = invalid_reason or (None if calls else NO_CALL)
            if self._refuses_whole:
                reason = reason or next(filter(None, faults), None)
            if reason is not None:  # nothing is sent to the foreign side
                return refuse_decision(self._repeat_observation(0.0), calls, reason)
            return self._make_outcome(calls, self._play(calls, faults))

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        reason = past[-1].outcome.invalid_reason if past else None
        text = f"Your last call was refused: {reason}\n\n{observation.text}" if reason else observation.text
        return (*self._system(), Message(role="user", content=text))

    def outcome_reward(self) -> float:
        return self._return

    def close(self) -> None:
        """Close the foreign side, after waiting for a call that still runs in another thread."""
        if self._lock.acquire(timeout=_CLOSE_WAIT_S):
            try:
                self._leave()
            finally:
                self._lock.release()

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True  # set before `open`, so that the peer is also closed if `open` fails
        specs = self._peer.open()
        if self._tools is not None and self._tools.specs != specs:
            raise ForeignFailed(f"{self.name} offers other tools than before")
        self._tools = Tools(specs, of=self.name)

    def _leave(self) -> None:
        self._runs = False
        if self._is_open:
            self._is_open = False
            self._peer.close()

    @contextmanager
    def _leave_on_failure(self) -> Iterator[None]:
        """Close the foreign side if the block raises, because the foreign side's state is then unknown."""
        try:
            yield
        except EpisodeOver:
            raise
        except ForeignFailed as failed:
            self._leave()
            if self._is_secret:
                raise type(failed)(failed.unquoted) from None  # the cause contains quotes too
            raise
        except BaseException:
            self._leave()
            raise

    def _require_running(self) -> Tools:
        if self._tools is None or not self._runs:
            raise EpisodeOver()
        return self._tools

    def _play(self, calls: Sequence[ToolRequest], faults: Sequence[str | None]) -> list[Shown]:
        """Execute the calls that have no fault; return an outcome for each call until the episode ends."""
        good = [
            Call(call.name, call.arguments or {})
            for call, fault in zip(calls, faults, strict=True)
            if not fault
        ]
        answers = self._peer.carry_out(good)
        shown: list[Shown] = []
        for fault in faults:
            answer = Shown("", refused=fault) if fault else next(answers, None)
            if answer is None:
                raise ForeignFailed(f"{self.name} answered {len(shown)} of {len(calls)} calls")
            shown.append(answer)
            if answer.terminated or answer.truncated:
                break
        return shown

    def _make_outcome(self, calls: Sequence[ToolRequest], shown: Sequence[Shown]) -> DecisionOutcome:
        rewards = tuple(self._read_reward(one) for one in shown)
        results = [f"error: {encodable(one.refused)}" if one.refused else _read_text(one) for one in shown]
        self._return += math.fsum(rewards)
        terminated, truncated = shown[-1].terminated, shown[-1].truncated
        self._runs = not (terminated or truncated)
        for one in shown:
            if not one.refused:
                self._observe(one)
        return DecisionOutcome(
            self._repeat_observation(rewards[-1]),
            env_rewards=rewards,
            terminated=terminated,
            truncated=truncated and not terminated,
            executed_actions=tuple(
                NOOP if one.refused else call.name for one, call in zip(shown, calls, strict=False)
            ),
            invalid_reason=next((encodable(one.refused) for one in shown if one.refused), None),
            result="\n".join(results),
            results=(*results, *[NOT_RUN] * (len(calls) - len(shown))),
        )

    def _read_reward(self, shown: Shown) -> float:
        reward = 0.0 if shown.refused else float(shown.reward)
        if not math.isfinite(reward):
            raise ForeignFailed(f"{self.name} pays a reward of {reward}, which is no finite number")
        return reward

    def _observe(self, shown: Shown) -> Observation:
        try:
            json.dumps(shown.data, allow_nan=False)
        except ValueError as exc:
            raise ForeignFailed(f"{self.name} shows a number that is not finite") from exc
        self._shown = Observation(_read_text(shown), self._data(shown), self._merge_counts(shown))
        return self._shown

    def _repeat_observation(self, reward: float) -> Observation:
        """Return the last observation again, with `reward` as the reward of the last env step."""
        self._shown = replace(started(self._shown), reward_last_step=reward)
        return self._shown

    def _data(self, shown: Shown) -> Mapping[str, Any]:
        return shown.data

    def _merge_counts(self, shown: Shown) -> Mapping[str, int]:
        """Return the largest count of each achievement in this episode so far.

        Raises ForeignFailed for an achievement that the episode's first counters did not contain.
        """
        before = self._shown.achievements_counts if self._shown is not None else {}
        new = shown.achievements
        if new is None:
            return before
        if self._achievements is None:
            self._achievements = frozenset(new)
        if others := sorted(new.keys() - self._achievements):
            raise ForeignFailed(
                f"{self.name} counts achievements that it did not name before: {others[:10]}; its first "
                "counters name all of them, with 0 for what was not done"
            )
        return {name: max(before.get(name, 0), new.get(name, 0)) for name in {**before, **new}}

    def _system(self, own: str = "") -> tuple[Message, ...]:
        text = own or self._instructions
        return (Message(role="system", content=text),) if text else ()


class ForeignConversation(ForeignEnvironment):
    """A foreign environment whose prompt is the whole conversation; each call in it has its own result."""

    _refuses_whole = False

    def __init__(self, name: str, peer: Peer, **options: Any) -> None:
        super().__init__(name, peer, **options)
        self.takes_answers = isinstance(peer, SpokenPeer)
        self._opening = self._own_system = ""

    def reset(self, seed: int) -> Observation:
        self._opening = self._own_system = ""
        return super().reset(seed)

    def opening(self) -> tuple[Message, ...]:
        started(self._shown)
        return (*self._system(self._own_system), Message(role="user", content=self._opening))

    def answer(self, text: str) -> DecisionOutcome:
        if not isinstance(self._peer, SpokenPeer):
            return self.step(())
        with self._lock, self._leave_on_failure():
            self._require_running()
            return self._make_outcome((ToolRequest("answer", {}),), [self._peer.say(text)])

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        opening = Message(role="user", content=observation.data["opening"])
        return (*self._system(observation.data["system"]), opening, *past_messages(past))

    def _data(self, shown: Shown) -> Mapping[str, Any]:
        self._own_system = self._own_system or shown.system
        self._opening = self._opening or shown.text or NOTHING
        return {**shown.data, "opening": self._opening, "system": self._own_system}


def _read_text(shown: Shown) -> str:
    return truncate(encodable(shown.text), MAX_RESULT_CHARS) or NOTHING


def remote_environment(
    name: str, peer: Peer, config: RemoteConfig, *, is_secret: bool = False
) -> ForeignEnvironment:
    """Return the environment of a server; `config.prompts` chooses its class."""
    kind = ForeignEnvironment if config.prompts == "fresh" else ForeignConversation
    return kind(name, peer, instructions=config.instructions, is_secret=is_secret)
