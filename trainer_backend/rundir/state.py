"""state.json: what a run is doing, for whoever watches it. Written by the process that trains, for others to
read; nothing of the run depends on it, and the lock beside it says whether that process still lives."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from shared_schemas.json_text import encodable
from trainer_backend.rundir.lock import Holder, holder
from trainer_backend.rundir.whole_files import replace_text

FILE = "state.json"
StateName = Literal["starting", "training", "evaluating", "ended", "stopped", "failed"]
# After these the process ends.
FINAL: frozenset[StateName] = frozenset({"ended", "stopped", "failed"})


@dataclass(frozen=True, slots=True)
class RunState:
    """
    Attributes:
        pid: the process that wrote it.
        iteration: the last that is finished; 0 before the first.
        stage: what is under way, as the terminal names it, such as `collect 3`; empty between stages.
        done, total: how far that has come.
        code, detail: of the error, where it failed; of JobError and the like, else empty.
        since: when `state` became what it is; UTC, ISO 8601.
        starts: how often the run was begun or continued, this time counted.
        run_id: that task apps know this start by; until they are asked for anything, that of the start before
            (empty: it is the first).
    """

    state: StateName
    pid: int
    iteration: int = 0
    stage: str = ""
    done: int = 0
    total: int = 0
    code: str = ""
    detail: str = ""
    since: str = ""
    starts: int = 1
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class Watched:
    """A run as it is seen from outside.

    Attributes:
        state: the last that was written; None: by no version that writes one.
        holder: who trains it now; None: nobody.
    """

    state: RunState | None
    holder: Holder | None

    @property
    def interrupted(self) -> bool:
        """Its process is gone without a word: killed, or the machine went down."""
        return self.holder is None and self.state is not None and self.state.state not in FINAL


def watch(folder: Path) -> Watched:
    """What a run directory says of its run, and whether anybody is there to say it."""
    found = holder(folder)  # first: a process that ends in between has then written its last state
    return Watched(read_state(folder), found)


def read_state(folder: Path) -> RunState | None:
    """The last state that was written; None where there is none, or none that can be read."""
    try:
        found = json.loads((folder / FILE).read_bytes())
        values = {field.name: found[field.name] for field in fields(RunState)}
        texts = {name: encodable(value) for name, value in values.items() if isinstance(value, str)}
        state = RunState(**{**values, **texts})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if state.state in get_args(StateName) else None


def write_state(folder: Path, state: RunState) -> None:
    """
    Raises:
        RunNotWritten: the disk is full, or refuses.
    """
    # Each second, for those who watch: not worth a wait for the disk.
    replace_text(folder / FILE, json.dumps(asdict(state)), durable=False)
