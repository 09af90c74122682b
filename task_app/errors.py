"""The errors of the task app; `service_kit.errors` defines the errors that all services share.

Every message says where the fault is, what was found, what is allowed and what was probably meant.
`service_kit.problems` converts an error into an HTTP reply. If an error ends a rollout,
`task_app.rollouts.results` converts it into a RolloutFailure.
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
    """Return a caller's text, shortened to `at_most` characters and "..." for an error message."""
    return name if len(name) <= at_most else name[:at_most] + "..."


class TaskAppError(ServiceError, code="task_app_error"):
    """Base class of the task app's errors."""

    def __str__(self) -> str:
        # A reply has separate fields for place and hint.
        return self.detail


class InvalidRequest(TaskAppError, code="invalid_request", status=422):
    """A value in the request is not allowed."""


def refuse_used(uses: Mapping[str, bool], why: str, *, where: str, hint: str | None = None) -> None:
    """Raise InvalidRequest if the request uses a part that would have no effect.

    `uses` maps the name of each such part to true if the request uses it. `why` completes the sentence
    "<name> has no effect ...".
    """
    for name, is_used in uses.items():
        if is_used:
            raise InvalidRequest(f"{name} has no effect {why}", where=where + name, hint=hint)


class UnknownName(InvalidRequest, code="unknown_name"):
    """The request contains an unknown name, for example of a plug-in or a model.

    For example, `UnknownName("environment", "craftr", ENVIRONMENTS)` suggests "crafter". If `like` is given,
    the message suggests the known name that is most similar to `like`.
    """

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
    """The request names a host that is not on the operator's list of allowed hosts."""


def check_host(kind: str, parts: SplitResult, hosts: Collection[str], *, where: str, hint: str) -> None:
    """Raise HostNotAllowed if a URL's host is not in `hosts`; `kind` is "inference" or "environment"."""
    if not is_listed(parts, hosts):
        allowed = ", ".join(sorted({name.lower() for name in hosts})) or "none"
        raise HostNotAllowed(
            f"{kind} host {host_and_port(parts)} is not on this task app's list; allowed: {allowed}",
            where=where,
            hint=hint,
            code=f"{kind}_host_not_allowed",
        )


class SnapshotRefused(InvalidRequest, code="snapshot_refused"):
    """The bytes are not a snapshot, are damaged, or are a snapshot of another kind or environment."""

    def __init__(self, detail: str, *, where: str | None = "snapshot", hint: str | None = None) -> None:
        super().__init__(detail, where=where, hint=hint)


class NotRestorable(InvalidRequest, code="not_restorable"):
    """The environment or policy has no methods snapshot() and restore()."""

    def __init__(self, kind: str, name: str, *, where: str) -> None:
        super().__init__(
            f"{kind} {name!r} cannot be snapshot or branched: it has no snapshot() and restore()", where=where
        )


class NotReseedable(InvalidRequest, code="not_reseedable"):
    """The request sets a seed for an environment that has no method reseed()."""


class UnknownId(TaskAppError, code="unknown_id", status=404):
    """No object has this id."""

    def __init__(self, kind: str, unknown_id: str, *, where: str, hint: str | None = None) -> None:
        super().__init__(f"there is no {kind} {clipped(unknown_id)!r}", where=where, hint=hint)


class Conflict(TaskAppError, code="conflict", status=409):
    """The named object is in a state that does not allow the request."""


class CursorExpired(Conflict, code="cursor_expired"):
    """The cursor was not issued by this process, for example because the service was restarted since."""


class IdempotencyConflict(Conflict, code="idempotency_conflict"):
    """A request repeats an Idempotency-Key, but has another method, path or body than the first request."""


class AnswerLost(Conflict, code="answer_lost"):
    """The retried request may have been carried out before, but the first answer is lost."""


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
    """Return `value`, which an environment sets in its first reset; raise EpisodeOver if it is still None."""
    if value is None:
        raise EpisodeOver("no episode was started", hint="reset the environment with a seed first")
    return value


class RewardConflict(Conflict, code="reward_conflict"):
    """The model call of a capture, or the capture's whole episode, already has a reward."""


class InferenceKeyNeeded(TaskAppError, code="inference_key_needed", status=428):
    """The policy was restored after a restart, but its inference_key is lost and must be sent again."""


class CapacityReached(TaskAppError, code="capacity_reached", status=429, retry_after_s=1):
    """The service has reached a limit, for example of sessions, rollouts, stored bytes or hanging calls."""


class ShuttingDown(TaskAppError, code="shutting_down", status=503, retry_after_s=5):
    """The service is stopping."""


class SessionBusy(TaskAppError, code="session_busy", status=503, retry_after_s=1):
    """An earlier request still uses the session."""


class JournalFailed(TaskAppError, code="journal_failed", status=507):
    """The database of sessions in the folder --state-dir cannot be written."""


class JournalDamaged(TaskAppError, code="journal_damaged"):
    """A stored session cannot be restored. Its data stay in the database."""


class EpisodeFailed(TaskAppError, code="episode_failed", status=424):
    """An episode failed, so that it has no trajectory.

    The HTTP status is not 5xx, because the service itself works, and a client need not repeat the request.
    """

    decisions_done = 0
    """Number of decisions that were complete when the episode failed."""


class PolicyUnavailable(EpisodeFailed, code="inference_unavailable", status=502):
    """The model could not be called, or its reply breaks the protocol."""


class PromptRefused(PolicyUnavailable, code="inference_refused", status=422):
    """The model's server refuses the messages, the tools, or a setting of the policy."""


class ContextLengthExceeded(EpisodeFailed, code="context_length_exceeded", status=422, recurs=True):
    """The prompt is too long. If a decision is already complete, the episode ends; otherwise it fails."""


class DeadlineExceeded(EpisodeFailed, code="deadline_exceeded", status=504):
    """An episode had no complete decision in time, or one call of an environment or policy took too long."""


class RewardFunctionFailed(EpisodeFailed, code="reward_function_failed"):
    """A reward function raised or took too long."""


class InteractionFailed(EpisodeFailed, code="interaction_failed"):
    """An interaction raised, took too long or was used out of order."""


class AgentFailed(EpisodeFailed, code="agent_failed"):
    """The agent did not start, ended before a model call was answered, or ended with a wrong exit code."""


class CriticalError(EpisodeFailed, code="critical_error", recurs=True):
    """A plug-in raised an unexpected error, or returned a value of a wrong type."""


def boundary(what: str, call: Callable[..., object] | None = None) -> Boundary:
    """Return a context manager that converts exceptions of plug-ins into CriticalError; see `Boundary`."""
    return Boundary(what, CriticalError, call)
