"""Metrics of an iteration, and of each policy that sampled in it. Pure, except `moment`."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shared_schemas.rollouts import Rollout, RolloutRequest
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.metrics import batch_metrics, outcome_over_worlds
from trainer_backend.collect.sources import name_sampler
from trainer_backend.core.conversations import (
    context_metrics,
    failure_metrics,
    interaction_metrics,
    segment_metrics,
)
from trainer_backend.core.metric import Metric, Row
from trainer_backend.core.mixture_history import EPISODES, OUTCOME, metric_name
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.segments import build_segments
from trainer_backend.core.statistics import (
    average_by_turn,
    episode_metrics,
    have_achievements,
    outcome_definition,
    unique_achievements,
)
from trainer_backend.credit.credit import Credited
from trainer_backend.credit.rewards import Policies
from trainer_backend.parts import InferenceServer
from trainer_backend.run.timeline import Span
from trainer_backend.rundir.rollout_files import Credit

# Metrics in seconds, including those that train.py, beginning.py and checkpointing.py measure.
TIME_METRICS = (
    Row(
        Metric("time/collect_s", "while rollouts were collected", "time", "collect"),
        Metric("time/update_s", "updates", "time", "update"),
        Metric("time/credit_s", "credit, and storing it", "time", "credit, store"),
        Metric("time/publish_s", "new weights on their way to the samplers", "time", "publish"),
        Metric("time/warmup_s", "the warm-up's steps"),
        Metric("time/evaluate_s", "an evaluation"),
        when="seconds by stage",
        note="With a critic or `kl_reward_coef`, scoring (stop 8 of the [route](route.md)) counts in "
        "`time/credit_s`, not in `time/update_s`",
    ),
    Row(
        Metric("time/environment_s", "steps of the environment"),
        Metric("time/interaction_s", "answers of interactions, counted nowhere else"),
        Metric("time/policy_s", "the policy"),
        when="sums of seconds over decisions, which overlap",
    ),
    Row(
        Metric("time/checkpoint_s", "seconds of checkpoints since the last line, which are written while "
               "rollouts are collected"),
        note="This time is in no timeline and not in `perf/overlap`; if an update waits for it, the wait is "
        "the learner's",
    ),
    Row(
        Metric("perf/collect_decisions_per_s", "decisions per second while the iteration was collected",
               "speed", "collecting"),
        Metric("perf/decisions_per_s", "the same over the whole iteration", "speed", "all in all"),
    ),
)  # fmt: skip
RECOVERY_METRICS = (
    Row(
        Metric("recovery/rollouts_reused", "rollouts that an earlier start of the run had collected before "
               "it was killed; rows of evaluations and of the teacher have it too"),
        note="No figure of speed counts them",
    ),
    Row(Metric("recovery/resumes", "how often the run was continued so far")),
    Row(
        Metric("recovery/gateway_restarts",
               "how often a gateway died and was started again in this iteration"),
        when="with `[cluster]`",
    ),
)  # fmt: skip


class Moment(NamedTuple):
    """A time of the monotonic clock in seconds, and the inference server's counts at that time."""

    seconds: float
    totals: Mapping[str, float]


async def moment(server: InferenceServer) -> Moment:
    return Moment(time.monotonic(), await server.totals())


@dataclass(frozen=True, slots=True)
class IterationResult:
    """An iteration's rollouts after they were collected, credited and stored (stops 2 to 10 of the route)."""

    batch: Batch
    branches: Batch
    """Rollouts that start at decisions of `batch`. They measure the decisions or are trained on."""
    credited: Credited
    start: Moment
    """The moment at which the first rollouts were requested."""
    collect_spans: Sequence[Span]
    credit_spans: Sequence[Span]
    mixture: Mapping[str, float]
    """Metrics by policy (`metrics_by_policy`)."""
    refilled: int = 0
    """Number of groups that were requested in addition to the plan, to replace flat groups."""
    requests: Sequence[RolloutRequest] = ()
    """The requests of all rounds."""


