"""GET /metrics: the service's counts, and the last figures of the jobs that run, or have just ended."""

import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from sqlalchemy import update

from tests.exposition import shape
from trainer_backend.jobs import exposition
from trainer_backend.jobs.exposition import page
from trainer_backend.rundir.state import ProcessRecord, read_state, write_state
from trainer_backend.store.tables import JOBS


async def samples(served) -> dict[str, float]:
    answer = await served.client.get("/metrics", headers={"Accept": "text/plain"})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    lines = [line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")]
    names = [name for name, _ in lines]
    assert len(names) == len(set(names)), "of two samples with one name Prometheus keeps one"
    return {name: float(value) for name, value in lines}


async def rows_written(served, job_id: str, *rows: dict) -> None:
    """Rows that a job's process might have written, brought into the store."""
    path = Path((await served.row(job_id)).run_dir) / "metrics.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    await served.service.line.ask(served.service.watcher.look, everything=False)


async def test_jobs_are_counted_by_state_and_the_processes_of_one_by_role_and_state_while_it_runs(served):
    running = await served.train("waiting")
    await served.post("waiting")
    states = (("replica", "a", "serving"), ("replica", "b", "serving"), ("replica", "c", "lost"))
    records = tuple(ProcessRecord(role, name, "", state, 1, "", "") for role, name, state in states)
    run_dir = Path((await served.row(running)).run_dir)
    write_state(run_dir, replace(read_state(run_dir), processes=records))
    found = await samples(served)
    labels = f'job_id="{running}",role="replica",run="waiting"'
    for name, value in (
        ('jobs{state="running"}', 1), ('jobs{state="queued"}', 1), ('jobs{state="failed"}', 0),
        ("processes", 1), ("store_up", 1), ("job_starts_total", 1),
        (f'run_processes{{{labels},state="serving"}}', 2), (f'run_processes{{{labels},state="lost"}}', 1),
    ):  # fmt: skip
        assert found[f"turnwise_trainer_{name}"] == value, name


async def test_last_numbers_of_both_kinds_of_rows_by_our_names_and_by_those_that_people_know(served):
    job_id = await served.train("waiting")
    iteration = {
        "rollout/failed": 3, "stop/max_decisions": 0.75, "app/lost": {"10.0.0.7:8001": 2, "own": 1},
        "episode/outcome_reward": 1.5,
    }  # fmt: skip
    held_out = {
        "rollout/failed": 5,
        "eval/success_rates": {"eat_cow": 0.5},
        "mixture/a-b": 1,
        "mixture/a_b": 2,
    }
    await rows_written(
        served, job_id,
        {"kind": "iteration", "iteration": 1, **iteration},
        {"kind": "evaluation", "iteration": 1, **held_out},
    )  # fmt: skip
    told = {
        (name, kind): value
        for sample, value in (await samples(served)).items()
        if (found := re.match(r'turnwise_trainer_(\w+)\{.*kind="(\w+)"', sample))
        for name, kind in [found.groups()]
    }
    assert told == {
        ("episode_outcome_reward", "iteration"): 1.5,
        ("rollout_failed", "iteration"): 3,
        ("rollout_failed", "evaluation"): 5,
        ("stop_max_decisions", "iteration"): 0.75,
        ("app_lost_10_0_0_7_8001", "iteration"): 2,
        ("app_lost_own", "iteration"): 1,
        ("eval_success_rates_eat_cow", "evaluation"): 0.5,
        ("mixture_a_b", "evaluation"): 1,  # two policies, and one name to Prometheus
        ("mixture_a_b_", "evaluation"): 2,
    }
    labels = f'{{job_id="{job_id}",run="waiting"}}'
    found = await samples(served)
    assert found[f"stop_max_decisions{labels}"] == 0.75
    assert found[f"errored_rollouts{labels}"] == 3
    assert (found[f"critic_score_mean{labels}"], found[f"training_global_step{labels}"]) == (1.5, 1)


async def test_the_last_figures_of_a_job_are_told_for_five_minutes_after_its_end(served, monkeypatch):
    monkeypatch.setattr(exposition, "_MOST_JOBS", 1)
    job_id = await served.post("quick")
    await served.until(job_id, "succeeded", iteration=2)
    await served.service.line.ask(served.service.watcher.look, everything=True)
    ended = (await served.row(job_id)).ended

    def told(after: timedelta) -> bool:
        store = replace(served.service.store, clock=lambda: ended + after)
        body = page(replace(served.service, store=store), version="1", accept="").body.decode()
        return f'critic_score_mean{{job_id="{job_id}",run="quick"}} 2.5' in body

    assert told(timedelta(minutes=5))
    later = await served.post("quick")  # is listed first, and ended longer ago
    await served.until(later, "succeeded", iteration=2)
    with served.service.store.write() as connection:
        long_ago = ended - timedelta(days=1)
        connection.execute(update(JOBS).where(JOBS.c.id == later).values(ended=long_ago))
    assert told(timedelta(minutes=5))
    assert not told(timedelta(minutes=5, seconds=1))


async def test_names_types_helps_and_labels_are_those_that_dashboards_were_built_on(served):
    await served.client.get("/jobs")
    text = (await served.client.get("/metrics")).text
    assert shape(text) == Path("tests/trainer_backend/jobs/metrics.txt").read_text().splitlines()


async def test_requests_are_counted_by_route_and_not_by_path(served):
    for path in ("/jobs", "/jobs/a", "/jobs/b", "/x", "/y"):
        await served.client.get(path)
    found = await samples(served)
    for route, status, count in (("/jobs/{job_id}", 404, 2), ("none", 404, 2), ("/jobs", 200, 1)):
        labels = f'{{method="GET",route="{route}",status="{status}"}}'
        assert found[f"turnwise_trainer_http_requests_total{labels}"] == count
