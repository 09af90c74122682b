"""OpenEnv's operations (reset, step, state) on our environment sessions, for the socket and HTTP routes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from task_app.dialects.openenv_wire import OpenEnvReset, read_action, reply_data, tools_json
from task_app.environment_calls import list_tools
from task_app.errors import UnknownId
from task_app.routes.env import open_session
from task_app.routes.wire import observation_json, step_json
from task_app.services import Services
from task_app.sessions.sessions import EnvironmentSession

STEP_KEYS = frozenset({"action", "session_id", "request_id"})


@dataclass(slots=True)
class OpenEnvSession:
    """Executes OpenEnv's operations on one environment session.

    The session is looked up for every operation, because it may have expired. `session_id` is the `env_id` of
    the /env routes, which can use the session too. `episode_id` is the client's name for the episode; without
    such a name, it is the session's id.
    """

    services: Services
    env_name: str
    session_id: str
    episode_id: str

    @classmethod
    async def start(cls, services: Services, env_name: str, body: OpenEnvReset) -> "OpenEnvSession":
        session_id, _ = await open_session(services, env_name, body.config or {}, seed=body.seed or 0)
        return cls(services, env_name, session_id, body.episode_id or session_id)

    @classmethod
    def of(cls, services: Services, env_name: str, session_id: str) -> "OpenEnvSession":
        name = services.environments.get(session_id, where="session_id").spec.env_name
        if name != services.boards.environment_name(env_name):
            hint = f"it is one of environment {name!r}"
            raise UnknownId("session", session_id, where="session_id", hint=hint)
        return cls(services, env_name, session_id, session_id)

    @property
    def session(self) -> EnvironmentSession:
        return self.services.environments.get(self.session_id, where="session_id")

    async def reset(self, body: OpenEnvReset) -> None:
        """Start a new episode in the world of the body's seed; without a seed, in the same world again."""
        session = self.session
        await session.reset(session.seed if body.seed is None else body.seed)
        self.episode_id = body.episode_id or self.session_id

    def reset_reply(self, *, ignored: list[str]) -> dict[str, Any]:
        """Return the reply to a reset. Its `reward` is null, as in OpenEnv."""
        session = self.session
        metadata = {**self._metadata(ignored), "outcome_definition": session.environment.outcome_definition}
        return reply_data(observation_json(session.observation), None, False, metadata)

    async def step(self, action: Mapping[str, Any], *, where: str, ignored: list[str]) -> dict[str, Any]:
        """Execute a decision, or list the tools, and return the reply.

        The reply to an action of type `call_tool` also contains the tool's name and result.
        """
        session = self.session
        tools = list_tools(session.environment)
        if action.get("type") == "list_tools":
            return reply_data({"tools": tools_json(tools)}, None, session.over, self._metadata(ignored))
        at_most = self.services.settings.max_calls_per_step
        requests = read_action(action, tools, at_most=at_most, where=where)
        before, outcome = await session.step(requests)
        step = step_json(session, before, outcome)
        observation = dict(step["observation"])
        if action.get("type") == "call_tool":
            observation |= {"tool_name": requests[0].name, "result": outcome.result}
        details = {name: step[name] for name in ("terminated", "truncated", "env_rewards", "step_idx")}
        metadata = {**self._metadata(ignored), **details, **step["info"], **step["metadata"]}
        return reply_data(observation, step["reward"], step["done"], metadata)

    def state(self) -> dict[str, Any]:
        """Return the episode's state, in which `step_count` is the number of decisions."""
        session = self.session
        return {
            "episode_id": self.episode_id,
            "step_count": session.turn,
            "env_steps": session.step_idx,
            "seed": session.seed,
            "done": session.over,
        }

    def end(self) -> None:
        """Remove the session, if it has not expired."""
        if self.services.environments.find(self.session_id) is not None:
            self.services.environments.remove(self.session_id, where="session_id")

    def _metadata(self, ignored: list[str]) -> dict[str, Any]:
        metadata = {"session_id": self.session_id, "episode_id": self.episode_id, "seed": self.session.seed}
        return metadata | ({"ignored": ignored} if ignored else {})


def ignored_keys(body: OpenEnvReset) -> list[str]:
    """Return the unknown keys of a reset, to be listed in the reply; OpenEnv's server ignores such keys."""
    return sorted(body.model_extra or {})
