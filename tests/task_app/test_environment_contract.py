"""Every environment of ours keeps the contract; and one that breaks it is told how."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from task_app.environments.crafter.balrog import BalrogEnvironment
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.documents.environment import DocumentsConfig, DocumentsEnvironment
from task_app.environments.sokoban.environment import SokobanConfig, SokobanEnvironment
from task_app.plugins import ENVIRONMENTS, default_plug_boards
from task_app.protocols import DecisionOutcome, Environment, Observation, PastDecision, ToolRequest
from task_app.testing import EnvironmentContract
from tests.task_app.counting import CountingEnvironment

BOARDS = default_plug_boards()
# What an environment needs beyond its defaults.
CONFIGS: dict[str, dict[str, Any]] = {
    "babyai": {"level": "PutNextLocalS5N3", "length": 20},
    "dialogue": {"prompt": "How much is 2 + 2?", "system": "Be brief."},
    "documents": {
        "document_content": "The code is 7. " * 40, "question": "Which code?", "ground_truth": "7",
    },
    "orders": {"requests": 3},
}  # fmt: skip


class TestOfTheBoard(EnvironmentContract):
    """Every environment that comes with us, by its name."""

    @pytest.fixture(autouse=True, params=ENVIRONMENTS)
    def _named(self, request: pytest.FixtureRequest) -> None:
        self.name = request.param
        if self.name not in BOARDS.playable:
            pytest.skip(f"{ENVIRONMENTS[self.name].needs} is not installed")

    def make(self) -> Environment:
        return BOARDS.environment(self.name, CONFIGS.get(self.name, {}))

    def test_its_name_is_that_of_the_board(self) -> None:
        assert self.make().name == self.name


class TestCompactCrafterThatEnds(EnvironmentContract):
    decisions = 60

    def make(self) -> Environment:
        return CrafterEnvironment(CrafterConfig(text="compact", max_actions=4, length=100))


class TestBalrogsCrafter(EnvironmentContract):
    decisions = 60
    words = "Move East"

    def make(self) -> Environment:
        return BalrogEnvironment(CrafterConfig(text="balrog", history=3, length=50))


class TestGeneratedDocumentsForSmallModels(EnvironmentContract):
    def make(self) -> Environment:
        settings = {"generate": {"kind": "hops", "chars": 900}, "text": "compact", "indexed": True}
        return DocumentsEnvironment(DocumentsConfig(**settings, chunk_size=90, tools=["readChunk", "finish"]))


class TestSokobanOfPushes(EnvironmentContract):
    def make(self) -> Environment:
        return SokobanEnvironment(SokobanConfig(text="compact", size=6, boxes=3, length=30))


class Broken(CountingEnvironment):
    """Passes its decisions through `spoil`, its prompts too when it is the second instance to word one."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self._changes = changes

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        names = [call.name for call in calls]
        reason = invalid_reason or (None if names == ["add"] and calls[0].arguments is not None else "no")
        outcome = super().step([ToolRequest("add", {"names": ["a"]})])
        return replace(outcome, invalid_reason=reason, **self._changes)

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> Any:
        found = super().messages(observation, past)
        return found if self._steps or not self._changes.get("result") else found[:1]


def build_contract(**changes: Any) -> EnvironmentContract:
    contract = EnvironmentContract()
    contract.make = lambda: Broken(**changes)
    return contract


EARNS = "every_decision_says_what_ran_and_what_it_earned"
REFUSES = "what_cannot_be_carried_out_runs_one_env_step_and_says_why"
PROMPTS = "the_prompt_is_a_pure_function_of_what_was_seen_and_done"


@pytest.mark.parametrize(
    ("changes", "test", "sentence"),
    [
        ({"env_rewards": ()}, EARNS, "env_rewards is empty"),
        ({"executed_actions": ()}, EARNS, "0 executed_actions, but 1 env_rewards"),
        ({"terminated": True, "truncated": True}, EARNS, "terminated and truncated at once"),
        ({}, REFUSES, "is carried out as if it were valid"),
        ({"terminated": True}, "after_the_end_nothing_runs", "step() ran although no episode"),
        ({"result": "x"}, PROMPTS, "reads more than its arguments"),
    ],
)
def test_a_broken_promise_is_named(changes: dict[str, Any], test: str, sentence: str):
    with pytest.raises(AssertionError) as caught:
        getattr(build_contract(**changes), f"test_{test}")()
    assert sentence in str(caught.value)
