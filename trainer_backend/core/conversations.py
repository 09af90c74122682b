"""Metrics of a batch of conversations: scores of answers, and edits of the context. Pure functions.

A conversation is an episode with a `Trajectory.full_history`: all its messages, deleted or not.
"""

import math
import re
from collections.abc import Mapping, Sequence

from shared_schemas.trajectory import StepData, StopReason, Trajectory
from trainer_backend.core.metric import Metric, Row
from trainer_backend.core.segments import Segment

# Codes by which a task app reports that an interaction failed.
DEADLINE, FAILED = "interaction_deadline", "interaction_failed"
# The context tools that may refuse single message ids, and a pattern of their refusals (DESIGN.md 4.12).
_EDITS = frozenset({"deleteContext", "deletePart", "summarizeContext"})
_REFUSED = re.compile(r'^(error: |deleted nothing|summarized nothing)|; refused |"message": "refused ')


def pick_conversations(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories that are conversations: those with a `full_history`."""
    return [item for item in trajectories if item.full_history]


def scores(step: StepData) -> list[float]:
    """Return the scores that the interaction gave to a decision's answer; usually there is one or none."""
    return [part.value for part in step.reward_parts if part.source == "interaction"]


INTERACTION_METRICS = (
    Row(
        Metric("interaction/score", "mean score of an answer", "answers",
               {"iteration": "training", "evaluation": "held-out"}),
        Metric("interaction/answers", "scored answers of an episode, mean"),
        Metric("interaction/user_turns", "turns of the user after the opening, mean"),
        note="The teacher's episodes have these too",
    ),
    Row(
        Metric("interaction/score_by_turn", "mean over episodes of the last score up to each turn"),
        note="An ended episode keeps its last score; one without a score counts as 0. With scores of 0 and 1 "
        "this is the success rate by turn",
    ),
    Row(
        Metric("interaction/timeouts", "rollouts that failed because an interaction did not answer in time"),
        Metric("interaction/failures", "rollouts that failed because of any fault of an interaction"),
        note="Retried rollouts count",
    ),
)  # fmt: skip


def interaction_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float | list[float]]:
    """Compute metrics of the scores that interactions gave to answers; empty if no answer was scored."""
    played = pick_conversations(trajectories)
    given = [score for item in played for step in item.steps for score in scores(step)]
    if not given:
        return {}
    return {
        "interaction/score": math.fsum(given) / len(given),
        "interaction/answers": len(given) / len(played),
        "interaction/user_turns": sum(map(user_turns, played)) / len(played),
        "interaction/score_by_turn": _score_by_turn(played),
    }


def user_turns(trajectory: Trajectory) -> int:
    """Count the user's messages that follow the prompt of the first decision."""
    if not trajectory.steps:
        return 0
    opening = len(trajectory.steps[0].observation_data.messages)
    return sum(message.role == "user" for message in trajectory.full_history[opening:])


CONTEXT_METRICS = (
    Row(
        Metric("statelm/deletes", "messages that its last view no longer shows", "context",
               "messages deleted"),
        Metric("statelm/refused_edits", "calls of context tools that were refused, whole or for one id"),
        Metric("statelm/peak_context", "tokens of its longest prompt with answer", "peak",
               {"iteration": "training", "evaluation": "held-out"}),
        when="means of an episode",
    ),
    Row(
        Metric("statelm/edited", "share of episodes that edited their context"),
        Metric("statelm/context_length_exceeded", "share that ended because the next prompt did not fit"),
    ),
    Row(
        Metric("statelm/segments", "segments", "context", "segments"),
        Metric("statelm/masked_tokens", "tokens in them that are context and not trained"),
        when="iterations only, means of an episode",
    ),
)  # fmt: skip


def context_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute metrics of context edits in conversations; empty without conversations.

    statelm/peak_context is absent if no decision reports the number of its prompt tokens.
    """
    played = pick_conversations(trajectories)
    if not played:
        return {}
    over = sum(item.stop_reason is StopReason.CONTEXT_LENGTH for item in played)
    metrics = {
        "statelm/deletes": sum(len(item.deleted_msg_ids) for item in played) / len(played),
        "statelm/edited": sum(item.had_delete_operation for item in played) / len(played),
        "statelm/refused_edits": sum(map(refused_edits, played)) / len(played),
        "statelm/context_length_exceeded": over / len(played),
    }
    lengths = [
        [
            info.prompt_tokens + (info.completion_tokens or 0)
            for info in infos
            if info.prompt_tokens is not None
        ]
        for infos in ([step.step_info for step in item.steps] for item in played)
    ]
    peaks = [max(totals) for totals in lengths if totals]
    return metrics | ({"statelm/peak_context": sum(peaks) / len(peaks)} if peaks else {})


def refused_edits(trajectory: Trajectory) -> int:
    """Count the context edits that were refused, wholly or for some of the messages that they name."""
    results = [
        message.content or ""
        for message in trajectory.full_history
        if (message.model_extra or {}).get("tool_name") in _EDITS
    ]
    return sum(_REFUSED.search(text) is not None for text in results)


def segment_metrics(segments: Sequence[Sequence[Segment]]) -> dict[str, float]:
    """Compute the mean numbers of segments and of context tokens per conversation.

    `segments` contains the segments of each conversation; without conversations the result is empty.
    """
    if not segments:
        return {}
    masked = sum(len(part) - len(part.logprobs) for found in segments for part in found)
    return {
        "statelm/segments": sum(map(len, segments)) / len(segments),
        "statelm/masked_tokens": masked / len(segments),
    }


def failure_metrics(failures: Mapping[str, int]) -> dict[str, float]:
    """Return metrics from `failures`, the number of failures per error code; a timeout is also a failure."""
    timeouts = failures.get(DEADLINE, 0)
    failed = timeouts + failures.get(FAILED, 0)
    return {"interaction/timeouts": float(timeouts), "interaction/failures": float(failed)}


def _score_by_turn(played: Sequence[Trajectory]) -> list[float]:
    longest = max(len(item.steps) for item in played)
    sums = [0.0] * longest
    for item in played:
        last = 0.0
        for t in range(longest):
            last = ([last, *scores(item.steps[t])] if t < len(item.steps) else [last])[-1]
            sums[t] += last
    return [value / len(played) for value in sums]
