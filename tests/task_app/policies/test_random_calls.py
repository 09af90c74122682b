"""Random play of any tool: what is drawn is what the schema describes."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from task_app.environments.crafter.prompt import tool_spec
from task_app.policies.random_calls import random_call
from task_app.policies.scripted import NO_TOOLS, RandomConfig, RandomPolicy, random_actions
from task_app.protocols import PolicyObservation


def tool(name: str = "act", **parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def drawn(seed: int = 0, longest: int = 3, **properties: object) -> dict[str, object]:
    return random_call([tool(properties=properties)], random.Random(seed), longest=longest)[1]


def test_crafter_is_played_as_it_was_before_any_other_tool_was():
    crafter = tool_spec(4).model_dump()
    for seed in range(5):
        call = random_call([crafter], random.Random(seed), longest=8)
        assert call == ("interact_many", {"actions": random_actions(random.Random(seed), 4)})


class Point(BaseModel):
    x: int = Field(ge=-3, lt=3)
    tag: str = Field(min_length=6, max_length=8)


class Everything(BaseModel):
    point: Point
    points: list[Point] = Field(min_length=2, max_length=5)
    share: float = Field(gt=0, le=1)
    large: int = Field(ge=1_000)
    small: int = Field(le=-1_000)
    either: bool | None
    colour: str = Field(json_schema_extra={"enum": ["red", "blue"]})


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_what_is_drawn_from_the_schema_of_a_model_is_one_of_its_values(seed: int):
    schema = Everything.model_json_schema()
    _, arguments = random_call([tool(**schema)], random.Random(seed), longest=3)
    again = Everything.model_validate(json.loads(json.dumps(arguments)), strict=True)
    assert len(again.points) == 3
    assert again.colour in ("red", "blue")


def test_a_list_is_as_long_as_both_limits_allow_and_never_too_short():
    words = {"type": "array", "items": {"const": "a"}}
    assert drawn(longest=3, words={**words, "maxItems": 2}) == {"words": ["a", "a"]}
    assert drawn(longest=3, words=words) == {"words": ["a"] * 3}
    assert drawn(longest=3, words={**words, "minItems": 5}) == {"words": ["a"] * 5}


def test_several_tools_are_all_played():
    tools = [tool("left"), tool("right"), {"type": "function", "function": {"name": "wait"}}]
    source = random.Random(0)
    called = [random_call(tools, source, longest=1) for _ in range(30)]
    assert {name for name, _ in called} == {"left", "right", "wait"}
    assert all(arguments == {} for _, arguments in called)


def having(**properties: object) -> dict[str, Any]:
    """The schema of an object that has all of these."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def listing(**of_the_list: object) -> dict[str, Any]:
    return having(x={"type": "array", **of_the_list})


def defining(reference: str, **definitions: object) -> dict[str, Any]:
    return having(x={"$ref": reference}) | {"$defs": definitions}


