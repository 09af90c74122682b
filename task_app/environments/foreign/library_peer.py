"""`textarena:ID`, `reasoning_gym:NAME` and `verifiers:MODULE`: run a library in a child process.

The process may use another Python (`Reach.python_with`), because the libraries need other package versions
than Turnwise. Each environment has its own process, because the libraries use global random generators. The
folder `children` contains a module for each library; its `__main__.py` documents the protocol.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue, RootModel

from shared_schemas.base import Body, StrictReply
from shared_schemas.messages import ToolSpec
from shared_schemas.prefixes import PREFIXES
from task_app.complaints import state_in
from task_app.environments.foreign.child import START_S, Child
from task_app.environments.foreign.configs import ReasoningGymConfig, TextArenaConfig, VerifiersConfig
from task_app.environments.foreign.environment import ForeignConversation
from task_app.environments.foreign.peer import Call, ForeignFailed, Shown
from task_app.environments.foreign.schemas import tool
from task_app.environments.foreign.words import typed
from task_app.errors import EpisodeOver, InvalidRequest, clipped, started
from task_app.protocols import DecisionOutcome, Observation, ToolRequest
from task_app.settings import Reach

CHILDREN = Path(__file__).with_name("children")


def replayable_environment(
    argument: str, config: TextArenaConfig | ReasoningGymConfig, reach: Reach
) -> "Replayable":
    if isinstance(config, TextArenaConfig):
        library, settings = "textarena", config.game
    else:
        library, settings = "reasoning_gym", config.dataset
    peer = LibraryPeer(library, argument, settings, reach)
    return Replayable(f"{library}:{argument}", peer, instructions=config.instructions)


def verifiers_environment(argument: str, config: VerifiersConfig, reach: Reach) -> ForeignConversation:
    if argument not in reach.verifiers_modules:
        raise InvalidRequest(
            f"taskset {clipped(argument)!r} is not on this task app's list; "
            f"allowed: {', '.join(reach.verifiers_modules) or 'none'}",
            where="env_name",
            hint=PREFIXES["verifiers"].how,
        )
    peer = LibraryPeer("verifiers", argument, config.model_dump(), reach)
    return ForeignConversation(f"verifiers:{argument}", peer, instructions="")


class _Offered(StrictReply):
    name: str
    description: str
    parameters: dict[str, JsonValue]


class _Ready(StrictReply):
    ready: list[_Offered] | None = None


class _Offer(RootModel[list[_Offered]]):
    """The answer to `offer`: the list of tools."""


class _World(StrictReply):
    tools: list[_Offered] = Field(default_factory=list)
    prompt: str
    system: str | None = None


class _Moved(StrictReply):
    """The outcome of a call or a text; a null counts as a missing key."""

    text: str | None = None
    data: dict[str, JsonValue] | None = None
    reward: float | None = None
    terminated: bool | None = None
    truncated: bool | None = None
    refused: str | None = None


class _Moves(RootModel[list[_Moved]]):
    """The answer to `call` or `say`: an outcome per call, or one outcome."""


class _Error(StrictReply):
    error: str


class LibraryPeer:
    """Plays one episode at a time in a child process, which runs `children/LIBRARY_child.py`."""

    def __init__(self, library: str, argument: str, config: Mapping[str, Any], reach: Reach) -> None:
        self._name = f"{library}:{argument}"
        self._library = library
        python = reach.python_with(library)
        self._command = (python, str(CHILDREN), library, argument, json.dumps(config))
        self._reach = reach
        self._child: Child | None = None
        self._folder = ""
        self._tools: list[_Offered] | None = None

    def open(self) -> tuple[ToolSpec, ...]:
        # The process gets its own folder for temporary files, so that they can be removed if it is killed.
        self._folder = tempfile.mkdtemp(prefix="turnwise-environment-")
        # Libraries iterate over sets of strings, whose order depends on PYTHONHASHSEED; with a fixed value,
        # equal seeds give equal episodes.
        variables, source = {"PYTHONHASHSEED": "0", "TMPDIR": self._folder}, self._library.upper()
        self._child = Child(
            self._name, self._command, self._reach, source=f"TURNWISE_{source}_PYTHON", variables=variables
        )
        start_s = max(START_S, self._reach.environment_deadline_s)
        if self._tools is None:
            ready = typed(_Ready, self._reply(self._child, start_s), f"{self._name}: its first line").ready
            if ready is None:
                self._child.tell({"offer": 0})
                ready = typed(
                    _Offer,
                    self._reply(self._child, start_s),
                    f"{self._name}: its offer after a line that is not ready",
                ).root
            self._tools = ready
        else:
            self._reply(self._child, start_s)
        return tuple(tool(one.name, one.description, one.parameters, of=self._name) for one in self._tools)

    def reset(self, seed: int) -> Shown:
        world = typed(_World, self._ask({"reset": seed}), f"{self._name}: an opening")
        if world.tools != self._tools:
            raise ForeignFailed(f"{self._name} offers other tools than before")
        return Shown(world.prompt, system=world.system or "")

    def carry_out(self, calls: Sequence[Call]) -> Iterator[Shown]:
        if calls:  # a library without tools has no `call`
            requests = [{"name": call.tool, "arguments": dict(call.arguments)} for call in calls]
            yield from self._read_outcomes({"call": requests})

    def say(self, text: str) -> Shown:
        (shown,) = self._read_outcomes({"say": text})
        return shown

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read_outcomes(self, request: Mapping[str, Any]) -> list[Shown]:
        count = len(request["call"]) if "call" in request else 1
        replies = typed(_Moves, self._ask(request), f"{self._name}: its answers").root
        if len(replies) != count:
            raise ForeignFailed(f"{self._name} answered {len(replies)} of {count} calls")
        return [
            Shown(
                one.text or "",
                one.data or {},
                one.reward or 0.0,
                terminated=bool(one.terminated),
                truncated=bool(one.truncated),
                refused=one.refused or None,
            )
            for one in replies
        ]

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._child is not None, "the peer is open"
        self._child.tell(request)
        return self._reply(self._child, self._reach.environment_deadline_s)

    def _reply(self, child: Child, deadline_s: float) -> Any:
        """Read the next line of the process. Raises ForeignFailed if the line is {"error": ...}."""
        reply = next(child.lines(deadline_s))
        if isinstance(reply, Mapping) and "error" in reply:
            error = clipped(typed(_Error, reply, f"{self._name}: a line").error, 1_000)
            how = f"; {PREFIXES[self._library].how}" if "pip install" in error else ""
            raise ForeignFailed(f"{self._name}: {error}{how}")
        return reply


class Moment(Body):
    """A snapshot of a replayable episode: its seed, and the text of each decision.

    The text is None for a decision that was refused.
    """

    seed: int
    said: tuple[str | None, ...]


class Replayable(ForeignConversation):
    """A conversation that the seed and the model's texts determine, so that a snapshot contains only these.

    `restore` plays the episode again from its start.
    """

    _seed: int | None = None
    _said: tuple[str | None, ...] = ()

    def reset(self, seed: int) -> Observation:
        self._seed = None
        observation = super().reset(seed)
        self._seed, self._said = seed, ()
        return observation

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        outcome = super().step(calls, invalid_reason=invalid_reason)
        self._said += (None,)
        return outcome

    def answer(self, text: str) -> DecisionOutcome:
        outcome = super().answer(text)
        self._said += (text,)
        return outcome

    def snapshot(self) -> bytes:
        return Moment(seed=started(self._seed), said=self._said).model_dump_json().encode()

    def restore(self, state: bytes) -> Observation:
        """Play the episode again up to the snapshot, and return its last observation.

        Raises ValueError if the state is invalid, or contains decisions after the end of the episode.
        """
        moment = state_in(Moment, state)
        observation = self.reset(moment.seed)
        try:
            for text in moment.said:
                outcome = self.step(()) if text is None else self.answer(text)
                observation = outcome.observation
        except EpisodeOver as exc:
            raise ValueError("snapshot.said: the episode has ended before") from exc
        return observation
