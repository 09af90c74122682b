"""How tests talk to /rollouts: as a trainer does."""

from contextlib import asynccontextmanager

from shared_schemas.rollouts import RolloutPage
from tests.task_app.counting import WaitingPolicy, boards, running_app


async def accept(client, *rollouts):
    return await client.post("/rollouts", json={"rollouts": list(rollouts)})


async def page(client, cursor=None, wait_s=20.0, run_id="r"):
    params = {"run_id": run_id, "wait_s": wait_s} | ({"cursor": cursor} if cursor else {})
    answer = await client.get("/rollouts", params=params)
    assert answer.status_code == 200, answer.text
    return RolloutPage.model_validate_json(answer.content)


async def wait_for_all(client, count, run_id="r", ids=frozenset()):
    """Poll as a trainer does until `count` rollouts ended, and those of these ids."""
    found, cursor = {}, None
    while len(found) < count or not ids <= found.keys():
        one = await page(client, cursor, run_id=run_id)
        cursor = one.cursor
        found |= {rollout.rollout_id: rollout for rollout in one.rollouts}
    return found


async def play(client, *rollouts):
    """Every rollout of the run that has ended once all of these have, by its id."""
    answer = await accept(client, *rollouts)
    assert answer.status_code == 202, answer.text
    return await wait_for_all(client, 0, ids={one["rollout_id"] for one in rollouts})


def waiting_boards(count):
    """Boards whose policy `waiting` gives out one of `policies` after the other."""
    policies = [WaitingPolicy() for _ in range(count)]
    given = iter(policies)
    return policies, boards(waiting=lambda: next(given))


@asynccontextmanager
async def waiting_app(count, **settings):
    """A client of an app with these boards, and the policies."""
    policies, plug_boards = waiting_boards(count)
    async with running_app(plug_boards, **settings) as client:
        yield client, policies


WAITING = {"policy": {"policy_name": "waiting"}}
