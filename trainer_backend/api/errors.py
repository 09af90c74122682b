"""What the API refuses on purpose, beside the errors of jobs and of the store."""

from trainer_backend.errors import TrainerError

# Of what waits for a place, or for a database that starts.
RETRY_S = 5


class ApiError(TrainerError):
    """The request cannot be carried out as it stands."""

    code = "request_invalid"
    status = 422
    title = "Request cannot be read"


class UnknownMediaType(ApiError):
    code = "media_type_unknown"
    status = 415
    title = "Media type is not read here"


class RunsNoJobs(ApiError):
    code = "runs_no_jobs"
    status = 409
    title = "This service runs no jobs"


class QueueFull(ApiError):
    code = "queue_full"
    status = 503
    retry_after_s = RETRY_S
    title = "Too many jobs wait"


class CheckEnded(ApiError):
    """A job that nobody can check in the time and the memory that there is for that."""

    code = "check_ended"
    title = "The check was ended"


class TooManyChecks(ApiError):
    code = "too_many_checks"
    status = 503
    retry_after_s = RETRY_S
    title = "Too many jobs wait to be checked"


class TooManyStreams(ApiError):
    code = "too_many_streams"
    status = 503
    retry_after_s = RETRY_S
    title = "Too many open event streams"
