"""The error classes of the trainer backend. Errors that all HTTP services share are in `service_kit.errors`.

Further subclasses are defined in `collect/wire.py` (for answers of task apps), `store/database.py`,
`pages/page.py` and `terminal/jobs_client.py`.

A message is one sentence that says what was found and what is allowed. `code` identifies the error for
programs, and `status` is the HTTP status of a reply with the error. `where` names the wrong part of the
input, and `hint` the likely remedy.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from service_kit.errors import ServiceError
from shared_schemas.chat import CONTEXT_LENGTH_EXCEEDED

# Seconds after which a client should repeat a request that a full queue or an absent database refused.
RETRY_S = 5


class TrainerError(ServiceError, code="trainer_error", title="Trainer error"):
    """Base class of the trainer's errors.

    A status below 500 means that a restart of the run would fail again, even if `recurs` is false.
    """

    rollout_ids: tuple[str, ...] = ()
    """Ids of the rollouts that caused the error; empty if `where` names a single rollout, or none did."""
    carries: ClassVar[Mapping[str, Any]] = {"rollout_ids": tuple[str, ...]}


class JobError(TrainerError, code="job_invalid", status=400, title="Invalid job"):
    """A job's settings are invalid, or cannot be met on this machine."""


class DataError(TrainerError, code="data_invalid", status=400, title="Data cannot be used"):
    """A file, split or row that the job's [data] names is missing or invalid."""


class ModelFolderError(TrainerError, code="model_folder_invalid", status=400, title="Model cannot be loaded"):
    """A model or tokenizer cannot be loaded or built."""


class CheckpointError(TrainerError, code="checkpoint_failed", title="Checkpoint failed"):
    """A checkpoint cannot be written or read."""


class RunDirectoryError(
    TrainerError, code="run_directory_invalid", status=400, title="Run directory cannot be used"
):
    """A run's folder, or a file that a command reads or writes, cannot be used as asked."""


class RunNotWritten(
    RunDirectoryError, code="run_not_written", status=507, title="Run directory cannot be written"
):
    """A file cannot be written, for example because the disk is full or access is denied."""


class NothingToLearnFrom(TrainerError, code="nothing_to_learn_from", title="No rollout was finished"):
    """No rollout of a stage was finished."""


class JobTeachesNothing(
    NothingToLearnFrom, code="job_teaches_nothing", status=422, title="The job gives nothing to learn from"
):
    """A stage has no usable rollout because of the job, data, policy or plug-in; a restart would not help."""


class TooManyLost(NothingToLearnFrom, code="too_many_lost", title="Too many rollouts were lost"):
    """The share of a stage's rollouts that failed for good exceeds `training.max_lost_share`."""


class UpdateStopped(TrainerError, code="update_stopped", title="The update could not go on"):
    """An update or warm-up could not continue. The optimizer step that failed did not change the weights."""

    steps_taken: int = 0
    """Optimizer steps of this update before the error. If 0, the weights are those of the last iteration."""
    carries: ClassVar[Mapping[str, Any]] = {**TrainerError.carries, "steps_taken": int}


class OutOfMemory(UpdateStopped, code="out_of_memory", title="The update ran out of memory"):
    """The update needed more memory than the device has."""


class SamplerMismatch(UpdateStopped, code="sampler_mismatch", title="Sampler and learner disagree"):
    """Sampler and learner computed log-probs that differ by more than `training.mismatch_limit`."""


class NonFiniteLoss(UpdateStopped, code="non_finite_loss", title="The update met NaN or infinity"):
    """The update computed NaN or infinity."""


class LearnerLost(TrainerError, code="learner_lost", title="The learner's process is lost"):
    """The learner's process died or does not answer. The run can continue from its last checkpoint."""


class LearnerFailed(TrainerError, code="learner_failed", title="The learner's process failed", recurs=True):
    """The learner's process failed or answered wrongly, and no other class describes the error."""


class NotPlaced(TrainerError, code="not_placed", title="A process could not be placed"):
    """A process of the run was not started in time, usually because no machine had free resources."""


class LearnerBusy(TrainerError, code="learner_busy", status=409, title="The learner's process is busy"):
    """The learner's process is busy with another call, or belongs to another orchestrator."""


class TaskAppError(TrainerError, code="task_app_failed", status=502, title="Task app failed"):
    """A task app refused a request, or could not be reached in time."""


class InferenceError(TrainerError, code="inference_failed", title="Inference failed"):
    """The engine or the gateway could not answer a request. Subclasses give the reason."""


class BadChatRequest(InferenceError, code="invalid_request", status=400, title="Invalid request"):
    """A request for a chat completion is invalid."""


