"""The errors of the trainer backend, as one tree; errors of the HTTP edge are in `service_kit.errors`.

    TrainerError
    ├── JobError                   a job's TOML is wrong
    ├── DataError                  a file, split or row of [data] is wrong
    ├── ModelFolderError           a model or tokenizer cannot be loaded or built
    ├── CheckpointError            a checkpoint cannot be written or read
    ├── RunDirectoryError          a run's folder cannot be created or read, or another process uses it
    │   └── RunNotWritten          the disk is full, or refuses
    ├── NothingToLearnFrom         no rollout of a stage was finished
    │   ├── JobTeachesNothing      and none would be: the cause is in the job, its data or a plug-in
    │   └── TooManyLost            more of a stage's rollouts failed than training.max_lost_share
    ├── CreditError                a trajectory cannot be credited (leaves below)
    ├── UpdateStopped              an update could not continue; it says how many steps were taken
    │   ├── NonFiniteLoss          it met NaN or infinity
    │   ├── SamplerMismatch        log-probs of sampler and learner differ by more than rounding
    │   └── OutOfMemory            it did not fit the device
    ├── LearnerLost                the learner's process died or is silent; a run goes on from its checkpoint
    ├── LearnerFailed              an error inside the learner's process that is none of these
    ├── NotPlaced                  nobody has had room for a process of the run in time
    ├── LearnerBusy                the learner's process works for another call, or another orchestrator
    ├── TaskAppError               a task app refused, or could not be reached in time
    │   ├── NoPictures             there are none of an episode (collect/wire.py)
    │   │   └── ReplayDeparts      it went otherwise when it was played again (collect/wire.py)
    │   ├── CursorExpired          it was started anew, and has lost what it had accepted (collect/wire.py)
    │   └── Answered               it works, and says why it cannot do what is asked (collect/wire.py)
    │       ├── Refused            it finds something wrong in the request
    │       ├── PluginFailed       one of its plug-ins raised
    │       └── BackendFailed      a server or process behind it failed
    ├── BadAddress, UnknownTurn, ReadOnly    a request to the dashboard cannot be met (pages/page.py)
    ├── ApiError                   a request to the service cannot be carried out (leaves below)
    ├── ServiceRefused, ServiceUnreachable   the service's answer to a terminal, or its absence (terminal/)
    ├── StoreError                 the database of jobs and runs cannot be used (leaves in store/database.py)
    │   ├── StoreUnavailable       it does not answer, or refuses to write
    │   ├── UnknownJob, UnknownRollout   no row has that id
    │   ├── UnknownCursor          the store did not issue the cursor
    │   ├── IdempotencyConflict    the key was used with another body
    │   └── JobConflict            the job's state does not allow the request
    │       └── JobChanged         somebody else changed the job after it was read
    └── InferenceError             the engine or the gateway could not answer
        ├── BadChatRequest         the request itself is wrong
        │   ├── ContextLengthExceeded   prompt + max_tokens do not fit the model
        │   └── UnknownModel       no policy of that name is served here
        ├── InferenceUnauthorized  missing or wrong key
        ├── WeightsRefused         new weights do not fit; the old ones still serve
        ├── EngineBusy             the queue is full; try again later
        ├── EngineTimeout          a bounded wait ran out
        ├── EngineOutOfMemory      a prompt, a decode step or new weights did not fit; the engine goes on
        ├── EngineStopped          stopped, or its thread ended with an error
        ├── RemoteUnavailable      a foreign server does not answer, or asks to try later
        └── RemoteRefused          it refuses, or its answer cannot be weighed

A message is one sentence: where, what was found, what is allowed. `code` is for programs, `status` is the
HTTP status of a reply with this error, `where` names the place and `hint` the likely remedy.
"""

import re

from service_kit.errors import ServiceError
from shared_schemas.chat import CONTEXT_LENGTH_EXCEEDED


class TrainerError(ServiceError):
    """The base of the tree.

    An error with a status below 500 certainly recurs, whatever its `recurs` says.

    Attributes:
        rollout_ids: the rollouts at fault, where they are several; of one, `where` is the place.
    """

    code = "trainer_error"
    title = "Trainer error"
    rollout_ids: tuple[str, ...] = ()


class JobError(TrainerError):
    code = "job_invalid"
    status = 400
    title = "Invalid job"


class DataError(TrainerError):
    code = "data_invalid"
    status = 400
    title = "Data cannot be used"


class ModelFolderError(TrainerError):
    code = "model_folder_invalid"
    status = 400
    title = "Model cannot be loaded"


class CheckpointError(TrainerError):
    code = "checkpoint_failed"
    title = "Checkpoint failed"


class RunDirectoryError(TrainerError):
    code = "run_directory_invalid"
    status = 400
    title = "Run directory cannot be used"


class RunNotWritten(RunDirectoryError):
    code = "run_not_written"
    status = 507
    title = "Run directory cannot be written"


class NothingToLearnFrom(TrainerError):
    code = "nothing_to_learn_from"
    title = "No rollout was finished"


