"""Reading a posted job is bounded as a whole: whatever is in it, it costs others nothing."""

import asyncio
import bisect
import os
import re
import signal
import time

import pytest

from trainer_backend.errors import CheckEnded, JobError, TooManyChecks
from trainer_backend.jobs.check_process import CheckProcess
from trainer_backend.jobs.posted import parse_document

MEBIBYTE = 1 << 20
MODEL = '[model]\npreset = "tiny-0.3m"\n'
DEEP = "more than 32 deep"
MANY = "a job holds at most 50000 keys, items of lists and lines"


async def test_a_call_is_ended_when_it_takes_too_long_or_too_much_and_the_next_one_is_answered(tmp_path):
    plugin = tmp_path / "imported.py"
    plugin.write_text("class Mark: ...")
    checks = CheckProcess(at_most_s=0.5, at_most_bytes=64 * MEBIBYTE, plugins=[plugin])
    try:
        imported = "[name for name in __import__('sys').modules if 'plugins_imported' in name]"
        assert len(await checks.ask(eval, imported)) == 1, "once for all jobs"
        with pytest.raises(CheckEnded, match=r"took longer than 0\.5 s, and was ended"):
            await checks.ask(time.sleep, 600.0)
        with pytest.raises(CheckEnded, match=r"took longer than 0\.5 s, and was ended"):
            await checks.ask(re.fullmatch, "(a+)+b", "a" * 60)  # within one call of C, which holds the GIL
        with pytest.raises(CheckEnded, match="needed more than 64 MiB of memory, and was ended"):
            await checks.ask(bytes, 1024 * MEBIBYTE)
        with pytest.raises(CheckEnded, match="was ended by SIGABRT"):
            await checks.ask(os.abort)
        with pytest.raises(RuntimeError, match="exit code 3"):
            await checks.ask(os._exit, 3)
        with pytest.raises(JobError, match="not valid TOML"):
            await checks.ask(parse_document, "[")
        server = await checks.ask(os.getppid)
        os.kill(server, signal.SIGKILL)
        with pytest.raises(CheckEnded):
            await checks.ask(os.getpid)
        assert await checks.ask(bisect.bisect, [1, 2], 1) == 1
        assert await checks.ask(os.getppid) != server
    finally:
        checks.close()


async def test_more_calls_than_may_wait_are_told_to_come_later():
    checks = CheckProcess(at_most=0)
    with pytest.raises(TooManyChecks):
        await checks.ask(os.getpid)
    checks.close()


def long_texts() -> list[tuple[str, str]]:
    """Texts, and a part of what they are told. Each held the interpreter for a minute, or took gigabytes."""
    return [
        ("[" + " " * (MEBIBYTE - 1), "not valid TOML"),
        ("\n".join(".".join([f"k{n}", *"a" * 998]) + " = 1" for n in range(520)), MANY),
        ("\n".join(".".join([f"k{n}", *"a" * 998]) + " = 1" for n in range(40)), DEEP),
        ("x = {" + ", ".join(f"k{n}{'.a' * 998} = 1" for n in range(40)) + "}", DEEP),
        (MODEL + "[evaluation]\ninstances = 60000000\n[rollout]\nseeds = [1]", "evaluation.instances"),
        (MODEL + f"[training]\niterations = {2**63 - 1}", "less than or equal to 1000000"),
        (MODEL + "[training]\n" + "".join(f"k{n:06} = 1\n" for n in range(24_000)), "and 23980 more"),
        (MODEL + "".join(f"k{n:06} = 1\n" for n in range(80_000)), MANY),
        (MODEL + f"[rollout]\nseeds = [{'-1, ' * 40_000}]", "rollout.seeds"),
        (MODEL + f'[data]\nevaluation_split = "x"\npath = "{"a/" * 500_000}"', "than 4096 characters"),
        ('[model]\npreset = "' + "step" * 250_000 + '"', "model.preset is 'stepstep"),
        (MODEL + 'x = """' + '\\"""' * 250_000, "not valid TOML"),
        (MODEL + "[rollout]\nenv_config = " + "[" * 1_000_000, MANY),
        (MODEL + "[rollout]\nenv_config = " + "[" * 40_000, DEEP),
        (f"[{'a.' * 24_000}a]", DEEP),
        (MODEL + "[rollout]\nenv_config = {seed = 0x" + "f" * 400_000 + "}", "more than 64 bits"),
        (MODEL + "[rollout]\nenv_config = {seed = " + "1" * 400_000 + "}", "not valid TOML: Exceeds"),
        (MODEL + "x = [\n" + "[1],\n" * 12_000 + "]", "x is not a key"),
    ]


async def test_no_text_of_a_job_keeps_the_service_busy_or_gets_a_long_reply(served, monkeypatch):
    monkeypatch.setattr(checks := served.service.checks, "_at_most_s", 60.0)
    parser = await checks.ask(os.getppid)
    for text, found in long_texts():
        os.kill(parser, signal.SIGSTOP)  # as if the text took for ever
        launch = {"job_type": "rl", "data": {"config": text[: MEBIBYTE // 3]}}
        posts = [
            asyncio.create_task(served.client.post("/jobs/check", content=text.encode()[:MEBIBYTE])),
            asyncio.create_task(served.client.post("/rl/jobs", json=launch)),
        ]
        for _ in posts:
            assert (await served.client.get("/jobs")).status_code == 200
        assert not any(post.done() for post in posts), text[:80]
        os.kill(parser, signal.SIGCONT)
        answer, refusal = await asyncio.gather(*posts)
        assert answer.status_code == 200, answer.text
        assert max(len(answer.content), len(refusal.content)) < 100_000
        findings = [finding["text"] for finding in answer.json()["findings"]]
        assert len(findings) <= 21
        assert any(found in finding for finding in findings), findings
        assert refusal.status_code in (400, 422) and refusal.json()["detail"], refusal.text


async def test_json_is_bounded_as_toml_is(served):
    many = {"config": {f"k{n}": 1 for n in range(5_000)}}
    answer = await served.client.post("/jobs", json=many)
    assert (answer.status_code, answer.json()["code"]) == (400, "job_invalid")
    assert answer.json()["detail"].endswith("and 4981 more, which are not told")  # `model` is missing too
    tables = {"model": {"preset": "tiny-0.3m"}, "rollout_only": [{}] * 40_000}
    answer = await served.client.post("/jobs", json={"config": tables})
    assert "rollout_only" in answer.json()["detail"] and "at most 32 items" in answer.json()["detail"]
    answer = await served.client.post(
        "/jobs", json={"toml": MODEL, "tags": {str(n): {} for n in range(9_000)}}
    )
    assert (answer.status_code, answer.json()["detail"]) == (422, "tags: 9000 tags; at most 32")


async def test_a_check_that_was_ended_is_told_as_that_and_not_as_a_store_that_is_away(served, monkeypatch):
    monkeypatch.setattr(served.service.checks, "_at_most_s", 1e-6)
    for path in ("/jobs/check", "/jobs", "/jobs?dry_run=true"):
        answer = await served.client.post(path, content=MODEL)
        assert (answer.status_code, answer.json()["code"]) == (422, "check_ended"), answer.text
        assert "checking the job took longer than 1e-06 s" in answer.json()["detail"]
