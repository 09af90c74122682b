"""Converts a stored rollout to a trajectory in ATIF, the Agent Trajectory Interchange Format. Pure functions.

Each message becomes one step, whose `source` is "system", "user" or "agent". A decision is an agent step with
the results of its tool calls, the exact tokens of its model call, and in `extra` its rewards and credit.

Source: ATIF v1.7, https://harborframework.com/docs/trajectory-format, RFC 0001 of harbor-framework/harbor;
field names after harbor 0.25.0, harbor/models/trajectories.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from operator import itemgetter
from typing import Any

from service_kit.release import version
from shared_schemas.messages import Message, ToolCall
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import PolicyLogprobs, StepData, Trajectory, exact_tokens, prompts, read_answer
from trainer_backend.core.statistics import step_deltas, sum_known

VERSION = "ATIF-v1.7"

Json = dict[str, Any]
_CREDIT = ("reward", "return_to_go", "value", "advantage")


def make_atif(rollout: Rollout, credits: Sequence[Mapping[str, Any]] = ()) -> Json | None:
    """Convert a rollout to an ATIF document; return None if the rollout has no trajectory.

    `credits` are the stored credit columns of each decision, from `read_credits`.
    """
    trajectory = rollout.trajectory
    if trajectory is None:
        return None
    by_turn = {credit["turn"]: credit for credit in credits}
    prompt_ids = list(_prompt_ids(trajectory.steps))
    agents = _agents(trajectory)
    stories = []
    for steps in agents:
        story = _Story()
        for step in steps:
            shown, ids = story.prompt(step), prompt_ids[step.turn - 1]
            agent = _decision(step, ids, by_turn.get(step.turn, {}), calls_a_model=bool(trajectory.model))
            if shown is not None:
                agent["extra"]["prompt_step_ids"] = shown
            story.answer(agent, step)
        story.end(steps, trajectory.full_history)
        stories.append(story)
    main, *others = (
        _document(rollout, trajectory, story.steps, steps)
        for story, steps in zip(stories, agents, strict=True)
    )
    names = ("outcome_reward", "outcome_definition", "achievements_counts", "env_steps", "wall_s")
    outcome = {name: getattr(trajectory, name) for name in names}
    main["final_metrics"]["extra"] = outcome | {"decisions": len(trajectory.steps)}
    main["extra"] = _about(rollout, trajectory)
    if others:
        _embed(main, others, stories, [steps[-1] for steps in agents])
    return main


def _document(rollout: Rollout, trajectory: Trajectory, told: list[Json], steps: Sequence[StepData]) -> Json:
    infos = [step.step_info for step in steps]
    totals = {
        "total_prompt_tokens": sum_known([info.prompt_tokens for info in infos]),
        "total_completion_tokens": sum_known([info.completion_tokens for info in infos]),
        "total_steps": len(told),
    }
    return {
        "schema_version": VERSION,
        "session_id": rollout.rollout_id,
        "trajectory_id": rollout.rollout_id,
        "agent": _present(
            {
                "name": trajectory.policy_name,
                "version": version(),
                "model_name": trajectory.model or None,
                "tool_definitions": [tool.model_dump(mode="json") for tool in trajectory.tools] or None,
            }
        ),
        "steps": told,
        "final_metrics": _present(totals),
    }


def _agents(trajectory: Trajectory) -> list[list[StepData]]:
    """Return the decisions of each agent of an episode; the agent of the first decision comes first.

    Only a captured agent may call other agents. Decisions whose prompts begin with the same message belong to
    the same agent, since an agent that shortens its conversation keeps the system prompt. In the returned
    steps, `messages` and `messages_reused` are relative to the previous decision of the same agent.
    """
    if not (trajectory.env_name.startswith("agent:") or trajectory.env_name == "capture"):
        return [list(trajectory.steps)]
    agents: dict[tuple[Any, ...], list[StepData]] = {}
    last: dict[tuple[Any, ...], tuple[Message, ...]] = {}
    for step, prompt in zip(trajectory.steps, prompts(trajectory.steps), strict=True):
        agent = _key(prompt[0])
        pairs = zip(prompt, last.get(agent, ()), strict=False)
        reused = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        changes = {"messages": prompt[reused:], "messages_reused": reused}
        seen = step.observation_data.model_copy(update=changes)
        agents.setdefault(agent, []).append(step.model_copy(update={"observation_data": seen}))
        last[agent] = prompt
    return list(agents.values())


def _embed(main: Json, others: Sequence[Json], stories: Sequence["_Story"], ends: Sequence[StepData]) -> None:
    """Add the other agents' documents to the main document, and refer to each from a tool result.

    The tool result must equal the agent's last answer (from `ends`), and a later prompt must be the first to
    show it. So no two documents refer to each other. A tool result that no prompt shows is used only if it is
    in the main document.
    """
    main["subagent_trajectories"] = list(others)
    for number, document in enumerate(others, start=1):
        document["trajectory_id"] = f"{main['trajectory_id']}~{number + 1}"
        answer, turn = read_answer(ends[number]).content, ends[number].turn
        arrived = [
            (shown, result)
            for place, story in enumerate(stories)
            for shown, result in story.results
            if answer and result["content"] == answer and "subagent_trajectory_ref" not in result
            if shown > turn and place != number and (shown < inf or place == 0)
        ]
        if arrived:
            _, result = min(arrived, key=itemgetter(0))
            result["subagent_trajectory_ref"] = [{"trajectory_id": document["trajectory_id"]}]


def _about(rollout: Rollout, trajectory: Trajectory) -> Json:
    names = ("run_id", "iteration", "group_id", "sibling", "attempt")
    of_trajectory = ("env_name", "seed", "parent_rollout_id", "parent_turn", "terminated", "truncated")
    about = {name: getattr(rollout, name) for name in names}
    about |= {name: getattr(trajectory, name) for name in of_trajectory}
    return _present({**about, "stop_reason": str(trajectory.stop_reason), "warnings": trajectory.warnings})


def _decision(
    step: StepData, prompt_ids: list[int] | None, credit: Mapping[str, Any], *, calls_a_model: bool
) -> Json:
    answer = read_answer(step)
    fields = {
        "message": answer.content,
        "tool_calls": [_call(call) for call in step.tool_calls] or None,
        "metrics": _metrics(step, prompt_ids) if calls_a_model else None,
        "llm_call_count": int(calls_a_model),
        "extra": _of_decision(step, credit),
    }
    return _present(fields)


def _call(call: ToolCall) -> Json:
    """Convert a tool call. Arguments that are not a JSON object are kept as text in `extra`."""
    written = {"tool_call_id": call.id, "function_name": call.function.name}
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        return {**written, "arguments": arguments}
    return {**written, "arguments": {}, "extra": {"arguments_text": call.function.arguments}}


def _metrics(step: StepData, prompt_ids: list[int] | None) -> Json | None:
    info, tokens = step.step_info, exact_tokens(step)
    metrics: Json = {"prompt_tokens": info.prompt_tokens, "completion_tokens": info.completion_tokens}
    extra: Json = {"finish_reason": info.finish_reason}
    if tokens is not None:
        metrics["prompt_token_ids"] = prompt_ids
        metrics["completion_token_ids"] = list(tokens.token_ids)
        metrics["logprobs"] = list(tokens.logprobs)
        extra["policy_versions"] = tokens.versions
    if step.sampling is not None:
        extra["sampling"] = step.sampling.model_dump(mode="json", exclude_none=True)
    metrics["extra"] = _present(extra) or None
    return _present(metrics) or None


def _of_decision(step: StepData, credit: Mapping[str, Any]) -> Json:
    info, deltas = step.step_info, step_deltas(step)
    facts = {
        "turn": step.turn,
        **{name: credit.get(name) for name in _CREDIT},
        "env_rewards": step.env_rewards,
        "reward_parts": [part.model_dump(mode="json") for part in step.reward_parts] or None,
        "unique_achievements": deltas.unique or None,
        "executed_actions": info.executed_actions or None,
        "invalid_reason": info.invalid_reason,
        "state_keys": step.observation_data.state_keys or None,
    }
    return _present(facts)


def _prompt_ids(steps: Sequence[StepData]) -> Iterator[list[int] | None]:
    """Yield the token ids of each decision's whole prompt, or None if they are unknown.

    prompt_t = (prompt_{t-1} + response_{t-1})[:prompt_ids_reused] + prompt_token_ids
    """
    before: list[int] = []
    for step in steps:
        tokens: PolicyLogprobs | None = exact_tokens(step)
        if tokens is None:
            yield None
            continue
        prompt = before[: tokens.prompt_ids_reused] + list(tokens.prompt_token_ids)
        yield prompt
        before = prompt + list(tokens.token_ids)


@dataclass(slots=True)
class _Story:
    """Builds the steps of one agent's document, decision by decision."""

    steps: list[Json] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    """The step_id of each message of the last prompt."""
    known: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """The step_id of each message added so far, by `_key`."""
    last_answer: int = 0
    """The step_id of the last decision."""
    turn: float = 0.0
    """The turn of the decision whose prompt is being added; inf after the last decision."""
    results: list[tuple[float, Json]] = field(default_factory=list)
    """Every tool result, with the turn of the first prompt that shows it, or inf if no prompt shows it."""

    def prompt(self, step: StepData) -> list[int] | None:
        """Add the new messages of a decision's prompt.

        Return the step_ids of the prompt's messages, or None if the prompt shows all steps so far.
        """
        observation, self.turn = step.observation_data, step.turn
        goes_on = observation.messages_reused == len(self.prompt_ids)
        self.prompt_ids = self.prompt_ids[: observation.messages_reused]
        for msg_id, message in observation.changed.items():
            self.prompt_ids[msg_id] = self._told(message, is_context=True)
        self._tell(observation.messages, goes_on=goes_on)
        shown = sorted(set(self.prompt_ids))
        return None if shown == [step["step_id"] for step in self.steps] else shown

    def answer(self, decision: Json, step: StepData) -> None:
        self._add("agent", decision)
        self.last_answer = len(self.steps)
        self.known[_key(read_answer(step))] = self.last_answer

    def end(self, steps: Sequence[StepData], history: Sequence[Message]) -> None:
        """Add the messages after the last answer, and the tool results that no prompt shows."""
        self.turn = inf
        if history:
            last = max(index for index, message in enumerate(history) if message.role == "assistant")
            self._tell(history[last:], goes_on=True)
        decisions = (item for item in self.steps if "turn" in item.get("extra", {}))
        texts = {item["message"] for item in self.steps if item["source"] == "user"}
        for decision, step in zip(decisions, steps, strict=True):
            result = step.step_info.tool_result
            if result and "observation" not in decision and (step.tool_calls or result not in texts):
                sole = step.tool_calls[0].id if len(step.tool_calls) == 1 else None
                decision["observation"] = {"results": [self._noted(_result(sole, result))]}

    def _tell(self, messages: Sequence[Message], *, goes_on: bool) -> None:
        """Add the new messages of a prompt. Messages up to the last assistant message count as context.

        If `goes_on`, an assistant message at the beginning of `messages` is the last decision, already added.
        """
        roles = [message.role for message in messages]
        if goes_on and self.last_answer and roles[:1] == ["assistant"]:
            self.known[_key(messages[0])] = self.last_answer
            self.prompt_ids.append(self.last_answer)
            messages, roles = messages[1:], roles[1:]
        context = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
        for index, message in enumerate(messages):
            self.prompt_ids.append(self._told(message, is_context=index < context))

    def _told(self, message: Message, *, is_context: bool) -> int:
        """Return the step_id of a message; first add the message, as a step or a tool result, if it is new.

        Outside the context, a user or assistant message is new even if an equal one was added before.
        """
        key = _key(message)
        if (is_context or message.role in ("system", "tool")) and key in self.known:
            return self.known[key]
        if message.role == "tool":
            self.known[key] = self._as_result(message)
        else:
            source = {"assistant": "agent", "user": "user"}.get(message.role, "system")
            calls = [_call(call) for call in message.tool_calls or ()]
            fields: Json = {"message": message.content or "", "tool_calls": calls or None}
            # Not sampled in this episode: an example of the opening, a summary, or an edited message.
            fields["is_copied_context"] = True if source == "agent" else None
            self.known[key] = self._add(source, _present(fields))
        return self.known[key]

    def _as_result(self, message: Message) -> int:
        """Add a tool result to the latest step with its call, and return the step_id of that step.

        Without such a step, or if its call has a result already, add the result as a new step.
        """
        for step in reversed(self.steps):
            if any(call["tool_call_id"] == message.tool_call_id for call in step.get("tool_calls", ())):
                results = step.setdefault("observation", {"results": []})["results"]
                if all(result.get("source_call_id") != message.tool_call_id for result in results):
                    results.append(self._noted(_result(message.tool_call_id, message.content or "")))
                    return int(step["step_id"])
                break
        extra = {"extra": {"tool_call_id": message.tool_call_id}} if message.tool_call_id else {}
        result = self._noted({"content": message.content or "", **extra})
        return self._add("system", {"message": "", "observation": {"results": [result]}})

    def _noted(self, result: Json) -> Json:
        self.results.append((self.turn, result))
        return result

    def _add(self, source: str, fields: Json) -> int:
        step_id = len(self.steps) + 1
        self.steps.append({"step_id": step_id, "source": source, **fields})
        return step_id


def _result(call_id: str | None, content: str) -> Json:
    return _present({"source_call_id": call_id, "content": content})


def _key(message: Message) -> tuple[Any, ...]:
    calls = tuple((call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ())
    return message.role, message.content or "", message.name, message.tool_call_id, calls


def _present(fields: Mapping[str, Any]) -> Json:
    return {name: value for name, value in fields.items() if value is not None}
