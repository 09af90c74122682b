"""The fixed policies of a job are loaded once, served beside the actor, and never trained.

The job's gateway renders their prompts and reads their answers as it does for the actor. A policy whose model
lies here has its own engine; a policy at somebody else's server is asked for token ids there.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shared_schemas.trajectory import Sampling
from trainer_backend.collect.endpoints import sends_key_in_the_open
from trainer_backend.collect.sources import Inference
from trainer_backend.core.policies import model_of
from trainer_backend.errors import InferenceError, JobError, RunDirectoryError, TrainerError
from trainer_backend.inference.chat_check import first_other_id, probe_text
from trainer_backend.inference.engine import EngineLimits, LocalEngine, stop_token_ids
from trainer_backend.inference.protocol import Extras
from trainer_backend.inference.remote_engine import RemoteEngine
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.job.addresses import shown
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import ModelTable
from trainer_backend.learner.device import place as placed
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import folder_to_serve, load_named
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.models.folder import drop_rows_beyond, embedding_rows, fingerprint
from trainer_backend.protocols import Reporter
from trainer_backend.run.policy_server import engine_limits, in_folder
from trainer_backend.run.preflight import naming, place, refuse_other_tokens, server_key
from trainer_backend.rundir.files import replace_text
from trainer_backend.rundir.layout import FIXED_RECORD, RunDirectory

# Which models the fixed policies of a run are, so that it goes on with no others.


@dataclass(frozen=True, slots=True)
class FixedWeights:
    """The folder that a fixed policy was loaded from, and its weights' `fingerprint`."""

    folder: str
    sha256: str

    @property
    def identity(self) -> str:
        """What two of one name must have in common."""
        return self.sha256

    @property
    def told(self) -> str:
        return f"the weights with sha256 {self.sha256}, of {self.folder}"


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """What somebody else's server calls a fixed policy, and its URL without the query. What stands behind the
    name cannot be known."""

    model: str
    url: str

    @property
    def identity(self) -> str:
        """Say which model this is. The URL is left out: a server may move, which is reported separately."""
        return self.model

    @property
    def told(self) -> str:
        return f"the model {self.model!r} at {self.url}"


FixedModel = FixedWeights | RemoteModel


def begin_record(run: RunDirectory, found: Mapping[str, FixedModel]) -> None:
    """Write down, by name, the models that a run begins with; no file for a run without.

    Raises:
        RunDirectoryError: the disk is full, or refuses.
    """
    path = run.path / FIXED_RECORD
    if not found:
        path.unlink(missing_ok=True)
        return
    text = json.dumps({name: asdict(model) for name, model in found.items()}, indent=2)
    replace_text(path, text + "\n")


def continue_record(run: RunDirectory, found: Mapping[str, FixedModel]) -> list[str]:
    """Check the policies against the run's record: known ones must be unchanged, new ones are added to it.

    Returns:
        A line for each whose model answers at another URL now.

    Raises:
        JobError: a policy of that name had other weights, or was another model; with both.
        RunDirectoryError: the record cannot be read or written.
    """
    recorded = _recorded(run)
    moved = []
    for name, model in found.items():
        before = recorded.get(name)
        if before is not None and (type(before), before.identity) != (type(model), model.identity):
            raise JobError(
                f"the run has samples of {before.told}, and now it names {model.told}",
                where=f"[rollout_only] {name!r}",
                hint="Name the first, give the new policy another name, or begin another run.",
            )
        if isinstance(model, RemoteModel) and before not in (None, model):
            moved.append(f"fixed policy {name!r}: {model.told}; the run has samples of it at another URL")
    begin_record(run, {**recorded, **found})
    return moved


def _recorded(run: RunDirectory) -> dict[str, FixedModel]:
    path = run.path / FIXED_RECORD
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: (RemoteModel if "url" in model else FixedWeights)(**model) for name, model in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error


# Characters of a sha256 that a person is shown.
_SHOWN = 12
# Log-probs above this are of a token that was the only choice: there a softmax is exactly 1.
_CERTAIN = -1e-5
# A probe samples this many tokens, since some leave a model no choice.
_SOME = 8


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


@dataclass(frozen=True, slots=True)
class Remote:
    """A fixed policy whose model answers at somebody else's server.

    Attributes:
        policy: to be served: the server's ids, rendered and read as the actor's.
    """

    table: RolloutOnlyTable
    engine: RemoteEngine
    policy: ServedPolicy

    async def probed(self) -> str:
        """Check that the server's samples can be weighted; return a line that describes it.

        Raises:
            JobError: it does not answer, or without token ids or log-probs; it has another tokenizer than the
                actor; its log-probs are not of what it samples from, though the job says so.
        """
        try:
            await self._refuse_other_tokens()
            if self.table.logprobs == "processed":
                await self._refuse_raw()
        except InferenceError as error:
            raise self._refused(
                f"what it samples could not be weighed: {error.detail}", error.hint
            ) from error
        finally:
            await self.engine.close()
        source = self.table.source
        return f"fixed policy {self.table.name!r}: {source} returns exact tokens, which are the actor's"

    async def _refuse_other_tokens(self) -> None:
        text, renderer = probe_text(self.policy.renderer), self.policy.renderer
        ids = renderer.encode(text)
        if difference := first_other_id(ids, await self.engine.text_ids(text)):
            raise self._refused(difference, "It serves a model of another family.")
        await self.engine.generate(ids, Sampling(max_tokens=1), request_id="probe")

    async def _refuse_raw(self) -> None:
        """Refuse log-probs that ignore truncation: with top_k 1 each token is certain and has log-prob 0."""
        ids = self.policy.renderer.encode(probe_text(self.policy.renderer))
        sampling = Sampling(top_k=1, temperature=0.5, max_tokens=_SOME)
        generation = await self.engine.generate(
            ids, sampling, request_id="probe", extras=Extras(processed=True)
        )
        lowest = min(generation.logprobs)
        if lowest < _CERTAIN:
            raise self._refused(
                f"with top_k = 1 its log-probs should be 0, and one is {lowest:.3g}: they are not of what it "
                "samples from, though the job says logprobs = 'processed'",
                "vLLM returns those with --logprobs-mode processed_logprobs.",
            )

    def _refused(self, told: str, hint: str | None) -> JobError:
        return JobError(told, where=f"{place(self.table.name)}, {self.table.source}", hint=hint)


