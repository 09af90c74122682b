"""GET /metrics: the service's counts, and the last figures of the jobs that run."""

import re

from tests.trainer_backend.api.test_a_job_s_life import iterate
from trainer_backend.api.known_names import OF_EVALUATIONS, OF_ITERATIONS


async def samples(served) -> dict[str, float]:
    answer = await served.client.get("/metrics", headers={"Accept": "text/plain"})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    lines = [line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


async def test_jobs_by_state_and_processes(served):
    running = await served.post("waiting")
    await served.until_it_trains(running)
    await served.post("waiting")
    found = await samples(served)
    assert found['turnwise_trainer_jobs{state="running"}'] == 1
    assert found['turnwise_trainer_jobs{state="queued"}'] == 1
    assert found['turnwise_trainer_jobs{state="failed"}'] == 0
    assert found["turnwise_trainer_processes"] == 1
    assert found["turnwise_trainer_store_up"] == 1
    assert found["turnwise_trainer_job_starts_total"] == 1


async def test_figures_of_a_job_that_runs_by_our_names_and_by_those_that_people_know(served):
    job_id = await served.post("waiting")
    await iterate(served, job_id, 1)
    await served.service.ask(served.service.watcher.look, everything=False)
    found = await samples(served)
    labels = f'{{job_id="{job_id}",run="waiting"}}'
    assert found[f"turnwise_trainer_decision_nonzero_frac{labels}"] == 0.25
    assert found[f"decision_nonzero_frac{labels}"] == 0.25
    assert found[f"critic_score_mean{labels}"] == 1.5
    assert found[f"training_global_step{labels}"] == 1


async def test_requests_are_counted_by_route_and_not_by_path(served):
    for path in ("/jobs", "/jobs/a", "/jobs/b", "/x", "/y"):
        await served.client.get(path)
    found = await samples(served)
    requests = {
        name: value
        for name, value in found.items()
        if name.startswith("turnwise_trainer_http_requests_total")
    }
    assert (
        requests['turnwise_trainer_http_requests_total{method="GET",route="/jobs/{job_id}",status="404"}']
        == 2
    )
    assert requests['turnwise_trainer_http_requests_total{method="GET",route="none",status="404"}'] == 2
    assert requests['turnwise_trainer_http_requests_total{method="GET",route="/jobs",status="200"}'] == 1


def test_known_names_are_names_of_prometheus():
    for name in (*OF_ITERATIONS, *OF_EVALUATIONS):
        assert re.fullmatch(r"[a-z_]+", name)
