"""`@reward_function`: what a user writes, checked where it is written, and its answer where it is given."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, overload

from pydantic import TypeAdapter, ValidationError

from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.messages import Message
from task_app.protocols import RewardMode

# The parameter that holds the episodes, and what it holds.
EPISODES: Mapping[RewardMode, str] = {"pointwise": "messages", "batch": "rollouts_messages"}
_READERS: Mapping[RewardMode, TypeAdapter[Any]] = {
    "pointwise": TypeAdapter(list[Message]),
    "batch": TypeAdapter(list[list[Message]]),
}


class NoResult(TypeError):
    """What a function returned is no result."""


class UserRewardFunction:
    """A decorated function: called with keywords alone, it answers checked results (`task_app.protocols`)."""

    def __init__(self, function: Callable[..., Any], mode: RewardMode) -> None:
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.mode = mode
        self._function = function

    def __call__(self, **given: Any) -> Any:
        """Call the function; messages may be given as JSON.

        Returns:
            An EvaluateResult, in batch mode a list of them; of an `async def` what must be awaited for it.

        Raises:
            TypeError: the episodes are missing.
            NoResult: the answer is none, or one for another number of episodes.
            ValueError: messages or results hold what they may not.
        """
        name = EPISODES[self.mode]
        if name not in given:
            raise TypeError(f"{self.__name__} is a {self.mode} reward function: call it with {name}=...")
        episodes = _READERS[self.mode].validate_python(given[name])
        answer = self._function(**{**given, name: episodes})
        if inspect.isawaitable(answer):
            return self._awaited(answer, len(episodes))
        return self._checked(answer, len(episodes))

    async def _awaited(self, answer: Any, episodes: int) -> Any:
        return self._checked(await answer, episodes)

    def _checked(self, answer: Any, episodes: int) -> Any:
        if self.mode == "pointwise":
            return _result(answer, "returned")
        if not isinstance(answer, list | tuple):
            raise NoResult(f"returned {_told(answer)}; a list of EvaluateResult is needed")
        if len(answer) != episodes:
            raise NoResult(f"returned {len(answer)} results for {episodes} episodes")
        return [_result(one, f"returned for episode {index}") for index, one in enumerate(answer)]


@overload
def reward_function(_func: Callable[..., Any], *, mode: RewardMode = ...) -> UserRewardFunction: ...


@overload
def reward_function(
    _func: None = None, *, mode: RewardMode = ...
) -> Callable[[Callable[..., Any]], UserRewardFunction]: ...


def reward_function(
    _func: Callable[..., Any] | None = None, *, mode: RewardMode = "pointwise"
) -> UserRewardFunction | Callable[[Callable[..., Any]], UserRewardFunction]:
    """Make a reward function of a function, `def` or `async def`; with or without parentheses.

    Args:
        mode: "pointwise" is called with the `messages` and the `ground_truth` of one episode, "batch" with
            `rollouts_messages` and a list of `ground_truth` of those that wait for it at the moment: one or
            more, of any group. The facts of `pool.Episode` come beside them, in batch mode as lists.

    Raises:
        ValueError: an unknown mode; or the function takes no **kwargs, so that a fact more would break it.
    """
    if mode not in EPISODES:
        raise ValueError(f"mode is {mode!r}; known: {', '.join(EPISODES)}")

    def decorate(function: Callable[..., Any]) -> UserRewardFunction:
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ValueError(f"Function {function.__name__!r} must accept **kwargs parameter")
        return UserRewardFunction(function, mode)

    return decorate if _func is None else decorate(_func)


def _result(answer: Any, did: str) -> EvaluateResult:
    """The answer as an EvaluateResult, which may come as the dict of its fields.

    Raises:
        NoResult: it is neither, or its fields do not fit.
    """
    if isinstance(answer, EvaluateResult):
        return answer
    if not isinstance(answer, dict):
        raise NoResult(f"{did} {_told(answer)}; EvaluateResult(score=...) is needed")
    try:
        return EvaluateResult.model_validate(answer)
    except ValidationError as exc:
        raise NoResult(f"{did} a dict that is no EvaluateResult: {finding(exc)}") from exc


def finding(exc: ValidationError) -> str:
    """The first of pydantic's errors on one line: `score: Field required`."""
    error = exc.errors(include_url=False)[0]
    place = ".".join(map(str, error["loc"]))
    told = error["msg"].removeprefix("Value error, ")
    return f"{place}: {told}" if place else told


def _told(answer: Any) -> str:
    """Describe a returned value in an error: its type, and its value if it is a number."""
    if answer is None:
        return "None"
    kind = type(answer).__name__
    return f"the {kind} {answer}" if isinstance(answer, int | float) else f"a {kind}"
