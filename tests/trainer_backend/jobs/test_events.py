"""Event streams: what was, what comes, from where one was, and an end; pieces of log files."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_backend.jobs.served import serving, settings_for
from trainer_backend.jobs.events import Place, _stream
from trainer_backend.jobs.run_routes import MOST_BYTES, Piece, read_piece


def parsed(text: str) -> list[tuple[str, str | None, dict[str, Any]]]:
    """Name, id and data of each event."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields["event"], fields.get("id"), json.loads(fields["data"])))
    return found


async def all_events(served, job_id: str, **named: Any):
    answer = await served.client.get(f"/jobs/{job_id}/events", **named)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parsed(answer.text)


async def test_a_stream_tells_all_and_ends_with_its_job_and_goes_on_behind_an_id_that_is_sent_back(served):
    job_id = await served.post("quick")
    events = await all_events(served, job_id)  # from before its start to its end
    rows = [data for name, _, data in events if name == "metrics"]
    assert [(row["kind"], row["iteration"], row["row"]["episode/outcome_reward"]) for row in rows] == [
        ("iteration", 1, 1.5), ("iteration", 2, 2.5),
    ]  # fmt: skip
    assert [data["state"] for name, _, data in events if name == "state"][-1] == "succeeded"
    assert events[-1] == ("end", None, {"state": "succeeded"})
    marked = [(identity, name, data) for name, identity, data in events if identity is not None]
    rest = await all_events(served, job_id, headers={"Last-Event-ID": marked[-1][0]})
    assert [name for name, _, _ in rest] == ["state", "end"]
    first_row = next(identity for identity, name, _ in marked if name == "metrics")
    rest = await all_events(served, job_id, params={"after": first_row})
    assert [data["iteration"] for name, _, data in rest if name == "metrics"] == [2]
    # A connection that is cut in the middle of a batch of lines loses none.
    lines = [(identity, data["text"]) for identity, name, data in marked if name == "log"]
    assert [text for _, text in lines] == ["start 1", "iteration 1", "iteration 2"]
    for came, (identity, _) in enumerate(lines, start=1):
        rest = await all_events(served, job_id, headers={"Last-Event-ID": identity})
        assert [data["text"] for name, _, data in rest if name == "log"] == [text for _, text in lines[came:]]
    for identity in ("x", "1", "1.", "-1.2", "1.2.3", "1" * 41, "9" * 19 + ".0", "0." + "9" * 20):
        answer = await served.client.get(f"/jobs/{job_id}/events", headers={"Last-Event-ID": identity})
        assert answer.status_code == 422, identity


async def test_a_quiet_stream_says_that_it_is_there_and_only_so_many_are_open(tmp_path: Path):
    settings = settings_for(tmp_path).model_copy(update={"heartbeat_s": 0.01, "max_streams": 1})
    async with serving(settings) as served:
        await served.train("waiting")
        queued = await served.post("waiting")
        stream = _stream(served.service, queued, Place())
        assert parsed((await anext(stream)).decode())[0][2]["state"] == "queued"
        assert await anext(stream) == b": still here\n\n"
        answer = await served.client.get(f"/jobs/{queued}/events")
        assert (answer.status_code, answer.json()["code"]) == (503, "too_many_streams")


async def test_a_stream_ends_with_its_job_s_deletion_and_with_the_service(served):
    running, queued = await served.train("waiting"), await served.post("waiting")
    await served.ask("pause", queued)
    stream = _stream(served.service, queued, Place())
    await anext(stream)
    await served.client.delete(f"/jobs/{queued}")
    assert parsed((await anext(stream)).decode()) == [("end", None, {"state": "deleted"})]
    other = _stream(served.service, running, Place())
    await anext(other)
    served.service.news.close()
    async with asyncio.timeout(60):
        async for _ in other:
            pass


