"""Watches one job of bench/study_faults.py from its POST to its end, kills its processes, and judges it.

`Watch` kills processes at the planned times. `judge` compares the run directory and the store with those of
the same run without faults.
"""

import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import SecretStr

from bench.fault_installation import OF_A_JOB, PATIENCE_S, Installation, Kind, Posted
from shared_schemas.rollouts import Rollout, RolloutRequest
from shared_schemas.trajectory import PolicyLogprobs
from task_app.policies.openai import decision_seed
from trainer_backend import job_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.rundir.checkpoint_paths import STATE_FILE, latest_checkpoint
from trainer_backend.rundir.files import read_texts
from trainer_backend.rundir.layout import RunDirectory, open_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.rollout_index import rollout_files
from trainer_backend.rundir.spool import plan_id, read_ledger
from trainer_backend.rundir.state import RunState, read_state, read_status
from trainer_backend.store import reads_rollouts
from trainer_backend.store.database import Store, open_store
from trainer_backend.store.metrics import list_numbers
from trainer_backend.store.rows import ENDED

# Seconds between two looks at files, two requests to the service, and two requests while it does not answer.
_LOOK_S, _ASK_S, _SILENT_S = 0.02, 0.5, 0.1
# Of the kills before the run starts, half come within _POSTING_S after the POST, half within _STARTING_S.
_STARTING_S, _POSTING_S = 6.0, 0.04


class Fault(NamedTuple):
    """A kill `delay_s` after the end of `iteration`; 0 stands for the start of the run, -1 for the POST."""

    iteration: int
    delay_s: float
    kind: Kind


class Kept(NamedTuple):
    """A finished rollout that a kill found on disk, the version of the newest checkpoint at that time, and
    whether newer weights were lost with the killed process."""

    rollout: Rollout
    saved_version: int
    weights_lost: bool


@dataclass
class Seen:
    """The events of one job, and its violated promises.

    Attributes:
        kills: number by kind of process and stage, as `job in collect`.
        losses: number of rollouts that were begun and had to be requested again, by cause.
        recovery_s: by kind, seconds from a kill to the first new rollout on disk, for a learner or gateway
            after its successor has started. A kill is left out if another kill came before that rollout. So
            is the database, for which no rollout waits.
        answers_s: by kind, seconds until the service answers from its store again.
        kept: by planned id, finished rollouts that kills found; each episode once, as the last kill found it.
        ages: the numbers of versions by which sampling policies lagged behind the policies in training.
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
    """A kill from which the job has not recovered. `lines` counts the rollouts in each spool, at the kill or
    when the successor was first seen; `without` has the processes of this kind before the kill."""

    kind: Kind
    at_s: float
    lines: dict[str, int]
    without: set[int] | None = None


def drawn_faults(
    draws: random.Random, kinds: Sequence[Kind], *, iterations: int, iteration_s: float
) -> list[Fault]:
    """Draw one fault of each kind at random times of a job; return them in order of time."""
    chosen = list(kinds)
    draws.shuffle(chosen)
    moments = []
    for _ in chosen:
        iteration = draws.randrange(-1, iterations)
        most_s = iteration_s if iteration >= 0 else draws.choice((_POSTING_S, _STARTING_S))
        moments.append((iteration, draws.uniform(0.0, most_s)))
    return [Fault(*moment, kind) for moment, kind in zip(sorted(moments), chosen, strict=True)]


class Watch:
    """Watches one job from its POST on, and kills processes."""

    def __init__(self, place: Installation, faults: Sequence[Fault], seen: Seen) -> None:
        self._place, self._faults, self._seen = place, list(faults), seen
        self._reached_s = {-1: time.monotonic()}
        self._wound: Wound | None = None
        self._silent: tuple[Kind, float] | None = None
        self._asked_s = 0.0

    def until_it_ended(self) -> dict[str, Any] | None:
        """Return the service's view of the ended job; None if the job did not end in time."""
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
        """Return the run directory; None until it exists."""
        return next((path.parent for path in self._place.runs.glob("*/run.json")), None)

    def _state(self) -> RunState | None:
        run = self._run()
        return None if run is None else read_state(run)

    def _note_progress(self) -> None:
        now, state = time.monotonic(), self._state()
        if state is not None and state.stage:
            for iteration in range(state.iteration + 1):
                self._reached_s.setdefault(iteration, now)
        if (wound := self._wound) is None:
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
        """Return the service's current view of the only job; None if there is no answer or no job."""
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
        reached_s = self._reached_s.get(fault.iteration, math.inf)
        return time.monotonic() - reached_s >= fault.delay_s and self._place.is_there(fault.kind)

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
        """Return the job's current stage in one word."""
        process, state = self._place.job_process(), self._state()
        if process is None:
            return "queue" if state is None else "restart"
        if state is None or state.pid != process.pid:
            return "start"
        return (state.stage or state.state).partition(" ")[0]

    def _spools(self) -> dict[str, list[bytes]]:
        """Return, for each spool, the lines of the current rollouts."""
        paths = self._place.runs.glob("*/rollouts/*.spool.jsonl")
        return {path.name: read_texts(path)[1:] for path in paths}

    def _lines(self) -> dict[str, int]:
        return {name: len(lines) for name, lines in self._spools().items()}

    def _keep_in_mind(self, *, weights_lost: bool) -> None:
        """Note the rollouts in the spools: they have finished, and their iterations must learn from them."""
        saved_version = self._saved_version()
        for name, lines in self._spools().items():
            if name.startswith("iteration_"):
                for line in lines:
                    rollout = Rollout.model_validate_json(line)
                    kept = self._seen.kept[plan_id(rollout.rollout_id)]
                    kept[:] = [one for one in kept if one.rollout.trajectory != rollout.trajectory]
                    kept.append(Kept(rollout, saved_version, weights_lost))

    def _saved_version(self) -> int:
        """Return the version of the newest checkpoint; look again if a newer one replaces it."""
        run = self._run()
        while run is not None and (newest := latest_checkpoint(run / "checkpoints")) is not None:
            with suppress(OSError):
                return int(json.loads((newest / STATE_FILE).read_text())["policy_version"])
        return -1


