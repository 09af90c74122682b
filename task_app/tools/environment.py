"""Base classes of environments in which a decision is one tool call; tools are methods of the subclass."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from shared_schemas.base import Body
from shared_schemas.messages import Message, ToolSpec
from task_app.complaints import state_in
from task_app.errors import EpisodeOver, started
from task_app.protocols import DecisionOutcome, Observation, PastDecision, ToolRequest
from task_app.tools.function import function_tool
from task_app.tools.toolbox import Answer, Toolbox

S = TypeVar("S", bound=BaseModel)


class Moment(Body, Generic[S], allow_inf_nan=False):
    """The content of a snapshot: the state, and the last env step's reward, which observations contain."""

    reward: float
    state: S


class OneCallEnvironment:
    """Base class of environments in which each decision is exactly one tool call.

    A subclass implements the methods that raise NotImplementedError here. A tool is a method with a typed
    signature; it appends each env step that it runs to `_ran`. If a call runs no env step or is refused, one
    env step without effect runs instead.
    """

    name: str
    outcome_definition: str
    _called = ""  # how error messages call the tools; if empty, by their names

    def __init__(self, tools: Iterable[Callable[..., str]]) -> None:
        self._toolbox = Toolbox(map(function_tool, tools))
        self._ran: list[tuple[str, float]] = []  # env steps of the current decision, with their rewards

    def over(self) -> bool:
        """Return whether the task has ended in the current state; a limit of env steps does not count."""
        raise NotImplementedError

    def tools(self) -> tuple[ToolSpec, ...]:
        return self._toolbox.specs()

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        before, self._ran = self._state_before(), []
        if self.over() or self._is_cut():
            raise EpisodeOver()
        names = self._called or " or ".join(tool.function.name for tool in self.tools())
        reason = invalid_reason or (None if len(calls) == 1 else f"call {names} once")
        answer = Answer.of_refusal(reason) if reason else self._toolbox.answer(calls[0])
        if answer.refused is not None:
            self._ran = []  # the env steps that the tool ran before it refused do not count
            self._run_nothing("noop", before)
        elif not self._ran:
            self._run_nothing(calls[0].name, before)
        actions, rewards = zip(*self._ran, strict=True)
        return DecisionOutcome(
            self._observe_after(before, is_refused=answer.refused is not None),
            env_rewards=rewards,
            terminated=self.over(),
            truncated=self._is_cut() and not self.over(),
            executed_actions=actions,
            invalid_reason=answer.refused,
            result=answer.text,
        )

    def _is_cut(self) -> bool:
        """Return whether the episode has reached a limit of env steps; by default there is no limit."""
        return False

    def _state_before(self) -> Any:
        """Return the state before a decision, which `_run_nothing` and `_observe_after` get as `before`.

        Raises EpisodeOver before the first reset.
        """
        raise NotImplementedError

    def _run_nothing(self, action: str, before: Any) -> None:
        """Run one env step without effect, and append it to `_ran` under the name `action`."""
        raise NotImplementedError

    def _observe_after(self, before: Any, *, is_refused: bool) -> Observation:
        raise NotImplementedError


class ToolEnvironment(OneCallEnvironment, Generic[S]):
    """Base class of an `Environment` with snapshots; a tool reads `self.state` and calls `run` per env step.

    A subclass sets `name`, `outcome_definition` and `state_model`, and implements `begin`, `over`, `counts`
    and `show`.
    """

    state_model: type[S]  # frozen; state and config must determine how the episode continues

    def __init__(self, tools: Iterable[Callable[..., str]]) -> None:
        super().__init__(tools)
        self._state: S | None = None
        self._reward = 0.0

    def begin(self, seed: int) -> S:
        """Return the state at the start of an episode; all randomness must come from the seed."""
        raise NotImplementedError

    def counts(self) -> Mapping[str, int]:
        """Return the achievements' counters, which never decrease; raising a counter is rewarded."""
        raise NotImplementedError

    def show(self) -> tuple[str, Mapping[str, Any]]:
        """Return the text and the data of the observation; the data must be JSON values."""
        raise NotImplementedError

    def outcome_reward(self) -> float:
        """Return the number of achievements unlocked so far; a subclass may define another outcome."""
        return float(sum(count > 0 for count in self.counts().values())) if self._state else 0.0

    @property
    def state(self) -> S:
        return started(self._state)

    def run(self, action: str, state: S, reward: float = 0.0) -> bool:
        """Run one env step that leads to `state`; return whether the episode continues."""
        self._state, self._reward = state, reward
        self._ran.append((action, reward))
        return not self.over()

    def reset(self, seed: int) -> Observation:
        self._state, self._reward = self.begin(seed), 0.0
        return self._observe()

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        """Return the prompt: by default one user message with the observation's text."""
        return (Message(role="user", content=observation.text),)

    def snapshot(self) -> bytes:
        return self._moment_model()(reward=self._reward, state=self.state).model_dump_json().encode()

    def restore(self, state: bytes) -> Observation:
        moment = state_in(self._moment_model(), state)
        self._state, self._reward = moment.state, moment.reward
        return self._observe()

    def _state_before(self) -> S:
        return self.state

    def _run_nothing(self, action: str, before: S) -> None:
        self.run(action, before)

    def _observe_after(self, before: S, *, is_refused: bool) -> Observation:
        return self._observe()

    def _moment_model(self) -> "type[Moment[S]]":
        return Moment[self.state_model]  # type: ignore[name-defined]  # pydantic builds it once for each state

    def _observe(self) -> Observation:
        text, data = self.show()
        return Observation(text, data, dict(self.counts()), self._reward)
