"""BALROG's protocol: its prompts letter for letter, its answers, and its measure of progress."""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from task_app.environments.crafter.balrog import ANSWERS, BalrogEnvironment
from task_app.environments.crafter.environment import CrafterConfig
from task_app.environments.crafter.rules import ACHIEVEMENTS, ACTIONS
from task_app.protocols import DecisionOutcome, Observation, ToolRequest

RECORD = json.loads(Path(__file__).with_name("balrog_games.json").read_text())


def fresh(seed: int = 3, **config: Any) -> tuple[BalrogEnvironment, Observation]:
    environment = BalrogEnvironment(CrafterConfig(text="balrog", **config))
    return environment, environment.reset(seed)


def prompt(environment: BalrogEnvironment, observation: Observation) -> list[list[str | None]]:
    return [[message.role, message.content] for message in environment.messages(observation, ())]


def play(environment: BalrogEnvironment, *answers: str) -> DecisionOutcome:
    for text in answers:
        outcome = environment.answer(text)
    return outcome


@pytest.mark.parametrize("game", RECORD["games"], ids=lambda game: f"world {game['seed']}")
def test_every_prompt_of_a_game_is_the_one_that_balrogs_own_code_made(game):
    environment, observation = fresh(game["seed"])
    digests = []
    for turn, text in enumerate(game["answers"]):
        messages = prompt(environment, observation)
        if str(turn) in game["current"]:  # some whole ones, so that a difference can be read
            assert messages[-1][1] == game["current"][str(turn)]
        digests.append(blake2b(json.dumps(messages).encode(), digest_size=8).hexdigest())
        observation = environment.answer(text).observation
    assert observation.text == game["end"]
    assert environment.outcome_reward() / len(ACHIEVEMENTS) == game["progression"]
    assert digests == game["digests"]


def test_a_shorter_history_is_a_setting():
    environment, _ = fresh(history=1)
    observation = play(environment, "Noop", "Do", "Noop").observation
    assert [role for role, _ in prompt(environment, observation)] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Move West", "move_left"),
        ("  Move North.\n", "move_up"),
        ("**Do**", "do"),
        ("Make Iron Pickaxe!", "make_iron_pickaxe"),
    ],
)
def test_an_answer_is_read_without_what_is_no_letter_space_or_colon(text, action):
    outcome = fresh()[0].answer(text)
    assert (outcome.executed_actions, outcome.invalid_reason) == ((action,), None)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("1. Do", " Do"),
        ("Dö", "D"),
        *((text, text) for text in ("", "move west", "Action: Do", "Do\n\nbecause", "Move\tWest")),
    ],
)
def test_any_other_answer_runs_a_noop_and_the_next_observation_says_so(text, word):
    environment, _ = fresh()
    outcome = environment.answer(text)
    assert outcome.executed_actions == ("noop",)
    assert outcome.invalid_reason == (
        f"{word!r} is no action; answer with one of the 17 names alone, such as 'Move West'"
    )
    messages = prompt(environment, outcome.observation)
    # An empty answer leaves no message, so two observations follow each other.
    assert [role for role, _ in messages[1:]] == ["user", *["assistant"] * bool(text), "user"]
    assert "\n\n\nYour previous output did not contain a valid action." in messages[-1][1]


def test_every_action_has_its_name():
    west = {"noop": "Noop", "do": "Do", "move_left": "Move West", "move_up": "Move North"}
    others = {name: name.replace("_", " ").title() for name in ACTIONS if not name.startswith("move")}
    named = dict(zip(ACTIONS, ANSWERS, strict=True))
    assert named.items() >= {**others, **west}.items()


def test_a_call_of_one_action_counts_as_its_name_and_a_longer_one_is_refused():
    environment, _ = fresh()
    call = {"actions": ["move_left"]}
    outcome = environment.step([ToolRequest("interact_many", call, json.dumps(call))])
    assert outcome.observation.data["history"][-1] == ["assistant", "Move West"]
    longer = {"actions": ["noop", "noop"]}
    refused = environment.step([ToolRequest("interact_many", longer, json.dumps(longer))])
    assert refused.invalid_reason == "'actions' holds 2 names; allowed are 1 to 1"
    assert refused.observation.text.count("did not contain a valid action") == 1


def test_a_snapshot_holds_the_window():
    environment, other = fresh()[0], fresh(5)[0]
    observation = play(environment, *["Move West", "", "what?", "Do"] * 8).observation
    assert other.restore(environment.snapshot()) == observation
    assert prompt(other, observation) == prompt(environment, observation)
    one, two = play(environment, "Noop", "Sleep"), play(other, "Noop", "Sleep")
    assert prompt(environment, one.observation) == prompt(other, two.observation)


def test_a_setting_without_effect_is_refused():
    with pytest.raises(ValidationError, match=r"max_actions .*'balrog'"):
        CrafterConfig(text="balrog", max_actions=4)
    with pytest.raises(ValidationError, match=r"history .*'compact'"):
        CrafterConfig(text="compact", history=4)
    with pytest.raises(ValidationError, match=r"memory .*'full'"):
        CrafterConfig(memory=True)