def iteration_metrics(
    policies: Policies, result: IterationResult, *, since: Moment, now: Moment
) -> dict[str, Any]:
    """Compute the metrics of an iteration. Speed and inference are measured from `since` to `now`.

    Metrics of skill cover only those rollouts of the actor that did not begin at a snapshot. If there are no
    such rollouts, these metrics are absent. Metrics of time and failures cover all rollouts.
    """
    batch = result.batch
    collect_s = sum(span.seconds for span in result.collect_spans)
    own = [item for item in policies.by_actor(batch.rollouts) if _is_whole(item)]
    episodes = [rollout.trajectory for rollout in own if rollout.trajectory is not None]
    trajectories = [item.trajectory for item in batch.rollouts if item.trajectory is not None]
    steps = [step.step_info for item in trajectories for step in item.steps]
    branched = branch_metrics(result.branches)
    decisions = len(steps) + branched.get("branch/decisions", 0.0) - _reused_decisions(result)
    return {
        **(episode_metrics(episodes) if episodes else {}),
        **outcome_bounds(own),
        "episode/outcome_definition": outcome_definition(trajectories),
        **result.credited.metrics,
        **conversation_metrics(own, batch.failures),
        **batch_metrics(batch),
        "recovery/rollouts_reused": float(len(batch.reused) + len(result.branches.reused)),
        **branched,
        **result.mixture,
        **(inference_metrics(since.totals, now.totals) if own else {}),
        **(average_by_turn(episodes) if episodes else {}),
        "group/refilled": float(result.refilled),
        "time/collect_s": collect_s,
        "time/credit_s": sum(span.seconds for span in result.credit_spans),
        "time/environment_s": sum(step.environment_s for step in steps),
        "time/interaction_s": sum(step.interaction_s for step in steps),
        "time/policy_s": sum(step.policy_s for step in steps),
        "perf/decisions_per_s": decisions / (now.seconds - since.seconds),
        "perf/collect_decisions_per_s": decisions / collect_s if collect_s else 0.0,
    }


def _is_whole(rollout: Rollout) -> bool:
    """Return False if the rollout's episode began at a snapshot, otherwise True."""
    return rollout.trajectory is None or not rollout.trajectory.is_continued


CHOICE_METRICS = (
    Row(Metric("mixture/alpha", "P(actor) of the schedule", "alpha", "schedule")),
    Row(
        Metric("rollout/policy_choice", "1 actor, 0 fixed, or with a mixing unit below the iteration the "
               "share of rollouts that the actor was to sample", "alpha", "planned"),
        Metric("rollout/using_actor", "1 where the actor was to sample at least one rollout"),
        Metric("rollout/using_fixed", "1 where a fixed policy was to"),
    ),
)  # fmt: skip


def metrics_by_policy(
    policies: Policies,
    requests: Iterable[RolloutRequest],
    rollouts: Sequence[Rollout],
    credits: Sequence[Credit],
    *,
    alpha: float | None,
) -> dict[str, float]:
    """Compute the share and the results of each policy in an iteration; empty without fixed policies.

    Args:
        requests: the requests of all rounds of the iteration.
        credits: the credits of the rollouts, in the order of the rollouts.
        alpha: the probability that the actor samples; None without fixed policies.

    Source: 4-mixture-of-rollout-models.md, "Monitoring and Logging" (names).
    """
    if alpha is None:
        return {}
    planned = Counter(map(name_sampler, requests))
    names = (ACTOR, *(table.name for table in policies.fixed))
    by_policy: dict[str, list[tuple[Rollout, Credit]]] = {name: [] for name in names}
    for rollout, credit in zip(rollouts, credits, strict=True):
        by_policy[policies.policy_by(rollout)].append((rollout, credit))
    metrics = {
        "rollout/policy_choice": planned[ACTOR] / planned.total(),
        "rollout/using_actor": float(planned[ACTOR] > 0),
        "rollout/using_fixed": float(planned[ACTOR] < planned.total()),
        "mixture/alpha": alpha,
    }
    for policy, played in by_policy.items():
        metrics |= {
            metric_name(policy, EPISODES): float(len(played)),
            metric_name(policy, "failed"): float(planned[policy] - len(played)),
            **{metric_name(policy, name): value for name, value in _means(played).items()},
        }
    return metrics


def _reused_decisions(result: IterationResult) -> int:
    """Count decisions that an earlier start collected; they do not count in the speed of this start."""
    return sum(
        len(item.trajectory.steps)
        for part in (result.batch, result.branches)
        for item in part.rollouts
        if item.rollout_id in part.reused and item.trajectory is not None
    )


