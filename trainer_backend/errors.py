"""The errors of the trainer backend, as one tree; errors of the HTTP edge are in `service_kit.errors`.

Some modules define further errors of their own subject: `collect/wire.py` (answers of task apps),
`store/database.py`, `pages/page.py` and `terminal/jobs_client.py`.

A message is one sentence: where, what was found, what is allowed. `code` is for programs, `status` is the
HTTP status of a reply with this error, `where` names the place and `hint` the likely remedy.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from service_kit.errors import ServiceError
from shared_schemas.chat import CONTEXT_LENGTH_EXCEEDED

# Seconds after which a client repeats a request that a full queue or an absent database refused.
RETRY_S = 5


class TrainerError(ServiceError, code="trainer_error", title="Trainer error"):
    """The base of the tree.

    An error with a status below 500 certainly recurs, whatever its `recurs` says.
    """

    rollout_ids: tuple[str, ...] = ()
    """The rollouts at fault if there are several. A single one is named in `where` instead."""
    carries: ClassVar[Mapping[str, Any]] = {"rollout_ids": tuple[str, ...]}


class JobError(TrainerError, code="job_invalid", status=400, title="Invalid job"):
    """A job's TOML is wrong."""


class DataError(TrainerError, code="data_invalid", status=400, title="Data cannot be used"):
    """A file, split or row of [data] is wrong."""


class ModelFolderError(TrainerError, code="model_folder_invalid", status=400, title="Model cannot be loaded"):
    """A model or tokenizer cannot be loaded or built."""


class CheckpointError(TrainerError, code="checkpoint_failed", title="Checkpoint failed"):
    """A checkpoint cannot be written or read."""


class RunDirectoryError(
    TrainerError, code="run_directory_invalid", status=400, title="Run directory cannot be used"
):
    """A run's folder cannot be created or read, or another process uses it."""


class RunNotWritten(
    RunDirectoryError, code="run_not_written", status=507, title="Run directory cannot be written"
):
    """The disk is full, or refuses."""


class NothingToLearnFrom(TrainerError, code="nothing_to_learn_from", title="No rollout was finished"):
    """No rollout of a stage was finished."""


class JobTeachesNothing(
    NothingToLearnFrom, code="job_teaches_nothing", status=422, title="The job gives nothing to learn from"
):
    """No rollout was finished, and a new start would not help: job, data, policy or plug-in is the cause."""


class TooManyLost(NothingToLearnFrom, code="too_many_lost", title="Too many rollouts were lost"):
    """More of a stage's rollouts failed than training.max_lost_share."""


class UpdateStopped(TrainerError, code="update_stopped", title="The update could not go on"):
    """An update or warm-up could not continue. The failing step has not changed the weights."""

    steps_taken: int = 0
    """Optimizer steps of this update before the error; 0: the weights are those of the last iteration."""
    carries: ClassVar[Mapping[str, Any]] = {**TrainerError.carries, "steps_taken": int}


class OutOfMemory(UpdateStopped, code="out_of_memory", title="The update ran out of memory"):
    """The update did not fit the device."""


class SamplerMismatch(UpdateStopped, code="sampler_mismatch", title="Sampler and learner disagree"):
    """Log-probs of sampler and learner differ by more than rounding."""


class NonFiniteLoss(UpdateStopped, code="non_finite_loss", title="The update met NaN or infinity"):
    """The update met NaN or infinity."""


class LearnerLost(TrainerError, code="learner_lost", title="The learner's process is lost"):
    """The learner's process died or is silent; a run continues from its checkpoint."""


class LearnerFailed(TrainerError, code="learner_failed", title="The learner's process failed", recurs=True):
    """Any other error inside the learner's process."""


class NotPlaced(TrainerError, code="not_placed", title="A process could not be placed"):
    """No machine had free resources in time for a process of the run."""


class LearnerBusy(TrainerError, code="learner_busy", status=409, title="The learner's process is busy"):
    """The learner's process is busy with another call, or belongs to another orchestrator."""


class TaskAppError(TrainerError, code="task_app_failed", status=502, title="Task app failed"):
    """A task app refused, or could not be reached in time."""