# Beginning of the metrics that count rollouts which were begun and not finished; the cause follows.
_LOSSES = "rollout/failure/"


def judge(
    place: Installation, job: Mapping[str, Any], posts: Sequence[Posted], iterations: int, seen: Seen
) -> None:
    """Check a job as the service reports it; `posts` are all its posts, the last of them after its end."""
    has_succeeded = job["state"] == "succeeded"
    seen.hold(f"succeeded, and not {job['state']}: {job['detail']}", holds=has_succeeded)
    seen.hold("posted again it is the same job", holds={post.job_id for post in posts} == {job["id"]})
    seen.hold("and no second one", holds=posts[-1].code == 200)
    seen.hold(f"no such answers: {place.refusals}", holds=not place.refusals)
    seen.hold("no process of the job outlives it", holds=not place.left_behind())
    if not has_succeeded:
        return
    run = open_run(Path(job["run_dir"]))
    seen.hold("one run directory", holds=len(list(place.runs.glob("*/run.json"))) == 1)
    judge_run(run, iterations, seen)
    judge_metrics(run, place, job["id"], seen)
    store = open_store(place.database.url)
    try:
        judge_store(run, store, job["id"], seen)
    finally:
        store.close()


def judge_run(run: RunDirectory, iterations: int, seen: Seen) -> None:
    """Check the run directory: every iteration once, every planned rollout once."""
    every, state = list(range(1, iterations + 1)), read_status(run.path).state
    rows = [(row["kind"], row["iteration"]) for row in run.metrics()]
    seen.counts["starts"] = state.starts if state is not None else 0
    seen.hold("ended", holds=state is not None and (state.state, state.iteration) == ("ended", every[-1]))
    seen.hold("one row an iteration", holds=[n for kind, n in rows if kind == "iteration"] == every)
    seen.hold("both evaluations", holds=[n for kind, n in rows if kind == "evaluation"] == [0, every[-1]])
    ledger = read_ledger(run.path)
    consumed = Counter(plan_id(name) for line in ledger for name in line.rollout_ids)
    seen.hold("one line of the ledger an iteration", holds=[line.iteration for line in ledger] == every)
    seen.hold("no rollout twice in the ledger", holds=set(consumed.values()) == {1})
    seen.counts["trained"] = consumed.total()
    planner = job_parts.planner(run.job(), "any", Inference("http://any", "any/actor", SecretStr("any")))
    judge_stage(run, "warmup", planner.warmup(), seen)
    for number in (0, every[-1]):
        judge_stage(run, f"evaluation_{number}", planner.evaluation(str(number)), seen)
    version = 0
    for line in ledger:
        stage = f"iteration_{line.iteration}"
        stored = judge_stage(run, stage, planner.training(line.iteration), seen)
        finished = [item for item in stored if item.trajectory is not None]
        names = sorted(plan_id(item.rollout_id) for item in finished)
        seen.hold(f"{stage}: learned", holds=sorted(map(plan_id, line.rollout_ids)) == names)
        ages = {version - sampler for item in finished for sampler in samplers(item)}
        seen.ages |= ages
        bound = range(planner.table.max_staleness + 1)
        seen.hold(f"{stage}: tokens {sorted(ages)} versions old", holds=ages <= set(bound))
        judge_kept(run, stored, stage, seen)
        version = line.policy_version


