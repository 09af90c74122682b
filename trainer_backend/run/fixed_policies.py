"""Loads the fixed policies of a job, which are served next to the actor and never trained.

The gateway renders their prompts and parses their answers as it does for the actor. A policy with a local
model has an engine of its own; a remote policy gets its token ids from a server that Turnwise does not run.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shared_schemas.trajectory import Sampling
from trainer_backend.collect.endpoints import sends_key_in_the_open
from trainer_backend.errors import EngineStopped, InferenceError, JobError, TrainerError
from trainer_backend.inference.actor import Extras
from trainer_backend.inference.chat_check import first_other_id, probe_text
from trainer_backend.inference.engine import LocalEngine, stop_token_ids
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.remote_engine import RemoteEngine
from trainer_backend.inference.served_policy import PolicyFacts, ServedPolicy
from trainer_backend.job.addresses import shown
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.learner.device import place as placed
from trainer_backend.learner.loading import folder_to_serve, load_named
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.models.folder import drop_rows_beyond, fingerprint
from trainer_backend.models.sources import in_folder
from trainer_backend.run.preflight import naming, place, refuse_other_tokens, server_key
from trainer_backend.rundir.fixed_record import FixedModel, FixedWeights, RemoteModel

# Characters of a sha256 that are shown to the user.
_SHOWN = 12
# A log-prob above this is that of a token that was the only choice, whose probability is 1.
_CERTAIN = -1e-5
# A probe samples this many tokens, since a model may be certain of a single token without truncation.
_PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LocalPolicy:
    """A fixed policy whose model is in a folder of this machine."""

    name: str
    weights: FixedWeights
    """The model folder, and the fingerprint of the weights, which is the same on any device."""
    policy: ServedPolicy
    engine: LocalEngine
    sampler_sha256: str
    """The fingerprint of the engine's weights, which may be rounded to a lower precision."""
    sampler: Callable[[], str]
    """Computes the fingerprint of the engine's weights again."""
    line: str
    """A line that describes the policy to the user."""


@dataclass(frozen=True, slots=True)
class RemotePolicy:
    """A fixed policy whose model runs on a remote server. Its prompts are rendered like the actor's."""

    table: RolloutOnlyTable
    engine: RemoteEngine
    policy: ServedPolicy

    @property
    def model(self) -> RemoteModel:
        """The policy's entry in the run's record of fixed policies."""
        assert self.table.model is not None and self.table.inference_url is not None, "it was validated"
        return RemoteModel(self.table.model, shown(self.table.inference_url))

    async def probe(self) -> str:
        """Check that training can use the server's tokens and log-probs; return a line about the policy."""
        try:
            text, renderer = probe_text(self.policy.renderer), self.policy.renderer
            ids = renderer.encode(text)
            if difference := first_other_id(ids, await self.engine.text_ids(text)):
                raise self._error(difference, "It serves a model of another family.")
            await self.engine.generate(ids, Sampling(max_tokens=1), request_id="probe")
            if self.table.logprobs == "processed":
                await self._refuse_raw(ids)
        except InferenceError as error:
            raise self._error(f"what it samples could not be weighed: {error.detail}", error.hint) from error
        finally:
            await self.engine.close()
        source = self.table.source
        return f"fixed policy {self.table.name!r}: {source} returns exact tokens, which are the actor's"

    async def _refuse_raw(self, ids: Sequence[int]) -> None:
        """Raise JobError if the server's log-probs are those of the distribution before truncation.

        With top_k = 1, every token is certain after truncation, so each log-prob must be 0.
        """
        sampling = Sampling(top_k=1, temperature=0.5, max_tokens=_PROBE_TOKENS)
        generation = await self.engine.generate(
            ids, sampling, request_id="probe", extras=Extras(processed=True)
        )
        lowest = min(generation.logprobs)
        if lowest < _CERTAIN:
            raise self._error(
                f"with top_k = 1 its log-probs should be 0, and one is {lowest:.3g}: they are not of what it "
                "samples from, though the job says logprobs = 'processed'",
                "vLLM returns those with --logprobs-mode processed_logprobs.",
            )

    def _error(self, detail: str, hint: str | None) -> JobError:
        return JobError(detail, where=f"{place(self.table.name)}, {self.table.source}", hint=hint)


