"""What the store raises on purpose; drawn in the tree of trainer_backend/errors.py."""

from trainer_backend.errors import TrainerError


class StoreError(TrainerError):
    """The store cannot be used as it stands: its address, its version."""

    code = "store_invalid"
    status = 400
    title = "Store cannot be used"


class StoreUnavailable(StoreError):
    """The database does not answer, or refuses to write. No run loses anything: the next sync catches up."""

    code = "store_unavailable"
    status = 503
    retry_after_s = 5  # about as long as a database needs to start
    title = "Store does not answer"


class UnknownJob(StoreError):
    code = "job_unknown"
    status = 404
    title = "Unknown job"


class UnknownRollout(StoreError):
    code = "rollout_unknown"
    status = 404
    title = "Unknown rollout"


class UnknownCursor(StoreError):
    """Where a page would begin, and no page before has said so."""

    code = "request_invalid"
    status = 422
    title = "Request cannot be read"

    def __init__(self, cursor: str) -> None:
        super().__init__(f"cursor is {cursor[:40]!r}; give back the one of the page before, as it came")


class IdempotencyConflict(StoreError):
    """The same key with another body."""

    code = "idempotency_conflict"
    status = 409
    title = "Idempotency key was used for another job"


class JobConflict(StoreError):
    """The job is in a state in which that makes no sense."""

    code = "job_conflict"
    status = 409
    title = "The job's state does not allow it"


class JobChanged(JobConflict):
    """Somebody else changed the job since it was read; read it again."""

    code = "job_changed"
    title = "The job was changed meanwhile"
