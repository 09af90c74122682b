"""The contents of an episode's page: its record, its row in the store, its group, its tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_schemas.trajectory import Trajectory
from trainer_backend.core.emission_views import assistant_turn_boundaries
from trainer_backend.core.segments import segments_of
from trainer_backend.errors import RunDirectoryError, SegmentError
from trainer_backend.pages.episode_view import DecisionLine, DecisionView, decision_lines, decision_view
from trainer_backend.pages.figures import number, short_id, signed, spaced
from trainer_backend.pages.page import Dashboard, UnknownTurn
from trainer_backend.pages.stored import StoredRollout, why_undrawn
from trainer_backend.pages.token_view import segment_view, token_advantages
from trainer_backend.store import jobs, reads_rollouts
from trainer_backend.store.rows import JobRow, RolloutRow


@dataclass(frozen=True, slots=True)
class Episode:
    """A rollout with all that its page needs."""

    job: JobRow
    run_dir: Path
    row: RolloutRow
    stored: StoredRollout
    siblings: tuple[RolloutRow, ...]
    consumed: int | None
    """The iteration whose update learned from it, or None."""

    @property
    def trajectory(self) -> Trajectory | None:
        return self.stored.rollout.trajectory

    def lines(self) -> list[DecisionLine]:
        assert self.trajectory is not None
        return decision_lines(self.trajectory, self.stored.columns)

    def decision(self, turn: int) -> DecisionView:
        assert self.trajectory is not None
        if not 1 <= turn <= len(self.trajectory.steps):
            raise UnknownTurn(
                f"rollout {self.row.rollout_id} has decisions 1 to {len(self.trajectory.steps)}, not {turn}"
            )
        return decision_view(self.trajectory, self.stored.columns, turn)

    def values(self) -> dict[str, Any]:
        """The values that the page shows of the whole episode."""
        failure = self.stored.rollout.failure
        return {
            "short": short_id(self.row.rollout_id),
            "group": self.row.group_id,
            "failed": "" if self.row.status == "finished" else self.row.status,
            "failure": f"{failure.code}: {failure.detail}" if failure is not None else "",
            "about": self._about(),
            "notes": self.trajectory.warnings if self.trajectory is not None else (),
            "siblings": self.siblings,
            "row": self.row,
            "no_pictures": why_undrawn(self.stored.rollout),
        }

    def _about(self) -> list[tuple[str, str]]:
        row, episode = self.row, self.trajectory
        facts = [
            ("stage", f"{row.stage} {row.iteration}" if row.iteration else row.stage),
            ("policy", row.policy),
            ("world", "" if row.seed is None else str(row.seed)),
            ("outcome", "" if episode is None else number(row.outcome_reward)),
            ("sum of r_t", "" if row.reward is None else signed(row.reward)),
            ("unique achievements", "" if not row.unique_achievements else str(row.unique_achievements)),
            ("decisions", str(row.decisions)),
            ("env steps", "" if row.env_steps is None else str(row.env_steps)),
            ("ended by", spaced(row.stop_reason or "")),
            ("learned from by", "" if self.consumed is None else f"iteration {self.consumed}"),
        ]
        if episode is not None and (reward := episode.user_reward) is not None:
            environment = number(reward.environment_outcome_reward)
            facts.append(("judged by", f"{reward.reward_function}; by its environment {environment}"))
        return [(name, value) for name, value in facts if value]


def episode_of(dashboard: Dashboard, job_id: str, rollout_id: str) -> Episode:
    store = dashboard.store
    job = jobs.get(store, job_id)
    row = reads_rollouts.rollout(store, job_id, rollout_id)
    if job.run_dir is None:
        raise RunDirectoryError(f"job {job_id} has no run directory yet")
    run_dir = Path(job.run_dir)
    return Episode(
        job, run_dir, row, dashboard.rollouts.read(run_dir / row.file, row.rollout_id),
        reads_rollouts.siblings(store, job_id, row),
        reads_rollouts.learning_iteration(store, job_id, row.rollout_id),
    )  # fmt: skip


def segment_of(dashboard: Dashboard, episode: Episode, turn: int) -> dict[str, Any]:
    """Return the segment that trains a decision, or the reason why no segment can be shown."""
    assert episode.trajectory is not None
    try:
        segments = segments_of(episode.trajectory.steps, rollout_id=episode.row.rollout_id)
    except SegmentError as error:
        return {"segment": None, "segments": 0, "no_tokens": f"Not to be trained on: {error}"}
    rows = token_advantages(episode.stored.columns)
    for index, segment in enumerate(segments):
        if any(t + 1 == turn for t, _, _ in assistant_turn_boundaries(segment)):
            view = segment_view(
                segment, index, turn=turn,
                decode=dashboard.token_texts(episode.run_dir) or (lambda one: f"[{one}]"),
                advantages=lambda t: rows[t] if t < len(rows) else (),
                largest=max((abs(value) for row in rows for value in row), default=0.0),
            )  # fmt: skip
            return {"segment": view, "segments": len(segments), "no_tokens": ""}
    return {"segment": None, "segments": len(segments), "no_tokens": "This decision sampled no token."}
