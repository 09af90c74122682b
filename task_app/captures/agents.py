"""Agents that the operator declares as commands. Each episode of an agent is one process.

    AGENTS = {"guess": Agent(["python", "guess_agent.py"])}

This line in a plug-ins file defines the environment `agent:guess`. The agent's process receives its task as
one JSON object on standard input. The model's URL and key are in the environment variables OPENAI_BASE_URL,
OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from service_kit.errors import SettingsError
from service_kit.output import Output
from service_kit.process import Child, without_keys
from shared_schemas.base import Body
from shared_schemas.messages import Message, ToolSpec
from task_app.captures.session import OUTCOME
from task_app.errors import InvalidRequest
from task_app.plugins import EnvironmentPlugin
from task_app.protocols import DecisionOutcome, Observation, PastDecision, ToolRequest

PREFIX = "agent:"
GROUND_TRUTH = "ground_truth"


@dataclass(frozen=True, slots=True)
class Agent:
    """Declares an agent in an operator's plug-ins file: its command, and how to run the command."""

    command: Sequence[str]
    """Program and arguments, without a shell. A path is relative to `folder`."""
    folder: Path | str | None = None
    """Working directory of the agent; None means the working directory of the task app."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the agent. From the task app's own environment, the agent inherits only the
    variables on a fixed list (`without_keys`), which contain no API keys. PYTHONPATH is not on the list."""
    exit_codes: tuple[int, ...] = (0,)
    """Exit codes that mean that the episode has finished; any other exit code fails the rollout."""
    models: tuple[str, ...] = ()
    """Model names that the agent may request; if empty, any name. The policy answers under every name."""
    sees_ground_truth: bool = False
    """Whether the agent's task contains the ground truth, from which the agent can compute a reward."""

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise SettingsError(
                f"the command of an Agent is {self.command!r}; it is a list of a program and its arguments, "
                'such as ["python", "agent.py"]'
            )

    @property
    def program(self) -> str | None:
        """The path of the executable that the agent's command starts; None if there is no such executable."""
        name = self.command[0]
        if self.folder is not None and os.path.dirname(name):
            name = os.path.join(self.folder, name)
        return shutil.which(name, path=self.variables.get("PATH", os.environ.get("PATH")))


class AgentConfig(Body):
    """The config of an agent's environment; any keys are allowed, and the agent receives them in its task."""

    model_config = ConfigDict(extra="allow")


class AgentEnvironment:
    """An agent as an environment. `step` always raises, because an agent calls the policy itself."""

    outcome_definition = OUTCOME
    quick_step = True

    def __init__(self, name: str, agent: Agent, config: AgentConfig) -> None:
        self.name, self.agent = name, agent
        self.config: dict[str, Any] = dict(config.model_extra or {})
        if agent.program is None:
            raise InvalidRequest(
                f"the program of {name}, {agent.command[0]!r}, is not there", where="env_name",
                hint="the operator's AGENTS name it",
            )  # fmt: skip

    def reset(self, seed: int) -> Observation:
        return Observation(text=f"{self.name} plays by itself in a rollout", data={})

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        raise InvalidRequest(
            f"{self.name} asks the policy itself and cannot be stepped", where="env_name",
            hint="POST /rollouts runs it",
        )  # fmt: skip

    def tools(self) -> tuple[ToolSpec, ...]:
        return ()

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        return (Message(role="user", content=observation.text),)

    def outcome_reward(self) -> float:
        return 0.0


def agent_plugin(name: str, agent: Agent) -> EnvironmentPlugin[AgentConfig]:
    return EnvironmentPlugin(AgentConfig, lambda config: AgentEnvironment(PREFIX + name, agent, config))


async def start_agent(agent: Agent, task: Mapping[str, Any], *, url: str, key: str, output: Output) -> Child:
    """Start an agent's process and send it the task. `url` is the capture's URL, without /v1."""
    model = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "TURNWISE_CAPTURE_URL": url,
    }
    child = await Child.start(
        agent.command, prints=output, folder=agent.folder, is_ours=False,
        env={**without_keys(os.environ), **agent.variables, **model},
    )  # fmt: skip
    with suppress(BrokenPipeError, ConnectionResetError):  # the agent need not read its task
        child.stdin.write(json.dumps(task).encode())
        child.stdin.close()
    return child
