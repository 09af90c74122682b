"""The Crafter environment: tool calls become env steps, whatever a model writes; and snapshots of a game."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from task_app.environments.crafter.engine import CrafterEngine
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.crafter.objects import Cow
from task_app.environments.crafter.prompt import NO_NEWS
from task_app.environments.crafter.rules import ACTIONS, RULES
from task_app.environments.crafter.snapshot import GROUND_BYTES, pack, unpack
from task_app.errors import EpisodeOver
from task_app.protocols import PastDecision, ToolRequest
from tests.task_app.environments.crafter.hand_made import fingerprint, meadow, put


def call(*actions: Any, name: str = "interact_many") -> ToolRequest:
    arguments = {"actions": list(actions)}
    return ToolRequest(name, arguments, json.dumps(arguments))


def fresh(seed: int = 3, **config: Any) -> CrafterEnvironment:
    environment = CrafterEnvironment(CrafterConfig(**config))
    environment.reset(seed)
    return environment


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([], "no tool call; call interact_many once with 1 to 8 actions"),
        ([call("noop", name="interact")], "unknown tool 'interact'"),
        ([ToolRequest("interact_many", None, "{oops")], "no JSON object: '{oops'"),
        ([call()], "'actions' holds 0 names; allowed are 1 to 8"),
        ([call(*["noop"] * 9)], "'actions' holds 9 names; allowed are 1 to 8"),
        ([call("move_lft")], "Did you mean 'move_left'?"),
        ([call("")], "known: " + ", ".join(sorted(ACTIONS))),
        ([call(3)], "'actions' must hold names, not 3"),
        ([ToolRequest("interact_many", {"action": ["noop"]})], "unknown argument 'action'"),
        ([ToolRequest("interact_many", {"actions": "noop"})], "'actions' must be a list"),
        ([call("noop"), call("fly")], "unknown action 'fly'"),
        (
            [call(*["noop"] * 5), call(*["noop"] * 4)],
            "2 calls hold 9 actions together; a decision has 1 to 8",
        ),
    ],
)
def test_an_invalid_call_runs_one_noop_and_says_why(calls, reason):
    environment = fresh()
    outcome = environment.step(calls)
    assert outcome.executed_actions == ("noop",)
    assert reason in outcome.invalid_reason
    stop = "" if outcome.invalid_reason.endswith("?") else "."
    told = f"{outcome.invalid_reason}{stop} One noop was executed instead."
    assert outcome.result == f"error: {told}"
    prompt = environment.messages(outcome.observation, [PastDecision(tuple(calls), outcome)])[-1].content
    assert prompt.endswith(f"Your last call was not carried out: {told}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = (
    st.none()
    | st.dictionaries(st.sampled_from(["actions", "action", "x"]), JSON, max_size=2)
    | st.fixed_dictionaries({"actions": st.lists(st.sampled_from([*ACTIONS, "left", ""]), max_size=10)})
)
CALLS = st.lists(
    st.builds(
        ToolRequest, st.sampled_from(["interact_many", "interact", ""]), ARGUMENTS, st.text(max_size=600)
    ),
    max_size=3,
)
SHARED = CrafterEnvironment(CrafterConfig(text="compact"))


@settings(max_examples=30)
@given(calls=CALLS)
def test_whatever_is_called_either_runs_as_written_or_runs_exactly_one_noop(calls):
    try:
        outcome = SHARED.step(calls)
    except EpisodeOver:
        SHARED.reset(0)
        outcome = SHARED.step(calls)
    if outcome.invalid_reason is None:
        wanted = [action for each in calls for action in each.arguments["actions"]]
        assert list(outcome.executed_actions) == wanted[: len(outcome.executed_actions)]
        assert outcome.terminated or len(outcome.executed_actions) == len(wanted)
    else:
        assert outcome.executed_actions == ("noop",)
    assert len(outcome.env_rewards) == len(outcome.executed_actions)


def test_the_news_of_a_refused_call_are_not_those_of_an_idle_action():
    environment = fresh()
    after_refusal = environment.step([call("fly")]).observation.text
    after_noop = environment.step([call("noop")]).observation.text
    refused = "News: the last call was not carried out, one noop"
    idle = "News: the last action changed nothing"
    assert refused in after_refusal and idle not in after_refusal
    assert idle in after_noop and refused not in after_noop


def test_the_compact_text_says_that_a_call_had_no_effect_and_whether_it_was_refused():
    environment = fresh(text="compact")
    # These words are what the presets learned from: a changed one changes every figure of Crafter.
    assert environment.step([call("fly")]).observation.text.split()[-2:] == ["no-effect", "invalid"]
    assert environment.step([call("noop")]).observation.text.endswith(" no-effect")


def test_the_limit_truncates_and_actions_after_it_do_not_run():
    environment = fresh(length=5)
    outcome = environment.step([call(*["noop"] * 8)])
    assert (outcome.truncated, outcome.terminated, len(outcome.env_rewards)) == (True, False, 5)
    with pytest.raises(EpisodeOver):
        environment.step([call("noop")])


def test_death_terminates_and_the_decision_keeps_what_it_earned():
    environment = fresh(length=5000)
    while not (outcome := environment.step([call(*["noop"] * 8)])).terminated:
        pass
    assert not outcome.truncated
    assert 1 <= len(outcome.env_rewards) <= 8
    assert outcome.observation.data["inventory"]["health"] == 0
    with pytest.raises(EpisodeOver):
        environment.step([])


def test_data_shows_nothing_beyond_the_view():
    data = fresh().step([call("do")]).observation.data
    assert " ".join(sorted(data)) == (
        "achievements dark daylight facing inventory max_steps near news position rows sleeping step target"
    )


def test_the_outcome_is_the_number_of_unique_achievements():
    environment = fresh()
    assert environment.outcome_reward() == 0.0
    for _ in range(20):
        outcome = environment.step([call("do", "do", "place_plant", "move_left")])
    counts = outcome.observation.achievements_counts
    assert environment.outcome_reward() == sum(count > 0 for count in counts.values()) > 0
    assert outcome.observation.data["achievements"] == sorted(name for name, n in counts.items() if n)


def test_the_full_prompt_states_the_game_its_true_costs_and_the_last_three_calls():
    environment = fresh()
    past = []
    for action in ("move_left", "move_right", "move_up", "x" * 900):
        calls = (call(action),)
        past.append(PastDecision(calls, outcome := environment.step(calls)))
    system, user = environment.messages(outcome.observation, past)
    assert "Crafter" in system.content
    assert f"place_table: uses {RULES.place['table'].uses['wood']} wood" in system.content
    assert f"do on tree: 1 wood; leaves {RULES.collect['tree'].leaves}" in system.content
    shown = user.content.split("Previous tool calls (most recent first):\n")[1].split("\n")
    assert len(shown[0]) == 2 + 500
    assert shown[1:3] == [
        '- interact_many: {"actions":["move_up"]}',
        '- interact_many: {"actions":["move_right"]}',
    ]


def test_without_a_past_the_prompt_says_none_and_compact_is_one_message():
    environment = CrafterEnvironment()
    assert environment.messages(environment.reset(1), ())[1].content.endswith("(most recent first):\n- none")
    compact = CrafterEnvironment(CrafterConfig(text="compact"))
    observation = compact.reset(1)
    (message,) = compact.messages(observation, ())
    assert (message.role, message.content) == ("user", observation.text)


def test_the_tool_bounds_the_actions_and_the_config_refuses_what_it_does_not_know():
    (tool,) = CrafterEnvironment(CrafterConfig(max_actions=4)).tools()
    assert tool.function.parameters["properties"]["actions"]["maxItems"] == 4
    for bad in ({"max_actions": 9}, {"max_actions": 0}, {"text": "short"}, {"lenght": 5}):
        with pytest.raises(ValidationError):
            CrafterConfig(**bad)


def test_hitting_a_creature_that_survives_is_an_effect():
    environment = fresh()
    environment._engine = engine = meadow()
    # Water on its other sides: it cannot wander off.
    for x, y in ((34, 32), (33, 31), (33, 33)):
        put(engine, "water", x, y)
    put(engine, Cow(33, 32))
    engine.player.facing = (1, 0)
    data = environment.step([call("do")]).observation.data
    assert (data["target"], data["news"]["no_effect"]) == ("cow", False)


def test_waiting_at_full_vitals_and_hunger_alone_are_no_effect():
    environment = fresh(seed=3)
    news = [environment.step([call("noop")]).observation.data["news"]["no_effect"] for _ in range(40)]
    assert all(news)  # hunger has struck within 40 steps, and is nothing that the noop did


def played(seed: int, steps: int) -> CrafterEngine:
    engine, rng = CrafterEngine(seed), np.random.default_rng(seed)
    engine.reset()
    for step in range(steps):
        engine.inventory.update(health=9, food=9, drink=9, energy=9 if step % 40 else 2, sapling=9, stone=9)
        engine.act(int(rng.integers(17)))
    return engine


@pytest.mark.parametrize(("seed", "steps"), [(1, 57), (3, 301)])
def test_a_restored_game_goes_on_like_the_original(seed: int, steps: int):
    engine = played(seed, steps)
    restored, *_ = unpack(pack(engine, reward=0.0, news=NO_NEWS))
    assert fingerprint(restored) == fingerprint(engine)
    rng = np.random.default_rng(99)
    for action in rng.integers(17, size=60).tolist():
        if engine.over:
            break
        assert restored.act(action) == engine.act(action)
        assert restored.view() == engine.view()
    assert fingerprint(restored) == fingerprint(engine)


def test_what_the_last_observation_told_comes_back():
    news = {"unlocked": ["wake_up"], "health_change": -2, "no_effect": True, "invalid": "half \ud83d"}
    _, reward, told, _ = unpack(pack(played(1, 3), reward=-0.2, news=news))
    assert (reward, told) == (-0.2, news | {"invalid": "half ?"})


@pytest.fixture(scope="module")
def good() -> bytes:
    return pack(played(4, 20), reward=0.0, news=NO_NEWS)


Change = Callable[[bytes], bytes]


def head(**fields: Any) -> Change:
    """The snapshot with other fields in its first line."""

    def change(data: bytes) -> bytes:
        line, _, rest = data.partition(b"\n")
        return json.dumps({**json.loads(line), **fields}).encode() + b"\n" + rest

    return change


def ground(material: int) -> Change:
    """The snapshot with another material in the last cell of the ground."""

    def change(data: bytes) -> bytes:
        line, _, rest = data.partition(b"\n")
        return line + b"\n" + rest[: GROUND_BYTES - 1] + bytes([material]) + rest[GROUND_BYTES:]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (head(format=2), "snapshot.format"),
        (head(surprise=1), "snapshot.surprise"),
        (head(memory={"step": 3, "cells": [[0, 200, "grass"]]}), "snapshot.memory.cells"),
        (head(seed=-1), "seed must be an int"),
        (head(step=10**400), "snapshot.step"),
        (head(achievements={"fly": 10**400}), "snapshot.achievements.fly"),
        (ground(0), "ground must hold materials"),
        (ground(200), "ground must hold materials"),
        (lambda data: data[:-1], "holds 6591 bytes after its first line"),
        (lambda data: data + b"x", "holds 6593 bytes after its first line"),
        (lambda data: b"{}" + data, "trailing characters"),
        (lambda data: b"", "EOF"),
        (head(word_position=625), "word_position"),
        (head(facing=[1, 1]), "facing"),
        (head(things=[[9, 1, 1, 1]]), "known kinds"),
        (head(things=[[1, 70, 1, 1]]), "outside the world"),
        (head(things=[[1, 5, 5, 1], [1, 5, 5, 1]]), "taken cell"),
        (head(things=[[4, 5, 5, 0, 7, 7]]), "arrow flying"),
        (head(inventory={"health": 9}), "missing or unknown names"),
        (head(hidden=[0.0]), "hidden"),
        (head(hidden=[float("nan")] * 5), "hidden"),
        (head(reward=float("inf")), "snapshot.reward"),
        (head(news={**NO_NEWS, "unlocked": ["flying"]}), "snapshot.news.unlocked"),
    ],
)
def test_an_impossible_snapshot_is_refused_with_its_place(good: bytes, change: Change, message: str):
    with pytest.raises(ValueError, match=message):
        unpack(change(good))
