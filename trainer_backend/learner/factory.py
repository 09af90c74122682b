"""Makes the learner of a job in this process."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shared_schemas.trajectory import Trajectory
from trainer_backend.core.critic import OfEpisode
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.device import place
from trainer_backend.learner.gradients import gradient_cosines
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.memory import less_memory, memory_plan, refuse_too_large
from trainer_backend.learner.ranks import ALONE, Ranks
from trainer_backend.learner.sharding import mesh_of
from trainer_backend.models.sources import tokenizer_in
from trainer_backend.protocols import CreditedEpisode, Progress
from trainer_backend.run.preflight import checked_folders


class LocalFactory:
    """Implements `protocols.LearnerFactory` in this process.

    Args:
        fixed: tables of the fixed policies.
        ranks: that hold the learner together with this process.

    Raises:
        JobError: the device that the job names is not there.
    """

    def __init__(
        self, config: LearnerConfig, fixed: Sequence[RolloutOnlyTable] = (), ranks: Ranks = ALONE
    ) -> None:
        placement = place(config.model.device)
        if ranks.are_several:  # here, where all ranks are; a model is loaded by one after the other
            mesh_of(ranks, config.ranks.data_parallel_replicate_degree, placement.device.type)
        self._config, self._fixed, self._ranks = config, fixed, ranks

    def fixed_folders(self, checkpoint: Path | None) -> Mapping[str, Path]:
        return checked_folders(self._fixed, self._config.model, checkpoint) if self._fixed else {}

    def plan_memory(self, checkpoint: Path | None, fixed: Sequence[Path]) -> str:
        def plan_of_this_rank() -> str:
            plan = memory_plan(self._config, checkpoint, fixed=fixed, ranks=self._ranks)
            refuse_too_large(plan, hint=less_memory(self._config))
            return plan.report()

        return self._ranks.together(plan_of_this_rank)

    def fresh(self, prompts: Sequence[Trajectory], tokenizer_of: Path | None) -> LocalLearner:
        tokenizer = None if tokenizer_of is None else tokenizer_in(tokenizer_of, self._config.model)
        return LocalLearner.fresh(self._config, prompts, tokenizer, self._ranks)

    def resumed(self, checkpoint: Path) -> tuple[LocalLearner, Progress]:
        return LocalLearner.resumed(self._config, checkpoint, self._ranks)

    def gradient_cosines(
        self,
        checkpoint: Path,
        episodes: Sequence[CreditedEpisode],
        advantages: Mapping[str, Sequence[OfEpisode]],
        tell: Callable[[int, int], None],
    ) -> list[tuple[str, str, float]]:
        """See `learner.gradients`."""
        return gradient_cosines(self._config, checkpoint, episodes, advantages, tell=tell, ranks=self._ranks)
