"""`verifiers:MODULE`: a taskset of the package `verifiers` (0.4), in a process of the operator's own Python.

An episode is one answer in words to the task number `seed`. Its reward is the trace's: the weighted sum of
the task's `@reward` functions. Tasksets with an Env of their own, tool servers or a runtime are refused.
There are no snapshots.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_schemas.messages import ToolSpec
from task_app.environments.foreign.child import START_S, Child
from task_app.environments.foreign.configs import VerifiersConfig
from task_app.environments.foreign.environment import ForeignConversation
from task_app.environments.foreign.mcp_words import number, object_in
from task_app.environments.foreign.peer import Call, ForeignFailed, Reach, Shown
from task_app.errors import InvalidRequest, clipped

CHILD = Path(__file__).with_name("verifiers_child.py")


def verifiers_environment(argument: str, config: VerifiersConfig, reach: Reach) -> ForeignConversation:
    if reach.python is None:
        raise InvalidRequest(
            "this task app knows no Python that has the package verifiers",
            where="env_name",
            hint="the operator installs it in an environment of its own, and sets TURNWISE_VERIFIERS_PYTHON",
        )
    if argument not in reach.tasksets:
        raise InvalidRequest(
            f"taskset {clipped(argument)!r} is not on this task app's list; "
            f"allowed: {', '.join(reach.tasksets) or 'none'}",
            where="env_name",
            hint="the operator extends it with TURNWISE_VERIFIERS_MODULES=module,...",
        )
    name = f"verifiers:{argument}"
    return ForeignConversation(name, VerifiersPeer(name, argument, config, reach), instructions="")


class VerifiersPeer:
    """One process, which plays one task at a time."""

    def __init__(self, name: str, module: str, config: VerifiersConfig, reach: Reach) -> None:
        self._name = name
        self._arguments = (module, json.dumps(config.taskset))
        self._reach = reach
        self._child: Child | None = None

    def open(self) -> tuple[ToolSpec, ...]:
        command = [str(self._reach.python), str(CHILD), *self._arguments]
        self._child = Child(self._name, command, self._reach, source="TURNWISE_VERIFIERS_PYTHON")
        self._reply(self._child, max(START_S, self._reach.deadline_s))
        return ()

    def reset(self, seed: int) -> Shown:
        task = self._ask({"reset": seed})
        return Shown(str(task.get("prompt")), system=str(task.get("system", "")))

    def carry_out(self, calls: Sequence[Call]) -> Iterator[Shown]:
        return iter(())  # there are no tools, so every call is refused before

    def say(self, text: str) -> Shown:
        reply = self._ask({"say": text})
        return Shown(
            "",
            {"rewards": reply.get("rewards")},
            reward=number(reply.get("reward"), self._name),
            terminated=True,
        )

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._child is not None, "the peer is open"
        self._child.tell(request)
        return self._reply(self._child, self._reach.deadline_s)

    def _reply(self, child: Child, deadline_s: float) -> dict[str, Any]:
        """The next line of the process, which is an object without an error."""
        reply = object_in(next(child.lines(deadline_s)), "a line of the process")
        if "error" in reply:
            raise ForeignFailed(f"{self._name}: {clipped(str(reply['error']), 500)}")
        return reply