def judge_kept(run: RunDirectory, stored: Sequence[Rollout], stage: str, seen: Seen) -> None:
    """Check that an iteration has the rollouts that kills found, unless no checkpoint held their weights.

    If the weights were lost, the rollouts are set aside. Recorded times show whether an episode was repeated.
    """
    aside = [
        Rollout.model_validate_json(line)
        for path in run.rollouts.glob(f"{stage}.unused-*.jsonl")
        for line in read_texts(path)[1:]
    ]
    unused = [one for one in aside if all(one.trajectory != item.trajectory for item in stored)]
    seen.counts["set_aside"] += len(unused)
    for item in stored:
        name = plan_id(item.rollout_id)
        for kept in seen.kept.get(name, ()):
            played = kept.rollout.trajectory
            is_young = max(samplers(kept.rollout), default=-1) > kept.saved_version
            if played == item.trajectory:
                is_of_lost = is_young and kept.weights_lost
                seen.hold(f"{stage}: nothing of weights that were lost", holds=not is_of_lost)
                continue
            seen.hold(f"{stage}: kept, or of weights that no checkpoint held", holds=is_young)
            is_there = any(plan_id(one.rollout_id) == name and one.trajectory == played for one in unused)
            seen.hold(f"{stage}: kept, or set aside", holds=is_there)


def samplers(rollout: Rollout) -> set[int]:
    """Return the policy versions that sampled a rollout's tokens."""
    steps = () if rollout.trajectory is None else rollout.trajectory.steps
    calls = [step.policy_logprobs for step in steps if isinstance(step.policy_logprobs, PolicyLogprobs)]
    return {version for call in calls for _, version in call.versions}


def judge_stage(
    run: RunDirectory, stage: str, planned: Sequence[RolloutRequest], seen: Seen
) -> list[Rollout]:
    """Check that every planned rollout is there once, in its world, with its seeds; return all of them."""
    stored = read_rollouts(run.rollouts_file(stage))
    names = sorted(plan_id(item.rollout_id) for item in planned)
    seen.hold(f"{stage}: planned", holds=sorted(plan_id(item.rollout_id) for item in stored) == names)
    requests = {plan_id(item.rollout_id): item for item in planned}
    for item in stored:
        played, request = item.trajectory, requests.get(plan_id(item.rollout_id))
        if played is None:
            seen.counts["failed_for_good"] += 1
            seen.hold(f"{stage}: failed, and no word of it", holds=item.failure is not None)
        elif request is not None:  # a rollout without a plan is reported above
            sampling = played.steps[0].sampling
            drawn = None if sampling is None else sampling.seed
            planned_seed = (
                None if stage == "warmup" else decision_seed(request.policy.seed, 1)
            )  # no teacher's
            seen.hold(f"{stage}: seed of the world", holds=played.seed == request.start.seed)
            seen.hold(f"{stage}: seed of the sampler", holds=drawn == planned_seed)
    return stored


def judge_metrics(run: RunDirectory, place: Installation, job_id: str, seen: Seen) -> None:
    """Check that GET /jobs/{id}/metrics equals metrics.jsonl, each iteration once."""
    rows = run.metrics()
    for kind in ("iteration", "evaluation"):
        written: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for row in rows:
            for name, value in list_numbers(row) if row["kind"] == kind else ():
                written[name].append((row["iteration"], value))
        found = place.ask(f"/jobs/{job_id}/metrics", kind=kind, points="5000")
        told = {
            name: list(zip(curve["iterations"], curve["values"], strict=True))
            for name, curve in found["series"].items()
        }
        seen.hold(f"the store's metrics of kind {kind}", holds=told == dict(written))
    for name, value in (item for row in rows for item in list_numbers(row)):
        if name.startswith(_LOSSES):
            seen.losses[name.removeprefix(_LOSSES)] += int(value)
        elif name == "recovery/rollouts_reused":
            seen.counts["reused"] += int(value)


def judge_store(run: RunDirectory, store: Store, job_id: str, seen: Seen) -> None:
    """Check that the store has each rollout of the run directory once."""
    files = ((file.name, item) for file in rollout_files(run.path) for item in read_rollouts(file.path))
    written = Counter((name, item.rollout_id, item.status) for name, item in files)
    page = reads_rollouts.rollouts(store, job_id, limit=200)
    rows = list(page.items)
    while page.cursor is not None:
        page = reads_rollouts.rollouts(store, job_id, cursor=page.cursor, limit=200)
        rows += page.items
    kept = Counter((row.file, row.rollout_id, row.status) for row in rows)
    seen.hold("the store's rollouts", holds=kept == written)
