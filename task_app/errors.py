"""The errors of the task app, as one tree; those of the HTTP edge are in `service_kit.errors`.

    TaskAppError                        code                          status
    ├── InvalidRequest                  invalid_request               422
    │   ├── UnknownName                 unknown_name                  422
    │   ├── HostNotAllowed              inference_host_not_allowed    422
    │   ├── SnapshotRefused             snapshot_refused              422
    │   └── NotRestorable               not_restorable                422
    ├── UnknownId                       unknown_id                    404
    ├── Conflict                        conflict                      409
    │   ├── CursorExpired               cursor_expired                409
    │   ├── IdempotencyConflict         idempotency_conflict          409
    │   ├── AnswerLost                  answer_lost                   409  carried out, but its answer is lost
    │   ├── EpisodeOver                 episode_over                  409
    │   └── RewardConflict              reward_conflict               409  a capture's call has a reward
    ├── InferenceKeyNeeded              inference_key_needed          428  a restart lost the policy's key
    ├── CapacityReached                 capacity_reached              429
    ├── ShuttingDown                    shutting_down                 503
    ├── SessionBusy                     session_busy                  503  an earlier request holds it
    ├── JournalFailed                   journal_failed                507  --state-dir cannot be written
    ├── JournalDamaged                  journal_damaged               500  at start only, never in a reply
    └── EpisodeFailed                   episode_failed                424  a rollout without a trajectory
        ├── PolicyUnavailable           inference_unavailable         502  or inference_protocol, _refused
        │   └── PromptRefused           inference_refused             422  by its server, for what it says
        ├── ContextLengthExceeded       context_length_exceeded       422  fails only a first decision
        ├── DeadlineExceeded            deadline_exceeded             504  fails only a first decision
        ├── RewardFunctionFailed        reward_function_failed        424  or reward_function_deadline
        ├── InteractionFailed           interaction_failed            424  or interaction_deadline
        ├── AgentFailed                 agent_failed                  424  no model call, or a wrong exit code
        └── CriticalError               critical_error                424  a plug-in broke

Every message says where, what was found, what is allowed and the likely intent. `service_kit.problems` turns
errors into problem+json; `rollouts` turns an EpisodeFailed into a RolloutFailure.
"""

from collections.abc import Callable, Collection

from service_kit.boundary import Boundary
from service_kit.errors import ServiceError
from shared_schemas.base import did_you_mean


def clipped(name: str, at_most: int = 80) -> str:
    """A caller's text, shortened for a message: it may be as long as a whole body."""
    return name if len(name) <= at_most else name[:at_most] + "..."


class TaskAppError(ServiceError):
    """Base of the tree."""

    code = "task_app_error"

    def __str__(self) -> str:
        # A reply has place and hint in fields of their own.
        return self.detail


class InvalidRequest(TaskAppError):
    code = "invalid_request"
    status = 422


class UnknownName(InvalidRequest):
    """`UnknownName("environment", "craftr", ENVIRONMENTS)` suggests "crafter"."""

    code = "unknown_name"

    def __init__(
        self,
        kind: str,
        name: str,
        known: Collection[str],
        *,
        where: str | None = None,
        like: str | None = None,
        hint: str | None = None,
    ) -> None:
        shown = clipped(name)
        guess = did_you_mean(shown if like is None else like, known)
        super().__init__(f"unknown {kind} {shown!r}{guess}", where=where, hint=hint)


class HostNotAllowed(InvalidRequest):
    code = "inference_host_not_allowed"


class SnapshotRefused(InvalidRequest):
    """The bytes are no snapshot, not whole, or a snapshot of something else."""

    code = "snapshot_refused"

    def __init__(self, detail: str, *, where: str | None = "snapshot", hint: str | None = None) -> None:
        super().__init__(detail, where=where, hint=hint)


