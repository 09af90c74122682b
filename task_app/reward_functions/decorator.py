"""`@reward_function` makes a reward function of a user's function, and checks its signature and results."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, overload

from pydantic import TypeAdapter, ValidationError

from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.messages import Message
from task_app.protocols import RewardMode

# Name of the parameter that holds the messages.
EPISODES: Mapping[RewardMode, str] = {"pointwise": "messages", "batch": "rollouts_messages"}
_READERS: Mapping[RewardMode, TypeAdapter[Any]] = {
    "pointwise": TypeAdapter(list[Message]),
    "batch": TypeAdapter(list[list[Message]]),
}


class NoResult(TypeError):
    """The reward function returned a value that is no `EvaluateResult`, or the wrong number of them."""


class UserRewardFunction:
    """A decorated reward function: accepts only keyword arguments, and checks the results."""

    def __init__(self, function: Callable[..., Any], mode: RewardMode) -> None:
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.mode = mode
        self._function = function

    def __call__(self, **facts: Any) -> Any:
        """Call the function; messages may be given as JSON.

        Returns:
            An EvaluateResult, or in batch mode a list of EvaluateResult. If the function is an `async def`,
            an awaitable of this value.

        Raises:
            TypeError: the messages are missing.
            NoResult: the function returned no EvaluateResult or dict of its fields; in batch mode, no list
                with one result for each episode.
            ValueError: messages have wrong fields, or the function built an EvaluateResult with wrong fields.
        """
        name = EPISODES[self.mode]
        if name not in facts:
            raise TypeError(f"{self.__name__} is a {self.mode} reward function: call it with {name}=...")
        episodes = _READERS[self.mode].validate_python(facts[name])
        answer = self._function(**{**facts, name: episodes})
        if not inspect.isawaitable(answer):
            return self._check_answer(answer, len(episodes))

        async def check_later() -> Any:
            return self._check_answer(await answer, len(episodes))

        return check_later()

    def _check_answer(self, answer: Any, episodes: int) -> Any:
        if self.mode == "pointwise":
            return _read_result(answer, "returned")
        if not isinstance(answer, list | tuple):
            raise NoResult(f"returned {_describe(answer)}; a list of EvaluateResult is needed")
        if len(answer) != episodes:
            raise NoResult(f"returned {len(answer)} results for {episodes} episodes")
        return [_read_result(one, f"returned for episode {index}") for index, one in enumerate(answer)]


@overload
def reward_function(_func: Callable[..., Any], *, mode: RewardMode = ...) -> UserRewardFunction: ...


@overload
def reward_function(
    _func: None = None, *, mode: RewardMode = ...
) -> Callable[[Callable[..., Any]], UserRewardFunction]: ...


def reward_function(
    _func: Callable[..., Any] | None = None, *, mode: RewardMode = "pointwise"
) -> UserRewardFunction | Callable[[Callable[..., Any]], UserRewardFunction]:
    """Decorate a `def` or `async def` as a reward function; usable with and without parentheses.

    Args:
        mode: a "pointwise" function is called with the `messages` and the `ground_truth` of one episode. A
            "batch" function is called with all episodes that wait at the moment: one or more, of any group.
            Its arguments are lists with one item per episode, such as `rollouts_messages` and `ground_truth`.
            `alignment.build_arguments` lists the further arguments.

    Raises:
        ValueError: the mode is unknown, or the function does not accept **kwargs, so that it would fail if a
            later version passed a new argument.
    """
    if mode not in EPISODES:
        raise ValueError(f"mode is {mode!r}; known: {', '.join(EPISODES)}")

    def decorate(function: Callable[..., Any]) -> UserRewardFunction:
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ValueError(f"Function {function.__name__!r} must accept **kwargs parameter")
        return UserRewardFunction(function, mode)

    return decorate if _func is None else decorate(_func)


def _read_result(answer: Any, prefix: str) -> EvaluateResult:
    """Return the answer, an EvaluateResult or a dict of its fields, as an EvaluateResult."""
    if isinstance(answer, EvaluateResult):
        return answer
    if not isinstance(answer, dict):
        raise NoResult(f"{prefix} {_describe(answer)}; EvaluateResult(score=...) is needed")
    try:
        return EvaluateResult.model_validate(answer)
    except ValidationError as exc:
        raise NoResult(f"{prefix} a dict that is no EvaluateResult: {first_error(exc)}") from exc


def first_error(exc: ValidationError) -> str:
    """Return the first of pydantic's errors in one line, such as `score: Field required`."""
    error = exc.errors(include_url=False)[0]
    prefix = ".".join(map(str, error["loc"]))
    message = error["msg"].removeprefix("Value error, ")
    return f"{prefix}: {message}" if prefix else message


def _describe(answer: Any) -> str:
    """Return words for a returned value in an error message: its type, and if it is a number, its value."""
    if answer is None:
        return "None"
    kind = type(answer).__name__
    return f"the {kind} {answer}" if isinstance(answer, int | float) else f"a {kind}"
