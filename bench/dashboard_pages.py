"""What the dashboard's pages take for a long run, from the request to the last byte, over SQLite.

    python -m bench.dashboard_pages [--iterations 1000] [--decisions 100000] [--limit-ms 200]

Two run directories are written and synced: episodes of ten decisions, the metrics that the panels draw, an
evaluation every tenth iteration, a log of 20,000 lines, and an episode of 25,200 tokens in one segment. Each
page is asked for in this process, without a socket, after it was asked for once: the least of five, of the
clock on the wall and of this process' CPU. Exit code 1 where a page is above the limit.
"""

import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI
from starlette.testclient import TestClient

from bench import kit
from shared_schemas.messages import Message
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import (
    ObservationData,
    PolicyLogprobs,
    Sampling,
    StepData,
    StepInfo,
    StopReason,
    Trajectory,
)
from trainer_backend.job.load import parse_job
from trainer_backend.pages.app import router
from trainer_backend.pages.page import Dashboard
from trainer_backend.pages.panels import PANELS
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.rollout_files import Credit, read_rollouts, write_rollouts
from trainer_backend.rundir.spool import LedgerEntry, append_to_ledger
from trainer_backend.rundir.state import append_log
from trainer_backend.store import jobs
from trainer_backend.store.database import Store, open_store
from trainer_backend.store.database import utc_now as now
from trainer_backend.store.rows import Job
from trainer_backend.store.sync import sync_run

LIMIT_MS = 200.0
T = 10  # decisions of an episode
REPEATS = 5
LOG_LINES = 20_000
NEW, SAMPLED = 1020, 1500  # tokens of a decision: of its prompt those that are new, and of its answer
ENDINGS = ("stop/environment_done", "stop/max_decisions", "stop/invalid_action")


def steps() -> tuple[StepData, ...]:
    before, after = ({"collect_wood": count} for count in (0, 1))
    return tuple(
        StepData(
            turn=turn,
            observation_data=ObservationData(
                messages=(Message(role="user", content="a prompt"),), achievements_counts=before
            ),
            next_observation=ObservationData(achievements_counts=after if turn == 1 else before),
            action_taken={"type": "tool_call"},
            env_rewards=(0.0, 1.0),
            step_info=StepInfo(executed_actions=("move_left", "do")),
        )
        for turn in range(1, T + 1)
    )


def episodes(iteration: int, count: int, kind: str, shared: tuple[StepData, ...]) -> list[Rollout]:
    return [
        Rollout(
            rollout_id=f"run.0123456789ab/{kind}/{iteration}/{number // 4}/{number % 4}",
            run_id="run.0123456789ab",
            iteration=iteration,
            group_id=f"{kind}/{iteration}/{number // 4}",
            sibling=number % 4,
            attempt=0,
            instance_id="i",
            status="finished",
            trajectory=Trajectory(
                env_name="crafter",
                policy_name="openai",
                model="run/actor",
                seed=number,
                steps=shared,
                outcome_reward=float(number * 7919 % 13),
                outcome_definition="unique achievements",
                achievements_counts={"collect_wood": 1},
                env_steps=2 * T,
                terminated=False,
                truncated=True,
                stop_reason=StopReason.MAX_DECISIONS,
                wall_s=1.0,
            ),
        )
        for number in range(count)
    ]


