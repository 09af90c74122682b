"""The `openenv` client itself against a task app on a real port.

Not in the extra `dev`: openenv 0.10.0 brings 113 packages (gradio, fastmcp, pandas ...). After `pip install
openenv` this file runs; `test_openenv.py` holds the same wire against recorded answers always.
"""

import pytest

openenv = pytest.importorskip("openenv.core.generic_client", reason="the package `openenv` is not installed")

from openenv.core.mcp_client import MCPToolClient  # noqa: E402

from tests.task_app.counting import KEY  # noqa: E402
from tests.task_app.test_service_process import task_app  # noqa: E402

WOOD = {"actions": ["move_right", "move_right", "move_right", "do"]}
HEADERS = {"X-API-Key": KEY}


@pytest.fixture(scope="module")
def http():
    with task_app() as (_, client):
        yield client


def url(http):
    return f"{str(http.base_url).rstrip('/')}/openenv/crafter"


async def test_the_client_plays_unchanged_and_its_session_ends_with_it(http):
    async with openenv.GenericEnvClient(base_url=url(http), headers=HEADERS) as env:
        start = await env.reset(seed=17, episode_id="mine")
        step = await env.step(WOOD)
        state = await env.state()
        session_id = start.metadata["session_id"]
        assert (start.reward, start.done, start.observation["metadata"]["seed"]) == (None, False, 17)
        assert (step.reward, step.done) == (1.0, False)
        assert step.metadata["achievements_added"] == ["collect_wood"]
        assert (state["episode_id"], state["step_count"]) == ("mine", 1)
        assert http.get(f"/env/{session_id}/frame").status_code == 200
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            await env.step({"nonsense": 1})
        child = await env.new_session()
        assert (await child.reset(seed=17)).metadata["session_id"] != session_id
    assert http.get(f"/env/{session_id}/frame").status_code == 404


async def test_the_tool_client_lists_and_calls(http):
    async with MCPToolClient(base_url=url(http), headers=HEADERS) as env:
        await env.reset(seed=17)
        assert [tool.name for tool in await env.list_tools()] == ["interact_many"]
        called = await env.call_tool("interact_many", **WOOD)
    assert (called["reward"], called["done"]) == (1.0, False)
    assert called["result"].endswith("unlocked collect_wood")


async def test_without_a_key_nothing_opens_and_the_url_may_carry_it(http):
    with pytest.raises(ConnectionError, match="401"):
        await openenv.GenericEnvClient(base_url=url(http)).connect()
    with_key = url(http).replace("://", f"://any:{KEY}@")
    async with openenv.GenericEnvClient(base_url=with_key) as env:
        assert (await env.reset(seed=3)).metadata["seed"] == 3
    async with MCPToolClient(base_url=with_key) as env:
        await env.reset(seed=17)
        assert (await env.call_tool("interact_many", **WOOD))["reward"] == 1.0
