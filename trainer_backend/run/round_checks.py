"""Checks that fixed policies did not fail, and that each rollout was sampled by the planned policy."""

from collections import Counter
from collections.abc import Sequence

from shared_schemas.rollouts import RolloutRequest
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.sources import name_sampler
from trainer_backend.credit.rewards import Policies
from trainer_backend.errors import JobTeachesNothing, NothingToLearnFrom, SegmentError, place
from trainer_backend.rundir.spool import plan_id

# Failure codes of task apps: the model server did not answer, or its answer lacked required fields.
_SILENT = frozenset({"inference_unavailable", "inference_refused", "inference_protocol"})
# A remote policy is refused once it has made _ENOUGH decisions and this share of them is invalid.
_NEARLY_ALL = 0.95
_ENOUGH = 20


def refuse_round(policies: Policies, requests: Sequence[RolloutRequest], batch: Batch) -> None:
    """Raise an error if a fixed policy failed in this round, or if the wrong policy sampled a rollout.

    Another policy never plays in place of a failed one, because this would change the job.

    Raises:
        NothingToLearnFrom: a fixed policy finished no rollout, because its server failed.
        JobTeachesNothing: almost every decision of a remote policy was invalid.
        SegmentError: a rollout was sampled by another policy than its request names.
    """
    if policies.fixed:
        _refuse_silent_policy(policies, requests, batch)
        _refuse_other_sampler(policies, requests, batch)
        _refuse_unreadable_policy(policies, batch)


def _refuse_silent_policy(policies: Policies, requests: Sequence[RolloutRequest], batch: Batch) -> None:
    samplers = _samplers(requests)
    finished = {samplers[plan_id(rollout.rollout_id)] for rollout in batch.rollouts}
    for table in policies.fixed:
        lost = [item for item in batch.failed if samplers[plan_id(item.rollout_id)] == table.name]
        silent = [item.failure for item in lost if item.failure and item.failure.code in _SILENT]
        if silent and table.name not in finished:
            raise NothingToLearnFrom(
                f"none of its {len(lost)} rollouts was finished, {len(silent)} x {silent[0].code}: "
                f"{silent[0].detail}",
                where=f"[rollout_only] {table.name!r} ({table.source})",
                hint="Nothing is played in its place; a run that is resumed goes on where it ended.",
            )


def _refuse_unreadable_policy(policies: Policies, batch: Batch) -> None:
    """Raise an error, with the likely cause, if almost all decisions of a remote policy are invalid."""
    for table in policies.fixed:
        if not table.is_remote:
            continue
        decisions = [
            step.step_info.invalid_reason
            for rollout in batch.rollouts
            if rollout.trajectory is not None and policies.policy_by(rollout) == table.name
            for step in rollout.trajectory.steps
        ]
        reasons = Counter(reason for reason in decisions if reason is not None)
        if len(decisions) >= _ENOUGH and reasons.total() >= _NEARLY_ALL * len(decisions):
            reason, times = reasons.most_common(1)[0]
            raise JobTeachesNothing(
                f"{reasons.total()} of its {len(decisions)} decisions were no call that could be carried "
                f"out, {times} x {reason!r:.200}",
                where=f"[rollout_only] {table.name!r} ({table.source})",
                hint="Its ids are read in the actor's tool-call format: does the server serve the model that "
                "the job names, and does that model call tools?",
            )


def _refuse_other_sampler(policies: Policies, requests: Sequence[RolloutRequest], batch: Batch) -> None:
    """Raise an error if the wrong policy sampled a rollout, because training treats policies differently."""
    samplers = _samplers(requests)
    for rollout in batch.rollouts:
        planned, sampler = samplers[plan_id(rollout.rollout_id)], policies.policy_by(rollout)
        if planned != sampler:
            model = rollout.trajectory.model if rollout.trajectory is not None else None
            raise SegmentError(
                f"{planned!r} was asked to sample it, and its model is {model!r}, which is the model of "
                f"{sampler!r}",
                where=place(rollout.rollout_id),
                hint=f"The policy {requests[0].policy.policy_name!r} must report the model of its request.",
            )


def _samplers(requests: Sequence[RolloutRequest]) -> dict[str, str]:
    """Map each rollout's plan id to the policy that its request names."""
    return {plan_id(request.rollout_id): name_sampler(request) for request in requests}
