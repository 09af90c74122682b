"""ledger.jsonl: which rollouts each finished update has learned from. No planned one is in it twice."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.json_lines import append_line, each_line, replace_lines

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
    """On disk before this returns. All lines are looked through: 3 ms a hundred of 64 rollouts each.

    Raises:
        RunDirectoryError: it names a planned rollout twice, or one that an earlier line names: one episode
            would be learned from twice, whatever starts of the run have called it.
        RunNotWritten: the disk is full, or refuses.
    """
    path, mine = folder / FILE, set[str]()
    for planned in map(planned_id, consumed.rollout_ids):
        if planned in mine:
            raise learned_twice(planned, consumed.iteration, consumed.iteration)
        mine.add(planned)
    for line in _lines(path):
        for planned in map(planned_id, line.rollout_ids):
            if planned in mine:
                raise learned_twice(planned, line.iteration, consumed.iteration)
    append_line(path, asdict(consumed), durable=True)


def planned_id(rollout_id: str) -> str:
    """What was planned, in whichever start and attempt: `run.1/train/3/0/1:1` is train/3/0/1. Pure."""
    start, slash, path = rollout_id.partition("/")
    return (path if slash else start).partition(":")[0]


def learned_twice(planned: str, first: int, second: int) -> RunDirectoryError:
    """What the trainer refuses to write, and the store to read."""
    return RunDirectoryError(f"{FILE}: rollout {planned} was learned from in iterations {first} and {second}")


def read_ledger(folder: Path) -> list[Consumed]:
    """All lines, oldest first; none of a run that an earlier version has trained."""
    return list(_lines(folder / FILE))


def forget_consumed_after(folder: Path, iteration: int) -> None:
    """Drop the lines of iterations that a resumed run will do again: their weights are gone."""
    lines = read_ledger(folder)
    if any(line.iteration > iteration for line in lines):
        replace_lines(
            folder / FILE, [asdict(line) for line in lines if line.iteration <= iteration], durable=True
        )


def _lines(path: Path) -> Iterator[Consumed]:
    for row in each_line(path):
        if row.keys() >= {"iteration", "policy_version", "rollout_ids"}:
            yield Consumed(row["iteration"], row["policy_version"], tuple(row["rollout_ids"]))
