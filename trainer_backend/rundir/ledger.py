"""ledger.jsonl: which rollouts each finished update has learned from. None is in two lines."""

from dataclasses import asdict, dataclass
from pathlib import Path

from trainer_backend.rundir.json_lines import append_line, read_lines, replace_lines

FILE = "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class Consumed:
    """What one iteration's update learned from; nothing where every group was flat.

    Attributes:
        policy_version: that serves after it.
        rollout_ids: of the episodes that were given to the update: not those of flat groups that were left
            out, not branches, which are measured with and not trained.
    """

    iteration: int
    policy_version: int
    rollout_ids: tuple[str, ...]


def append_consumed(folder: Path, consumed: Consumed) -> None:
    """On disk before this returns.

    Raises:
        RunNotWritten: the disk is full, or refuses.
    """
    append_line(folder / FILE, asdict(consumed), durable=True)


def read_ledger(folder: Path) -> list[Consumed]:
    """All lines, oldest first; none of a run that an earlier version has trained."""
    rows, _ = read_lines(folder / FILE)
    return [
        Consumed(row["iteration"], row["policy_version"], tuple(row["rollout_ids"]))
        for row in rows
        if row.keys() >= {"iteration", "policy_version", "rollout_ids"}
    ]


def forget_consumed_after(folder: Path, iteration: int) -> None:
    """Drop the lines of iterations that a resumed run will do again: their weights are gone."""
    lines = read_ledger(folder)
    if any(line.iteration > iteration for line in lines):
        replace_lines(folder / FILE, [asdict(line) for line in lines if line.iteration <= iteration])