class ContextLengthExceeded(BadChatRequest, code=CONTEXT_LENGTH_EXCEEDED, title="The context is full"):
    """Prompt and answer would exceed the model's context length. Attributes contain the token counts."""

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
        # The message begins with OpenAI's wording, because other clients recognise the error by it.
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
    """A request's `model` is not the name of a policy that is served here."""


class InferenceUnauthorized(InferenceError, code="invalid_api_key", status=401, title="Missing or wrong key"):
    """The API key of the request is missing or wrong."""


class WeightsRefused(
    InferenceError, code="weights_refused", status=400, title="Weights do not fit the model"
):
    """New weights do not fit the model, or no server loaded them in time.

    A local engine then continues to serve the previous weights. A vLLM server's weights are unknown.
    """


class EngineBusy(InferenceError, code="engine_busy", status=503, title="Too many waiting requests"):
    """The engine's queue of requests is full; the request may be repeated later."""


class EngineTimeout(InferenceError, code="engine_timeout", status=504, title="Generation took too long"):
    """The engine did not answer within a time limit."""


class EngineOutOfMemory(
    InferenceError, code="engine_out_of_memory", status=503, title="The engine ran out of memory"
):
    """A prompt, a decode step or new weights did not fit in memory. The engine continues to serve."""


class EngineStopped(InferenceError, code="engine_stopped", status=503, title="The engine does not run"):
    """The engine was stopped, or its thread ended with an error."""


class RemoteUnavailable(
    InferenceError,
    code="inference_unavailable",
    status=503,
    title="The server of a fixed policy does not answer",
):
    """The remote server of a fixed policy does not answer, or asks the client to retry later."""


class RemoteRefused(
    InferenceError, code="inference_refused", status=424, title="The server of a fixed policy gave no sample"
):
    """The remote server of a fixed policy refused a request, or its answer is invalid.

    The status is 424, because clients would repeat the request after a 5xx, and the caller made no mistake.
    """


# For a wrong argument that a job sets, such as gamma or a clip range, `core` raises a plain ValueError.


class CreditError(
    TrainerError, ValueError, code="credit_failed", title="A trajectory cannot be credited", recurs=True
):
    """Advantages cannot be computed for a trajectory. Subclasses give the reason."""


class RewardError(CreditError, code="reward_undefined", title="The rewards of an episode are not defined"):
    """The rewards of an episode cannot be computed, or contradict its outcome reward."""


class AdvantageError(CreditError, code="advantage_undefined", title="An advantage is not defined"):
    """An estimator cannot compute an advantage, or returned an invalid one."""


class SegmentError(
    CreditError, code="tokens_do_not_fit", title="The tokens of a decision do not fit together"
):
    """The tokens, log-probs or expert choices recorded for a decision are inconsistent or unusable."""


class BatchError(CreditError, code="batch_invalid", title="Segments cannot be packed or weighted"):
    """Segments cannot be packed into a batch, or their tokens cannot be weighted."""


def place(rollout_id: str, turn: int | None = None, token: int | None = None) -> str:
    """Return a text such as `rollout r-3, turn 5, token 2`; turns count from 1, tokens from 0."""
    parts = [f"rollout {rollout_id or '(unnamed)'}"]
    parts += [] if turn is None else [f"turn {turn}"]
    parts += [] if token is None else [f"token {token}"]
    return ", ".join(parts)


def rejected_rollouts(error: TrainerError) -> tuple[str, ...]:
    """Return the ids of the rollouts that caused an error; empty if the error has another cause."""
    found = re.match(r"rollout ([^\s,]+)", error.where or "")
    return error.rollout_ids or ((found[1],) if found else ())


class ApiError(TrainerError, code="request_invalid", status=422, title="Request cannot be read"):
    """A request to the trainer service is invalid."""


class UnknownMediaType(ApiError, code="media_type_unknown", status=415, title="Media type is not read here"):
    """The service does not read the media type of the request's body."""


class RunsNoJobs(ApiError, code="runs_no_jobs", status=409, title="This service runs no jobs"):
    """The service was started with `--no-jobs`: it shows runs, and accepts no jobs."""


class QueueFull(ApiError, code="queue_full", status=503, title="Too many jobs wait", retry_after_s=RETRY_S):
    """The queue of jobs has its maximum length."""


class CheckEnded(ApiError, code="check_ended", title="The check was ended"):
    """A job's check exceeded its limit of time or memory, or its process was killed."""


class TooManyChecks(
    ApiError,
    code="too_many_checks",
    status=503,
    title="Too many jobs wait to be checked",
    retry_after_s=RETRY_S,
):
    """The number of jobs that wait to be checked has reached its maximum."""


class TooManyStreams(
    ApiError, code="too_many_streams", status=503, title="Too many open event streams", retry_after_s=RETRY_S
):
    """The number of open event streams has reached its maximum."""
