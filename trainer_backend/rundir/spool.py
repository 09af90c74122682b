"""The finished rollouts of a stage, on disk as they come and before a task app is told to forget them.

    rollouts/iteration_n.spool.jsonl     a header, then a rollout a line

After a kill they stand for their requests, if the stage asks the same policy for the same again: the header
says what was asked for and of which weights. Failed rollouts are not in it; they are planned again.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared_schemas.rollouts import Rollout, RolloutRequest
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.files import (
    append_line,
    append_text,
    each_line,
    read_lines,
    read_texts,
    replace_lines,
    writing,
)

_ENDING = ".spool.jsonl"


class Spool:
    """The finished rollouts of one stage. Make it with `Spool.begun`."""

    def __init__(self, path: Path, header: Mapping[str, Any], found: Mapping[str, Rollout]) -> None:
        self.path, self._header, self._found = path, header, found
        self._is_there = bool(found)

    @classmethod
    def begun(
        cls, path: Path, requests: Sequence[RolloutRequest], *,
        policy_version: int, gateway_url: str | None, tell: Callable[[str], None],
    ) -> "Spool":  # fmt: skip
        """The spool of a stage that begins, with what an earlier start of the same has left in it.

        Args:
            path: `RunDirectory.spool_file` of the stage.
            requests: that the stage begins with; others follow from what comes of them.
            policy_version: that will serve them.
            gateway_url: where that is; another one in every start.
            tell: is given a sentence about what was left; what cannot be used is set aside.

        Raises:
            RunNotWritten: the disk is full, or refuses.
        """
        header = {"plan": plan_digest(requests, gateway_url), "policy_version": policy_version}
        rows = read_lines(path)
        if rows and rows[0] == header:
            found = {planned_id(item.rollout_id): item for item in _rollouts_in(path)}
            if found:
                tell(f"{len(found)} rollouts of {path.name} were collected before, and are used")
            return cls(path, header, found)
        if len(rows) > 1:
            set_aside(path, tell, why="for another plan, or of other weights")
        return cls(path, header, {})

    def standing_for(self, requests: Iterable[RolloutRequest]) -> dict[str, Rollout]:
        """Return rollouts of an earlier start by the id of the request that each answers, with its ids.

        A task app has logged it under the id of an earlier start, in which only the run's id was another.
        """
        found = ((request, self._found.get(planned_id(request.rollout_id))) for request in requests)
        return {request.rollout_id: _named(old, request) for request, old in found if old is not None}

    def keep(self, rollout: Rollout) -> None:
        """Add one that is finished. A kill cannot lose it; after a power cut it may be asked for again.

        Raises:
            RunNotWritten: the disk is full, or refuses.
        """
        if not self._is_there:
            replace_lines(self.path, [self._header], durable=False)
            self._is_there = True
        append_text(self.path, rollout.model_dump_json(exclude_unset=True), durable=False)

    def remove(self) -> None:
        """Delete the spool, after its rollouts are stored for good."""
        with writing(self.path):
            self.path.unlink(missing_ok=True)


def plan_digest(requests: Iterable[RolloutRequest], gateway_url: str | None) -> str:
    """The same for two plans that ask for the same, whenever, by whatever gateway. Pure."""
    digest = blake2b(digest_size=16)
    for request in requests:
        digest.update(json.dumps(_asked_for(request, gateway_url), sort_keys=True).encode())
    return digest.hexdigest()


def tidy_spools(folder: Path, iteration: int, tell: Callable[[str], None]) -> None:
    """Before a run goes on from the end of an iteration: of its spools only that iteration's evaluation and
    the next iteration's are of weights that are still there.

    Args:
        folder: rollouts/ of the run.
        iteration: -1: the run begins anew.

    Raises:
        RunNotWritten: the disk refuses.
    """
    for path in sorted(folder.glob(f"*_*{_ENDING}")):
        stage, _, digits = path.name.removesuffix(_ENDING).rpartition("_")
        number = int(digits) if digits.isdecimal() else -1
        usable = {"iteration": iteration + 1, "evaluation": iteration}.get(stage)
        if usable is None or number == usable:
            continue
        if number > usable or iteration < 0:
            set_aside(path, tell, why="of weights that no checkpoint holds")
        else:  # it was stored for good, and its remover killed
            with writing(path):
                path.unlink()


def set_aside(path: Path, tell: Callable[[str], None], *, why: str) -> None:
    """Rename a spool that cannot be used."""
    count, number = max(len(read_texts(path)) - 1, 0), 1
    while (aside := path.with_name(path.name.replace(_ENDING, f".unused-{number}.jsonl"))).exists():
        number += 1
    with writing(path):
        path.rename(aside)
    tell(f"{count} rollouts of {path.name} were collected {why}; they are left in {aside.name}, unused")


def _asked_for(request: RolloutRequest, gateway_url: str | None) -> dict[str, Any]:
    """Return a request without the parts that differ in every start."""
    wire = request.model_dump(mode="json", exclude={"run_id": True, "policy": {"inference_key"}})
    wire["rollout_id"] = planned_id(request.rollout_id)
    config = wire["policy"]["config"]
    wire["policy"]["config"] = {
        key: value for key, value in config.items() if (key, value) != ("inference_url", gateway_url)
    }
    return wire


def _named(rollout: Rollout, request: RolloutRequest) -> Rollout:
    """With the ids that the request would have given it; so what sorts by ids sorts as in an unbroken run."""
    attempt = f":{rollout.attempt}" if rollout.attempt else ""
    parent, trajectory = request.start.parent_rollout_id, rollout.trajectory
    if parent is not None and trajectory is not None:
        trajectory = trajectory.model_copy(update={"parent_rollout_id": parent})
    return rollout.model_copy(
        update={
            "rollout_id": f"{request.rollout_id}{attempt}",
            "run_id": request.run_id,
            "group_id": request.group_id,
            "trajectory": trajectory,
        }
    )


def _rollouts_in(path: Path) -> list[Rollout]:
    """Return the rollouts after the header. An unreadable line is skipped; its rollout is requested again."""
    found = []
    for line in read_texts(path)[1:]:
        try:
            found.append(Rollout.model_validate_json(line))
        except ValidationError:
            continue
    return found


# ledger.jsonl lists the rollouts that each finished update has learned from; none is in it twice.

LEDGER_FILE = "ledger.jsonl"


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
    path, mine = folder / LEDGER_FILE, set[str]()
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
    """Return a rollout's id without start and attempt: `run.1/train/3/0/1:1` is train/3/0/1. Pure."""
    start, slash, path = rollout_id.partition("/")
    return (path if slash else start).partition(":")[0]


def learned_twice(planned: str, first: int, second: int) -> RunDirectoryError:
    """What the trainer refuses to write, and the store to read."""
    return RunDirectoryError(
        f"{LEDGER_FILE}: rollout {planned} was learned from in iterations {first} and {second}"
    )


def read_ledger(folder: Path) -> list[Consumed]:
    """All lines, oldest first; none of a run that an earlier version has trained."""
    return list(_lines(folder / LEDGER_FILE))


def forget_consumed_after(folder: Path, iteration: int) -> None:
    """Drop the lines of iterations that a resumed run will do again: their weights are gone."""
    lines = read_ledger(folder)
    if any(line.iteration > iteration for line in lines):
        replace_lines(
            folder / LEDGER_FILE,
            [asdict(line) for line in lines if line.iteration <= iteration],
            durable=True,
        )


def _lines(path: Path) -> Iterator[Consumed]:
    for row in each_line(path):
        if row.keys() >= {"iteration", "policy_version", "rollout_ids"}:
            yield Consumed(row["iteration"], row["policy_version"], tuple(row["rollout_ids"]))
