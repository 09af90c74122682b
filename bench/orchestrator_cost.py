"""CPU time that the orchestrator spends on a decision and on a token, from a task app's reply to the learner.

    python -m bench.orchestrator_cost [--decisions 400]

Rollouts of a played iteration of the demo, credited by siblings (`stepwise`), their decisions given as many
tokens as in the demo, and as many as a larger model's: each stage is timed in this process, and a line
through the two sizes gives its cost per decision and per token (of new prompt and answer together). Least CPU
time of some repeats.

    read     parse a page of rollouts and check it (`collect.client`)
    keep     append each to the spool (`rundir.spool`)
    credit   segments, rewards and advantages (`credit`)
    store    write the iteration's file (`rundir.rollout_files`)
    send     write the learner's call (`learner.calls`)
    receive  read it, in the learner's process; each rank does
    pack     put all segments into tensors (`core.collate`), once for each thing that is computed of them

The first two go on beside the collection; credit, store and send come between it and the update.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from bench import kit
from bench.demo_iteration import QUICK, played
from bench.study_results import IN_GROUPS
from shared_schemas.rollouts import Rollout, RolloutPage
from shared_schemas.trajectory import PolicyLogprobs
from trainer_backend import job_parts
from trainer_backend.core.collate import pack_segments
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.calls import CALLS
from trainer_backend.rundir.rollout_files import write_rollouts
from trainer_backend.rundir.spool import Spool

# New prompt tokens and sampled tokens of a decision.
SIZES = ((56, 6), (300, 200))
_ROW_TOKENS = 32768
# The rollouts are multiplied under new ids, for which a critic has no values.
BY_SIBLINGS = (*IN_GROUPS, "algorithm.advantage=stepwise")


class CostLine(NamedTuple):
    """What a stage costs: CPU seconds of a decision without tokens, and of each token."""

    decision_s: float
    token_s: float


def calls_of(turns: int, prompt: int, answer: int) -> list[PolicyLogprobs]:
    """Exact tokens of an episode whose prompts go on from the answers before."""
    return [
        PolicyLogprobs(
            prompt_ids_reused=turn * (prompt + answer),
            prompt_token_ids=tuple(range(1000, 1000 + prompt)),
            token_ids=tuple(range(50_000, 50_000 + answer)),
            logprobs=tuple(-1.0 / (3 + number) for number in range(answer)),
            finish_reason="stop",
            versions=((0, 0),),
        )
        for turn in range(turns)
    ]


def sized(rollouts: Sequence[Rollout], decisions: int, prompt: int, answer: int) -> list[Rollout]:
    """At least so many decisions with so many tokens each, in rollouts with ids of their own."""
    made: list[Rollout] = []
    total = 0
    for number in count():
        if total >= decisions:
            return made
        for rollout in rollouts:
            assert rollout.trajectory is not None
            steps = rollout.trajectory.steps
            calls = calls_of(len(steps), prompt, answer)
            steps = tuple(
                step.model_copy(update={"policy_logprobs": call})
                for step, call in zip(steps, calls, strict=True)
            )
            trajectory = rollout.trajectory.model_copy(update={"steps": steps})
            name = {
                "rollout_id": f"{rollout.rollout_id}.{number}",
                "group_id": f"{rollout.group_id}.{number}",
            }
            made.append(rollout.model_copy(update={"trajectory": trajectory, **name}))
            total += len(steps)
    raise AssertionError("count never ends")


def stage_costs(job: JobConfig, rollouts: Sequence[Rollout], folder: Path) -> dict[str, float]:
    """Least CPU seconds of each stage."""
    page = RolloutPage(rollouts=tuple(rollouts), cursor="1", unfinished=0, instance_id="i")
    text, credit = page.model_dump_json(), job_parts.credit(job)
    spool = Spool(folder / "spool.jsonl", {}, {})
    credited = credit.credit(rollouts)
    arguments = (credited.episodes, 1, None)
    body = CALLS.write_arguments("update", arguments)
    segments = [segment for episode in credited.episodes for segment in episode.segments]

    def keep() -> None:
        for rollout in rollouts:
            spool.keep(rollout)

    stages: dict[str, Callable[[], object]] = {
        "read": lambda: RolloutPage.model_validate(json.loads(text)),
        "keep": keep,
        "credit": lambda: credit.credit(rollouts),
        "store": lambda: write_rollouts(folder / "rollouts.parquet", rollouts, credited.credits),
        "send": lambda: CALLS.write_arguments("update", arguments),
        "receive": lambda: CALLS.read_arguments("update", body),
        "pack": lambda: pack_segments(segments, row_tokens=_ROW_TOKENS),
    }
    return {name: kit.least(work, repeats=3).cpu_s for name, work in stages.items()}


def cost_lines(decisions: int) -> dict[str, CostLine]:
    """The cost of each stage."""
    demo = played((*QUICK, *BY_SIBLINGS))
    rollouts = [rollout for rollout in demo.rollouts if rollout.trajectory is not None]
    points = []
    for prompt, answer in SIZES:
        some = sized(rollouts, decisions, prompt, answer)
        total = sum(len(item.trajectory.steps) for item in some if item.trajectory is not None)
        with tempfile.TemporaryDirectory() as folder:
            costs = stage_costs(demo.job, some, Path(folder))
        points.append({name: seconds / total for name, seconds in costs.items()})
    small, large = (sum(size) for size in SIZES)
    lines = {}
    for name in points[0]:
        token_s = (points[1][name] - points[0][name]) / (large - small)
        lines[name] = CostLine(points[0][name] - small * token_s, token_s)
    return lines


def main() -> int:
    options = kit.options(__doc__, ("--decisions", 400, "of each size"))
    lines = cost_lines(options.decisions)
    for name, line in lines.items():
        print(f"{name:8s} {1e6 * line.decision_s:7.1f} us a decision + {1e6 * line.token_s:6.3f} us a token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
