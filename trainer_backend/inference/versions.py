"""Tell engines where to find the weights of a policy version. This module does not import torch."""

from pathlib import Path

from shared_schemas.base import Body


class ScoredPrompt(Body):
    """A fixed prompt, and the learner's log-probs of `ids[1:]` under the weights of one version."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class WeightAddress(Body):
    """The address from which servers receive a version, while the learner's process has this version."""

    host: str
    port: int


class PolicyVersion(Body):
    number: int
    folder: Path
    """A whole model folder, or a folder of adapters."""
    base: Path | None = None
    """The base model's folder if `folder` contains adapters, else None. All versions have the same base."""
    address: WeightAddress | None = None
    """Set if servers receive the weights from the learner; `folder` may then contain older weights."""
    prompt: ScoredPrompt | None = None
    """The canary: the prompt that tests a server after it loaded the version. None for the local engine."""

    @property
    def model(self) -> Path:
        """Return a whole model folder with the version's config and tokenizer. Its weights may be older."""
        return self.base or self.folder
