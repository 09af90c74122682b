"""--state-dir: a task app killed with SIGKILL, and the one started after it."""

import signal

import pytest

from task_app.__main__ import main
from tests.task_app.playing import ON, act
from tests.task_app.test_service_process import task_app

MOVES = [
    act("move_right"),
    act("move_right", "move_right", "do"),
    act("move_down", "move_right", "do"),
    act("noop"),
]


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(10)


def posted(client, path, body, *, key=None):
    headers = {"Idempotency-Key": key} if key else {}
    answer = client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def created(client, *, key=None):
    body = {"env_name": "crafter", "seed": 17, "config": {"step_rewards": ON, "text": "compact"}}
    return posted(client, "/env/create", body, key=key)["env_id"]


def stepped(client, env_id, calls, *, key=None):
    return posted(client, "/env/step", {"env_id": env_id, "tool_calls": calls}, key=key)


def test_after_a_kill_sessions_go_on_and_retries_get_the_answers_of_before(tmp_path, capsys):
    # Every second decision is written whole, so one of the two killed sessions has a decision after that.
    settings = {"TURNWISE_JOURNAL_SNAPSHOT_EVERY": "2"}
    with task_app("--state-dir", str(tmp_path), **settings) as (process, client):
        undisturbed, even, odd = created(client), created(client, key="create"), created(client)
        expected = [stepped(client, undisturbed, calls) for calls in MOVES]
        begun = [stepped(client, even, calls, key=f"{i}") for i, calls in enumerate(MOVES[:2])]
        assert begun == [stepped(client, odd, calls) for calls in MOVES[:2]] == expected[:2]
        snapshot = posted(client, "/env/snapshot", {"env_id": odd})["snapshot"]
        assert stepped(client, odd, MOVES[2]) == expected[2]

        # A second task app cannot use its folder.
        with pytest.raises(SystemExit, match="2"):
            main(["--port", "0", "--state-dir", str(tmp_path)])
        assert "is in use by another task app" in capsys.readouterr().err
        kill(process)
    with task_app("--state-dir", str(tmp_path), **settings) as (_, client):
        assert created(client, key="create") == even
        assert stepped(client, even, MOVES[1], key="1") == begun[1]
        body = {"env_id": even, "tool_calls": MOVES[2]}
        other = client.post("/env/step", json=body, headers={"Idempotency-Key": "1"})
        assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")
        assert [stepped(client, even, calls) for calls in MOVES[2:]] == expected[2:]
        assert stepped(client, odd, MOVES[3]) == expected[3]
        # A snapshot too goes on alike in another process, in which strings hash otherwise.
        restored = posted(client, "/env/restore", {"snapshot": snapshot})["env_id"]
        assert [stepped(client, restored, calls)["metadata"] for calls in MOVES[2:]] == [
            step["metadata"] for step in expected[2:]
        ]
