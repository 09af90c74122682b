"""The rows of a job: read, checked, and parted into those to train on and those held out.

Whole in memory: a run goes through all of them in shuffled epochs anyway, and what is wrong with the last row
is told before the first is played.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer_backend.core.seeds import derived_seed
from trainer_backend.data.layout import files_of
from trainer_backend.data.records import read_records
from trainer_backend.data.rows import Parsed, Row, parse_row
from trainer_backend.errors import DataError, JobError
from trainer_backend.job.rollout_table import DataTable
from trainer_backend.job.schema import JobConfig

_SHARES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of one split, in the order of their files.

    Attributes:
        name: such as `train of data/gsm8k`.
        rows: each id once.
        used: columns that they were read from, by what they became.
        unread: columns that nothing reads.
    """

    name: str
    rows: tuple[Row, ...]
    used: Mapping[str, str]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DataSet:
    """Rows to train on, and those that every evaluation plays.

    Attributes:
        training: in the order of their files.
        evaluation: the same for every job with this data and held_out_seed.
        told: a line each, for a person.
        by_id: those to train on; held-out ones may have the same ids, as many sets count anew in each split.
    """

    training: tuple[Row, ...]
    evaluation: tuple[Row, ...]
    told: tuple[str, ...] = ()
    by_id: Mapping[str, Row] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_id", {row.id: row for row in self.training})


def data_of(job: JobConfig) -> DataSet | None:
    """The rows that a job names; None where its environment makes its own worlds."""
    data = None if job.data is None else read_data(job.data, instances=job.evaluation.instances)
    if job.multi_turn.interaction_config_path is not None and not _has_interactions(job.data, data):
        told = (
            "no row has interaction_kwargs"
            if data is not None
            else "there is no [data] whose rows it answers"
        )
        raise JobError(
            f"the run would ignore it: {told}",
            where="multi_turn.interaction_config_path",
            hint="data.interaction names the interaction of rows that name none.",
        )
    return data


def _has_interactions(table: DataTable | None, data: DataSet | None) -> bool:
    if data is None or table is None:
        return False
    rows = (*data.training, *data.evaluation)
    return table.interaction is not None or any(row.interaction is not None for row in rows)


def read_data(table: DataTable, *, instances: int) -> DataSet:
    """Read the data set of a job.

    Args:
        instances: at most so many held-out rows are evaluated on (evaluation.instances).
    """
    split = read_split(table.path, table.split)
    if table.held_out_share is None:
        other = read_split(table.evaluation_path or table.path, table.held_out_split)
        training, held_out, splits = split.rows, other.rows, [split, other]
    else:
        training, held_out = _parted(split.rows, table.held_out_share, table.held_out_seed)
        splits = [split]
        for rows, what in ((training, "to train on"), (held_out, "to evaluate on")):
            if not rows:
                told_share = f"data.held_out_share = {table.held_out_share:g}"
                raise DataError(f"{told_share} leaves no row {what} of {len(split.rows)}", where=split.name)
    evaluation = chosen_instances(held_out, instances, table.held_out_seed)
    counts = (
        f"data: {len(training)} rows to train on, {len(evaluation)} of {len(held_out)} held-out rows played"
    )
    return DataSet(training, evaluation, (counts, *map(_told, splits), *_shared_prompts(training, held_out)))


def read_split(path: Path, split: str) -> Split:
    """The rows of one split.

    A row without an id of its own is called by its split and its number from 0 in it, such as `train/17`: the
    same for every format.
    """
    parsed: list[Parsed] = []
    places: dict[str, str] = {}
    unread: dict[str, None] = {}
    for file in files_of(path, split):
        for record in read_records(file):
            found = parse_row(record.columns, where=record.where, default_id=f"{split}/{len(parsed)}")
            if found.row.id in places:
                raise DataError(
                    f"id {found.row.id!r} is also that of {places[found.row.id]}; each row has its own",
                    where=record.where,
                )
            if parsed:
                _refuse_another_kind(found, parsed[0], record.where)
            places[found.row.id] = record.where
            unread |= dict.fromkeys(found.unread)
            parsed.append(found)
    if not parsed:
        raise DataError(f"split {split!r} has no rows", where=str(path))
    rows = tuple(item.row for item in parsed)
    return Split(f"{split} of {path}", rows, parsed[0].used, tuple(unread))


def _refuse_another_kind(found: Parsed, first: Parsed, where: str) -> None:
    """Rows that are read from other columns than the first: half a data set would mean something else."""
    if found.used == first.used:
        return
    for what in sorted({*found.used, *first.used}):
        here, there = found.used.get(what), first.used.get(what)
        if here != there:
            raise DataError(
                f"{what} comes from {here or 'nowhere'}, but in the first row from {there or 'nowhere'}; "
                "all rows of a split have the same columns",
                where=where,
            )


def _parted(rows: Sequence[Row], share: float, seed: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """To train on, and held out: for each row a function of its id alone, so that a longer file of the same
    rows holds out the same ones and more."""
    held_out = {
        row.id for row in rows if derived_seed(seed, "held out", row.id, below=_SHARES) < share * _SHARES
    }
    return (
        tuple(row for row in rows if row.id not in held_out),
        tuple(row for row in rows if row.id in held_out),
    )


def chosen_instances(rows: Sequence[Row], instances: int, seed: int) -> tuple[Row, ...]:
    """So many of the rows, or all: by a hash of their ids, since files are often sorted."""
    order = sorted(rows, key=lambda row: derived_seed(seed, "instances", row.id))
    return tuple(order[:instances])


def _told(split: Split) -> str:
    used = ", ".join(f"{what} from {place}" for what, place in split.used.items())
    unread = f"; not read: {', '.join(split.unread)}" if split.unread else ""
    return f"{split.name}: {len(split.rows)} rows, {used}{unread}"


def _shared_prompts(training: Sequence[Row], held_out: Sequence[Row]) -> list[str]:
    """A line where a held-out row asks what a training row asks: it is held out in name only."""
    known = {_key(row): row.id for row in training}
    shared = [(row.id, known[_key(row)]) for row in held_out if _key(row) in known]
    if not shared:
        return []
    example = " = ".join(shared[0])
    return [f"warning: {len(shared)} held-out rows ask what a training row asks ({example})"]


def _key(row: Row) -> tuple[object, ...]:
    messages = row.prompt if isinstance(row.prompt, str) else tuple(m["content"] for m in row.prompt)
    return messages, row.document
