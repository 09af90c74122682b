"""Posting, also again, by a form or of an example; looking, deleting: ways in, and refusals, also of text
that no reply and no database can hold."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import tomli
from structlog.testing import capture_logs

from tests.conftest import tiny_job
from tests.trainer_backend.jobs.served import document, serving, settings_for
from trainer_backend.errors import QueueFull
from trainer_backend.jobs.posted import Checked
from trainer_backend.jobs.submission import (
    JobsForPages,
    Submission,
    build_dashboard,
    examples_in,
    hash_body,
    submit,
)
from trainer_backend.rundir.layout import create_run
from trainer_backend.rundir.lock import run_lock
from trainer_backend.rundir.state import RunState, append_log, write_state
from trainer_backend.terminal.templates import Choices, write_job

TOML = '[job]\nname = "waiting"\n[model]\npreset = "tiny-0.3m"\n[tags]\nteam = "a"\n'


def typed(kind: str) -> dict[str, str]:
    return {"Content-Type": kind}


FORM = typed("application/x-www-form-urlencoded")


async def test_a_job_is_posted_as_toml_or_json(served):
    for sent in (
        {"content": TOML, "headers": typed("application/toml")},
        {"content": TOML, "headers": typed("text/plain; charset=utf-8")},
        {"content": TOML, "headers": FORM},
        {"content": TOML},
        {"json": {"toml": TOML}},
        {"json": {"config": document("waiting"), "tags": {"team": "a"}}},
    ):
        answer = await served.client.post("/jobs", **sent)
        job = answer.json()
        assert (answer.status_code, answer.headers["location"]) == (201, f"/jobs/{job['id']}")
        told = (job["name"], job["tags"], job["origin"], job["warnings"])
        assert told == ("waiting", {"team": "a"}, "api", [])


NULLS = document("x", rollout={"env_config": {"a": [[{"b": [None]}]]}})
NO_JOBS = [
    ({"content": "[model\n"}, 400, "not valid TOML: Expected ']' at the end of a table declaration (at line"),
    ({"content": "[modell]\n"}, 400, "modell is not a key"),
    ({"content": b"\xff"}, 422, "column 1 is no UTF-8"),
    ({"content": "[" * 100_000, "headers": typed("application/json")}, 422, "no JSON"),
    ({"json": {}}, 422, "exactly one of 'config' and 'toml'"),
    ({"json": {"toml": "", "config": {}}}, 422, "exactly one of 'config' and 'toml'"),
    ({"json": {"tolm": ""}}, 422, "'tolm' is not known here. Did you mean 'toml'? Known: config, tags, toml"),
    ({"json": {"config": {"model": 3}}}, 400, "model"),
    *(
        (
            {"json": {"config": NULLS}, "params": params},
            400,
            "rollout.env_config.a[0][0].b[0] is null, and a job",
        )
        for params in ({}, {"dry_run": "true"})
    ),
    ({"content": TOML, "headers": typed("image/png")}, 415, "Content-Type is 'image/png'; known:"),
    ({"content": TOML, "headers": {"Idempotency-Key": "a b"}}, 422, "idempotency-key"),
    ({"content": TOML, "params": {"dryrun": "true"}}, 422, "'dryrun' is not known here"),
]


async def test_what_is_no_job_or_no_cursor_is_refused_with_its_place(served):
    for sent, status, told in NO_JOBS:
        answer = await served.client.post("/jobs", **sent)
        assert (answer.status_code, answer.json()["status"]) == (status, status), told
        assert told in answer.json()["detail"], answer.text
    answer = await served.client.post("/jobs", content=TOML.replace("\n", ""), headers=FORM)
    assert answer.json()["hint"] == "curl -d drops line ends; send --data-binary @job.toml."
    assert (await served.client.get("/jobs")).json()["jobs"] == []
    answer = await served.client.get("/jobs", params={"cursor": "9" * 18})
    assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")
    assert "send the cursor of the previous page unchanged" in answer.json()["detail"]


async def test_a_dry_run_resolves_and_stores_nothing(served):
    answer = await served.client.post("/jobs", params={"dry_run": True}, content=TOML + "[vllm]\n")
    found = answer.json()
    assert (answer.status_code, [line.split(" ")[0] for line in found["warnings"]]) == (200, ["[vllm]"])
    assert tomli.loads(found["toml"])["training"]["group_size"] == 8
    assert (await served.client.get("/jobs")).json()["jobs"] == []


async def test_many_clients_with_one_key_make_one_job_and_without_one_each_their_own(served):
    keyed = [served.client.post("/jobs", content=TOML, headers={"Idempotency-Key": "k"}) for _ in range(12)]
    plain = [served.client.post("/jobs", content=TOML) for _ in range(6)]
    answers = await asyncio.gather(*keyed, *plain)
    told = [(answer.status_code, "idempotency-replayed" in answer.headers) for answer in answers[:12]]
    assert sorted(told) == [(200, True)] * 11 + [(201, False)]
    assert len({answer.json()["id"] for answer in answers[:12]}) == 1
    assert len({answer.json()["id"] for answer in answers}) == 7
    assert len((await served.client.get("/jobs")).json()["jobs"]) == 7


async def test_verbs_of_many_clients_at_once_lose_nothing(served):
    job_id = await served.post("waiting")
    await served.until_it_trains(job_id)
    verbs = ["pause", "resume"] * 8 + ["cancel"]
    answers = await asyncio.gather(*(served.ask(verb, job_id) for verb in verbs))
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert answers[-1].status_code == 200
    job = await served.until(job_id, "cancelled", "queued", "running", "paused")
    done = [answer.json()["version"] for answer in answers if answer.status_code == 200]
    assert max(done) <= job["version"]
    # A verb after the cancel was refused, or resumed the job: it ends as the last change says.
    if job["state"] != "cancelled":
        await served.ask("cancel", job_id)
        await served.until(job_id, "cancelled")


async def test_jobs_are_listed_newest_first_page_by_page(served):
    ids = [await served.post("waiting") for _ in range(5)]
    first = (await served.client.get("/jobs", params={"limit": 3})).json()
    second = (await served.client.get("/jobs", params={"limit": 3, "cursor": first["next_cursor"]})).json()
    assert [job["id"] for job in first["jobs"] + second["jobs"]] == ids[::-1]
    assert second["next_cursor"] is None
    await served.until(ids[0], "running")
    queued = (await served.client.get("/jobs", params={"state": ["queued", "paused"]})).json()["jobs"]
    assert [job["id"] for job in queued] == ids[:0:-1]


async def test_a_job_is_named_by_its_id_the_beginning_of_it_or_its_own_name(served):
    job_id = await served.post("waiting")
    for name in (job_id, job_id[:8], "waiting"):
        assert (await served.job(name))["id"] == job_id
    await served.post("waiting")
    twice = await served.client.get("/jobs/waiting")
    assert twice.status_code == 404 and "2 jobs are called 'waiting'" in twice.json()["detail"]
    close = await served.client.get("/jobs/waitin")
    assert (close.status_code, close.json()["code"]) == (404, "job_unknown")
    assert "there is no job 'waitin'. Did you mean 'waiting'?" in close.json()["detail"]
    assert (await served.client.get(f"/jobs/{job_id[:3]}")).status_code == 404, "too short to be meant"


async def test_its_config_can_be_posted_again(served):
    job_id = await served.post("waiting", training={"iterations": 7})
    config = await served.client.get(f"/jobs/{job_id}/config")
    assert config.headers["content-type"].startswith("application/toml")
    assert tomli.loads(config.text)["training"]["iterations"] == 7
    again = await served.client.post("/jobs", content=config.text)
    assert again.status_code == 201
    assert (await served.client.get(f"/jobs/{again.json()['id']}/config")).text == config.text


async def test_only_what_has_ended_is_deleted_and_its_files_if_asked_for(served):
    kept, removed = await served.post("quick"), await served.post("quick")
    waiting = await served.post("waiting")
    early = await served.client.delete(f"/jobs/{waiting}")
    assert early.status_code == 409 and "cancel it first" in early.json()["detail"]
    paths = [Path((await served.until(job_id, "succeeded"))["run_dir"]) for job_id in (kept, removed)]
    assert (await served.client.delete(f"/jobs/{kept}")).status_code == 204
    assert (await served.client.delete(f"/jobs/{removed}", params={"files": True})).status_code == 204
    assert [path.exists() for path in paths] == [True, False]
    for job_id in (kept, removed):
        assert (await served.client.get(f"/jobs/{job_id}")).status_code == 404
    await asyncio.to_thread(served.service.watcher.look, everything=True)
    assert [job["id"] for job in (await served.client.get("/jobs")).json()["jobs"]] == [waiting]


async def test_a_run_of_the_command_line_is_shown_and_left_alone_and_forgotten_once_it_is_gone(served):
    run = create_run(tiny_job(), served.service.data.path / "tiny")
    with run_lock(run.path):
        await asyncio.to_thread(served.service.watcher.look, everything=True)
        job = await served.job("tiny")
        assert (job["origin"], job["state"]) == ("cli", "running")
        refused = await served.ask("cancel", job["id"])
        assert refused.status_code == 409 and "run of `turnwise train`" in refused.json()["detail"]
        assert (await served.client.delete(f"/jobs/{job['id']}")).status_code == 409
    await asyncio.to_thread(served.service.watcher.look, everything=True)
    assert (await served.job("tiny"))["state"] == "paused"
    for files in (False, True):
        answer = await served.client.delete(f"/jobs/{job['id']}", params={"files": files})
        assert answer.status_code == 409 and "not this service's to delete" in answer.json()["detail"]
    assert (run.path / "run.json").exists() and not (run.path / "forgotten").exists()
    shutil.rmtree(run.path)
    assert (await served.client.delete(f"/jobs/{job['id']}")).status_code == 204


async def test_a_job_of_another_service_on_the_same_database_is_shown_and_left_to_it(tmp_path):
    url = f"sqlite:///{tmp_path}/shared.db"
    async with serving(settings_for(tmp_path / "a", database_url=url)) as first:
        job_id = await first.train("waiting")
        async with serving(settings_for(tmp_path / "b", database_url=url)) as second:
            assert (await second.job(job_id))["state"] == "running"
            for answer in (await second.ask("cancel", job_id), await second.client.delete(f"/jobs/{job_id}")):
                assert answer.status_code == 409 and "another trainer service" in answer.json()["detail"]
            mine = await second.post("quick")
            await second.until(mine, "succeeded")
        assert (await first.job(job_id))["state"] == "running"


async def test_a_service_that_only_shows_changes_no_job_and_takes_none(tmp_path):
    async with serving(settings_for(tmp_path)) as served:
        job_id = await served.post("quick")
        run_dir = Path((await served.until(job_id, "succeeded"))["run_dir"])
    async with serving(settings_for(tmp_path, jobs=False)) as served:
        for answer in (
            await served.client.delete(f"/jobs/{job_id}", params={"files": True}),
            await served.client.delete(f"/jobs/{job_id}"),
            await served.ask("cancel", job_id),
            await served.client.post("/jobs", content=TOML),
            await served.client.post("/rl/jobs", json={"job_type": "rl", "data": {"config": TOML}}),
        ):
            assert (answer.status_code, answer.json()["code"]) == (409, "runs_no_jobs")
        assert (await served.job(job_id))["state"] == "succeeded" and run_dir.exists()
        assert (await served.client.post("/jobs/check", content=TOML)).json()["ok"]


async def test_what_is_posted_while_a_job_is_tried_counts_against_the_queue(tmp_path):
    settings = settings_for(tmp_path).model_copy(update={"max_queued": 1})
    async with serving(settings) as served:
        running = await served.post("waiting")
        await served.until(running, "running")

        async def trial(toml: str) -> tuple[str, ...]:
            await served.post("waiting")
            return ()

        sent = Submission(TOML.encode(), hash_body(TOML.encode()), media_type="application/toml")
        with pytest.raises(QueueFull):
            await submit(served.service, sent, None, trial)


KEY = {"Idempotency-Key": "k-1"}


async def test_a_job_that_was_accepted_is_answered_again_when_the_queue_is_full_or_a_file_of_it_is_gone(
    tmp_path: Path,
):
    model = tmp_path / "models" / "mine"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    settings = settings_for(tmp_path / "runs", roots=(model.parent,)).model_copy(update={"max_queued": 1})
    async with serving(settings) as served:
        await served.until(await served.post("waiting"), "running")
        body = {"config": {**document("waiting"), "model": {"path": str(model)}, "vllm": {}}}
        first = await served.client.post("/jobs", json=body, headers=KEY)
        full = await served.client.post("/jobs", json=body)
        assert (full.status_code, full.json()["code"]) == (503, "queue_full")
        again = await served.client.post("/jobs", json=body, headers=KEY)
        (model / "config.json").unlink()
        assert (await served.client.post("/jobs", json=body)).status_code == 400
        later = await served.client.post("/jobs", json=body, headers=KEY)
        other = await served.client.post("/jobs", json={"config": {"model": 3}}, headers=KEY)
    told = [(one.status_code, "idempotency-replayed" in one.headers) for one in (first, again, later)]
    assert told == [(201, False), (200, True), (200, True)]
    assert first.json()["id"] == again.json()["id"] == later.json()["id"]
    (warning,) = again.json()["warnings"]
    assert warning.startswith("[vllm] is for other backends") and later.json()["warnings"] == []
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")


async def test_a_form_that_is_sent_twice_is_one_job_and_another_text_another(served):
    desk = JobsForPages(served.service)
    first, again = await desk.submit(TOML, "ab12"), await desk.submit(TOML, "ab12")
    assert first.id == again.id
    other_text = await desk.submit(TOML + "[training]\niterations = 3\n", "ab12")
    other_form = await desk.submit(TOML, "ab13")
    assert len({first.id, other_text.id, other_form.id}) == 3


def test_examples_are_those_of_the_operator_s_folders_and_what_is_none_is_left_out(tmp_path):
    mine, yours = tmp_path / "mine", tmp_path / "yours"
    for folder in (mine, yours):
        folder.mkdir()
        (folder / "both.toml").write_text(f"# {folder.name}\n")
    (mine / "alone.toml").write_text("# alone\n")
    (mine / "latin.toml").write_bytes(b"# \xe9\n")
    (mine / "folder.toml").mkdir()
    with capture_logs() as logs:
        found = examples_in([mine, yours, tmp_path / "none"])
    assert found == (
        ("alone", "# alone\n"),
        (str(mine / "both.toml"), "# mine\n"),
        (str(yours / "both.toml"), "# yours\n"),
    )
    assert [line["file"] for line in logs] == [str(mine / "folder.toml"), str(mine / "latin.toml")]


@pytest.mark.parametrize("environ", [{}, {"TASK_URL": "http://127.0.0.1:9"}])
async def test_the_form_opens_with_what_init_writes_and_that_can_start(tmp_path, environ):
    write_job(tmp_path / "job.toml", Choices())
    async with serving(settings_for(tmp_path / "data", environ=environ)) as served:
        (name, text), *others = build_dashboard(served.service).examples
        assert (name, text) == ("turnwise init", (tmp_path / "job.toml").read_text())
        assert await JobsForPages(served.service).check(text) == Checked(ok=True, findings=())
        assert {name for name, _ in others} == {file.stem for file in Path("configs").glob("*.toml")}


HALF = "\ud83d"
JSON = {"Content-Type": "application/json"}
ANY_JSON = {"Content-Type": "application/x+json"}
NUL = "U+0000, which no database holds"


BODIES = [
    ("/jobs", {"config": document("a"), "tags": {"team": HALF}}, JSON, "half a character"),
    ("/jobs", {"config": document("a"), "tags": {"team": "\0"}}, JSON, f"tags.team holds {NUL}"),
    ("/jobs", {"toml": "[model\ud83d]"}, JSON, "half a character"),
    ("/rl/jobs", {"job_type": HALF, "data": {}}, ANY_JSON, "half a character"),
    ("/jobs", json.dumps({"config": document("a")}).encode("utf-16"), JSON, "is UTF-16"),
    ("/jobs", b'{"toml": "\xed\xa0\xbd"}', JSON, "column 11 is no UTF-8"),
    ("/rl/jobs", {HALF: 1}, {b"Content-Type": b"\x85application/json"}, "half a character"),
    ("/jobs", b'[model]\npreset = "tiny-0.3m"\n[tags]\nteam = "\\u0000"', {}, f"'tags' holds {NUL}"),
    ("/jobs", b'[model]\npath = "a\\u0000"', {}, f"'model' holds {NUL}"),
    ("/jobs/check", b'[model]\npath = "\\ud83d"', {}, "not valid TOML"),
    ("/jobs/check", b'["a\\u0000"]\nx = 1', {}, f"holds {NUL}"),
]  # fmt: skip


async def test_a_body_is_refused_with_its_place(served):
    for path, body, headers, told in BODIES:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await served.client.post(path, content=content, headers=headers)
        assert answer.status_code in ((200,) if path == "/jobs/check" else (400, 422)), answer.text
        assert told in answer.text, body
        assert (await served.client.get("/jobs")).json()["jobs"] == []


async def test_a_byte_order_mark_is_no_part_of_a_job_and_a_form_s_text_may_be_refused(served):
    toml = '[job]\nname = "quick"\n[model]\npreset = "tiny-0.3m"\n'
    for body, headers in (
        (toml, {}),
        (json.dumps({"toml": toml}), JSON),
        (json.dumps({"toml": f"\ufeff{toml}"}), JSON),
    ):
        content = body.encode("utf-8-sig")
        answer = await served.client.post("/jobs", content=content, headers=headers)
        assert answer.status_code == 201, answer.text
    for form, told in (("\ufeff[model]\npreset = 1", "preset"), (f"[model]\n{HALF}", "no UTF-8")):
        (finding,) = (await JobsForPages(served.service).check(form)).findings
        assert told in finding.text


async def test_so_is_an_address(served):
    for path, part in (("/jobs/a%00b", "path"), ("/jobs/a/metrics?names=%00", "query")):
        answer = await served.client.get(path)
        assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")
        assert answer.json()["detail"] == f"the {part} holds {NUL}"


async def test_half_a_character_that_a_run_wrote_down_is_shown_as_a_question_mark(served):
    job_id = await served.post("quick")
    run_dir = Path((await served.until(job_id, "succeeded"))["run_dir"])
    write_state(run_dir, RunState("failed", 1, detail=f"no file {HALF}", stage=HALF))
    append_log(run_dir, f"no file {HALF}")
    listed = (await served.client.get("/jobs", headers=JSON)).json()["jobs"]
    assert [job["progress"]["stage"] for job in listed] == ["?"]
    log = (await served.client.get(f"/jobs/{job_id}/log", params={"tail": 1})).json()
    assert log["lines"][0]["text"] == "no file ?"
    # A request without a body may say that it is JSON.
    assert (await served.client.get(f"/jobs/{job_id}/events", headers=JSON)).status_code == 200
    assert (await served.client.post(f"/jobs/{job_id}/cancel", headers=JSON)).status_code == 409
