"""Looks at a job of bench/study_faults.py from its post to its end, kills when it is time, takes times."""

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.fault_installation import OF_A_JOB, PATIENCE_S, Installation, Kind
from shared_schemas.rollouts import Rollout
from trainer_backend.rundir.checkpoint_paths import STATE_FILE, latest_checkpoint
from trainer_backend.rundir.files import read_texts
from trainer_backend.rundir.state import RunState, read_state
from trainer_backend.store.rows import ENDED

# Between two looks at files; between two questions to the service, also to one that did not answer.
_LOOK_S, _ASK_S, _SILENT_S = 0.02, 0.5, 0.1
# A start takes some seconds; half the kills before it is over meet the post itself.
_STARTING_S, _POSTING_S = 6.0, 0.04


class Fault(NamedTuple):
    """A fault at this time after an iteration's end; -1: during the post, 0: during the run itself."""

    iteration: int
    delay_s: float
    kind: Kind


class Kept(NamedTuple):
    """A finished rollout that a kill found on disk.

    Attributes:
        saved_version: that the newest checkpoint held then.
        weights_lost: whether younger weights than that were lost with the killed process.
    """

    rollout: Rollout
    saved_version: int
    weights_lost: bool


@dataclass
class Seen:
    """The events of one job, and its violated promises.

    Attributes:
        kills: by kind and stage, `job in collect`.
        losses: rollouts that were begun and asked for again, by cause.
        recovery_s: by kind, from a kill to the first new rollout on disk (of a learner or gateway: the first
            one once its successor runs); not where another kill came before that, and not of the database,
            which no rollout waits for.
        answers_s: by kind, until the service answers again out of its store.
        kept: what kills found finished, by its planned id; each episode once, as the last kill found it.
        ages: how many versions the samplers of the tokens lay behind the policies that learned from them.
    """

    counts: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    answers_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    kept: dict[str, list[Kept]] = field(default_factory=lambda: defaultdict(list))
    ages: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def hold(self, what: str, *, holds: bool) -> None:
        if not holds and what not in self.wrong:
            self.wrong.append(what)


@dataclass
class Wound:
    """A kill before recovery.

    Attributes:
        lines: the number of rollouts in each spool, at the kill or when the successor was first seen.
        without: the processes of this kind that are no successor.
    """

    kind: Kind
    at_s: float
    lines: dict[str, int]
    without: set[int] | None = None


def drawn_faults(
    draws: random.Random, kinds: Sequence[Kind], *, iterations: int, iteration_s: float
) -> list[Fault]:
    """One fault of each kind at random times of a job, in order."""
    chosen = list(kinds)
    draws.shuffle(chosen)
    moments = []
    for _ in chosen:
        iteration = draws.randrange(-1, iterations)
        most_s = iteration_s if iteration >= 0 else draws.choice((_POSTING_S, _STARTING_S))
        moments.append((iteration, draws.uniform(0.0, most_s)))
    return [Fault(*moment, kind) for moment, kind in zip(sorted(moments), chosen, strict=True)]


