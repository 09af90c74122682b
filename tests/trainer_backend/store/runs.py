"""Run directories with figures that can be worked by hand."""

from pathlib import Path
from typing import Any

from shared_schemas.rollouts import Rollout, RolloutFailure
from tests.trainer_backend.pages.hand_made import COW, TABLE, WOOD, rollout
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.rundir.spool import LedgerEntry, append_to_ledger


def new_run(path: Path, **tables: Any) -> RunDirectory:
    from tests.conftest import tiny_job

    return create_run(tiny_job(**tables), path)


def episodes(iteration: int, *, run: str = "run") -> list[Rollout]:
    """A group of two: 2 achievements in three decisions, and 0 in two."""
    group = f"train/{iteration}/0"
    found = [
        rollout(10, [WOOD, (), COW], group=group, sibling=0),
        rollout(10, [(), ()], group=group, sibling=1),
    ]
    return [
        item.model_copy(update={"iteration": iteration, "rollout_id": f"{run}/{group}/{item.sibling}"})
        for item in found
    ]


# r_t, the returns and what an estimator may have made of them.
CREDITS = (
    Credit([1.0, 0.0, 1.0], [0.5, 0.25, 0.5], [2.0, 1.0, 1.0], state_keys_T=("s", "a", "b")),
    Credit([0.0, 0.0], [-0.5, -0.25], [0.0, 0.0], state_keys_T=("s", "s")),
)


def failed(iteration: int) -> Rollout:
    item = episodes(iteration)[0]
    return item.model_copy(
        update={
            "rollout_id": f"run/train/{iteration}/0/2",
            "sibling": 2,
            "status": "failed",
            "trajectory": None,
            "failure": RolloutFailure(code="task_app_lost", detail="gone"),
        }
    )


def metrics_row(iteration: int, **numbers: Any) -> dict[str, Any]:
    return {
        "kind": "iteration",
        "iteration": iteration,
        "policy/version": iteration,
        "episode/outcome_reward": 1.0,
        "episode/outcome_definition": "unique achievements",
        "decision/unique_by_turn": [0.5, 0.0, 1.0],
        "app/finished": {"own": 2.0},
        **numbers,
    }


def finish(run: RunDirectory, iteration: int, **numbers: Any) -> None:
    """What an iteration leaves behind: its rollouts, what was consumed, its row."""
    played = episodes(iteration)
    write_rollouts(run.rollouts_file(f"iteration_{iteration}"), [*played, failed(iteration)], CREDITS)
    append_to_ledger(run.path, LedgerEntry(iteration, iteration, tuple(item.rollout_id for item in played)))
    run.append_metrics(metrics_row(iteration, **numbers))


def evaluate(run: RunDirectory, iteration: int, outcome: float) -> None:
    """An evaluation of one world, where the episode unlocks three."""
    played = rollout(2**30, [WOOD, COW, TABLE], group="evaluation/0")
    item = played.model_copy(update={"rollout_id": f"run/evaluation/{iteration}/0", "iteration": iteration})
    write_rollouts(run.rollouts_file(f"evaluation_{iteration}"), [item])
    run.append_metrics({"kind": "evaluation", "iteration": iteration, "eval/outcome_reward": outcome})


def checkpoint(run: RunDirectory, iteration: int, size: int) -> None:
    folder = run.checkpoints / f"iteration_{iteration}"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * (size - 2))
    (folder / "state.json").write_text("{}")