WHOLE, TEXT = {"type": "integer"}, {"type": "string"}
NODE = having(v=WHOLE, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
TREE = {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
ENDLESS = having(n={"$ref": "#/$defs/n"})
FAN = having(**{name: {"$ref": "#/$defs/fan"} for name in "abcdefgh"})
SATISFIABLE: list[dict[str, Any]] = [
    {},
    having(x={}, y=True),
    having(x={"type": ["integer", "null"]}),
    having(x={"const": {"a": [1, None]}}),
    defining("#/$defs/a~1b%20c", **{"a/b c": {"const": 5}}),
    defining("#/$defs/node", node=NODE),
    defining("#/$defs/tree", tree=TREE),
    having(x={"allOf": [WHOLE, {"minimum": 3}, {"maximum": 5}]}),
    having(x={"oneOf": [{**WHOLE, "multipleOf": 3}, {**WHOLE, "multipleOf": 5}]}),
    having(x={"anyOf": [False, {**TEXT, "minLength": 30, "maxLength": 30}]}),
    {"properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"properties": {"a": {}, "b": {}}, "not": {"required": ["a"]}},
    {"properties": {"a": False, "b": {"enum": []}}},
    {"if": having(a={"const": 1}), "then": {"required": ["b"]}, "properties": {"a": {"enum": [1, 2]}}},
    {"additionalProperties": WHOLE, "minProperties": 2, "required": ["z"]},
    listing(items={"enum": [1, 2, 3, 4]}, minItems=4, uniqueItems=True),
    listing(prefixItems=[WHOLE, TEXT], items=False, minItems=2),
    listing(items=WHOLE, contains={"const": 99}, minContains=2, maxContains=2, minItems=3),
    having(x={**WHOLE, "exclusiveMinimum": 3, "exclusiveMaximum": 5}),
    having(x={**WHOLE, "minimum": 0.5, "maximum": 1.5}),
    having(x={"type": "number", "multipleOf": 0.25, "minimum": 0.1, "maximum": 0.3}),
    having(x={**TEXT, "not": {"const": "text"}}),
]
OTHERS: list[Any] = [
    False,
    7,
    having(x=False),
    having(x={**WHOLE, "minimum": 5, "maximum": 1}),
    having(x={"enum": [], "type": "no such"}),
    having(x={"not": {}}),
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    defining("#/$defs/none"),
    defining("http://elsewhere/schema"),
    defining("#/$defs/n", n=ENDLESS),
    defining("#/$defs/fan", fan=FAN),
    {"type": 5, "properties": [1], "required": "x", "enum": 3, "anyOf": {"a": 1}, "minimum": "a"},
    {"properties": {"a": None, "b": 3}, "required": [1, {"a": 1}]},
    having(x={**TEXT, "pattern": "(", "minLength": -1, "maxLength": "x"}),
    having(x={**TEXT, "minLength": 10**12}),
    having(x={**WHOLE, "minimum": 10**400}),
    having(x={**WHOLE, "multipleOf": 0}),
    having(x={**WHOLE, "multipleOf": 5e-324}),
    listing(minItems=10**9),
    listing(contains={}, minContains=10**12),
    listing(items="x", minItems=2.5, uniqueItems="y"),
]


@pytest.mark.parametrize("schema", SATISFIABLE, ids=str)
def test_a_call_fits_the_schema_of_its_tool(schema: dict[str, Any]):
    for seed in range(12):
        _, arguments = random_call([tool(**schema)], random.Random(seed), longest=seed % 4 + 1)
        assert Draft202012Validator(schema).is_valid(json.loads(json.dumps(arguments))), arguments


@pytest.mark.parametrize("schema", OTHERS, ids=lambda schema: str(schema)[:60])
def test_a_schema_that_nothing_fits_or_that_is_none_gets_some_object(schema: Any):
    offered = {"function": {"name": "act", "parameters": schema}}
    for seed in range(3):
        _, arguments = random_call([offered], random.Random(seed), longest=3)
        assert isinstance(arguments, dict) and json.dumps(arguments, allow_nan=False).isascii()


KEYWORDS = sorted({key for schema in SATISFIABLE for key in re.findall(r"[$a-zA-Z]+", str(schema))})
KINDS = ("object", "array", "string", "number", "integer", "boolean", "null", "#", "x")
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(-1e6, 1e6) | st.sampled_from(KINDS)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "x"]), inner),
    max_leaves=12,
)


@settings(max_examples=60)
@given(ANYTHING, st.integers(0, 99))
def test_no_schema_makes_the_policy_raise(schema: Any, seed: int):
    offered = {"function": {"name": "act", "parameters": schema}}
    assert isinstance(random_call([offered], random.Random(seed), longest=3)[1], dict)


async def test_the_random_policy_calls_the_tools_that_it_is_offered():
    policy = RandomPolicy(RandomConfig(seed=3))
    seen = PolicyObservation((), {})
    action, *_ = await policy.get_action(seen, [tool("guess", properties={"n": {"enum": [7]}})])
    assert action["tool_calls"] == [{"id": "call_0", "name": "guess", "arguments": '{"n": 7}'}]
    without, *_ = await policy.get_action(seen, [])
    assert (without["type"], without["content"]) == ("text", NO_TOOLS)