class FixedPolicies:
    """The fixed policies of a job; most jobs have none."""

    def __init__(self, loaded: Sequence[Loaded] = (), remote: Sequence[Remote] = ()) -> None:
        self._loaded, self.remote = loaded, remote

    @classmethod
    def of(cls, job: JobConfig, folders: Mapping[str, Path], learner: LocalLearner) -> "FixedPolicies":
        """
        Args:
            folders: by name, as `checked_folders` found them.
            learner: of the actor, which has to know the same tokens.

        Raises:
            JobError: a model has other tokens than the actor, or ends its answers otherwise; or the variable
                that should hold a server's key holds none.
            ModelFolderError: a model cannot be loaded, or cannot be played exactly.
        """
        remote = [table for table in job.fixed_policies if table.is_remote]
        engines = 1 + len(job.fixed_policies) - len(remote)
        limits = engine_limits(job.inference, job.rollout_allocation_schedule, engines=engines)
        return cls(
            [_load(name, in_folder(job.model, path), learner, limits) for name, path in folders.items()],
            [_at_a_server(table, learner, max_model_len=job.inference.max_model_len) for table in remote],
        )

    @property
    def policies(self) -> dict[str, ServedPolicy]:
        """By name, for the gateway."""
        return {
            **{item.name: item.policy for item in self._loaded},
            **{item.table.name: item.policy for item in self.remote},
        }

    @property
    def weights(self) -> dict[str, FixedWeights]:
        """By name, where each lies and what lay there."""
        return {item.name: item.weights for item in self._loaded}

    def told(self) -> list[str]:
        """A line for each that was loaded."""
        return [item.told for item in self._loaded]

    def compared(self) -> list[str]:
        """Return a line for each policy, which says after the last rollout that its weights are unchanged.

        Raises:
            TrainerError: weights have changed, so no sample of the run can be trusted.
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


def fixed_models(tables: Sequence[RolloutOnlyTable], loaded: FixedPolicies) -> dict[str, FixedModel]:
    """By name, what a run that goes on has to find again: of every fixed policy of the job."""
    return {
        **loaded.weights,
        **{
            table.name: RemoteModel(table.model, shown(table.inference_url))
            for table in tables
            if table.model is not None and table.inference_url is not None
        },
    }


def fixed_inferences(job: JobConfig, gateway: Inference) -> dict[str, Inference]:
    """Return where to ask each fixed policy, by name: at the actor's gateway, under its own model name."""
    # What is drawn from a part of the vocabulary has to be weighed by its probability there.
    asks = {"processed_logprobs": True}
    return {
        table.name: replace(
            gateway,
            model=model_of(job.job.name, table.name),
            asks=asks if job.sampling_of(table).is_truncated else {},
        )
        for table in job.fixed_policies
    }


def _at_a_server(table: RolloutOnlyTable, learner: LocalLearner, *, max_model_len: int) -> Remote:
    assert table.inference_url is not None and table.model is not None, "the table was validated"
    engine = RemoteEngine(
        table.inference_url, table.model, server_key(table),
        stop_ids=stop_token_ids(learner.model, learner.tokenizer),
        vocabulary=embedding_rows(learner.model),
        max_model_len=max_model_len,
        processed=table.logprobs == "processed",
    )  # fmt: skip
    return Remote(table, engine, ServedPolicy(engine, learner.tokenizer))


def _load(name: str, table: ModelTable, learner: LocalLearner, limits: EngineLimits) -> Loaded:
    folder = table.path
    assert folder is not None and limits.max_model_len is not None, "of a folder, within the job's limits"
    with naming(name):
        model, tokenizer = load_named(table)
        refuse_unsupported(model, longest=limits.max_model_len)
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
    placement = placed(table.device)
    served = folder_to_serve(model, folder, placement)
    serves = weights.sha256 if placement.low is None and not beyond else fingerprint(served)
    policy = ServedPolicy(LocalEngine(served, stop_ids=stop_ids, limits=limits), tokenizer)
    told = f"fixed policy {name!r}: {folder}, sha256 {weights.sha256[:_SHOWN]}"
    if beyond:
        told += f"; it never samples the {beyond} ids that no tokenizer has and the actor does not embed"
    return Loaded(name, weights, policy, serves, lambda: fingerprint(served), told)


async def joined_policies(
    job: JobConfig, folders: Mapping[str, Path], learner: LocalLearner, reporter: Reporter
) -> FixedPolicies:
    """Load the fixed policies beside the actor, and try others' servers; all must share the actor's tokens.

    Args:
        folders: by name, of those whose model lies here.

    Raises:
        JobError, ModelFolderError: one cannot be mixed with the actor.
    """
    fixed = await asyncio.to_thread(FixedPolicies.of, job, folders, learner)
    for line in fixed.told():
        reporter.say(line)
    for item in fixed.remote:
        reporter.say(await item.probed())
        if sends_key_in_the_open(item.table.inference_url or "", keyed=item.table.api_key_env is not None):
            reporter.say(f"its key goes to {item.table.source} unencrypted; prefer https")
    return fixed