async def test_logs_are_read_from_a_place_a_long_one_whole_and_curves_by_name_or_all(served):
    job_id = await served.post("quick")
    await served.until(job_id, "succeeded")

    async def log(**query: Any) -> dict[str, Any]:
        return (await served.client.get(f"/jobs/{job_id}/log", params=query)).json()

    first = await log(tail=1)
    assert [line["text"] for line in first["lines"]] == ["iteration 2"]
    assert await log(offset=first["next_offset"]) == {"lines": [], "next_offset": first["next_offset"]}
    folder = Path((await served.job(job_id))["run_dir"])
    (folder / "process.log").write_bytes(b"one\ntw\xff\nhalf")
    assert await log(part="process") == {
        "lines": [{"time": "", "text": "one"}, {"time": "", "text": "tw\ufffd"}], "next_offset": 8,
    }  # fmt: skip
    for part in ("gateway_1", "task_app_1"):
        (folder / f"{part}.log").write_bytes(b"listening\n")
        assert [line["text"] for line in (await log(part=part))["lines"]] == ["listening"]
    assert (await log(part="task_app"))["lines"] == (await log(part="learner"))["lines"] == []
    assert (await served.client.get(f"/jobs/{job_id}/log?part=secrets")).status_code == 422
    found = (await served.client.get(f"/jobs/{job_id}/metrics")).json()
    assert sorted(found["series"]) == ["decision/nonzero_frac", "episode/outcome_reward", "policy/version"]
    some = await served.client.get(f"/jobs/{job_id}/metrics", params={"names": ["policy/*", "none"]})
    assert list(some.json()["series"]) == ["policy/version"]
    assert (await served.client.get(f"/jobs/{job_id}/metrics?kind=evaluation")).json()["series"] == {}
    rows = [json.dumps({"time": "", "text": f"{number:06d} {'x' * 9_000}"}) for number in range(300)]
    (folder / "run.log").write_text("".join(f"{row}\n" for row in rows))  # 2.7 MB, in pieces
    told = [data["text"][:6] for name, _, data in await all_events(served, job_id) if name == "log"]
    assert told == [f"{number:06d}" for number in range(300)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.log"


def test_lines_come_with_the_byte_after_each_and_one_that_is_being_written_does_not(path):
    path.write_bytes(b"one\n\nthree\nfo")
    assert read_piece(path, 0) == Piece((b"one", b"", b"three"), (4, 5, 11), 11, False)
    assert read_piece(path, 4) == Piece((b"", b"three"), (5, 11), 11, False)
    assert read_piece(path, 11) == read_piece(path, 11, last=True) == Piece((), (), 11, False)


def test_a_file_that_is_not_there_or_was_rewritten(path):
    assert read_piece(path, 7) == Piece((), (), 0, False)
    path.write_bytes(b"new\n")
    assert read_piece(path, 7) == read_piece(path, 7, last=True) == Piece((b"new",), (4,), 4, False)


def test_a_line_that_is_longer_than_a_piece_comes_as_a_whole_and_the_last_piece_begins_with_a_line(path):
    long = b"x" * (MOST_BYTES + 5)
    path.write_bytes(long + b"\nshort\n")
    assert read_piece(path, 0).lines == (long,)
    assert read_piece(path, 0).more
    assert read_piece(path, 0, last=True).lines == (b"short",)
    path.write_bytes(b"before\n" + (b"y" * 1023 + b"\n") * 1024)
    assert len(read_piece(path, 0, last=True).lines) == 1024


def test_what_no_run_has_told_is_left_out_and_what_was_printed_is_shown_somehow(path):
    path.write_bytes(b'{"time": "t", "text": "a"}\n[1]\nhalf {\n')
    assert [(line.time, line.text, end) for line, end in read_piece(path, 0).log_lines()] == [("t", "a", 27)]
    assert Piece((b"tw\xff", b"", b"a\rb")).texts() == ["tw\ufffd", "", "a", "b"]
