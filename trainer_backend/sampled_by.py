"""Which policy of a job sampled a rollout, and the token sequences that it is trained on. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared_schemas.rollouts import Rollout
from trainer_backend.core.errors import SegmentError, place
from trainer_backend.core.policies import ACTOR, policy_in
from trainer_backend.core.segments import CONTEXT, Segment, segments_of
from trainer_backend.jobfile.mixture_table import RolloutOnlyTable


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies that sample the rollouts of a job.

    Attributes:
        job_name: their models are called after it.
        fixed: those that are never trained.
        temperature: the actor's.
    """

    job_name: str
    fixed: tuple[RolloutOnlyTable, ...]
    temperature: float

    def of_name(self, name: str) -> RolloutOnlyTable:
        """A fixed policy; KeyError where there is none of that name."""
        return {table.name: table for table in self.fixed}[name]

    def policy_by(self, rollout: Rollout) -> str:
        """ACTOR, or the name of the fixed policy that sampled it, as its trajectory tells.

        Raises:
            SegmentError: a policy that the job does not have. As the actor's own its samples would be
                trained on without weights, and nothing would tell.
        """
        model = None if rollout.trajectory is None else rollout.trajectory.model
        policy = policy_in(self.job_name, model)
        known = [ACTOR, *(table.name for table in self.fixed)]
        if policy not in known:
            raise SegmentError(
                f"sampled by {policy!r} (model {model!r}); the policies of this job are {', '.join(known)}",
                where=place(rollout.rollout_id),
                hint="Was [rollout_only] taken out of the job, or its name changed?",
            )
        return policy

    def segments_by(self, rollout: Rollout) -> list[Segment]:
        """Stop 7 for a finished rollout; none for another.

        What a fixed policy sampled is scored at the actor's temperature: the policy that is trained is
        softmax(logits / rollout.temperature), whoever sampled at whichever other (DESIGN.md 4.9).

        Raises:
            SegmentError: see `policy_by` and `segments_of`.
        """
        if rollout.trajectory is None:
            return []
        own = None if self.policy_by(rollout) == ACTOR else self.temperature
        return segments_of(rollout.trajectory.steps, rollout_id=rollout.rollout_id, temperature=own)

    def final_view_by(self, rollout: Rollout) -> Segment | None:
        """The prompt after the last decision of an episode that a limit cut short, where there is one.

        One token stands behind it that belongs to no decision and is never trained: a critic reads the value
        of a state where the first token after it is predicted, and here that is this one.

        Raises:
            SegmentError: see `segments_by`.
        """
        episode = rollout.trajectory
        if episode is None or episode.final_view is None:
            return None
        last = episode.steps[-1]
        after = last.model_copy(update={"turn": last.turn + 1, "policy_logprobs": episode.final_view})
        whole = segments_of([*episode.steps, after], rollout_id=rollout.rollout_id)[-1]
        start = whole.decision.index(last.turn)
        end = start + 1
        return replace(
            whole,
            token_ids=whole.token_ids[:end],
            decision=(CONTEXT,) * start + (0,),
            logprobs=(0.0,) * start + whole.logprobs[start:end],
            versions=(CONTEXT,) * start + whole.versions[start:end],
            temperatures=(1.0,) * end,
        )

    def by_actor(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Those that the policy in training sampled: what its own curves are made of."""
        return [rollout for rollout in rollouts if self.policy_by(rollout) == ACTOR]