class FixedPolicies:
    def __init__(self, local: Sequence[LocalPolicy] = (), remote: Sequence[RemotePolicy] = ()) -> None:
        self._local, self.remote = local, remote

    @classmethod
    def of(
        cls,
        tables: Sequence[RolloutOnlyTable],
        folders: Mapping[str, Path],
        actor: PolicyFacts,
        keys: EngineKeys,
    ) -> "FixedPolicies":
        """Load the models in `folders` (by policy name), and make clients for the remote policies."""
        return cls(
            [_load(name, path, actor, keys) for name, path in folders.items()],
            [_at_a_server(table, actor, keys) for table in tables if table.is_remote],
        )

    @property
    def policies(self) -> dict[str, ServedPolicy]:
        return {
            **{item.name: item.policy for item in self._local},
            **{item.table.name: item.policy for item in self.remote},
        }

    @property
    def models(self) -> dict[str, FixedModel]:
        """Return the models by policy name. A resumed run must have equal models."""
        return {
            **{item.name: item.weights for item in self._local},
            **{item.table.name: item.model for item in self.remote},
        }

    async def describe(self, tell: Callable[[str], None], *, probes: bool) -> None:
        """Describe the local policies to the user. If `probes`, check and describe the remote ones too."""
        for local in self._local:
            tell(local.line)
        for item in self.remote if probes else ():
            tell(await item.probe())
            has_key = item.table.api_key_env is not None
            if sends_key_in_the_open(item.table.inference_url or "", has_key=has_key):
                tell(f"its key goes to {item.table.source} unencrypted; prefer https")

    async def release(self) -> None:
        """Free the device memory of the local engines' caches (`LocalEngine.release`)."""
        for item in self._local:
            with suppress(EngineStopped):  # the next caller of the engine gets the error
                await item.engine.release()

    def verify(self) -> list[str]:
        """Check after the last rollout that no weights have changed; return a line for each local model."""
        for item in self._local:
            if (now := item.sampler()) != item.sampler_sha256:
                raise TrainerError(
                    "its weights have changed since they were loaded: "
                    f"sha256 {item.sampler_sha256} then, {now} now",
                    where=place(item.name),
                )
        return [
            f"fixed policy {item.name!r}: its weights are as they were loaded, sha256 "
            f"{item.weights.sha256[:_SHOWN]}"
            for item in self._local
        ]


def _at_a_server(table: RolloutOnlyTable, actor: PolicyFacts, keys: EngineKeys) -> RemotePolicy:
    assert table.inference_url is not None and table.model is not None, "the table was validated"
    engine = RemoteEngine(
        table.inference_url, table.model, server_key(table),
        stop_ids=actor.stop_ids,
        vocabulary=actor.vocabulary,
        max_model_len=keys.max_model_len,
        processed=table.logprobs == "processed",
    )  # fmt: skip
    return RemotePolicy(table, engine, ServedPolicy(engine, actor.tokenizer))


def _load(name: str, folder: Path, actor: PolicyFacts, keys: EngineKeys) -> LocalPolicy:
    with naming(name):
        model, tokenizer = load_named(in_folder(actor.table, folder))
        refuse_unsupported(model, longest=keys.max_model_len)
    refuse_other_tokens(name, actor.tokenizer, tokenizer)
    stop_ids = stop_token_ids(model.generation_config, tokenizer)
    if stop_ids != actor.stop_ids:
        raise JobError(
            f"it ends its answers with the ids {list(stop_ids)}, the actor with {list(actor.stop_ids)}",
            where=place(name),
            hint="generation_config.json of both folders must name the same eos_token_id.",
        )
    weights = FixedWeights(str(folder.resolve()), fingerprint(model))
    beyond = drop_rows_beyond(model, actor.vocabulary)
    placement = placed(actor.table.device)
    served = folder_to_serve(model, folder, placement)
    # The learner is another model, so it cannot replay the experts that this one chose.
    own_keys = keys.model_copy(update={"replay_experts": False})
    engine = LocalEngine(served, stop_ids=stop_ids, keys=own_keys)
    line = f"fixed policy {name!r}: {folder}, sha256 {weights.sha256[:_SHOWN]}"
    if beyond:
        line += f"; it never samples the {beyond} ids that no tokenizer has and the actor does not embed"
    return LocalPolicy(
        name,
        weights,
        ServedPolicy(engine, tokenizer),
        engine,
        sampler_sha256=weights.sha256 if placement.low is None and not beyond else fingerprint(served),
        sampler=lambda: fingerprint(served),
        line=line,
    )