def long_run(folder: Path, iterations: int, decisions: int) -> RunDirectory:
    """A run whose middle iteration has a conversation of T decisions and 25,200 tokens."""
    run = create_run(parse_job({"model": {"preset": "tiny-0.3m"}}, where="bench").config, folder)
    shared, count = steps(), max(1, decisions // (iterations * T))
    credit = Credit([0.0] * T, [0.5] * T, [1.0] * T, state_keys_T=[f"{t:032x}" for t in range(T)])
    for iteration in range(1, iterations + 1):
        played = episodes(iteration, count, "train", shared)
        write_rollouts(run.rollouts_file(f"iteration_{iteration}"), played, [credit] * count)
        append_to_ledger(
            run.path, LedgerEntry(iteration, iteration, tuple(item.rollout_id for item in played))
        )
    write_metrics(run, iterations)
    long_episode(run, (iterations + 1) // 2)
    for line in range(LOG_LINES):
        append_log(run.path, f"iteration {line // 20}: something was said of it, line {line}")
    return run


def write_metrics(run: RunDirectory, iterations: int) -> None:
    """The metrics that the panels draw."""
    # Of a run outcomes and ratios have bands.
    lines = [(line, panel.section == "Outcome" or line.band) for panel in PANELS for line in panel.lines]
    names = [name for line, banded in lines for name in (line.metrics if banded else [line.metric])]
    plain = [name for name in names if not name.endswith("*") and not name.startswith("eval/")]
    for iteration in range(1, iterations + 1):
        numbers = {name: math.sin(iteration / 40) + iteration / 300 for name in (*plain, *ENDINGS)}
        run.append_metrics({"kind": "iteration", "iteration": iteration, **numbers})
        if iteration % 10 == 0:
            rates = {f"achievement_{number}": 0.5 for number in range(22)}
            held_out = {name: 3.0 for name in names if name.startswith("eval/")}
            row = {"kind": "evaluation", "iteration": iteration, "eval/episodes": 128, **held_out}
            run.append_metrics({**row, "eval/success_rates": rates})


def long_episode(run: RunDirectory, iteration: int) -> None:
    """The first episode of the iteration as a conversation of T decisions."""
    path = run.rollouts_file(f"iteration_{iteration}")
    first, *others = read_rollouts(path)
    assert first.trajectory is not None
    talk = tuple(
        step.model_copy(
            update={
                "sampling": Sampling(max_tokens=SAMPLED),
                "policy_logprobs": PolicyLogprobs(
                    prompt_ids_reused=t * (NEW + SAMPLED),
                    prompt_token_ids=tuple(range(NEW)),
                    token_ids=tuple(range(SAMPLED)),
                    logprobs=(-0.7,) * SAMPLED,
                    finish_reason="stop",
                    versions=((0, iteration - 1),),
                ),
            }
        )
        for t, step in enumerate(steps())
    )
    episode = first.trajectory.model_copy(update={"steps": talk})
    credits = [Credit([0.0] * T, [0.5] * T, [1.0] * T) for _ in range(1 + len(others))]
    write_rollouts(path, [first.model_copy(update={"trajectory": episode}), *others], credits)


def addresses(job_id: str, other: str, iteration: int) -> dict[str, str]:
    run = f"/runs/{job_id}"
    return {
        "runs": "/",
        "runs, searched and sorted": "/?text=long&state=active&sort=evaluation",
        "numbers side by side": f"/compare/numbers?run={job_id}&run={other}",
        "run": run,
        "its charts' values": f"{run}/charts",
        "its head, which a live page asks for": f"{run}/head",
        "two runs laid over one another": f"{run}?with={other}",
        "their charts' values": f"{run}/charts?with={other}",
        "one chart as a table": f"{run}/values?panel=outcome",
        "rollouts": f"{run}/rollouts",
        "rollouts by outcome, filtered": f"{run}/rollouts?stage=train&sort=outcome_reward&min_reward=3",
        "rollouts, only lost": f"{run}/rollouts?lost=1",
        "rollouts by length": f"{run}/rollouts?min_decisions=2&sort=decisions",
        "a rollout": f"{run}/rollouts/train/{iteration}/0/1",
        "a decision among 25,200 tokens": f"{run}/rollouts/train/{iteration}/0/0?turn=5",
        "the job": f"{run}/config",
    }


def synced(store: Store, run: RunDirectory, name: str) -> str:
    """Sync the run, and return the id of its job."""
    config = (run.path / "job.toml").read_text(encoding="utf-8")
    new = Job(name=name, config=config, home="bench", state="running", run_dir=str(run.path))
    job, _ = jobs.create(store, new)
    sync_run(store, job.id, run)
    return job.id


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__,
        ("--iterations", 1000),
        ("--decisions", 100_000, "of all iterations together"),
        ("--limit-ms", LIMIT_MS, "most of a page"),
        arguments=arguments,
    )
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{folder}/store.db")
        ids = []
        for name, decisions in (("long", options.decisions), ("other", 10 * options.iterations)):
            run = long_run(Path(folder) / name, options.iterations, decisions)
            start = time.perf_counter()
            ids.append(synced(store, run, name))
            print(f"the first sync of {name!r} took {time.perf_counter() - start:.1f} s")
        app = FastAPI()
        app.include_router(router)
        app.state.dashboard = Dashboard(store, None, now)
        client = TestClient(app)
        for name, address in addresses(ids[0], ids[1], (options.iterations + 1) // 2).items():
            size = len(client.get(address).raise_for_status().content)
            cost = kit.least(lambda address=address: client.get(address), REPEATS)
            wall, cpu = 1e3 * cost.wall_s, 1e3 * cost.cpu_s
            slowest = max(slowest, wall)
            told = kit.verdict(wall <= options.limit_ms, "TOO SLOW")
            print(f"{name:38s} {wall:7.1f} ms ({cpu:.1f} of CPU), {size / 1e3:.0f} kB  {told}")
        store.close()
    return 0 if slowest <= options.limit_ms else 1


if __name__ == "__main__":
    sys.exit(main())
