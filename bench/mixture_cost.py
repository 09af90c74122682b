"""What a fixed policy beside the actor costs: choosing, telling apart and weighing; and its memory.

    python -m bench.mixture_cost [--limit 0.01] [--quick]

Two iterations of the demo's job, in groups of four siblings with `stepwise` in place of the critic, are
played from one short warm-up, three times: by the actor alone; with a
fixed policy of the same weights that takes the first of them; and with one that takes half of the rollouts.
Told is the trainer's CPU time a decision of each (a task app is another process, and plays the same). The
figure that is held against the limit: all that a mixture adds to an iteration, gone through again on the
rollouts of the last one, its least CPU time of some repeats as a share of that iteration's:

    choosing   planning the iteration's requests, less planning them for the actor alone
    looking    the same for a schedule that looks back, on a run of 1,000 iterations: all its rows are read
    apart      who sampled each rollout, and the metrics by policy
    weighing   weights of all sampled tokens by policy, and their metrics, less those of the actor alone

No weights move when another policy samples: both are loaded, and a request names its model. What does cost
is decoding two halves of a batch in two engines, where rollouts of one iteration are shared out: told, not
judged. The memory plans of the job without and with the fixed policy are printed; the weights planned for it
must be those of its folder.

Exit code 1 where the share is above the limit, or the plan is wrong.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from bench import kit
from bench.credit_share import decisions
from bench.demo_iteration import JOB, QUICK, SETTINGS, Watching
from bench.study_results import IN_GROUPS
from shared_schemas.rollouts import Rollout
from trainer_backend import job_parts, learner_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.core.segments import build_segments
from trainer_backend.job.load import load_job
from trainer_backend.job.mixture_table import AllocationTable, RolloutOnlyTable
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import ModelTable
from trainer_backend.learner.behaviour import mixture_metrics, weighed
from trainer_backend.learner.memory_plan import MemoryPlan, memory_plan
from trainer_backend.learner.stepping import Scored
from trainer_backend.run.iteration_metrics import metrics_by_policy
from trainer_backend.rundir.files import read_lines
from trainer_backend.rundir.layout import create_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.start import run_job

LIMIT = 0.01
LONG = 1_000  # iterations


@dataclass(frozen=True, slots=True)
class Played:
    """The iterations of a job.

    cpu_s: of the trainer's process, of each.
    decisions: of each.
    rollouts: of the last one.
    row: of metrics, of the last one.
    """

    job: JobConfig
    cpu_s: list[float]
    decisions: list[int]
    rollouts: list[Rollout]
    row: dict[str, Any]

    @property
    def milliseconds(self) -> float:
        """CPU milliseconds per decision."""
        return 1e3 * sum(self.cpu_s) / sum(self.decisions)


class EachIteration(Watching):
    """Records the CPU time of every iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.each_s: list[float] = []

    def metrics(self, row: dict[str, Any], line: str) -> None:
        super().metrics(row, line)
        if row["kind"] == "iteration":
            self.each_s.append(self.took_s)


def played(job: JobConfig, path: Path) -> Played:
    directory, watching = create_run(job, path), EachIteration()
    asyncio.run(run_job(job, directory, watching, resume=False))
    stored = [read_rollouts(file) for file in sorted(directory.iteration_files())]
    finished = [[item for item in rollouts if item.trajectory is not None] for rollouts in stored]
    counts = [decisions(items) for items in finished]
    row = next((row for row in reversed(directory.metrics()) if row["kind"] == "iteration"), {})
    return Played(job, watching.each_s, counts, (finished or [[]])[-1], row)


def with_twin(job: JobConfig, folder: Path, schedule: AllocationTable) -> JobConfig:
    twin = RolloutOnlyTable(model_path=folder)
    return job.model_copy(update={"rollout_only": (twin,), "rollout_allocation_schedule": schedule})


