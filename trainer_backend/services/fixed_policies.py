"""The fixed policies of a job: loaded once, served beside the actor, never trained; and what shows that.

One whose model lies here has an engine of its own behind the job's gateway. One at somebody else's server is
asked there, and nothing of it is here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer_backend.collect.samplers import Inference
from trainer_backend.core.policies import model_of
from trainer_backend.errors import JobError, TrainerError
from trainer_backend.inference.engine import LocalEngine, stop_token_ids
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.jobfile.mixture_table import RolloutOnlyTable
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.jobfile.urls import shown
from trainer_backend.learner.copies import folder_to_serve
from trainer_backend.learner.device import place as placed
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import load_named
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.models.folder import embedding_rows
from trainer_backend.models.frozen import drop_rows_beyond, fingerprint
from trainer_backend.rundir.fixed_record import FixedModel, FixedWeights, RemoteModel
from trainer_backend.services.fixed_folders import naming, place, refuse_other_tokens, server_key
from trainer_backend.services.policy_server import engine_limits, in_folder

# Of a sha256, where a person reads it.
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Loaded:
    """A fixed policy whose model lies here.

    Attributes:
        weights: where it lies, and the fingerprint of what lies there, on any device.
        policy: to be served.
        serves: the fingerprint of what samples, which rounding may have made another.
        current: takes that fingerprint again.
        told: a line about it.
    """

    name: str
    weights: FixedWeights
    policy: ServedPolicy
    serves: str
    current: Callable[[], str]
    told: str


class FixedPolicies:
    """Those of a job that are served from here; none in most jobs."""

    def __init__(self, loaded: Sequence[Loaded] = ()) -> None:
        self._loaded = loaded

    @classmethod
    def of(cls, job: JobConfig, folders: Mapping[str, Path], learner: LocalLearner) -> "FixedPolicies":
        """
        Args:
            folders: by name, as `checked_folders` found them.
            learner: of the actor, which has to know the same tokens.

        Raises:
            JobError: a model has other tokens than the actor, or ends its answers otherwise.
            ModelFolderError: a model cannot be loaded, or cannot be played exactly.
        """
        return cls([_load(job, name, folder, learner) for name, folder in folders.items()])

    @property
    def policies(self) -> dict[str, ServedPolicy]:
        """By name, for the gateway."""
        return {item.name: item.policy for item in self._loaded}

    @property
    def weights(self) -> dict[str, FixedWeights]:
        """By name, where each lies and what lay there."""
        return {item.name: item.weights for item in self._loaded}

    def told(self) -> list[str]:
        """A line for each that was loaded."""
        return [item.told for item in self._loaded]

    def compared(self) -> list[str]:
        """A line for each, after the last rollout: its weights are those of the beginning.

        Raises:
            TrainerError: they are not, which nothing here may do: no sample of the run can be trusted.
        """
        for item in self._loaded:
            if (now := item.current()) != item.serves:
                raise TrainerError(
                    f"its weights have changed since they were loaded: sha256 {item.serves} then, {now} now",
                    where=place(item.name),
                )
        return [
            f"fixed policy {item.name!r}: its weights are as they were loaded, sha256 "
            f"{item.weights.sha256[:_SHOWN]}"
            for item in self._loaded
        ]


def fixed_models(job: JobConfig, loaded: FixedPolicies) -> dict[str, FixedModel]:
    """By name, what a run that goes on has to find again: of every fixed policy of the job."""
    return {
        **loaded.weights,
        **{
            table.name: RemoteModel(table.model, shown(table.inference_url))
            for table in job.fixed_policies
            if table.model is not None and table.inference_url is not None
        },
    }


def fixed_inferences(job: JobConfig, gateway: Inference) -> dict[str, Inference]:
    """By name, where each fixed policy of the job is asked.

    Args:
        gateway: that of the actor, which serves those whose model lies here too.

    Raises:
        JobError: the variable that should hold a server's key holds none.
    """
    return {
        table.name: _at_a_server(job, table) if table.is_remote else _at_the_gateway(job, table, gateway)
        for table in job.fixed_policies
    }


def _at_the_gateway(job: JobConfig, table: RolloutOnlyTable, gateway: Inference) -> Inference:
    # What is drawn from a part of the vocabulary has to be weighed by its probability there.
    asks = {"processed_logprobs": True} if job.sampling_of(table).is_truncated else {}
    return replace(gateway, model=model_of(job.job.name, table.name), asks=asks)


def _at_a_server(job: JobConfig, table: RolloutOnlyTable) -> Inference:
    assert table.inference_url is not None and table.model is not None, "the table was validated"
    asks: dict[str, Any] = {"exact_tokens": "vllm", "known_as": model_of(job.job.name, table.name)}
    if table.logprobs == "processed":
        asks["processed_logprobs"] = True  # of a gateway like ours; others know it by how they were started
    if job.model.chat_template_kwargs:
        asks["chat_template_kwargs"] = job.model.chat_template_kwargs
    return Inference(table.inference_url, table.model, server_key(table), asks=asks)


def _load(job: JobConfig, name: str, folder: Path, learner: LocalLearner) -> Loaded:
    with naming(name):
        model, tokenizer = load_named(in_folder(job, folder))
        refuse_unsupported(model, longest=job.inference.max_model_len)
    refuse_other_tokens(name, learner.tokenizer, tokenizer)
    stop_ids = stop_token_ids(model, tokenizer)
    actors = stop_token_ids(learner.model, learner.tokenizer)
    if stop_ids != actors:
        raise JobError(
            f"it ends its answers with the ids {list(stop_ids)}, the actor with {list(actors)}",
            where=place(name),
            hint="generation_config.json of both folders must name the same eos_token_id.",
        )
    weights = FixedWeights(str(folder.resolve()), fingerprint(model))
    beyond = drop_rows_beyond(model, embedding_rows(learner.model))
    placement = placed(job.model.device)
    served = folder_to_serve(model, folder, placement)
    serves = weights.sha256 if placement.low is None and not beyond else fingerprint(served)
    limits = engine_limits(job, engines=1 + sum(not table.is_remote for table in job.fixed_policies))
    policy = ServedPolicy(LocalEngine(served, stop_ids=stop_ids, limits=limits), tokenizer)
    told = f"fixed policy {name!r}: {folder}, sha256 {weights.sha256[:_SHOWN]}"
    if beyond:
        told += f"; it never samples the {beyond} ids that no tokenizer has and the actor does not embed"
    return Loaded(name, weights, policy, serves, lambda: fingerprint(served), told)
