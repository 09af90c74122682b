"""Which fixed policies a job has. No torch here: this process loads them, with [cluster] the gateways."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_backend.job.mixture_table import AllocationTable, RolloutOnlyTable
from trainer_backend.job.tables import InferenceTable

if TYPE_CHECKING:  # torch
    from trainer_backend.inference.served_policy import PolicyFacts
    from trainer_backend.run.fixed_policies import FixedPolicies


@dataclass(frozen=True, slots=True)
class FixedSetup:
    """How the fixed policies of a job, of which most have none, are loaded beside any actor."""

    tables: tuple[RolloutOnlyTable, ...] = ()
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Folders of those with a local model, by name."""
    schedule: AllocationTable | None = None
    """Says whether they sample at the same time as the actor."""

    async def load(
        self,
        actor: "PolicyFacts",
        inference: InferenceTable,
        tell: Callable[[str], None],
        *,
        probes: bool = True,
    ) -> "FixedPolicies":
        """Load them, and describe them to a person; try the servers of the remote ones.

        Args:
            actor: must have the same tokens.
            inference: the limits of each engine.
            probes: whether servers are tried.
        """
        from trainer_backend.run.fixed_policies import FixedPolicies, describe
        from trainer_backend.run.policy_server import engine_limits

        limits = engine_limits(inference, self.schedule, engines=1 + len(self.folders))
        fixed = await asyncio.to_thread(FixedPolicies.of, self.tables, self.folders, actor, limits)
        await describe(fixed, tell, probes=probes)
        return fixed