def added(found: Played) -> dict[str, float]:
    """CPU seconds that the mixture adds to the last iteration, by their cause."""
    job, rollouts = found.job, found.rollouts
    alone = job.model_copy(update={"rollout_only": (), "rollout_allocation_schedule": None})
    asked = Inference("http://127.0.0.1:9", f"{job.job.name}/actor", None)
    plan, plain = job_parts.planner(job, "run", asked), job_parts.planner(alone, "run", asked)
    adaptive = AllocationTable(type="adaptive", alpha_0=0.5, unit="rollout")
    learning = job.model_copy(update={"rollout_allocation_schedule": adaptive})
    requests, credits = plan.training(1), job_parts.credit(job).credit(rollouts).credits

    def apart() -> None:
        policies, schedule = job_parts.credit(job).policies, plan.allocation.schedule
        assert schedule is not None
        policies.by_actor(rollouts)
        metrics_by_policy(policies, requests, rollouts, credits, alpha=schedule.alpha_at(1))

    def looking_back(file: Path) -> None:
        planner = job_parts.planner(learning, "run", asked)
        allocation = planner.allocation.after(read_lines(file))
        replace(planner, allocation=allocation).training(LONG + 1)

    planned_s = kit.least(lambda: plain.training(1)).cpu_s
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "metrics.jsonl"
        rows = ({**found.row, "iteration": number} for number in range(1, LONG + 1))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        looking_s = kit.least(lambda: looking_back(file)).cpu_s - planned_s
    weighed, unweighed = (kit.least(lambda of=of: _weigh(of, rollouts)).cpu_s for of in (job, alone))
    return {
        "choosing": max(kit.least(lambda: plan.training(1)).cpu_s - planned_s, 0.0),
        "looking": max(looking_s, 0.0),
        "apart": kit.least(apart).cpu_s,
        "weighing": max(weighed - unweighed, 0.0),
    }


def _weigh(job: JobConfig, rollouts: Sequence[Rollout]) -> None:
    """With log-probs that are those of who sampled: how long it takes does not depend on them."""
    objectives = learner_parts.learner_config(job).objectives
    drafts = []
    for rollout in rollouts:
        assert rollout.trajectory is not None
        own = build_segments(rollout.trajectory.steps, rollout_id=rollout.rollout_id)
        name = str(rollout.trajectory.model).rpartition("/")[2]
        drafts += [Scored(part, policy=name if name in objectives else "actor") for part in own]
    proximal = [draft.segment.logprobs.tolist() for draft in drafts]
    mixture_metrics(objectives, weighed(drafts, proximal, objectives), {})


def main() -> int:
    options = kit.options(
        __doc__,
        ("--limit", LIMIT, "most of an iteration's CPU time"),
        ("--quick", False, "small iterations, to see that it works"),
    )
    in_groups = (*IN_GROUPS, "algorithm.advantage=stepwise")
    settings = (*SETTINGS, *in_groups, "evaluation.every_n_iters=2", *(QUICK if options.quick else ()))
    with tempfile.TemporaryDirectory() as folder:
        met = _measured(Path(folder), settings, options.limit)
    return 0 if met else 1


def _measured(folder: Path, settings: Sequence[str], limit: float) -> bool:
    warm = load_job(JOB, (*settings, "training.iterations=0")).config
    played(warm, folder / "warm")
    model = folder / "warm" / "checkpoints" / "iteration_0"
    job = load_job(JOB, (*settings, "training.iterations=2")).config
    job = job.model_copy(update={"warmup": None, "model": ModelTable(path=model, device="cpu")})
    switching = AllocationTable(type="step", switch_steps=(2,))
    halves = AllocationTable(type="constant", alpha=0.5, unit="rollout")
    alone = played(job, folder / "alone")
    by_turns = played(with_twin(job, model, switching), folder / "turns")
    mixed = played(with_twin(job, model, halves), folder / "mixed")
    for told, found in (
        ("alone", alone),
        ("every other iteration", by_turns),
        ("half of the rollouts", mixed),
    ):
        print(
            f"{told:24s}{found.milliseconds:6.2f} ms of CPU time a decision, {sum(found.decisions)} decisions"
        )
    costs, took_s = added(mixed), mixed.cpu_s[-1]
    for name, seconds in costs.items():
        print(f"{name:24s}{1e3 * seconds:6.1f} ms an iteration, {seconds / took_s:.3%}")
    planned = _plans_agree(job, mixed.job, model)
    share = sum(costs.values()) / took_s
    met = share <= limit
    print(f"a mixture adds {share:.3%} to an iteration (at most {limit:.2%}): {'ok' if met else 'MISSED'}")
    return met and planned


def _plans_agree(job: JobConfig, mixed: JobConfig, model: Path) -> bool:
    """The plans, and whether the second counts the weights that its folder has."""
    without, beside = (
        memory_plan(learner_parts.learner_config(job)),
        memory_plan(learner_parts.learner_config(mixed), fixed=[model]),
    )
    print(f"{without}\n{beside}")
    weights = AutoModelForCausalLM.from_pretrained(model, local_files_only=True).parameters()
    counted, there = _fixed(beside), 4 * sum(weight.numel() for weight in weights)
    print(f"weights of the fixed policy: {counted} bytes planned, {there} in its folder")
    return counted == there


def _fixed(plan: MemoryPlan) -> int:
    return next(size for kind, size in plan.needs.device.items() if kind == "fixed")


if __name__ == "__main__":
    sys.exit(main())
