"""Makes the reply of POST /rollout, with an optional trace, from a rollout's episodes. Performs no I/O.

The reply contains one trajectory per episode; with `on_done = "reset"` there may be several episodes. Beyond
what the API requires, the reply contains the observation's data, the stop reason, exact tokens on request,
and all warnings.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from shared_schemas.messages import Message
from shared_schemas.plain_text import encodable
from shared_schemas.rewards import decision_rewards, event_terms
from shared_schemas.trajectory import StepData, StopReason, exact_tokens, prompts, transcript
from task_app.dialects.one_call.plan import LegacyPlan
from task_app.dialects.one_call.request import PER_ACHIEVEMENT, LegacyRollout, Stepwise
from task_app.episode.actions import json_object
from task_app.episode.decisions import achievements_added
from task_app.errors import CriticalError, EpisodeFailed, TaskAppError
from task_app.protocols import AgentPolicy, Environment, Observation, policy_name
from task_app.routes.wire import observation_json
from task_app.sessions.sessions import EnvironmentSession


def stepwise_blocks(steps: Sequence[StepData], rules: Stepwise) -> list[dict[str, Any]]:
    """Return `info.stepwise` for each decision of an episode; an empty list if decision rewards are off."""
    if not rules.emits_decision_rewards:
        return []
    credits: Counter[str] = Counter()
    return [_make_block(step, len(steps), rules, credits) for step in steps]


def _make_block(step: StepData, decisions: int, rules: Stepwise, credits: Counter[str]) -> dict[str, Any]:
    rewards = step.metadata.decision_rewards or decision_rewards({}, {}, turn=step.turn)
    delta, *bonuses = event_terms(rewards, rules, decisions_left=decisions - (step.turn - 1))
    base, of_strategy = delta, dict[str, Any]()
    if rules.strategy == PER_ACHIEVEMENT:
        components = _credit_achievements(rewards.all, rules, credits)
        base = float(sum(part["reward"] for part in components))
        names = [part["achievement"] for part in components]
        of_strategy = {"components": components, "credited_achievements": names}
    return {
        "decision_index": step.turn,
        "indicator": int(rewards.unique_delta > 0),
        "new_achievements": list(rewards.unique),
        "reward": base + sum(bonuses),
        "strategy": rules.strategy,
        "base_reward": base,
        **of_strategy,
    }


def _credit_achievements(
    achievements: Sequence[str], rules: Stepwise, credits: Counter[str]
) -> list[dict[str, Any]]:
    """Return the rewarded achievements of a decision, with their rewards.

    `credits` counts how often each achievement has been rewarded in the episode; it is updated.
    """
    components = []
    for name in achievements:
        limit = rules.k_limits.get(name, 1)
        if 0 < limit <= credits[name]:
            continue
        credits[name] += 1
        components.append({"achievement": name, "reward": rules.weights.get(name, 1.0)})
    return components


def stepwise_details(
    episodes: Sequence[Sequence[dict[str, Any]]], rules: Stepwise, *, unlocked: Sequence[str]
) -> dict[str, Any]:
    """Return `metrics.details.stepwise` of a rollout, from the results of `stepwise_blocks` for each episode.

    `unlocked` are the achievements that are unlocked at the end of the last episode.
    """
    blocks = [block for episode in episodes for block in episode]
    unique = sorted({name for block in blocks for name in block["new_achievements"]})
    return {
        "indicator_sum": sum(block["indicator"] for block in blocks),
        "reward_sum": float(sum(block["reward"] for block in blocks)),
        "resource_reward": 0.0,
        "new_achievements_total": sum(len(block["new_achievements"]) for block in blocks),
        **rules.model_dump(exclude={"step_rewards_enabled", "event_rewards_kind"}),
        "unique_achievements_total": len(unique),
        "unique_achievements": unique,
        "final_achievements": sorted(unlocked),
    }


TIMED_OUT = "partial_max_time"


@dataclass(frozen=True, slots=True)
class Episode:
    """One played episode. `observations` [T + 1]: one before each of the T decisions, and the final one."""

    steps: tuple[StepData, ...]
    observations: tuple[Observation, ...]
    outcome_reward: float | None
    stop_reason: StopReason | None
    failure: TaskAppError | None = None
    is_timed_out: bool = False

    @property
    def is_cancelled(self) -> bool:
        """Whether an abort of the run, or a stop of the service, ended the episode early."""
        return self.stop_reason is None and self.failure is None and not self.is_timed_out


@dataclass(frozen=True, slots=True)
class Cast:
    """What a rollout is played with: its plan, environment, policy and reward switches.

    Environment and policy are new, or belong to living sessions.
    """

    plan: LegacyPlan
    environment: Environment
    policy: AgentPolicy
    stepwise: Stepwise
    env_session: EnvironmentSession | None
    seed: int
    inference_url: str | None


@dataclass(slots=True)
class Result:
    """The episodes that were played, and the warnings that arose while they were played."""

    episodes: list[Episode] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    aborted: bool = False


def reply(result: Result, cast: Cast, *, created_at: datetime) -> dict[str, Any]:
    """Return the whole reply. The run's id stands for the id of a new environment or policy, which has none.

    If an episode failed with a CriticalError, raise this error. Also raise an error that is no EpisodeFailed
    and ended an episode before its first decision.
    """
    plan, body, episodes = cast.plan, cast.plan.body, result.episodes
    for episode in episodes:
        failure = episode.failure
        # No decision was made, and the error came neither from the policy nor from the environment.
        has_no_effect = not episode.steps and not isinstance(failure, EpisodeFailed)
        if failure is not None and (isinstance(failure, CriticalError) or has_no_effect):
            raise failure
    blocks = [stepwise_blocks(episode.steps, cast.stepwise) for episode in episodes]
    trajectories = [_trajectory(*pair, cast) for pair in zip(episodes, blocks, strict=True)]
    decisions = sum(len(episode.steps) for episode in episodes)
    return {
        "run_id": body.run_id,
        "trajectories": trajectories if body.record.trajectories else [],
        "branches": {},
        "metrics": _metrics(episodes, blocks, cast.stepwise),
        "aborted": result.aborted,
        "ops_executed": 2 * decisions,
        "trace": _trace(episodes, body, created_at) if body.record.return_trace else None,
        "trace_correlation_id": plan.correlation_id,
        "pipeline_metadata": {
            "inference_url": cast.inference_url,
            "trace_correlation_id": plan.correlation_id,
            "env_name": cast.environment.name,
            "seed": cast.seed,
            "policy_name": policy_name(cast.policy),
            "policy_config": dict(plan.policy_config),
        },
        "warnings": [*plan.warnings, *result.warnings, *_later_warnings(episodes, cast)],
    }


def _trajectory(episode: Episode, blocks: list[dict[str, Any]], cast: Cast) -> dict[str, Any]:
    body = cast.plan.body
    steps = [
        _step(episode, index, prompt, blocks, cast) for index, prompt in enumerate(prompts(episode.steps))
    ]
    data: dict[str, Any] = {
        "env_id": body.env.env_id or body.run_id,
        "policy_id": body.policy.policy_id or body.run_id,
        "steps": steps,
        "final": _final(episode),
        "length": len(steps),
        "inference_url": cast.inference_url or "",  # the API requires a text; a scripted policy has no URL
        "trace_correlation_id": cast.plan.correlation_id,
    }
    if blocks:
        data["decision_samples"] = [
            {
                "decision_index": block["decision_index"],
                "indicator": block["indicator"],
                "r_i": block["reward"],
                "actions": [
                    {"tool": call["tool_name"], "args": call["arguments"]} for call in step["tool_calls"]
                ],
            }
            for block, step in zip(blocks, steps, strict=True)
        ]
    return data


def _final(episode: Episode) -> dict[str, Any]:
    final: dict[str, Any] = {
        "observation": observation_json(episode.observations[-1]) if episode.observations else None,
        "stop_reason": episode.stop_reason.value if episode.stop_reason else None,
        "outcome_reward": episode.outcome_reward,
    }
    status, error = _rollout_status(episode)
    if status is not None:
        final |= {"rollout_status": status, "error": error, "at_op": 2 * len(episode.steps)}
    return final


def _rollout_status(episode: Episode) -> tuple[str | None, str | None]:
    """Return (status, error) of an episode that was cut short; (None, None) for any other episode."""
    if episode.is_timed_out:
        return TIMED_OUT, "safety.max_time_s passed"
    if episode.failure is not None:
        of_policy = isinstance(episode.failure, EpisodeFailed)
        status = "partial_policy_error" if of_policy else f"partial_{episode.failure.code}"
        return status, encodable(episode.failure.detail)
    if episode.stop_reason is StopReason.INVALID_ACTION:
        last = episode.steps[-1]
        status = "partial_invalid_action" if last.tool_calls else "partial_no_tool_calls"
        return status, last.step_info.invalid_reason
    if episode.stop_reason is StopReason.CONTEXT_LENGTH:
        return "partial_policy_error", "the prompt does not fit the model any more"
    return ("partial_aborted", "the rollout was cancelled") if episode.is_cancelled else (None, None)


def _step(
    episode: Episode, index: int, prompt: Sequence[Message], blocks: list[dict[str, Any]], cast: Cast
) -> dict[str, Any]:
    step, record = episode.steps[index], cast.plan.body.record
    after = step.next_observation.achievements_counts if step.next_observation else {}
    info: dict[str, Any] = {
        "achievements_added": achievements_added(step.observation_data.achievements_counts, after),
        "executed_actions": list(step.step_info.executed_actions),
        "meta": _meta(step, prompt, cast),
    }
    if blocks:
        info["stepwise"] = blocks[index]
    if step.step_info.invalid_reason is not None:
        reason = "invalid_action" if step.tool_calls else "no_tool_calls"
        info |= {"terminated": step.is_done, "reason": reason, "error": step.step_info.invalid_reason}
    return {
        "obs": observation_json(episode.observations[index]),
        "tool_calls": [_call(call.function.name, call.function.arguments) for call in step.tool_calls],
        "reward": float(sum(step.env_rewards or ())),
        "env_rewards": list(step.env_rewards or ()),
        "done": step.is_done,
        "terminated": step.terminated,
        "truncated": step.truncated,
        "logprob": sum(tokens.logprobs) if record.logprobs and (tokens := exact_tokens(step)) else None,
        "value": step.policy_value_estimate if record.value else None,
        "info": info,
    }


def _meta(step: StepData, prompt: Sequence[Message], cast: Cast) -> dict[str, Any]:
    info = step.step_info
    meta: dict[str, Any] = {
        "inference_url": cast.inference_url,
        "inference_request": {
            "messages": [message.model_dump(mode="json", exclude_none=True) for message in prompt]
        },
        "turn_index": step.turn,
        "raw_response": step.raw_policy_output,
        "usage": {"prompt_tokens": info.prompt_tokens, "completion_tokens": info.completion_tokens},
        "inference_ms": 1_000 * info.policy_s,
        "timing": {"inference_s": info.policy_s, "env_step_ms": 1_000 * info.environment_s},
        **step.metadata.model_dump(mode="json", exclude_none=True),
    }
    if cast.plan.body.record.logprobs and (logprobs := step.policy_logprobs) is not None:
        meta["policy_logprobs"] = logprobs if isinstance(logprobs, dict) else logprobs.model_dump(mode="json")
        meta["sampling"] = step.sampling.model_dump(mode="json") if step.sampling else None
    return meta


def _call(name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the reply's form; arguments that are not a JSON object stay the model's text."""
    parsed = json_object(arguments)
    return {"tool_name": name, "arguments": arguments if parsed is None else dict(parsed)}


