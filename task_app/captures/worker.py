"""Runs a rollout of an agent. The agent's process plays the episode; each model call is a decision."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

from service_kit.output import Output
from service_kit.process import name_exit
from service_kit.tasks import racing
from shared_schemas.messages import Message
from shared_schemas.plain_text import encodable
from shared_schemas.rollouts import CostKeys, MultiTurn, RolloutRequest
from shared_schemas.trajectory import StepData, StopReason, Trajectory
from task_app.captures.agents import GROUND_TRUTH, AgentEnvironment, start_agent
from task_app.captures.door import Captures
from task_app.captures.session import Capture, CaptureSpec
from task_app.errors import AgentFailed, DeadlineExceeded, EpisodeFailed, UnknownId, refuse_used


class AgentWorker:
    """Plays one episode of an agent, in place of task_app.episode.worker.RLRolloutWorker."""

    def __init__(
        self, request: RolloutRequest, environment: AgentEnvironment, spec: CaptureSpec, captures: Captures
    ) -> None:
        self._request, self._environment = request, environment
        self._spec, self._captures = spec, captures
        self._capture: Capture | None = None

    @property
    def decisions_done(self) -> int:
        return len(self._capture.steps) if self._capture is not None else 0

    async def run_episode(self) -> tuple[list[StepData], list[Message], Any]:
        """Run the agent until it exits, ends its capture, or reaches a time limit.

        Return the decisions, the messages of all conversations, and the request's ground truth.
        """
        spec = replace(self._spec, spans=self._spec.spans.here())
        capture = self._capture = self._captures.open(spec)
        try:
            async with capture.lock:  # while its lock is held, a capture does not expire
                await self._play(capture, self._captures.find_url(capture))
        except EpisodeFailed as exc:
            exc.decisions_done = self.decisions_done
            raise
        finally:
            capture.end(StopReason.DEADLINE)  # has no effect if the capture has ended already
            with suppress(UnknownId):  # a client may have deleted the capture
                self._captures.sessions.remove(capture.capture_id, where="capture_id")
        messages = [message for conversation in capture.conversations for message in conversation]
        return list(capture.steps), messages, self._request.ground_truth

    def trajectory(self) -> Trajectory:
        """Return the finished episode; call this after `run_episode`."""
        assert self._capture is not None, "run_episode has not finished"
        return self._capture.trajectory()

    async def _play(self, capture: Capture, url: str) -> None:
        name, agent = self._environment.name, self._environment.agent
        output = Output("agent", name, is_for_debugging=True, secret=capture.key)
        try:
            child = await start_agent(agent, self._task(), url=url, key=capture.key, output=output)
        except OSError as exc:
            raise AgentFailed(f"{name} did not start: {exc}") from exc
        exit_code: int | None = None
        try:
            with suppress(TimeoutError):
                # Stop waiting when the capture is over, because it failed or because the agent ended it.
                async with (
                    asyncio.timeout(self._request.limits.timeout_s),
                    racing(child.ended(), capture.over.wait()) as (exit_task, _),
                ):
                    exit_code = exit_task.result() if exit_task.done() else None
            if exit_code is None:
                capture.end(StopReason.DEADLINE)
        finally:
            await child.end_all()  # also completes its output
        if (failure := capture.failure) is not None:
            capture.failure = None  # its traceback would keep the capture alive
            raise failure
        self._conclude(capture, exit_code, encodable(output.last_text()))

    def _conclude(self, capture: Capture, exit_code: int | None, output: str) -> None:
        """End the capture with the episode's stop reason, or raise an error if there is no usable episode."""
        name = self._environment.name
        if not capture.steps and capture.too_long is not None:
            raise capture.too_long
        if exit_code is None:
            if not capture.steps and capture.stop_reason is StopReason.DEADLINE:
                raise DeadlineExceeded(f"limits.timeout_s passed before {name} had an answer{_after(output)}")
            if not capture.steps:
                raise AgentFailed(f"{name} ended its capture before it had an answer{_after(output)}")
            return
        # If a limit refused the last call, ignore the exit code: many agents then exit with an exception.
        if capture.refused is None and exit_code not in self._environment.agent.exit_codes:
            raise AgentFailed(f"{name} ended with {name_exit(exit_code)}{_after(output)}")
        if not capture.steps:
            raise AgentFailed(
                f"{name} ended with {name_exit(exit_code)} and had no model call answered{_after(output)}"
            )
        capture.end(capture.refused or StopReason.ENVIRONMENT_DONE)

    def _task(self) -> dict[str, Any]:
        """Return the agent's task: seed, rollout_id, config, and ground truth if the agent may see it."""
        task = {"seed": self._spec.seed, "rollout_id": self._request.rollout_id, **self._environment.config}
        task.pop(GROUND_TRUTH, None)
        if self._environment.agent.sees_ground_truth:
            own = self._environment.config.get(GROUND_TRUTH)
            task[GROUND_TRUTH] = own if self._request.ground_truth is None else self._request.ground_truth
        return task


def refuse_without_effect(request: RolloutRequest, environment: AgentEnvironment, *, where: str) -> None:
    """Raise InvalidRequest if the request has parts that cannot affect an agent.

    For example, an interaction or a snapshot has no effect, because an agent makes its own prompts and state.
    """
    parts = {
        "interaction": request.interaction is not None,
        "multi_turn": request.multi_turn != MultiTurn(),
        "snapshot_turns": bool(request.snapshot_turns),
        "start.snapshot": request.start.snapshot is not None,
        "limits.termination_regex": request.limits.termination_regex is not None,
        **{f"limits.{name}": getattr(request.limits, name) != 0 for name in CostKeys.model_fields},
        "final_view": request.final_view,
    }
    refuse_used(parts, f"on {environment.name}, which makes its own prompts and state", where=where)


def _after(output: str) -> str:
    return f"; its last output: {output[-600:]}" if output else ""
