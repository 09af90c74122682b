"""A function with a typed signature as a tool: its schema, its call, its bounded result."""

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import Field

from task_app.protocols import Tool, ToolRequest
from task_app.tools import Toolbox, ToolRefused, function_tool


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
        (
            "add",
            {"numbr": 3},
            "add has no argument 'numbr'; known: number, times, unit. Did you mean 'number'?",
        ),
        ("add", {"number": "3"}, "the argument 'number' of add is '3': Input should be a valid integer"),
        ("add", {"number": True}, "the argument 'number' of add is True: Input should be a valid integer"),
        (
            "add",
            {"number": 10},
            "the argument 'number' of add is 10: Input should be less than or equal to 9",
        ),
        ("add", {"number": 7}, "7 brings bad luck"),
    ],
)
def test_a_bad_call_is_refused_in_a_sentence_for_the_model(name, arguments, reason):
    counter = Counter()
    answer = box(counter).answer(ToolRequest(name, arguments, "{oops"))
    assert (answer.refused, answer.text) == (reason, f"error: {reason}")
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


def untyped(number) -> str:
    return str(number)


def listed(*numbers: int) -> str:
    return str(numbers)


def anything(value: object) -> str:
    """Take it."""
    return str(value)


def silent(number: int) -> str:
    return str(number)


async def fetch(number: int) -> str:
    """Fetch it."""
    return str(number)


def half(number: int) -> float:
    """Halve it."""
    return number / 2


def maybe(number: int) -> str | None:
    """Perhaps."""
    return None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (untyped, "tool untyped: the parameter 'number' has no type"),
        (listed, r"tool listed: .* cannot be given by name"),
        (anything, "tool anything: the type of 'value' allows anything"),
        (silent, "tool silent has no docstring"),
        (fetch, "tool fetch is async; a tool answers at once: make it a plain def"),
        (half, "tool half is said to return float; a model reads text: make it"),
        (maybe, r"tool maybe is said to return str \| None; "),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_when_it_is_made_one(function, words):
    with pytest.raises(TypeError, match=words):
        function_tool(function)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tools are named 'add'"):
        Toolbox([function_tool(Counter().add), function_tool(Counter().add)])


def test_a_result_that_is_no_text_is_told_with_what_it_is():
    def untold(number: int):
        """Give it back."""
        return number

    with pytest.raises(TypeError, match=r"^tool untold returned 1 \(int\); text is needed$"):
        Toolbox([function_tool(untold)]).answer(ToolRequest("untold", {"number": 1}))