class InferenceError(TrainerError, code="inference_failed", title="Inference failed"):
    """The engine or the gateway could not answer."""


class BadChatRequest(InferenceError, code="invalid_request", status=400, title="Invalid request"):
    """The request itself is wrong."""


class ContextLengthExceeded(BadChatRequest, code=CONTEXT_LENGTH_EXCEEDED, title="The context is full"):
    """The context is full. The error carries the counts of tokens, so that callers can check a budget."""

    carries: ClassVar[Mapping[str, Any]] = {"prompt_tokens": int, "max_tokens": int, "max_model_len": int}

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


class UnknownModel(BadChatRequest, code="model_not_found", status=404, title="Unknown model"):
    """No policy of that name is served here."""


class InferenceUnauthorized(InferenceError, code="invalid_api_key", status=401, title="Missing or wrong key"):
    """The key is missing or wrong."""


class WeightsRefused(
    InferenceError, code="weights_refused", status=400, title="Weights do not fit the model"
):
    """New weights do not fit; the old ones still serve."""


class EngineBusy(InferenceError, code="engine_busy", status=503, title="Too many waiting requests"):
    """The queue is full; try again later."""


class EngineTimeout(InferenceError, code="engine_timeout", status=504, title="Generation took too long"):
    """A bounded wait ran out."""


class EngineOutOfMemory(
    InferenceError, code="engine_out_of_memory", status=503, title="The engine ran out of memory"
):
    """A prompt, a decode step or new weights did not fit; the engine continues."""


class EngineStopped(InferenceError, code="engine_stopped", status=503, title="The engine does not run"):
    """The engine was stopped, or its thread ended with an error."""


class RemoteUnavailable(
    InferenceError,
    code="inference_unavailable",
    status=503,
    title="The server of a fixed policy does not answer",
):
    """A remote server does not answer, or asks to try later."""


class RemoteRefused(
    InferenceError, code="inference_refused", status=424, title="The server of a fixed policy gave no sample"
):
    """A remote server refused. The caller did nothing wrong, so the status is 424: no client repeats it."""


# If an argument that a job sets (gamma, a clip range) is wrong, the core raises a plain ValueError instead.


class CreditError(
    TrainerError, ValueError, code="credit_failed", title="A trajectory cannot be credited", recurs=True
):
    """A trajectory cannot be credited."""


class RewardError(CreditError, code="reward_undefined", title="The rewards of an episode are not defined"):
    """The rewards of an episode are not defined."""


class AdvantageError(CreditError, code="advantage_undefined", title="An advantage is not defined"):
    """An advantage is not defined."""


class SegmentError(
    CreditError, code="tokens_do_not_fit", title="The tokens of a decision do not fit together"
):
    """The tokens of a decision do not fit together."""


class BatchError(CreditError, code="batch_invalid", title="Segments cannot be packed or weighted"):
    """Segments cannot be packed or weighted."""


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


class ApiError(TrainerError, code="request_invalid", status=422, title="Request cannot be read"):
    """The request is invalid."""


class UnknownMediaType(ApiError, code="media_type_unknown", status=415, title="Media type is not read here"):
    """The body has a media type that the service does not read."""


class RunsNoJobs(ApiError, code="runs_no_jobs", status=409, title="This service runs no jobs"):
    """The service was started to show runs only."""


class QueueFull(ApiError, code="queue_full", status=503, title="Too many jobs wait", retry_after_s=RETRY_S):
    """The queue has its maximum length."""


class CheckEnded(ApiError, code="check_ended", title="The check was ended"):
    """A job could not be checked within the limits of time and memory."""


class TooManyChecks(
    ApiError,
    code="too_many_checks",
    status=503,
    title="Too many jobs wait to be checked",
    retry_after_s=RETRY_S,
):
    """As many jobs as allowed wait to be checked already."""


class TooManyStreams(
    ApiError, code="too_many_streams", status=503, title="Too many open event streams", retry_after_s=RETRY_S
):
    """As many event streams as allowed are open already."""
