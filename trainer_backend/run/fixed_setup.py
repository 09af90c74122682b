"""The settings with which a job's fixed policies are loaded. This module does not import torch."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainer_backend.inference.keys import EngineKeys
from trainer_backend.job.mixture_table import AllocationTable, RolloutOnlyTable

if TYPE_CHECKING:  # torch
    from trainer_backend.inference.served_policy import PolicyFacts
    from trainer_backend.run.fixed_policies import FixedPolicies

Keys = TypeVar("Keys", bound=EngineKeys)


@dataclass(frozen=True, slots=True)
class FixedSetup:
    """The settings of a job's fixed policies. Most jobs have no fixed policies."""

    tables: tuple[RolloutOnlyTable, ...] = ()
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Model folders of the policies with a local model, by policy name."""
    schedule: AllocationTable | None = None
    """The `unit` of the schedule decides whether fixed policies and the actor sample at the same time."""

    def share_threads(self, keys: Keys) -> Keys:
        """Return `keys` with the number of threads that each engine on this machine may use.

        The actor and the local fixed policies share `keys.threads`: more threads would take the task app's
        cores. But if a single policy samples each iteration, every engine may use all threads.
        """
        if self.schedule is None or self.schedule.unit == "iteration":
            return keys
        return keys.model_copy(update={"threads": max(1, keys.threads // (1 + len(self.folders)))})

    async def load(
        self,
        actor: "PolicyFacts",
        inference: EngineKeys,
        tell: Callable[[str], None],
        *,
        probes: bool = True,
    ) -> "FixedPolicies":
        """Load the policies within the limits of `inference`, describe them, and probe remote servers."""
        from trainer_backend.run.fixed_policies import FixedPolicies

        keys = self.share_threads(inference)
        fixed = await asyncio.to_thread(FixedPolicies.of, self.tables, self.folders, actor, keys)
        await fixed.describe(tell, probes=probes)
        return fixed