def outcome_bounds(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the 95 % interval of the mean outcome over groups; empty for fewer than two groups."""
    finished = [(item.group_id, item.trajectory) for item in rollouts if item.trajectory is not None]
    groups = [group_id for group_id, _ in finished]
    if len(set(groups)) < 2:
        return {}
    interval = outcome_over_worlds([episode for _, episode in finished], groups)
    assert interval.low is not None and interval.high is not None, "two groups have an interval"
    return {"episode/outcome_reward_low": interval.low, "episode/outcome_reward_high": interval.high}


def conversation_metrics(rollouts: Sequence[Rollout], failures: Counter[str]) -> dict[str, Any]:
    """Return the metrics of conversations; empty without any. `failures` counts failed rollouts by code."""
    trajectories = [item.trajectory for item in rollouts if item.trajectory is not None]
    answered = interaction_metrics(trajectories)
    failed = failure_metrics(failures)
    segments = [
        build_segments(item.trajectory.steps, rollout_id=item.rollout_id)
        for item in rollouts
        if item.trajectory is not None and item.trajectory.full_history
    ]
    return {
        **answered,
        **(failed if answered or any(failed.values()) else {}),
        **context_metrics(trajectories),
        **segment_metrics(segments),
    }


def branch_metrics(branches: Batch) -> dict[str, Any]:
    """Return the metrics of branches (rollouts that continue from a decision); empty without branches."""
    if not branches.all:
        return {}
    decisions = sum(len(item.trajectory.steps) for item in branches.rollouts if item.trajectory is not None)
    return {**branches.losses.row(branches=True), "branch/decisions": float(decisions)}


_DRIFT = (
    "Each would break a prefix if text were rendered again; here the ids are kept. `GET /v1/models` "
    "has these counts by model, with a digest of its chat template"
)
# Computed from the counts of servers and engines (`InferenceServer.totals`).
INFERENCE_METRICS = (
    Row(
        Metric("inference/requests", "requests"),
        Metric("inference/prompt_tokens", "tokens of their prompts"),
        Metric("inference/sampled_tokens", "tokens that were sampled"),
        Metric("inference/steps", "steps, of which each samples one token for every running request"),
        when="work of the engine while the iteration was collected",
    ),
    Row(
        Metric("inference/mean_running", "running requests, mean over the engine's steps", "engine",
               "running"),
    ),
    Row(
        Metric("inference/prompt_tokens_reused", "prompt tokens that a running row or a kept prefix had, not "
               "computed"),
    ),
    Row(
        Metric("inference/prompt_tokens_recomputed", "prompt tokens that a running row or a kept prefix had, "
               "and that were computed again: the model has states, and none was kept where the prompts "
               "part"),
    ),
    Row(
        Metric("inference/preempted", "rows that were freed when the cache was full; their requests waited, "
               "and were computed again"),
        when="on CUDA",
        note="Many of them: lower `inference.max_running`",
    ),
    Row(
        Metric("inference/sleep_s", "seconds that vLLM's servers took to give back the GPU's memory"),
        Metric("inference/wake_s", "and to take it again"),
        when="only with `inference.sleep`",
        note="Means over the servers; with several gateways their sum",
    ),
    Row(
        Metric("inference/prefix_extended", "prompts that continue all ids of the last prompt and answer of "
               "their rollout: one segment"),
    ),
    Row(
        Metric("inference/prefix_broken/*", "prompts that do not, and so open a segment, by cause: `fresh` "
               "(the prompt does not hold the last answer, as in Crafter), `edited` (an earlier message "
               "changed), `reasoning` (the template [drops the reasoning]"
               "(models.md#chat-templates-and-tool-calls) of an earlier turn), `template` (the template does "
               "not continue the sampled ids for another reason), `tools`, `other_model`, `unknown` (the "
               "gateway no longer knows the rollout's answers)"),
    ),
    Row(
        Metric("inference/drift_checked", "answers that were sent back as messages"),
        Metric("inference/drift_tokens", "of those: answers that have other ids when tokenised again"),
        Metric("inference/drift_text", "answers that the template writes differently from what was sampled"),
        Metric("inference/drift_text_untold", "answers that the template cannot write alone"),
        note=_DRIFT,
    ),
    Row(
        Metric("inference/lost_mass", "probability that truncation took away, mean over the tokens sampled "
               "under it"),
        when="only with truncated sampling (`top_p` and the like)",
        note="The trained policy keeps it (`rollout.allow_truncated_sampling`)",
    ),
)  # fmt: skip


def inference_metrics(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Compute the metrics of inference between two readings of `InferenceServer.totals`.

    A step samples one token for every running request, so the tokens per step are the mean number of running
    requests. `lost_mass` is the mean probability mass that truncated sampling removed, over the tokens that
    were sampled with truncation; absent if there are none.
    """
    used = {name: float(after[name] - before.get(name, 0.0)) for name in after}
    steps, truncated, lost = used["steps"], used.pop("truncated_tokens"), used.pop("lost_mass")
    restarts = used.pop("gateway_restarts", None)
    return {
        **{f"inference/{name}": count for name, count in used.items()},
        "inference/mean_running": used["sampled_tokens"] / steps if steps else 0.0,
        **({"inference/lost_mass": lost / truncated} if truncated else {}),
        **({} if restarts is None else {"recovery/gateway_restarts": restarts}),
    }


def _means(played: Sequence[tuple[Rollout, Credit]]) -> Mapping[str, float]:
    """Return means over one policy's episodes that did not begin at a snapshot; empty if there are none."""
    played = [pair for pair in played if _is_whole(pair[0])]
    episodes = [rollout.trajectory for rollout, _ in played if rollout.trajectory is not None]
    if not episodes:
        return {}
    count = len(episodes)
    means = {
        "decisions": sum(len(item.steps) for item in episodes) / count,
        OUTCOME: math.fsum(item.outcome_reward for item in episodes) / count,
        "reward": math.fsum(math.fsum(credit.rewards_T) for _, credit in played) / count,
    }
    if have_achievements(episodes):
        means["unique_achievements"] = sum(map(unique_achievements, episodes)) / count
    return means
