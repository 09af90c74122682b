"""Text that no reply and no database can hold is refused where it enters, and harms no other request."""

import json
from pathlib import Path

from tests.trainer_backend.jobs.served import document
from trainer_backend.jobs.submission import JobsForPages
from trainer_backend.rundir.state import RunState, append_log, write_state

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


async def test_a_request_without_a_body_may_say_that_it_is_json(served):
    job_id = await served.post("quick")
    await served.until(job_id, "succeeded")
    for answer in (
        await served.client.get(f"/jobs/{job_id}/events", headers=JSON),
        await served.client.post(f"/jobs/{job_id}/cancel", headers=JSON),
    ):
        assert answer.status_code in (200, 409), answer.text


async def test_half_a_character_that_a_run_wrote_down_is_shown_as_a_question_mark(served):
    job_id = await served.post("quick")
    run_dir = Path((await served.until(job_id, "succeeded"))["run_dir"])
    write_state(run_dir, RunState("failed", 1, detail=f"no file {HALF}", stage=HALF))
    append_log(run_dir, f"no file {HALF}")
    listed = (await served.client.get("/jobs")).json()["jobs"]
    assert [job["progress"]["stage"] for job in listed] == ["?"]
    log = (await served.client.get(f"/jobs/{job_id}/log", params={"tail": 1})).json()
    assert log["lines"][0]["text"] == "no file ?"