class JobTeachesNothing(NothingToLearnFrom):
    code = "job_teaches_nothing"
    status = 422
    title = "The job gives nothing to learn from"


class TooManyLost(NothingToLearnFrom):
    code = "too_many_lost"
    title = "Too many rollouts were lost"


class UpdateStopped(TrainerError):
    """An update or warm-up that could not continue. The failing step has not changed the weights.

    Attributes:
        steps_taken: optimizer steps of this update before it; 0: the weights are those of the last iteration.
    """

    code = "update_stopped"
    title = "The update could not go on"
    steps_taken: int = 0


class OutOfMemory(UpdateStopped):
    code = "out_of_memory"
    title = "The update ran out of memory"


class SamplerMismatch(UpdateStopped):
    code = "sampler_mismatch"
    title = "Sampler and learner disagree"


class NonFiniteLoss(UpdateStopped):
    code = "non_finite_loss"
    title = "The update met NaN or infinity"


class LearnerLost(TrainerError):
    code = "learner_lost"
    title = "The learner's process is lost"


class LearnerFailed(TrainerError):
    code = "learner_failed"
    recurs = True
    title = "The learner's process failed"


class NotPlaced(TrainerError):
    code = "not_placed"
    title = "A process could not be placed"


class LearnerBusy(TrainerError):
    code = "learner_busy"
    status = 409
    title = "The learner's process is busy"


class TaskAppError(TrainerError):
    code = "task_app_failed"
    status = 502
    title = "Task app failed"


class InferenceError(TrainerError):
    code = "inference_failed"
    title = "Inference failed"


class BadChatRequest(InferenceError):
    code = "invalid_request"
    status = 400
    title = "Invalid request"


class ContextLengthExceeded(BadChatRequest):
    """The context is full. It carries the counts, so that callers can check a budget."""

    code = CONTEXT_LENGTH_EXCEEDED
    title = "The context is full"

    def __init__(
        self,
        *,
        prompt_tokens: int,
        max_tokens: int,
        max_model_len: int,
        whose: str = "the model's own",
        at_least: bool = False,
    ) -> None:
        # OpenAI's words first, by which other clients recognise this error.
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens ({whose}), and a prompt of "
            f"{'at least ' * at_least}{prompt_tokens} tokens + max_tokens {max_tokens} = "
            f"{prompt_tokens + max_tokens} were asked for",
            where="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len


class UnknownModel(BadChatRequest):
    code = "model_not_found"
    status = 404
    title = "Unknown model"


class InferenceUnauthorized(InferenceError):
    code = "invalid_api_key"
    status = 401
    title = "Missing or wrong key"


class WeightsRefused(InferenceError):
    code = "weights_refused"
    status = 400
    title = "Weights do not fit the model"


class EngineBusy(InferenceError):
    code = "engine_busy"
    status = 503
    title = "Too many waiting requests"


class EngineTimeout(InferenceError):
    code = "engine_timeout"
    status = 504
    title = "Generation took too long"


class EngineOutOfMemory(InferenceError):
    code = "engine_out_of_memory"
    status = 503
    title = "The engine ran out of memory"


class EngineStopped(InferenceError):
    code = "engine_stopped"
    status = 503
    title = "The engine does not run"


class RemoteUnavailable(InferenceError):
    code = "inference_unavailable"
    status = 503
    title = "The server of a fixed policy does not answer"


class RemoteRefused(InferenceError):
    """A foreign server's refusal: 424, which no client repeats, since the caller did nothing wrong."""

    code = "inference_refused"
    status = 424
    title = "The server of a fixed policy gave no sample"


# If an argument that a job sets (gamma, a clip range) is wrong, the core raises a plain ValueError instead.


class CreditError(TrainerError, ValueError):
    code = "credit_failed"
    recurs = True
    title = "A trajectory cannot be credited"


class RewardError(CreditError):
    code = "reward_undefined"
    title = "The rewards of an episode are not defined"


class AdvantageError(CreditError):
    code = "advantage_undefined"
    title = "An advantage is not defined"


class SegmentError(CreditError):
    code = "tokens_do_not_fit"
    title = "The tokens of a decision do not fit together"


class BatchError(CreditError):
    code = "batch_invalid"
    title = "Segments cannot be packed or weighted"


def place(rollout_id: str, turn: int | None = None, token: int | None = None) -> str:
    """Return `rollout r-3, turn 5, token 2`; turns count from 1, tokens from 0."""
    parts = [f"rollout {rollout_id or '(unnamed)'}"]
    parts += [] if turn is None else [f"turn {turn}"]
    parts += [] if token is None else [f"token {token}"]
    return ", ".join(parts)


def rejected_rollouts(error: TrainerError) -> tuple[str, ...]:
    """Return the ids of the rollouts that an error blames; none where it blames something else."""
    found = re.match(r"rollout ([^\s,]+)", error.where or "")
    return error.rollout_ids or ((found[1],) if found else ())


# Seconds to wait for a place, or for a database that starts.
RETRY_S = 5


class ApiError(TrainerError):
    """The request is invalid."""

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
    """A job that cannot be checked within the limits of time and memory."""

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
