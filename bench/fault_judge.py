"""Whether a job of bench/study_faults.py is, in run directory and store, the one that it would have been."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from bench.fault_installation import Installation, Posted
from bench.fault_watch import Seen, plan_id
from shared_schemas.rollouts import Rollout, RolloutRequest
from shared_schemas.trajectory import PolicyLogprobs, Trajectory
from task_app.policies.openai import decision_seed
from trainer_backend import job_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.rundir.files import read_texts
from trainer_backend.rundir.layout import RunDirectory, open_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.rollout_index import rollout_files
from trainer_backend.rundir.spool import read_ledger
from trainer_backend.rundir.state import read_status
from trainer_backend.store import reads_rollouts
from trainer_backend.store.database import Store, open_store
from trainer_backend.store.metrics import list_numbers
from trainer_backend.store.rows import RolloutRow

# What rows of metrics say of rollouts that were begun and not finished, by cause.
_LOSSES = "rollout/failure/"


def judge(
    place: Installation, job: Mapping[str, Any], posts: Sequence[Posted], iterations: int, seen: Seen
) -> None:
    """
    Args:
        job: as the service tells of it.
        posts: of that job; the last one after its end.
    """
    seen.hold(f"succeeded, and not {job['state']}: {job['detail']}", holds=job["state"] == "succeeded")
    seen.hold("posted again it is the same job", holds={post.job_id for post in posts} == {job["id"]})
    seen.hold("and no second one", holds=posts[-1].code == 200)
    seen.hold(f"no such answers: {place.refusals}", holds=not place.refusals)
    seen.hold("no process of the job outlives it", holds=not place.left_behind())
    if job["state"] != "succeeded":
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
    """Check that the iteration has what kills found of it, but for that of weights that no checkpoint held.

    Where these were lost it has been set aside. Its times tell an episode from one that was played anew.
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
    """The policy versions that sampled its tokens."""
    steps = () if rollout.trajectory is None else rollout.trajectory.steps
    calls = [step.policy_logprobs for step in steps if isinstance(step.policy_logprobs, PolicyLogprobs)]
    return {version for call in calls for _, version in call.versions}


def judge_stage(
    run: RunDirectory, stage: str, planned: Sequence[RolloutRequest], seen: Seen
) -> list[Rollout]:
    """Check that every planned rollout is there once, and return what is there."""
    stored = read_rollouts(run.rollouts_file(stage))
    names = sorted(plan_id(item.rollout_id) for item in planned)
    seen.hold(f"{stage}: planned", holds=sorted(plan_id(item.rollout_id) for item in stored) == names)
    requests = {plan_id(item.rollout_id): item for item in planned}
    for item in stored:
        name = plan_id(item.rollout_id)
        if item.trajectory is None:
            seen.counts["failed_for_good"] += 1
            seen.hold(f"{stage}: failed, and no word of it", holds=item.failure is not None)
        else:
            judge_episode(stage, item.trajectory, requests.get(name), seen)
    return stored


def judge_episode(stage: str, played: Trajectory, asked: RolloutRequest | None, seen: Seen) -> None:
    """Check that the episode has the planned world and seeds."""
    if asked is None:
        return  # not planned at all: said already
    sampling = played.steps[0].sampling
    drawn = None if sampling is None else sampling.seed
    wanted = None if stage == "warmup" else decision_seed(asked.policy.seed, 1)  # a teacher has none
    seen.hold(f"{stage}: seed of the world", holds=played.seed == asked.start.seed)
    seen.hold(f"{stage}: seed of the sampler", holds=drawn == wanted)


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
    written = Counter(
        (file.name, item.rollout_id, item.status)
        for file in rollout_files(run.path)
        for item in read_rollouts(file.path)
    )
    rows = every_rollout(store, job_id)
    seen.hold(
        "the store's rollouts",
        holds=Counter((row.file, row.rollout_id, row.status) for row in rows) == written,
    )


def every_rollout(store: Store, job_id: str) -> list[RolloutRow]:
    page = reads_rollouts.rollouts(store, job_id, limit=200)
    rows = list(page.items)
    while page.cursor is not None:
        page = reads_rollouts.rollouts(store, job_id, cursor=page.cursor, limit=200)
        rows += page.items
    return rows
