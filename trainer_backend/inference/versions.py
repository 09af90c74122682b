"""Describe a version of the policy on disk for engines. This module imports no torch."""

from pathlib import Path

from shared_schemas.base import Body


class ScoredPrompt(Body):
    """A fixed prompt, and the learner's log-probs of `ids[1:]` under the weights of one version."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class WeightAddress(Body):
    """The address at which the learner's process sends a version to servers, while it has the version."""

    host: str
    port: int


class PolicyVersion(Body):
    number: int
    folder: Path
    """A whole model folder, or a folder of adapters."""
    base: Path | None = None
    """The base model folder of adapters, the same for all versions; None: `folder` is whole."""
    address: WeightAddress | None = None
    """The address from which a server gets the weights, if `folder` has older weights; None: from disk."""
    prompt: ScoredPrompt | None = None
    """The canary, by which a server that has loaded the version is tested; None for the local engine."""

    @property
    def model(self) -> Path:
        """Return a whole model folder with the version's config and tokenizer, perhaps with old weights."""
        return self.base or self.folder
