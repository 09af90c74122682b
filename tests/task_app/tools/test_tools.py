"""A function with a typed signature as a tool, and the environment around tools, by hand."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from shared_schemas.base import Body
from task_app.errors import EpisodeOver
from task_app.protocols import Tool, ToolRequest
from task_app.testing import EnvironmentContract
from task_app.tools import Toolbox, ToolEnvironment, ToolRefused, function_tool


@dataclass
class Counter:
    """State that its tools work on."""

    total: int = 0

    def add(
        self,
        number: Annotated[int, Field(ge=1, le=9, description="what to add")],
        times: int | None = None,
        unit: Literal["one", "ten"] = "one",
    ) -> str:
        """Add a number to
        the total.

        This paragraph is for people.
        """
        if number == 7:
            raise ToolRefused("7 brings bad luck")
        self.total += number * (times or 1) * (10 if unit == "ten" else 1)
        return f"total {self.total}"

    def shout(self, length: int) -> str:
        """Say it loudly."""
        return "a" * length


def box(counter: Counter, **settings) -> Toolbox:
    return Toolbox([function_tool(counter.add), function_tool(counter.shout)], **settings)


def test_the_signature_is_the_schema_and_the_first_paragraph_the_description():
    tool: Tool = function_tool(Counter().add)
    assert tool.spec.function.model_dump() == {
        "name": "add",
        "description": "Add a number to the total.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "required": ["number"],
            "properties": {
                "number": {"type": "integer", "minimum": 1, "maximum": 9, "description": "what to add"},
                "times": {"type": "integer"},
                "unit": {"type": "string", "enum": ["one", "ten"], "default": "one"},
            },
        },
    }


def test_a_tool_works_on_the_state_it_is_bound_to():
    one, other = Counter(), Counter()
    assert box(one).answer(ToolRequest("add", {"number": 2, "times": 3})).text == "total 6"
    assert box(other).answer(ToolRequest("add", {"number": 2, "unit": "ten"})).text == "total 20"
    assert (one.total, other.total) == (6, 20)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("ad", {}, "there is no tool 'ad'; known: add, shout. Did you mean 'add'?"),
        ("add", None, "the arguments of add are no JSON object: '{oops'"),
        ("add", {}, "add needs the argument 'number'"),
        ("add", {"numbr": 3}, "add has no argument 'numbr'; known: number, times, unit. Did you mean"),
        ("add", {"number": "3"}, "the argument 'number' of add is '3': "),
        ("add", {"number": True}, "the argument 'number' of add is True: "),
        ("add", {"number": 10}, "the argument 'number' of add is 10: "),
        ("add", {"number": 7}, "7 brings bad luck"),
    ],
)
def test_a_bad_call_is_refused_in_a_sentence_for_the_model(name, arguments, reason):
    counter = Counter()
    answer = box(counter).answer(ToolRequest(name, arguments, "{oops"))
    assert answer.refused.startswith(reason) and answer.text == f"error: {answer.refused}"
    assert counter.total == 0


def test_a_megabyte_of_result_is_cut_and_says_so():
    answer = box(Counter()).answer(ToolRequest("shout", {"length": 1_000_000}))
    note = "\n[cut: the first 20000 of 1000000 characters are shown]"
    assert answer.text == "a" * 20_000 + note and answer.refused is None
    assert box(Counter(), max_result_chars=5).answer(ToolRequest("shout", {"length": 5})).text == "aaaaa"


def test_a_fault_of_the_tools_own_code_is_no_refusal():
    def broken() -> str:
        """It breaks."""
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        Toolbox([function_tool(broken)]).answer(ToolRequest("broken", {}))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def tool(number) -> str: 'Doc.'", "the parameter 'number' has no type"),
        ("def tool(*numbers: int) -> str: 'Doc.'", "cannot be given by name"),
        ("def tool(value: object) -> str: 'Doc.'", "the type of 'value' allows anything"),
        ("def tool(number: int) -> str: return ''", "has no docstring"),
        ("async def tool(number: int) -> str: 'Doc.'", "is async"),
        ("def tool(number: int) -> float: 'Doc.'", "is said to return float"),
        ("def tool(number: int) -> str | None: 'Doc.'", r"is said to return str \| None"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_when_it_is_made_one(source, words):
    defined: dict = {}
    exec(source, defined)
    with pytest.raises(TypeError, match=f"tool tool.* {words}"):
        function_tool(defined["tool"])


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tools are named 'add'"):
        Toolbox([function_tool(Counter().add), function_tool(Counter().add)])


def test_a_result_that_is_no_text_is_told_with_what_it_is():
    def untold(number: int):
        """Give it back."""
        return number

    with pytest.raises(TypeError, match=r"^tool untold returned 1 \(int\)"):
        Toolbox([function_tool(untold)]).answer(ToolRequest("untold", {"number": 1}))


class Sum(Body):
    total: int


class Summing(ToolEnvironment[Sum]):
    """A sum starts at the seed, and is over at 12; `add` runs an env step a number."""

    name, outcome_definition, state_model = "summing", "1 at the end", Sum

    def __init__(self) -> None:
        super().__init__([self.add, self.read])

    def begin(self, seed: int) -> Sum:
        return Sum(total=seed)

    def add(self, numbers: list[int]) -> str:
        """Add the numbers, in order."""
        if not numbers:
            raise ToolRefused("no numbers")
        for number in numbers:
            if number < 0:
                raise ToolRefused("it only grows")
            if not self.run(f"add {number}", Sum(total=self.state.total + number), reward=number / 2):
                break
        return "added"

    def read(self) -> str:
        """Read the sum."""
        return str(self.state.total)

    def over(self) -> bool:
        return self.state.total >= 12

    def counts(self) -> dict[str, int]:
        return {"half": int(self.state.total >= 6), "whole": int(self.over())}

    def show(self) -> tuple[str, dict[str, Any]]:
        return f"sum {self.state.total}", {"total": self.state.total}


class TestSumming(EnvironmentContract):
    def make(self) -> Summing:
        return Summing()


def add(*numbers: int) -> ToolRequest:
    return ToolRequest("add", {"numbers": list(numbers)}, "")


def test_each_number_is_an_env_step_until_the_end():
    environment = Summing()
    environment.reset(1)
    outcome = environment.step([add(5, 6, 7)])
    assert outcome.env_rewards == (2.5, 3.0)  # 1 + 5 + 6 is 12: the 7 is never added
    assert outcome.executed_actions == ("add 5", "add 6")
    assert (outcome.terminated, outcome.observation.reward_last_step) == (True, 3.0)
    assert environment.outcome_reward() == 2.0
    with pytest.raises(EpisodeOver):
        environment.step([add(1)])


@pytest.mark.parametrize(
    ("calls", "executed", "reason"),
    [
        ([ToolRequest("read", {}, "")], "read", None),
        ([add()], "noop", "no numbers"),
        ([add(2, -1)], "noop", "it only grows"),
        ([add(1), add(2)], "noop", "call add or read once"),
        ([], "noop", "call add or read once"),
    ],
)
def test_a_call_that_runs_nothing_costs_one_env_step_without_effect(calls, executed, reason):
    environment = Summing()
    environment.reset(1)
    outcome = environment.step(calls)
    assert (outcome.executed_actions, outcome.env_rewards) == ((executed,), (0.0,))
    assert outcome.invalid_reason == reason
    assert outcome.observation.data == {"total": 1}


def test_a_snapshot_of_another_state_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"snapshot\.state\.total"):
        Summing().restore(b'{"reward": 0.0, "state": {"total": "much"}}')
