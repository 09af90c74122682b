"""GET /metrics: what was counted, in Prometheus' words. The numbers are those of the requests of the test."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.exposition import shape
from tests.task_app.counting import KEY, rollout, running_app
from tests.task_app.fake_inference import calling, fake_inference, status
from tests.task_app.rollout_client import WAITING, accept, play, waiting_app


async def scraped(client):
    """Every sample as {(name, labels): value}."""
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples, name, **labels):
    return samples.get((name, tuple(sorted(labels.items()))))


async def test_requests_are_counted_by_route_and_status_and_ids_are_no_labels(client):
    env_id = (await client.post("/env/create", json={"env_name": "counting"})).json()["env_id"]
    step = {"env_id": env_id, "tool_calls": [{"tool": "add", "args": {"names": ["a", "b"]}}]}
    for _ in range(3):
        assert (await client.post("/env/step", json=step)).status_code == 200
    await client.get(f"/env/{env_id}/frame")
    await client.get("/nowhere/at/all")
    await client.get("/info", headers={"X-API-Key": "wrong"})
    samples = await scraped(client)
    name = "turnwise_http_requests_total"
    assert value(samples, name, method="POST", route="/env/create", status="200") == 1
    assert value(samples, name, method="POST", route="/env/step", status="200") == 3
    assert value(samples, name, method="GET", route="/env/{env_id}/frame", status="404") == 1
    assert value(samples, name, method="GET", route="none", status="404") == 1
    assert value(samples, name, method="GET", route="none", status="401") == 1
    assert value(samples, "turnwise_http_request_seconds_count", route="/env/step") == 3
    assert value(samples, "turnwise_http_request_seconds_bucket", route="/env/step", le="+Inf") == 3
    assert value(samples, "turnwise_sessions", kind="env") == 1
    assert value(samples, "turnwise_decisions_total", source="session") == 3
    assert value(samples, "turnwise_env_steps_total", source="session") == 6
    assert not [labels for _, labels in samples if any(env_id in text for pair in labels for text in pair)]


async def test_rollouts_are_counted_by_how_they_ended(client):
    broken = rollout("b", policy={"policy_name": "planned", "config": {"names": ["boom"]}})
    await play(client, rollout("a"), broken)
    samples = await scraped(client)
    ended = "turnwise_rollouts_ended_total"
    assert value(samples, ended, status="finished", reason="max_decisions") == 1
    assert value(samples, ended, status="failed", reason="critical_error") == 1
    # `a` took two decisions of one env step each; a failure has no trajectory to count
    assert value(samples, "turnwise_decisions_total", source="rollout") == 2
    assert value(samples, "turnwise_env_steps_total", source="rollout") == 2
    assert value(samples, "turnwise_rollouts_held") == 2
    assert value(samples, "turnwise_held_bytes") > 0


async def test_queued_and_running_rollouts_are_told_while_they_are():
    async with waiting_app(2, max_concurrent_rollouts=1) as (client, (policy, _)):
        await accept(client, rollout("a", **WAITING), rollout("b", **WAITING))
        await policy.asked.wait()
        samples = await scraped(client)
        assert value(samples, "turnwise_rollouts", state="running") == 1
        assert value(samples, "turnwise_rollouts", state="queued") == 1
        await client.delete("/rollouts/b")
        samples = await scraped(client)
    assert value(samples, "turnwise_rollouts", state="queued") == 0
    assert value(samples, "turnwise_rollouts_ended_total", status="cancelled", reason="cancelled") == 1


async def test_a_second_attempt_to_ask_a_model_is_counted():
    async with fake_inference(status(503, {}), calling("a")) as fake, running_app() as client:
        config = {"inference_url": fake.url, "model": "m"}
        policy = {"policy_name": "openai", "config": config}
        assert (await play(client, rollout("a", policy=policy)))["a"].status == "finished"
        samples = await scraped(client)
    assert value(samples, "turnwise_inference_retries_total") == 1


async def test_names_types_helps_and_labels_are_those_that_dashboards_were_built_on():
    async with fake_inference(calling("a")) as fake, running_app() as client:
        policy = {"policy_name": "openai", "config": {"inference_url": fake.url, "model": "m"}}
        await play(client, rollout("a", policy=policy))
        text = (await client.get("/metrics")).text
    assert shape(text) == Path("tests/task_app/observing/metrics.txt").read_text().splitlines()


async def test_metrics_need_the_key_unless_the_operator_opened_them():
    async with running_app() as client:
        assert (await client.get("/metrics", headers={"X-API-Key": ""})).status_code == 401
        assert KEY not in (await client.get("/metrics")).text
    async with running_app(open_routes=("metrics",)) as client:
        assert (await client.get("/metrics", headers={"X-API-Key": ""})).status_code == 200
        assert (await client.get("/info", headers={"X-API-Key": ""})).status_code == 401


async def test_openmetrics_is_spoken_to_who_asks_for_it(client):
    answer = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
