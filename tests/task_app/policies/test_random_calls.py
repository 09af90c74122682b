"""Random play of any tool: what is drawn is what the schema describes."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field
from referencing import Registry

from task_app.environments.crafter.prompt import tool_spec
from task_app.policies.json_schema import KINDS, Steps, Validator
from task_app.policies.random_calls import random_call
from task_app.policies.random_values import random_object
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


NODE: dict[str, Any] = {
    "$defs": {
        "n": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/n"}},
                "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "properties": {"root": {"$ref": "#/$defs/n"}},
    "required": ["root"],
}
EXPR: dict[str, Any] = {
    "$defs": {
        "e": {
            "oneOf": [
                {"type": "number"},
                {
                    "type": "object",
                    "properties": {
                        "op": {"enum": ["+", "-"]},
                        "l": {"$ref": "#/$defs/e"},
                        "r": {"$ref": "#/$defs/e"},
                    },
                    "required": ["op", "l", "r"],
                    "additionalProperties": False,
                },
            ]
        }
    },
    "type": "object",
    "properties": {"e": {"$ref": "#/$defs/e"}},
    "required": ["e"],
}
SATISFIABLE: dict[str, dict[str, Any]] = dict(
    node=NODE,
    expr=EXPR,
    selfroot={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "sub": {"$ref": "#"}},
        "required": ["a"],
    },
    typelist_rec={
        "$defs": {
            "t": {"type": ["object", "null"], "properties": {"n": {"$ref": "#/$defs/t"}}, "required": ["n"]}
        },
        "properties": {"t": {"$ref": "#/$defs/t"}},
        "required": ["t"],
    },
    allof=having(x={"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]}),
    allof_obj={"allOf": [having(a={"type": "string"}), having(b={"type": "integer"})]},
    oneof_req={
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    oneof_num=having(
        x={"oneOf": [{"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 5}]}
    ),
    anyof=having(x={"anyOf": [False, {"type": "string", "minLength": 3, "maxLength": 3}]}),
    refsib=having(x={"$ref": "#/$defs/p", "maximum": 4})
    | {"$defs": {"p": {"type": "integer", "minimum": 2}}},
    refesc=having(x={"$ref": "#/$defs/a~1b%20c"}) | {"$defs": {"a/b c": {"const": 5}}},
    const=having(x={"const": {"a": [1, None]}}),
    enumt=having(x={"type": "string", "enum": [1, None, "a"]}),
    typelist=having(x={"type": ["integer", "null"]}),
    notype=having(x={}),
    t=having(x=True),
    noprops={"type": "object", "properties": {}},
    empty={},
    arr=having(x={"type": "array", "items": {"enum": [1, 2, 3, 4]}, "minItems": 4, "uniqueItems": True}),
    arrmax=having(x={"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}),
    uniqtext=having(x={"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 5}),
    uniqobj=having(
        x={"type": "array", "items": having(a={"type": "integer"}), "uniqueItems": True, "minItems": 5}
    ),
    tuple_=having(
        x={
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "items": False,
            "minItems": 2,
        }
    ),
    contains=having(
        x={
            "type": "array",
            "items": {"type": "integer"},
            "contains": {"const": 99},
            "minContains": 2,
            "maxContains": 2,
            "minItems": 3,
        }
    ),
    containsonly=having(x={"contains": {"type": "null"}}),
    pp={
        "type": "object",
        "patternProperties": {"^s_[a-z]+$": {"type": "integer"}},
        "additionalProperties": False,
        "minProperties": 3,
    },
    ap={
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "minProperties": 2,
        "required": ["zz"],
    },
    pnames={"type": "object", "propertyNames": {"pattern": "^[A-Z]{2,4}$"}, "minProperties": 3},
    maxprops={
        "type": "object",
        "properties": {"a": {}, "b": {}, "c": {}},
        "required": ["c"],
        "maxProperties": 2,
    },
    depreq={
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "required": ["a"],
        "dependentRequired": {"a": ["zip"]},
    },
    depsch={
        "type": "object",
        "properties": {"a": {}, "b": {"type": "integer"}},
        "required": ["a"],
        "dependentSchemas": {"a": {"properties": {"b": {"minimum": 50}}, "required": ["b"]}},
    },
    pat=having(x={"type": "string", "pattern": r"^[A-Z]{3}-\d{4}(x|y)?$"}),
    pat2=having(x={"type": "string", "pattern": "^[a-z]+$", "minLength": 30, "maxLength": 40}),
    patsearch=having(x={"type": "string", "pattern": "foo|bar"}),
    pathex=having(x={"type": "string", "pattern": "^(?:0x)?[0-9a-fA-F]+$", "maxLength": 5}),
    pat_and=having(x={"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]}),
    look=having(x={"type": "string", "pattern": r"^(?=.*\d)[a-z0-9]{6,}$"}),
    notpat=having(x={"type": "string", "pattern": r"^[^\s/]+$"}),
    fmt=having(
        **{
            f: {"type": "string", "format": f}
            for f in ("date", "date-time", "email", "uuid", "uri", "ipv4", "hostname", "weird")
        }
    ),
    fmtlen=having(x={"type": "string", "format": "email", "maxLength": 5}),
    exmin=having(x={"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}),
    exnum=having(x={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
    mult=having(x={"type": "integer", "minimum": 1, "maximum": 1000, "multipleOf": 250}),
    mult2=having(x={"type": "number", "multipleOf": 0.25, "minimum": 0.1, "maximum": 0.3}),
    mult3=having(x={"type": "number", "multipleOf": 0.01}),
    mult4=having(x={"type": "integer", "multipleOf": 100, "minimum": 1}),
    mult5=having(x={"type": "integer", "multipleOf": 1.5}),
    intbounds=having(x={"type": "integer", "minimum": 0.5, "maximum": 1.5}),
    huge=having(x={"type": "number", "minimum": -1e308, "maximum": 1e308}),
    hugeint=having(x={"type": "integer", "minimum": 10**400}),
    negmax=having(x={"type": "integer", "maximum": -1000}),
    eq=having(x={"type": "number", "minimum": 2, "maximum": 2}),
    not_=having(x={"type": "string", "not": {"const": "text"}}),
    nottype=having(x={"not": {"type": "string"}}),
    notreq={"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a"]}},
    ite={
        "type": "object",
        "properties": {"k": {"enum": ["a", "b"]}},
        "required": ["k"],
        "if": {"properties": {"k": {"const": "a"}}},
        "then": {"required": ["x"]},
        "else": {"required": ["y"]},
        "additionalProperties": True,
    },
    disc={
        "type": "object",
        "properties": {
            "cmd": {
                "oneOf": [
                    having(kind={"const": "a"}, n={"type": "integer"}),
                    having(kind={"const": "b"}, s={"type": "string"}),
                ]
            }
        },
        "required": ["cmd"],
    },
    optbad={
        "type": "object",
        "properties": {
            "a": False,
            "b": {"type": "integer"},
            "c": {"enum": []},
            "d": {"type": "integer", "minimum": 5, "maximum": 1},
        },
    },
    toplevelanyof={
        "anyOf": [having(a={"type": "integer"}), having(b={"type": "string"})],
        "additionalProperties": True,
    },
    toplevelref={"$ref": "#/$defs/A", "$defs": {"A": having(q={"type": "integer"})}},
    nested=having(
        a=having(
            b=having(
                c={
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "number", "minimum": 0}, "minItems": 1},
                    "minItems": 2,
                }
            )
        )
    ),
    null=having(x={"type": "null"}),
    minlen=having(x={"type": "string", "minLength": 200}),
    maxlen0=having(x={"type": "string", "maxLength": 0}),
    anchor=having(x={"$ref": "#foo"}) | {"$defs": {"f": {"$anchor": "foo", "type": "integer"}}},
    defs4=having(x={"$ref": "#/definitions/f"}) | {"definitions": {"f": {"type": "boolean"}}},
    mutual={
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}},
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
        },
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "required": ["a"],
    },
    anyjson={
        "$defs": {
            "j": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"$ref": "#/$defs/j"}},
                    {"type": "object", "additionalProperties": {"$ref": "#/$defs/j"}, "minProperties": 1},
                ]
            }
        },
        "properties": {"j": {"$ref": "#/$defs/j"}},
        "required": ["j"],
    },
)
OTHERS: dict[str, Any] = dict(
    false=having(x=False),
    contra=having(x={"type": "integer", "minimum": 5, "maximum": 1}),
    enum0=having(x={"enum": []}),
    arrtop={"type": "array"},
    infinite={
        "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
        "properties": {"n": {"$ref": "#/$defs/n"}},
        "required": ["n"],
    },
    selfref={"$ref": "#"},
    loop={"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    noref=having(x={"$ref": "#/$defs/none"}),
    ext=having(x={"$ref": "http://x/y"}),
    garbage={
        "type": 5,
        "properties": [1],
        "required": "x",
        "enum": 3,
        "anyOf": {"a": 1},
        "allOf": "x",
        "minimum": "a",
    },
    garbage2=having(x={"type": "foo"}),
    garbage3=having(x={"type": "string", "pattern": "(", "minLength": -1, "maxLength": "x", "format": 7}),
    biglen=having(x={"type": "string", "minLength": 10**12}),
    bigarr=having(x={"type": "array", "minItems": 10**9}),
    g4=having(x={"type": "array", "items": "x", "minItems": 2.5, "uniqueItems": "y"}),
    g5=having(x={"type": "integer", "multipleOf": 0}),
    g6=having(x={"type": "integer", "multipleOf": -2}),
    g7={"properties": {"a": None, "b": 3, "c": "x"}},
    g8={"required": [1, {"a": 1}]},
    nulltop=having(x={"not": {}}),
    fan={
        "$defs": {
            "f": {
                "type": "object",
                "properties": {k: {"$ref": "#/$defs/f"} for k in "abcdefgh"},
                "required": list("abcdefgh"),
            }
        },
        "$ref": "#/$defs/f",
    },
    anyself={"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    pnull=having(x={"type": "string", "pattern": "^\\x00$"}),
    psur=having(x={"type": "string", "pattern": "[\\ud800-\\udfff]"}),
    prep=having(x={"type": "string", "pattern": "^(a{1000}){1000}$"}),
    fanopt={
        "$defs": {"f": {"type": "object", "properties": {k: {"$ref": "#/$defs/f"} for k in "abcdefgh"}}},
        "properties": {"f": {"$ref": "#/$defs/f"}},
    },
)


@pytest.mark.parametrize("name", SATISFIABLE)
def test_every_call_fits_the_schema_of_its_tool(name: str):
    schema = SATISFIABLE[name]
    validator = Draft202012Validator(schema, registry=Registry())
    for seed in range(12):
        _, arguments = random_call([tool(**schema)], random.Random(seed), longest=seed % 4 + 1)
        validator.validate(json.loads(json.dumps(arguments)))


@pytest.mark.parametrize("name", OTHERS)
def test_a_schema_that_nothing_fits_or_that_is_none_gets_some_object(name: str):
    offered = {"function": {"name": "act", "parameters": OTHERS[name]}}
    for seed in range(3):
        _, arguments = random_call([offered], random.Random(seed), longest=3)
        assert isinstance(arguments, dict) and json.dumps(arguments, allow_nan=False).isascii()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, "", "a", "ab"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
SIZE, BOUND = st.integers(0, 3), st.integers(-3, 3) | st.just(0.5)


def schemas(*references: str) -> st.SearchStrategy[Any]:
    leaves = st.sampled_from([True, False, *({"$ref": reference} for reference in references)])
    return st.recursive(
        leaves,
        lambda inner: st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(KINDS) | st.lists(st.sampled_from(KINDS), min_size=1, unique=True),
                "const": JSON,
                "enum": st.lists(JSON, min_size=1, max_size=4),
                **dict.fromkeys(("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"), BOUND),
                "multipleOf": st.sampled_from([1, 2, 0.5]),
                **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), SIZE),
                **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), SIZE),
                "pattern": st.sampled_from(["^a", "b$", "[^a]", r"^\w{2,3}$"]),
                "uniqueItems": st.booleans(),
                **dict.fromkeys(
                    ("items", "contains", "additionalProperties", "not", "if", "then", "else"), inner
                ),
                "propertyNames": st.sampled_from([{"pattern": "a"}, {"maxLength": 1}]),
                **dict.fromkeys(("allOf", "anyOf", "oneOf"), st.lists(inner, min_size=1, max_size=3)),
                "prefixItems": st.lists(inner, min_size=1, max_size=3),
                "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
                "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=2),
                "required": st.lists(st.sampled_from("abcd"), max_size=3, unique=True),
                "dependentRequired": st.dictionaries(st.sampled_from("ab"), st.just(["c"]), max_size=1),
                "dependentSchemas": st.dictionaries(st.sampled_from("ab"), inner, max_size=1),
            },
        ),
        max_leaves=8,
    )


@given(
    schema=schemas("#/$defs/a", "#/$defs/b"),
    a=schemas(),
    b=schemas("#/$defs/a"),
    value=JSON,
    seed=st.integers(0, 99),
)
def test_any_schema_gets_a_call_and_what_is_said_to_fit_does(
    schema: Any, a: Any, b: Any, value: Any, seed: int
):
    root = {**schema, "$defs": {"a": a, "b": b}} if isinstance(schema, dict) else schema
    arguments = random_object(root, random.Random(seed), longest=3)
    assert isinstance(arguments, dict)
    validator = Draft202012Validator(root, registry=Registry())
    for one in (value, arguments):
        assert Validator(root, Steps(10_000)).fits(one, root) == validator.is_valid(one)


async def test_the_random_policy_calls_the_tools_that_it_is_offered():
    policy = RandomPolicy(RandomConfig(seed=3))
    seen = PolicyObservation((), {})
    action, *_ = await policy.get_action(seen, [tool("guess", properties={"n": {"enum": [7]}})])
    assert action["tool_calls"] == [{"id": "call_0", "name": "guess", "arguments": '{"n": 7}'}]
    without, *_ = await policy.get_action(seen, [])
    assert (without["type"], without["content"]) == ("text", NO_TOOLS)