def _metrics(
    episodes: Sequence[Episode], blocks: Sequence[list[dict[str, Any]]], rules: Stepwise
) -> dict[str, Any]:
    returns = [float(sum(sum(step.env_rewards or ()) for step in episode.steps)) for episode in episodes]
    last = episodes[-1] if episodes else None
    counts = last.observations[-1].achievements_counts if last and last.observations else {}
    unlocked = sorted(name for name, count in counts.items() if count)
    details: dict[str, Any] = {"achievements": unlocked}
    events_score = None
    if rules.emits_decision_rewards:
        details["stepwise"] = stepwise_details(blocks, rules, unlocked=unlocked)
        events_score = details["stepwise"]["reward_sum"]
    return {
        "episode_returns": returns,
        "mean_return": sum(returns) / len(returns) if returns else 0.0,
        "num_steps": sum(len(episode.steps) for episode in episodes),
        "num_episodes": len(episodes),
        "outcome_score": last.outcome_reward if last else None,
        "events_score": events_score,
        "details": details,
    }


def _later_warnings(episodes: Sequence[Episode], cast: Cast) -> list[str]:
    record = cast.plan.body.record
    steps = [step for episode in episodes for step in episode.steps]
    warnings = []
    if record.logprobs and any(exact_tokens(step) is None for step in steps):
        warnings.append("record.logprobs: this policy's server sends no exact tokens; logprob is null there")
    if record.value and any(step.policy_value_estimate is None for step in steps):
        warnings.append("record.value: this policy has no value estimate; value is null there")
    if record.return_trace and record.trace_format == "structured":
        warnings.append("record.trace_format structured is the same as full here")
    if len(episodes) > 1:
        warnings.append(
            f"on_done is reset: {len(episodes)} episodes of seed {cast.seed} were played, a trajectory each"
        )
    return warnings


