"""A version of the policy on disk, as it is handed to engines. No torch here."""

from pathlib import Path

from shared_schemas.base import Body


class ScoredPrompt(Body):
    """A fixed prompt, and the learner's log-probs of `ids[1:]` under the weights of one version."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class WeightAddress(Body):
    """The address at which the learner's process sends a version to servers, as long as it has it."""

    host: str
    port: int


class PolicyVersion(Body):
    """A version of the policy."""

    number: int
    folder: Path
    """A whole model folder, or one of adapters."""
    base: Path | None = None
    """The model folder that adapters are over, which is the same for all versions; None: `folder` is
    whole."""
    address: WeightAddress | None = None
    """Where a server gets the weights instead, those of `folder` being old by now; None: from disk."""
    prompt: ScoredPrompt | None = None
    """The test of a server that has loaded the folder; None where an engine of ours loads it."""

    @property
    def model(self) -> Path:
        """A whole model folder: its config and tokenizer are the version's, its weights may be the base's."""
        return self.base or self.folder
