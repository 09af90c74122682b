"""The process of `verifiers:MODULE`: `PYTHON verifiers_child.py MODULE CONFIG`, with the operator's Python.

It imports nothing of Turnwise, since that Python need not have it. It answers each line of stdin with one
line: {"reset": seed} with the task of that number, {"say": text} with the reward of the answer, both with
{"error": sentence} where that fails. It ends when stdin closes.
"""

import asyncio
import inspect
import itertools
import json
import os
import sys
from typing import Any

try:
    import verifiers.v1 as vf
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.utils.loaders import environment_class, load_taskset, taskset_config_type
except ImportError as exc:
    print(json.dumps({"error": f"{sys.executable} has no verifiers 0.4 ({exc}): pip install verifiers"}))
    sys.exit(1)

# Of a taskset without an end: worlds are the seeds modulo this.
MAX_TASKS = 10_000


class Unplayable(Exception):
    """The taskset needs more of `verifiers` than its tasks and rewards."""


class Tasks:
    """The tasks of a taskset, of which one is played at a time."""

    def __init__(self, module: str, config: dict[str, Any]) -> None:
        self._config = taskset_config_type(module)(id=module, **config)
        taskset = load_taskset(self._config)
        refuse(environment_class(module) is not vf.SingleAgentEnv, "an Env of its own")
        refuse(bool(taskset.toolsets(self._config)), "tool servers")
        self._tasks = list(itertools.islice(taskset, MAX_TASKS))
        refuse(not self._tasks, "tasks: it has none")
        self._task: Any = None

    def reset(self, seed: int) -> dict[str, Any]:
        task = self._tasks[seed % len(self._tasks)]
        kind = type(task)
        refuse(bool(kind.toolsets(task.config)), "tool servers")
        refuse(kind.NEEDS_CONTAINER, "a container")
        changed = [
            name for name in ("setup", "finalize") if getattr(kind, name) is not getattr(vf.Task, name)
        ]
        refuse(bool(changed), f"a runtime for {' and '.join(changed)}()")
        for reward in task.hooks("reward"):
            runtime = inspect.signature(reward).parameters.get("runtime")
            refuse(
                runtime is not None and runtime.default is inspect.Parameter.empty,
                f"a runtime for its reward {reward.__name__!r}",
            )
        refuse(not task.data.prompt_text, "a user who opens the conversation")
        self._task = task
        return {"system": task.data.system_prompt or "", "prompt": task.data.prompt_text}

    def say(self, text: str) -> dict[str, Any]:
        task = self._task
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )
        system = [vf.SystemMessage(content=task.data.system_prompt)] if task.data.system_prompt else []
        turn = prepare_turn(trace, [*system, vf.UserMessage(content=task.data.prompt_text)])
        answer = vf.AssistantMessage(content=text)
        turn.commit(vf.Response(id="0", created=0, model="turnwise", message=answer, finish_reason="stop"))
        asyncio.run(task.score(trace))
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return {"reward": trace.reward, "rewards": rewards}


def refuse(holds: bool, what: str) -> None:
    if holds:
        raise Unplayable(f"it needs {what}; only tasks with one answer in words can be played here")


def main(module: str, config: str) -> None:
    # What the taskset prints goes to stderr, so that it cannot break the exchange.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        tasks = Tasks(module, json.loads(config))
        print(json.dumps({"ready": True}), file=replies, flush=True)
        for line in sys.stdin:
            ((name, argument),) = json.loads(line).items()
            reply = tasks.reset(argument) if name == "reset" else tasks.say(argument)
            print(json.dumps(reply), file=replies, flush=True)
    except BaseException as exc:  # a SystemExit of the taskset too: the service must hear the cause
        message = str(exc) if isinstance(exc, Unplayable) else f"{type(exc).__name__}: {exc}"
        print(json.dumps({"error": message[:500]}), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
