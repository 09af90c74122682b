"""Sessions as they should be, without the service's code for snapshots: a log, played again to copy it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shared_schemas.rewards import decision_rewards
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.policies.random_calls import random_call
from task_app.protocols import PastDecision, ToolRequest

PAST_SHOWN = 3


@dataclass
class PlainEnvironment:
    """An environment session. `log` is all that was done since the reset; a copy does it again."""

    config: dict[str, Any]
    seed: int
    emits: bool = False
    log: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.over, self.step_idx, self.metadata = False, 0, {}
        self._environment = CrafterEnvironment(CrafterConfig(**self.config))
        self.observation = self._environment.reset(self.seed)
        self._past: list[PastDecision] = []
        log, self.log = self.log, []
        for actions in log:
            self.step(actions)

    def copy(self) -> "PlainEnvironment":
        # Its switches are its own from here on, and what was told of the last decision stays told.
        copied = PlainEnvironment(self.config, self.seed, self.emits, list(self.log))
        copied.metadata = self.metadata
        return copied

    def step(self, actions: Sequence[str]) -> dict[str, Any]:
        """The parts of POST /env/step's answer that tell everything that happened."""
        request = ToolRequest("interact_many", {"actions": list(actions)}, "")
        outcome = self._environment.step([request])
        self.log.append(tuple(actions))
        turn, before, after = len(self.log), self.observation, outcome.observation
        self.metadata = {}
        if self.emits:
            record = decision_rewards(before.achievements_counts, after.achievements_counts, turn=turn)
            self.metadata = {"decision_rewards": record.model_dump(mode="json")}
        self.observation = after
        self.over = outcome.terminated or outcome.truncated
        self.step_idx += len(outcome.env_rewards)
        self._past.append(PastDecision((request,), outcome))
        return self.shown() | {
            "done": self.over,
            "env_rewards": list(outcome.env_rewards),
            "turn": turn,
            "invalid_reason": outcome.invalid_reason,
        }

    def shown(self) -> dict[str, Any]:
        """What a session shows at any time."""
        return {
            "text": self.observation.text,
            "data": self.observation.data,
            "counts": self.observation.achievements_counts,
            "reward_last_step": self.observation.reward_last_step,
            "step_idx": self.step_idx,
            "metadata": self.metadata,
        }

    def prompt(self) -> list[dict[str, Any]]:
        """The messages of the next decision."""
        messages = self._environment.messages(self.observation, self._past[-PAST_SHOWN:])
        return [message.model_dump(mode="json", exclude_none=True) for message in messages]

    def tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(mode="json") for tool in self._environment.tools()]


@dataclass
class PlainPolicy:
    """A session of the random policy: its seed, and how often it decided."""

    seed: int
    env_id: str
    decisions: int = 0

    def next_actions(self, environment: PlainEnvironment) -> list[str]:
        """Drawn from the start every time: the tool is always the same, so is the number of draws."""
        source = random.Random(self.seed)
        for _ in range(self.decisions + 1):
            _, arguments = random_call(environment.tools(), source, longest=8)
        self.decisions += 1
        return arguments["actions"]


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """The same parts of what the service answered."""
    observation, info = answer["observation"], answer["info"]
    parts = {
        "text": observation["text"],
        "data": observation["data"],
        "counts": observation["achievements_counts"],
        "reward_last_step": observation["reward_last_step"],
        "step_idx": answer["step_idx"],
        "metadata": answer["metadata"],
    }
    if "env_rewards" in answer:
        parts |= {
            "done": answer["done"],
            "env_rewards": answer["env_rewards"],
            "turn": info["turn"],
            "invalid_reason": info["invalid_reason"],
        }
    return parts
