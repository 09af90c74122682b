"""Metrics of a batch of conversations: scores of answers, and edits of the context. Pure.

A conversation is an episode whose history the task app kept (`Trajectory.full_history`); metric names are
listed in docs/metrics.md.
"""

import math
import re
from collections.abc import Mapping, Sequence

from shared_schemas.trajectory import StepData, StopReason, Trajectory
from trainer_backend.core.segments import Segment

# Failures of an interaction, as a task app names them.
DEADLINE, FAILED = "interaction_deadline", "interaction_failed"
# The context tools that refuse ids one by one, in their result, and what they then say (DESIGN.md 4.12).
_EDITS = frozenset({"deleteContext", "deletePart", "summarizeContext"})
_REFUSED = re.compile(r'^(error: |deleted nothing|summarized nothing)|; refused |"message": "refused ')


def pick_conversations(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Those that kept a history."""
    return [item for item in trajectories if item.full_history]


def scores(step: StepData) -> list[float]:
    """What the interaction gave the decision; mostly one score or none."""
    return [part.value for part in step.reward_parts if part.source == "interaction"]


def interaction_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float | list[float]]:
    """Return the metrics of answers' scores, over those of the episodes that are conversations; empty if no
    answer was scored.

    They are interaction/score (mean of an answer), interaction/answers (that were scored, of an episode),
    interaction/user_turns (what its user said after the opening), interaction/score_by_turn [T]: mean over
    episodes of the last score up to each decision. An ended episode keeps its last, one without a score
    counts 0, so the last entry is the mean of the last turn scores; where scores are 0 or 1, all of it is a
    success rate by turn.
    """
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
    """How often the user spoke after the opening, which is what the first decision is shown."""
    if not trajectory.steps:
        return 0
    opening = len(trajectory.steps[0].observation_data.messages)
    return sum(message.role == "user" for message in trajectory.full_history[opening:])


def context_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """How conversations kept within their context; empty without conversations.

    Means of an episode: statelm/deletes (messages that its last view no longer showed), statelm/refused_edits
    (calls that were refused, in whole or of an id), and statelm/peak_context (tokens of its longest prompt
    and answer; absent where no server counts). Shares of episodes: statelm/edited (they edited their context)
    and statelm/context_length_exceeded (it ended them).
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
    peaks = [max(of_episode) for of_episode in lengths if of_episode]
    return metrics | ({"statelm/peak_context": sum(peaks) / len(peaks)} if peaks else {})


def refused_edits(trajectory: Trajectory) -> int:
    """Calls that wanted to edit the context and were told, in their result, that some of it may not be."""
    results = [
        message.content or ""
        for message in trajectory.full_history
        if (message.model_extra or {}).get("tool_name") in _EDITS
    ]
    return sum(_REFUSED.search(text) is not None for text in results)


def segment_metrics(segments: Sequence[Sequence[Segment]]) -> dict[str, float]:
    """Means of an episode over conversations: statelm/segments, and statelm/masked_tokens, the context tokens
    that stand in its segments and are not trained.
    """
    if not segments:
        return {}
    masked = sum(len(part) - len(part.logprobs) for found in segments for part in found)
    return {
        "statelm/segments": sum(map(len, segments)) / len(segments),
        "statelm/masked_tokens": masked / len(segments),
    }


def failure_metrics(failures: Mapping[str, int]) -> dict[str, float]:
    """Count interaction/timeouts and interaction/failures, which includes them, also of retried rollouts."""
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
