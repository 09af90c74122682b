"""--state-dir: a task app killed with SIGKILL, and the one started after it."""

import signal

from tests.task_app.test_service_process import _run, task_app

ON = {"enabled": True, "mode": "decision_stepwise"}


def acts(*names):
    return [{"tool": "interact_many", "args": {"actions": list(names)}}]


MOVES = [
    acts("move_right"),
    acts("move_right", "move_right", "do"),
    acts("move_down", "move_right", "do"),
    acts("noop"),
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


def test_after_a_kill_a_session_goes_on_at_its_last_decision(tmp_path):
    settings = {"TURNWISE_JOURNAL_SNAPSHOT_EVERY": "2"}
    with task_app("--state-dir", str(tmp_path), **settings) as (process, client):
        undisturbed, killed = created(client), created(client)
        expected = [stepped(client, undisturbed, calls) for calls in MOVES]
        found = [stepped(client, killed, calls) for calls in MOVES[:2]]
        kill(process)
    with task_app("--state-dir", str(tmp_path), **settings) as (process, client):
        found.append(stepped(client, killed, MOVES[2]))
        kill(process)
    with task_app("--state-dir", str(tmp_path), **settings) as (process, client):
        found.append(stepped(client, killed, MOVES[3]))
    assert found == expected


def test_retries_after_a_kill_get_the_answers_of_before(tmp_path):
    with task_app("--state-dir", str(tmp_path)) as (process, client):
        env_id = created(client, key="create")
        first = stepped(client, env_id, MOVES[0], key="one")
        kill(process)
    with task_app("--state-dir", str(tmp_path)) as (_, client):
        assert created(client, key="create") == env_id
        assert stepped(client, env_id, MOVES[0], key="one") == first
        assert stepped(client, env_id, MOVES[0], key="two")["info"]["turn"] == 2
        body = {"env_id": env_id, "tool_calls": MOVES[1]}
        other = client.post("/env/step", json=body, headers={"Idempotency-Key": "one"})
        assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")


def test_a_folder_in_use_is_refused_and_its_user_goes_on(tmp_path):
    with task_app("--state-dir", str(tmp_path)) as (_, client):
        ended = _run("--port", "0", "--state-dir", str(tmp_path))
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "is in use by another task app" in ended.stderr
        created(client)
