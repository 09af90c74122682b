"""What a line of the log names: the request, the session, the rollout; never a key."""

import pytest
import structlog
from structlog.testing import capture_logs

from service_kit.logs import configure_logs
from tests.task_app.counting import KEY, rollout, running_app
from tests.task_app.rollout_client import accept, wait_for_all

BOOM = [{"tool": "add", "args": {"names": ["boom"]}}]


@pytest.fixture
def logs():
    """What is logged, with what is bound to it."""
    configure_logs("debug")
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as found:
        yield found


async def test_a_request_has_an_id_in_its_answer_and_in_every_line(logs, client):
    env_id = (await client.post("/env/create", json={"env_name": "counting"})).json()["env_id"]
    logs.clear()
    step = {"env_id": env_id, "tool_calls": BOOM}
    answer = await client.post("/env/step", json=step, headers={"X-Request-ID": "mine-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (424, "mine-1")
    assert [line["event"] for line in logs] == ["boundary", "request"]
    assert all((line["request_id"], line["env_id"]) == ("mine-1", env_id) for line in logs)
    assert (logs[1]["route"], logs[1]["status"]) == ("/env/step", 424)


async def test_a_rollout_logs_its_own_ids_and_not_those_of_the_request_that_started_it(logs):
    broken = rollout("b", policy={"policy_name": "planned", "config": {"names": ["boom"]}})
    async with running_app(max_concurrent_rollouts=1) as client:
        await accept(client, rollout("a"), broken)
        await wait_for_all(client, 2)
    told = {line["event"]: line for line in logs if "rollout_id" in line}
    assert (told["rollout_finished"]["run_id"], told["rollout_finished"]["rollout_id"]) == ("r", "a")
    assert (told["boundary"]["rollout_id"], told["rollout_failed"]["rollout_id"]) == ("b", "b")
    assert not [line for line in told.values() if "request_id" in line]


IDS = ["", "two words", "x" * 129, "schlüssel", f"trace-{KEY}", KEY, "a\tb", '"quoted"']


@pytest.mark.parametrize(("sent", "presented"), [*((one, KEY) for one in IDS), (KEY, "")])
async def test_an_id_that_is_no_id_or_holds_a_key_is_replaced(logs, client, sent, presented):
    headers = {"X-Request-ID": sent.encode(), "X-API-Key": presented}
    answer = await client.get("/health", headers=headers)
    found = answer.headers["x-request-id"]
    assert found != sent
    assert len(found) == 16
    assert [line["request_id"] for line in logs] == [found]
    assert KEY not in str(answer.headers) + str(logs)


async def test_ids_of_requests_differ_and_nothing_stays_bound(client):
    answers = [await client.get("/health") for _ in range(20)]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 20
    structlog.contextvars.clear_contextvars()
