"""Plays a taskset of the package `verifiers` 0.4 with the taskset's own Env, over several turns with tools.

The Env runs in an event loop of this process until its agent sends a request to the model. The Env continues
when the model answers, until the next request or the end. The messages that the next request adds are the
outcome of the answer. At the end, the reward of the `verifiers` trace is the reward of the outcome. The Env
must have exactly one agent, because there is only one model.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

try:
    from verifiers.v1.clients import Client, ModelContext
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.interception import server
    from verifiers.v1.types import content_text
    from verifiers.v1.utils.loaders import (
        default_harness_id,
        env_config_type,
        load_environment,
        resolve_env_config,
    )
except ImportError as exc:
    sys.exit(f"{sys.executable} has no verifiers 0.4 ({exc}): pip install verifiers")

HARNESS = "verifiers_harness"  # a module of this folder
# The largest number of tasks that are used from a finite taskset, and from an endless one, which makes its
# tasks on demand.
MAX_TASKS, MAX_ENDLESS = 10_000, 1_000
Json = dict[str, Any]


class Player(Client):  # type: ignore[misc]  # mypy runs without this package
    """Stands in for the client of the model: a request of the Env waits until `World` sets `answer`."""

    def __init__(self) -> None:
        self.messages: Sequence[Any] = ()
        self.tools: Sequence[Any] = ()
        self.answer: asyncio.Future[Json] | None = None
        self._session: str | None = None

    def begin(self) -> None:
        """Forget the last episode's request, so that a new episode can begin."""
        self.answer = self._session = None

    async def get_response(
        self, dialect: Any, body: Json, sampling: Any, session_id: str | None = None, **_: Any
    ) -> Any:
        if self._session not in (None, session_id):
            raise RuntimeError("its Env runs the agent more than once in an episode")
        self._session = session_id
        request = dialect.parse_request(body)
        self.messages, self.tools = request.messages, request.tools or ()
        self.answer = asyncio.get_running_loop().create_future()
        message = await self.answer
        finish = "tool_calls" if "tool_calls" in message else "stop"
        raw = {
            "id": "0", "object": "chat.completion", "created": 0, "model": "turnwise",
            "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}],
        }  # fmt: skip
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class World:
    """Plays the tasks of a taskset, one at a time."""

    def __init__(self, module: str, config: Json) -> None:
        self._env = _load_environment(module, config)
        taskset = self._env.taskset
        self._is_bounded = taskset.bounded
        self._rest: Iterator[Any] = iter(taskset)
        self._tasks = list(itertools.islice(self._rest, MAX_TASKS if self._is_bounded else 1))
        refuse(not self._tasks, "tasks: it has none")
        self._player = Player()
        self._seen = 0  # number of messages of the conversation that were already returned
        self._episode: asyncio.Task[Any] | None = None
        self._loop = asyncio.new_event_loop()
        server.resolve_client = lambda config: self._player
        self._serving = self._env.serving()
        self._loop.run_until_complete(self._serving.__aenter__())
        first = self._tasks[0]
        has_tools = bool(taskset.toolsets(taskset.config) or type(first).toolsets(first.config))
        self.tools: list[Json] | None = None if has_tools else []

    def offer(self, seed: int) -> list[Json]:
        """Begin an episode, whose first request lists the tools, and return the tools."""
        tools: list[Json] = self.reset(seed)["tools"]
        return tools

    def reset(self, seed: int) -> Json:
        task = self._choose_task(seed)
        refuse(type(task).NEEDS_CONTAINER, "a container")
        self._loop.run_until_complete(self._cancel_episode())
        self._player.begin()
        context = ModelContext(model="turnwise", client=EvalClientConfig())
        self._episode = self._loop.create_task(self._env.run_episode(task, context))
        self._loop.run_until_complete(self._continue_episode())
        if self._player.answer is None:
            sys.exit(_find_error(self._episode.result()) or "the episode ended before the model was asked")
        messages, self._seen = self._player.messages, len(self._player.messages)
        is_foreign = any(message.role not in ("system", "user") for message in messages)
        refuse(is_foreign, "a prompt with the model's words")
        tools = [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in self._player.tools
        ]
        return {
            "system": _join_texts(messages, "system"),
            "prompt": _join_texts(messages, "user"),
            "tools": tools,
        }

    def say(self, text: str) -> list[Json]:
        new, end = self._answer({"content": text})
        return [{"text": _join_texts(new, "user"), **end}]

    def call(self, calls: list[Json]) -> list[Json]:
        ids = [f"call_{self._seen}_{number}" for number in range(len(calls))]
        wire = [
            {
                "id": call_id, "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call_id, call in zip(ids, calls, strict=True)
        ]  # fmt: skip
        new, end = self._answer({"content": None, "tool_calls": wire})
        texts = {message.tool_call_id: _read_text(message) for message in new if message.role == "tool"}
        outcomes: list[Json] = [{"text": texts.get(call_id, "")} for call_id in ids]
        parts = filter(None, (outcomes[-1]["text"], _join_texts(new, "user")))
        outcomes[-1] = {"text": "\n\n".join(parts), **end}
        return outcomes

    def _answer(self, message: Json) -> tuple[Sequence[Any], Json]:
        """Answer the waiting request, and let the Env continue.

        Returns:
            The new messages of the next request, and {}; at the end, no messages and the final outcome.
        """
        assert self._player.answer is not None and self._episode is not None, "a request waits"
        answer, self._player.answer = self._player.answer, None
        answer.set_result(message)
        self._loop.run_until_complete(self._continue_episode())
        if self._player.answer is None:
            return (), _final_outcome(self._episode.result())
        messages = self._player.messages
        if len(messages) <= self._seen or messages[self._seen].role != "assistant":
            sys.exit("it has rewritten the conversation; only one that grows can be played here")
        new, self._seen = messages[self._seen + 1 :], len(messages)
        return new, {}

    async def _continue_episode(self) -> None:
        """Let the Env run until it sends a request to the model or ends."""
        assert self._episode is not None
        while self._player.answer is None and not self._episode.done():
            await asyncio.wait([self._episode], timeout=0.005)

    async def _cancel_episode(self) -> None:
        if self._episode is not None and not self._episode.done():
            self._episode.cancel()
            await asyncio.wait([self._episode])
        self._episode = None

    def _choose_task(self, seed: int) -> Any:
        if self._is_bounded:
            return self._tasks[seed % len(self._tasks)]
        number = seed % MAX_ENDLESS
        self._tasks += itertools.islice(self._rest, max(0, number + 1 - len(self._tasks)))
        return self._tasks[number % len(self._tasks)]


def _load_environment(module: str, config: Json) -> Any:
    agents = [
        name
        for name, field in env_config_type(module).model_fields.items()
        if isinstance(field.default, AgentConfig)
    ]
    refuse(len(agents) != 1, f"{len(agents)} agents ({', '.join(agents)}), and one is played")
    refuse(default_harness_id(module) != "bash", "a harness of its own")
    agent = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}, "max_turns": config["max_turns"]}
    return load_environment(
        resolve_env_config({"taskset": {"id": module, **config["taskset"]}, agents[0]: agent})
    )


def _final_outcome(episode: Any) -> Json:
    if error := _find_error(episode):
        sys.exit(error)
    trace = episode.traces[0]
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    stop = trace.stop_condition or ""
    is_limit = stop.startswith("max_") or trace.is_timeout
    return {
        "reward": trace.reward, "data": {"rewards": rewards, "stop": stop},
        "truncated" if is_limit else "terminated": True,
    }  # fmt: skip


def _find_error(episode: Any) -> str:
    """Return a description of an episode's errors, or "" if the episode had none."""
    if episode.ok:
        return ""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed"


def _join_texts(messages: Sequence[Any], role: str) -> str:
    return "\n\n".join(_read_text(message) for message in messages if message.role == role)


def _read_text(message: Any) -> str:
    parts = [] if isinstance(message.content, str) else message.content
    refuse(any(part.type != "text" for part in parts), "a model that sees pictures")
    return str(content_text(message.content))


def refuse(holds: bool, what: str) -> None:
    if holds:
        sys.exit(f"it needs {what}; docs/foreign.md says what can be played here")


open_world = World