class Watch:
    """Watches one job from its post on."""

    def __init__(self, place: Installation, faults: Sequence[Fault], seen: Seen) -> None:
        self._place, self._faults, self._seen = place, list(faults), seen
        self._reached_s = {-1: time.monotonic()}
        self._wound: Wound | None = None
        self._silent: tuple[Kind, float] | None = None
        self._asked_s = 0.0

    def until_it_ended(self) -> dict[str, Any] | None:
        """The service's view of the ended job; None if it did not end in time."""
        until_s = self._reached_s[-1] + PATIENCE_S
        while time.monotonic() < until_s:
            self._seen.counts.update(f"{kind}_ended_by_itself" for kind in self._place.keep_up())
            self._note_progress()
            if self._faults and self._is_due(self._faults[0]):
                self._strike(self._faults.pop(0))
            if time.monotonic() - self._asked_s >= (_ASK_S if self._silent is None else _SILENT_S):
                job = self._asked()
                if job is not None and job["state"] in (*ENDED, "paused"):
                    self._seen.counts["too_late"] = len(self._faults)
                    return job
            time.sleep(_LOOK_S)
        return None

    def _run(self) -> Path | None:
        """The run directory, once it exists."""
        return next((path.parent for path in self._place.runs.glob("*/run.json")), None)

    def _state(self) -> RunState | None:
        run = self._run()
        return None if run is None else read_state(run)

    def _note_progress(self) -> None:
        now, state = time.monotonic(), self._state()
        if state is not None and state.stage:
            for iteration in range(state.iteration + 1):
                self._reached_s.setdefault(iteration, now)
        wound = self._wound
        if wound is None:
            return
        lines = self._lines()
        if wound.without is not None:
            if not self._pids(wound.kind) - wound.without:
                return
            wound.lines, wound.without = lines, None
        if any(n > wound.lines.get(name, 0) for name, n in lines.items()):
            self._seen.recovery_s[wound.kind].append(round(now - wound.at_s, 2))
            self._wound = None

    def _pids(self, kind: Kind) -> set[int]:
        return {process.pid for process in self._place.processes(kind)}

    def _asked(self) -> dict[str, Any] | None:
        """The service's current view of the only job."""
        self._asked_s = time.monotonic()
        answer = self._place.ask("/jobs")
        if answer is None:
            return None
        if self._silent is not None:
            kind, at_s = self._silent
            self._seen.answers_s[kind].append(round(time.monotonic() - at_s, 2))
            self._silent = None
        self._seen.hold("one job at any time", holds=len(answer["jobs"]) <= 1)
        return next(iter(answer["jobs"]), None)

    def _is_due(self, fault: Fault) -> bool:
        reached_s = self._reached_s.get(fault.iteration)
        if reached_s is None or time.monotonic() - reached_s < fault.delay_s:
            return False
        return self._place.is_there(fault.kind)

    def _strike(self, fault: Fault) -> None:
        kind = fault.kind
        self._seen.kills[f"{kind} in {self._stage()}"] += 1
        self._seen.counts[f"{kind}_killed"] += 1
        before = self._pids(kind) if kind in OF_A_JOB else None
        at_s = time.monotonic()
        self._place.kill(kind)
        if kind != "database":
            self._seen.counts["overtaken"] += self._wound is not None
            self._wound = Wound(kind, at_s, self._lines(), before)
        self._keep_in_mind(weights_lost=kind in ("service", "job", "learner"))
        self._place.start(kind)
        if kind in ("service", "database"):
            self._silent, self._asked_s = (kind, at_s), 0.0

    def _stage(self) -> str:
        """The job's current stage in a word."""
        process, state = self._place.job_process(), self._state()
        if process is None:
            return "queue" if state is None else "restart"
        if state is None or state.pid != process.pid:
            return "start"
        return (state.stage or state.state).partition(" ")[0]

    def _spools(self) -> dict[str, list[bytes]]:
        """The current rollouts of each spool."""
        run = self._run()
        paths = [] if run is None else run.glob("rollouts/*.spool.jsonl")
        return {path.name: read_texts(path)[1:] for path in paths}

    def _lines(self) -> dict[str, int]:
        return {name: len(lines) for name, lines in self._spools().items()}

    def _keep_in_mind(self, *, weights_lost: bool) -> None:
        """What stands in a spool has finished, and must be what its iteration learns from."""
        saved_version = self._saved_version()
        for name, lines in self._spools().items():
            if name.startswith("iteration_"):
                for line in lines:
                    rollout = Rollout.model_validate_json(line)
                    kept = self._seen.kept[plan_id(rollout.rollout_id)]
                    kept[:] = [one for one in kept if one.rollout.trajectory != rollout.trajectory]
                    kept.append(Kept(rollout, saved_version, weights_lost))

    def _saved_version(self) -> int:
        """Of the newest checkpoint; one that a younger one replaces meanwhile is looked for again."""
        run = self._run()
        while run is not None and (newest := latest_checkpoint(run / "checkpoints")) is not None:
            with suppress(OSError):
                return int(json.loads((newest / STATE_FILE).read_text())["policy_version"])
        return -1


def plan_id(rollout_id: str) -> str:
    """Without the id of the start, and without the number of an attempt."""
    return rollout_id.partition("/")[2].partition(":")[0]
