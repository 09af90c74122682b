"""No part of a key in any reply, log line, trace or file: looked for by searching all of them."""

import asyncio
import random

import httpx
import pytest

from service_kit.logs import configure_logs
from service_kit.server import Listener, ServerThread
from task_app.app import create_app
from task_app.settings import Settings
from tests.task_app.fake_inference import completion, fake_inference, status
from tests.task_app.test_service_process import crafter

# Letters that no hex id holds. Six in a row of a key are a part of it.
LETTERS = "GHJKLMPQRSTVWXYZ"
PART = 6


def secret(seed):
    return "".join(random.Random(seed).choices(LETTERS, k=32))


PRIMARY, ALIAS, INFERENCE, WRONG = (secret(seed) for seed in range(4))


def parts(key):
    return [key[i : i + PART] for i in range(len(key) - PART + 1)]


def held(text):
    """Which keys have a part in this."""
    keys = {"primary": PRIMARY, "alias": ALIAS, "inference": INFERENCE, "wrong": WRONG}
    return [name for name, key in keys.items() if any(part in text for part in parts(key))]


def test_the_search_finds_a_part_of_a_key():
    assert held(f"prefix {ALIAS[5:11]} suffix") == ["alias"]
    assert held(PRIMARY[:5]) == []


class Spoken:
    """Every reply, as it came."""

    def __init__(self, client):
        self.texts = []
        self.client = client

    def __call__(self, method, path, **more):
        answer = self.client.request(method, path, **more)
        self.texts.append(f"{answer.headers} {answer.text}")
        return answer


def wrong_keys(say):
    """Strangers, in every way that a key may be presented."""
    for headers in (
        {"X-API-Key": WRONG},
        {"X-API-Key": "", "X-API-Keys": f"{WRONG},{PRIMARY[:20]}"},
        {"X-API-Key": "", "Authorization": f"Bearer {WRONG}"},
        {"X-API-Key": PRIMARY[:-1]},
    ):
        for path in ("/health", "/info", "/env/create", "/rollouts", "/nowhere"):
            say("GET", path, headers=headers)


def mistakes(say):
    """Keys where they do not belong."""
    say("GET", "/rollouts", params={"run_id": "r", "cursor": "x"})
    policy = {"policy_name": "openai", "config": {"inference_url": "http://evil.example", "model": "m"}}
    say("POST", "/policy/create", json=policy | {"inference_key": INFERENCE})
    say("POST", "/policy/create", json=policy | {"inference_key": [INFERENCE]})
    say("POST", "/policy/create", json=policy | {"inference_kye": INFERENCE})
    config = {**policy["config"], "api_key": INFERENCE}
    say("POST", "/policy/create", json=policy | {"config": config})
    older = {"run_id": "r", "ops": ["agent", "env"], "env": {"env_name": "crafter", "seed": 1}}
    for headers in ({"Authorization": f"Bearer {WRONG}"}, [INFERENCE]):
        config["extra_headers"] = headers
        say("POST", "/rollout", json=older | {"policy": policy | {"config": config}})
    url = f"http://user:{INFERENCE}@127.0.0.1/v1"
    say("POST", "/policy/create", json=policy | {"config": {"inference_url": url, "model": "m"}})
    bad = crafter("bad", policy=policy | {"inference_key": INFERENCE})
    say("POST", "/rollouts", json={"rollouts": [bad]})


def work(say, url):
    """A session, a policy and a rollout whose model server repeats the key that it was sent."""
    for path in ("/", "/health", "/info", "/task_info?seed=1", "/openapi.json"):
        say("GET", path)
    made = say("POST", "/env/create", json={"env_name": "crafter"}, headers={"Idempotency-Key": "k"}).json()
    calls = [{"tool": "interact_many", "args": {"actions": ["noop"]}}]
    say("POST", "/env/step", json={"env_id": made["env_id"], "tool_calls": calls})
    config = {"inference_url": url, "model": "m", "ask_token_ids": False, "max_attempts": 1}
    policy = {"policy_name": "openai", "config": config, "inference_key": INFERENCE}
    bound = say("POST", "/policy/create", json=policy | {"bound_env_id": made["env_id"]}).json()
    for _ in range(3):
        say("POST", "/policy/step", json={"policy_id": bound["policy_id"]})
    say("POST", "/policy/snapshot", json={"policy_id": bound["policy_id"]})
    asked = crafter("a", policy=policy, limits={"max_decisions": 3})
    say("POST", "/rollouts", json={"rollouts": [asked]})
    while not say("GET", "/rollouts", params={"run_id": "r", "wait_s": 10}).json()["rollouts"]:
        pass
    say("GET", "/rollouts/a")
    older = {"run_id": "r1", "ops": ["agent", "env"], "env": {"env_name": "crafter", "seed": 1}}
    own = {"inference_url": url, "model": "m", "api_key": INFERENCE, "max_attempts": 1}
    say("POST", "/rollout", json=older | {"policy": {"policy_name": "crafter-react", "config": own}})
    tools = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    say("POST", "/openenv/crafter/mcp", json=tools, auth=("any", PRIMARY))


@pytest.mark.parametrize("form", ["text", "json"])
async def test_no_reply_log_line_or_file_holds_a_part_of_a_key(form, tmp_path, capsys):
    call = {"id": "c", "type": "function", "function": {"name": "interact_many", "arguments": "{}"}}
    told = {"role": "assistant", "content": f"you sent Bearer {INFERENCE}", "tool_calls": [call]}
    refused = status(500, {"error": {"message": f"Bearer {INFERENCE} is no good"}})
    configure_logs("debug", form=form)
    async with fake_inference(completion(told), refused, completion(told)) as fake:
        replies = await asyncio.to_thread(spoken, tmp_path, fake.url)
    log = capsys.readouterr().err
    assert {name for text in replies for name in held(text)} == set()
    assert held(log) == []
    assert "rollout_finished" in log, "the log is there"
    files = list(tmp_path.iterdir())
    assert [path.name for path in files if path.suffix == ".sqlite3"]
    assert [path.name for path in files if held(path.read_bytes().decode("latin-1"))] == []


def spoken(folder, url):
    """What a server answers to all that a stranger, a careless caller and a trainer say."""
    app = create_app(Settings(api_keys=(PRIMARY, ALIAS), state_dir=folder))
    with (
        ServerThread(app, Listener("127.0.0.1", 0)) as address,
        httpx.Client(base_url=address, headers={"X-API-Key": ALIAS}, timeout=20.0) as client,
    ):
        say = Spoken(client)
        wrong_keys(say)
        mistakes(say)
        work(say, url)
    return say.texts
