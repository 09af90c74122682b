"""The errors of the task app; `service_kit.errors` has those of the HTTP edge.

Every message says where the fault is, what was found, what is allowed and the likely intent.
`service_kit.problems` makes problem+json of errors; `rollouts` makes a RolloutFailure of an EpisodeFailed.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar
from urllib.parse import SplitResult

from service_kit.boundary import Boundary
from service_kit.errors import ServiceError
from shared_schemas.base import did_you_mean
from shared_schemas.urls import host_and_port, is_listed

T = TypeVar("T")


def clipped(name: str, at_most: int = 80) -> str:
    """Shorten a caller's text for a message."""
    return name if len(name) <= at_most else name[:at_most] + "..."


class TaskAppError(ServiceError, code="task_app_error"):
    """Base of the tree."""

    def __str__(self) -> str:
        # A reply has separate fields for place and hint.
        return self.detail


class InvalidRequest(TaskAppError, code="invalid_request", status=422):
    """A value in the request is not allowed."""


def refuse_used(uses: Mapping[str, bool], why: str, *, where: str, hint: str | None = None) -> None:
    """Raise InvalidRequest for the first part of a request that is used; `why` says why it has no effect."""
    for name, is_used in uses.items():
        if is_used:
            raise InvalidRequest(f"{name} has no effect {why}", where=where + name, hint=hint)


class UnknownName(InvalidRequest, code="unknown_name"):
    """A name is not on its list: `UnknownName("environment", "craftr", ENVIRONMENTS)` suggests "crafter"."""

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


class HostNotAllowed(InvalidRequest, code="inference_host_not_allowed"):
    """The host is not on the operator's list."""


def check_host(kind: str, parts: SplitResult, hosts: Collection[str], *, where: str, hint: str) -> None:
    """Raise HostNotAllowed if a URL's host is not on the list for its kind: `inference` or `environment`."""
    if not is_listed(parts, hosts):
        allowed = ", ".join(sorted({name.lower() for name in hosts})) or "none"
        raise HostNotAllowed(
            f"{kind} host {host_and_port(parts)} is not on this task app's list; allowed: {allowed}",
            where=where,
            hint=hint,
            code=f"{kind}_host_not_allowed",
        )


class SnapshotRefused(InvalidRequest, code="snapshot_refused"):
    """The bytes are no snapshot, an incomplete one, or one of another kind."""

    def __init__(self, detail: str, *, where: str | None = "snapshot", hint: str | None = None) -> None:
        super().__init__(detail, where=where, hint=hint)


class NotRestorable(InvalidRequest, code="not_restorable"):
    """The plug-in has no snapshot() and restore()."""

    def __init__(self, kind: str, name: str, *, where: str) -> None:
        super().__init__(
            f"{kind} {name!r} cannot be snapshot or branched: it has no snapshot() and restore()", where=where
        )


class NotReseedable(InvalidRequest, code="not_reseedable"):
    """The environment has no reseed()."""


class UnknownId(TaskAppError, code="unknown_id", status=404):
    """No object has this id."""

    def __init__(self, kind: str, unknown_id: str, *, where: str, hint: str | None = None) -> None:
        super().__init__(f"there is no {kind} {clipped(unknown_id)!r}", where=where, hint=hint)


class Conflict(TaskAppError, code="conflict", status=409):
    """The named object is in a state that does not allow the request."""


class CursorExpired(Conflict, code="cursor_expired"):
    """The service was restarted since it gave the cursor."""


class IdempotencyConflict(Conflict, code="idempotency_conflict"):
    """An idempotency key was used again with another body."""


class AnswerLost(Conflict, code="answer_lost"):
    """The retried request was executed, but its answer is lost."""


class EpisodeOver(Conflict, code="episode_over"):
    """A step was requested after the end of the episode."""

    def __init__(
        self,
        detail: str = "the episode has ended; no further step is possible",
        *,
        where: str | None = None,
        hint: str | None = "reset the environment to start a new episode",
    ) -> None:
        super().__init__(detail, where=where, hint=hint)


def started(value: T | None) -> T:
    """Return a value that is set from the first reset on; raise EpisodeOver if it is None."""
    if value is None:
        raise EpisodeOver("no episode was started", hint="reset the environment with a seed first")
    return value


class RewardConflict(Conflict, code="reward_conflict"):
    """A call of a capture, or its episode, has a reward already."""


class InferenceKeyNeeded(TaskAppError, code="inference_key_needed", status=428):
    """The policy survived a restart, but its key did not."""


class CapacityReached(TaskAppError, code="capacity_reached", status=429, retry_after_s=1):
    """The service has reached a limit: of sessions, rollouts or bytes, or of plug-in calls that hang."""


class ShuttingDown(TaskAppError, code="shutting_down", status=503, retry_after_s=5):
    """The service is stopping."""


class SessionBusy(TaskAppError, code="session_busy", status=503, retry_after_s=1):
    """An earlier request holds the session."""


class JournalFailed(TaskAppError, code="journal_failed", status=507):
    """The folder of --state-dir cannot be written."""


class JournalDamaged(TaskAppError, code="journal_damaged"):
    """A stored session cannot be restored; it stays in the database."""


class EpisodeFailed(TaskAppError, code="episode_failed", status=424):
    """An episode failed and has no trajectory.

    The status is not 5xx, because the service works, and a client need not repeat the request.
    """

    decisions_done = 0
    """Number of complete decisions."""


class PolicyUnavailable(EpisodeFailed, code="inference_unavailable", status=502):
    """The model could not be called, or its reply breaks the protocol."""


class PromptRefused(PolicyUnavailable, code="inference_refused", status=422):
    """The model's server refuses the messages, the tools, or a setting of the policy."""


class ContextLengthExceeded(EpisodeFailed, code="context_length_exceeded", status=422, recurs=True):
    """The prompt is too long. An episode with a complete decision ends; any other episode fails."""


class DeadlineExceeded(EpisodeFailed, code="deadline_exceeded", status=504):
    """The time of an episode ran out before its first decision was complete."""


class RewardFunctionFailed(EpisodeFailed, code="reward_function_failed"):
    """A reward function raised or took too long."""


class InteractionFailed(EpisodeFailed, code="interaction_failed"):
    """An interaction raised, took too long or was used out of order."""


class AgentFailed(EpisodeFailed, code="agent_failed"):
    """The agent did not start, had no model call answered, or ended with an exit code that is not allowed."""


class CriticalError(EpisodeFailed, code="critical_error", recurs=True):
    """A plug-in raised an unexpected error, or returned a value of a wrong type."""


def boundary(what: str, call: Callable[..., object] | None = None) -> Boundary:
    """Make a `Boundary` that converts exceptions of plug-ins to CriticalError."""
    return Boundary(what, CriticalError, call)
