"""An Idempotency-Key: a request that was accepted is answered again, whatever has changed meanwhile."""

from pathlib import Path

from tests.trainer_backend.jobs.served import document, serving, settings_for

TOML = '[job]\nname = "waiting"\n[model]\npreset = "tiny-0.3m"\n[vllm]\n'
KEY = {"Idempotency-Key": "k-1"}


async def test_a_job_that_was_accepted_is_answered_again_when_the_queue_is_full(tmp_path: Path):
    async with serving(settings_for(tmp_path).model_copy(update={"max_queued": 1})) as served:
        running = await served.post("waiting")
        await served.until(running, "running")
        first = await served.client.post("/jobs", content=TOML, headers=KEY)
        full = await served.client.post("/jobs", content=TOML)
        assert (full.status_code, full.json()["code"]) == (503, "queue_full")
        again = await served.client.post("/jobs", content=TOML, headers=KEY)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    (warning,) = again.json()["warnings"]
    assert warning.startswith("[vllm] is for other backends")


async def test_a_job_that_was_accepted_is_answered_again_when_a_file_of_it_is_gone(tmp_path: Path):
    model = tmp_path / "models" / "mine"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    async with serving(settings_for(tmp_path / "runs", roots=(model.parent,))) as served:
        body = {"config": {**document("waiting"), "model": {"path": str(model)}}}
        first = await served.client.post("/jobs", json=body, headers=KEY)
        assert first.status_code == 201, first.text
        (model / "config.json").unlink()
        assert (await served.client.post("/jobs", json=body)).status_code == 400
        again = await served.client.post("/jobs", json=body, headers=KEY)
        other = await served.client.post("/jobs", json={"config": {"model": 3}}, headers=KEY)
    assert (again.status_code, again.json()["id"], again.json()["warnings"]) == (200, first.json()["id"], [])
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")
