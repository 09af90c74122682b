"""The operator's agents: commands that a rollout may name, and the process that plays one episode.

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
    """An agent as the operator configures it, in a plug-ins file."""

    command: Sequence[str]
    """Program and arguments; no shell reads them. A path is relative to `folder`."""
    folder: Path | str | None = None
    """Where it runs; None: where the task app does."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Its further environment variables, by value. Of the task app's own it gets those that hold no keys, and
    no PYTHONPATH."""
    exit_codes: tuple[int, ...] = (0,)
    """Codes that are an episode's end; any other fails the rollout."""
    models: tuple[str, ...] = ()
    """Names that it may ask for; empty: any, and the policy answers."""
    sees_ground_truth: bool = False
    """Whether its task has the row's ground truth, by which it can reward itself."""

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise SettingsError(
                f"the command of an Agent is {self.command!r}; it is a list of a program and its arguments, "
                'such as ["python", "agent.py"]'
            )

    @property
    def program(self) -> str | None:
        """Where the program is, as its process will find it; None: nowhere."""
        name = self.command[0]
        if self.folder is not None and os.path.dirname(name):
            name = os.path.join(self.folder, name)
        return shutil.which(name, path=self.variables.get("PATH", os.environ.get("PATH")))


class AgentConfig(Body):
    """The config of an agent's environment: whatever the agent reads."""

    model_config = ConfigDict(extra="allow")


class AgentEnvironment:
    """An agent by its name on the board. It cannot be stepped: the agent itself asks the policy."""

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
    """The agent as an environment on the plug board."""
    return EnvironmentPlugin(AgentConfig, lambda config: AgentEnvironment(PREFIX + name, agent, config))


async def start_agent(agent: Agent, task: Mapping[str, Any], *, url: str, key: str, output: Output) -> Child:
    """Start the agent, and give it its task and its model at the capture's `url`, without /v1.

    The key is of the capture alone.
    """
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
    with suppress(BrokenPipeError, ConnectionResetError):  # one that reads no task
        child.stdin.write(json.dumps(task).encode())
        child.stdin.close()
    return child