class NotRestorable(InvalidRequest):
    """The plug-in has no snapshot() and restore()."""

    code = "not_restorable"

    def __init__(self, kind: str, name: str, *, where: str) -> None:
        super().__init__(
            f"{kind} {name!r} cannot be snapshot or branched: it has no snapshot() and restore()", where=where
        )


class NotReseedable(InvalidRequest):
    """The environment has no reseed()."""

    code = "not_reseedable"

    def __init__(self, name: str, *, where: str) -> None:
        super().__init__(
            f"environment {name!r} cannot be given other draws: it has no reseed()",
            where=where,
            hint="leave draws_seed out: its draws then are those of the snapshot's generator, if it has any",
        )


class UnknownId(TaskAppError):
    code = "unknown_id"
    status = 404

    def __init__(self, kind: str, unknown_id: str, *, where: str, hint: str | None = None) -> None:
        super().__init__(f"there is no {kind} {clipped(unknown_id)!r}", where=where, hint=hint)


class Conflict(TaskAppError):
    code = "conflict"
    status = 409


class CursorExpired(Conflict):
    code = "cursor_expired"


class IdempotencyConflict(Conflict):
    code = "idempotency_conflict"


class AnswerLost(Conflict):
    """A retry of a request that was carried out, but whose answer is lost."""

    code = "answer_lost"


class EpisodeOver(Conflict):
    """A step after the end of the episode."""

    code = "episode_over"

    def __init__(
        self,
        detail: str = "the episode has ended; no further step is possible",
        *,
        where: str | None = None,
        hint: str | None = "reset the environment to start a new episode",
    ) -> None:
        super().__init__(detail, where=where, hint=hint)


class RewardConflict(Conflict):
    """A second reward for a call of a capture, or for its episode."""

    code = "reward_conflict"


class InferenceKeyNeeded(TaskAppError):
    """The policy survived a restart, but its key did not."""

    code = "inference_key_needed"
    status = 428


class CapacityReached(TaskAppError):
    code = "capacity_reached"
    status = 429
    retry_after_s = 1


class ShuttingDown(TaskAppError):
    code = "shutting_down"
    status = 503
    retry_after_s = 5


class SessionBusy(TaskAppError):
    code = "session_busy"
    status = 503
    retry_after_s = 1


class JournalFailed(TaskAppError):
    code = "journal_failed"
    status = 507


class JournalDamaged(TaskAppError):
    """A stored session that cannot be restored; it stays in the database."""

    code = "journal_damaged"


class EpisodeFailed(TaskAppError):
    """An episode without a trajectory.

    Attributes:
        decisions_done: how many were complete when it failed.
    """

    code = "episode_failed"
    # No 5xx: the service works, and what it depends on does not. A client need not repeat the request.
    status = 424
    decisions_done = 0


class PolicyUnavailable(EpisodeFailed):
    """The model could not be asked, or its reply breaks the protocol."""

    code = "inference_unavailable"
    status = 502


class PromptRefused(PolicyUnavailable):
    """The model's server refuses what the request says: its messages or tools, or a setting of the policy."""

    code = "inference_refused"
    status = 422


class ContextLengthExceeded(EpisodeFailed):
    """The prompt does not fit the model; this ends an episode, or fails one without a complete decision."""

    code = "context_length_exceeded"
    status = 422
    recurs = True


class DeadlineExceeded(EpisodeFailed):
    code = "deadline_exceeded"
    status = 504


class RewardFunctionFailed(EpisodeFailed):
    code = "reward_function_failed"


class InteractionFailed(EpisodeFailed):
    code = "interaction_failed"


class AgentFailed(EpisodeFailed):
    """The agent had no model call answered, or its process ended in another way than it may."""

    code = "agent_failed"


class CriticalError(EpisodeFailed):
    """A plug-in raised an unexpected error, or gave what no plug-in may give."""

    code = "critical_error"
    recurs = True


def boundary(what: str, call: Callable[..., object] | None = None) -> Boundary:
    """Turn whatever a plug-in raises within it into a CriticalError; see `Boundary`."""
    return Boundary(what, CriticalError, call)