def _trace(episodes: Sequence[Episode], body: LegacyRollout, created_at: datetime) -> dict[str, Any]:
    """Return the rollout's trace. Unless the format is compact, it includes the events and the messages.

    In the trace's `decision_rewards`, `turn` counts from 0, as readers of these traces expect. In the reply's
    steps, it counts from 1.
    """
    steps = [step for episode in episodes for step in episode.steps]
    messages = [message for episode in episodes for message in transcript(episode.steps)]
    data: dict[str, Any] = {
        "session_id": body.run_id,
        "created_at": created_at.astimezone(UTC).isoformat(),
        "metadata": body.model_dump(include={"training_session_id", "synth_base_url"}),
        "events_count": len(steps),
        "messages_count": len(messages),
        "lm_calls": [
            {
                "step_id": f"decision_{step.turn - 1}",
                "tool_calls": [call.model_dump(mode="json", exclude_none=True) for call in step.tool_calls],
                "raw_response": step.raw_policy_output,
                "prompt_tokens": step.step_info.prompt_tokens,
                "completion_tokens": step.step_info.completion_tokens,
                "latency_ms": 1_000 * step.step_info.policy_s,
            }
            for step in steps
        ],
        "decision_rewards": [
            {
                "turn": rewards.turn - 1,
                "ach_delta": rewards.ach_delta,
                "unique_delta": rewards.unique_delta,
                "achievements": list(rewards.all),
                "unique_achievements": list(rewards.unique),
            }
            for step in steps
            if (rewards := step.metadata.decision_rewards)
        ],
    }
    if body.record.trace_format != "compact":
        data["event_history"] = [
            {
                "event_type": "environment",
                "step_id": f"decision_{step.turn - 1}",
                "reward": float(sum(step.env_rewards or ())),
                "executed_actions": list(step.step_info.executed_actions),
                "terminated": step.terminated,
                "truncated": step.truncated,
            }
            for step in steps
        ]
        data["messages"] = [message.model_dump(mode="json", exclude_none=True) for message in messages]
    return data
