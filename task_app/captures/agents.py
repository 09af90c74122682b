"""The operator's agents: their commands, and the process that plays one episode.

    AGENTS = {"guess": Agent(["python", "guess_agent.py"])}

in a plug-ins file gives the environment `agent:guess`. The process gets its task as one JSON object on
standard input, and its model as OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY.
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
    """An agent in an operator's plug-ins file."""

    command: Sequence[str]
    """Program and arguments, without a shell. A path is relative to `folder`."""
    folder: Path | str | None = None
    """Working directory; None: that of the task app."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the agent. Of the task app's variables it gets only those on a fixed list
    (`without_keys`), none of which holds a key. PYTHONPATH is not on the list."""
    exit_codes: tuple[int, ...] = (0,)
    """Exit codes of a finished episode; any other code fails the rollout."""
    models: tuple[str, ...] = ()
    """Model names that the agent may request; empty allows any name. The policy always answers."""
    sees_ground_truth: bool = False
    """Whether the agent's task contains the row's ground truth, from which it can compute a reward."""

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise SettingsError(
                f"the command of an Agent is {self.command!r}; it is a list of a program and its arguments, "
                'such as ["python", "agent.py"]'
            )

    @property
    def program(self) -> str | None:
        """The path at which the agent's process will find the program; None if there is none."""
        name = self.command[0]
        if self.folder is not None and os.path.dirname(name):
            name = os.path.join(self.folder, name)
        return shutil.which(name, path=self.variables.get("PATH", os.environ.get("PATH")))


class AgentConfig(Body):
    """The config of an agent's environment: any keys that the agent reads."""

    model_config = ConfigDict(extra="allow")


class AgentEnvironment:
    """An agent as an environment. It cannot be stepped, because the agent calls the policy itself."""

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
    """Start an agent's process and send it its task; its model is at the capture's `url` (without /v1)."""
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
