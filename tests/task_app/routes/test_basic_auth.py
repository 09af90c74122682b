"""The key as the password of `Authorization: Basic`: for people's browsers, and nothing that acts."""

import base64

import httpx

from task_app.app import create_app
from task_app.settings import Settings
from tests.task_app.counting import KEY, boards


def basic(user, password):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def stranger():
    app = create_app(Settings(api_keys=(KEY,)), boards=boards())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://task-app")


async def test_the_password_is_the_key():
    async with stranger() as client:
        for user, password, status in (
            ("me", KEY, 200),
            (KEY, "", 200),
            ("me", "no", 401),
            (KEY, "no", 401),
        ):
            answer = await client.get("/info", headers={"Authorization": basic(user, password)})
            assert answer.status_code == status, (user, password)


async def test_a_browser_that_another_site_commands_can_read_nothing_and_do_nothing():
    # It adds the password to a form that a page elsewhere makes it send.
    async with stranger() as client:
        headers = {"Authorization": basic("me", KEY)}
        assert (await client.post("/env/create", json={}, headers=headers)).status_code == 401
        assert (await client.delete("/rollouts/a", headers=headers)).status_code == 401


async def test_a_program_that_knows_an_address_alone_calls_tools():
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    app = create_app(Settings(api_keys=(KEY,)), boards=boards())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://any:{KEY}@task-app") as client:
        answer = await client.post("/openenv/counting/mcp", json=call)
        assert answer.json()["result"]["tools"][0]["name"] == "add", answer.text
        for header in ("Origin", "Sec-Fetch-Site"):
            page = await client.post("/openenv/counting/mcp", json=call, headers={header: "cross-site"})
            assert page.status_code == 401
        elsewhere = await client.post("/env/create", json={"env_name": "counting"})
    assert elsewhere.status_code == 401


async def test_what_is_no_basic_header_is_no_key():
    async with stranger() as client:
        for value in ("Basic", "Basic ", "Basic !!!", "Basic " + "=" * 9, "Basic Og=="):
            answer = await client.get("/info", headers={"Authorization": value})
            assert answer.status_code == 401, value


async def test_only_a_person_is_asked_for_a_password():
    async with stranger() as client:
        page = await client.get("/env/x/view", headers={"Accept": "text/html,*/*"})
        program = await client.get("/env/x/view")
    assert page.headers["www-authenticate"].startswith("Basic realm=")
    assert program.headers["www-authenticate"] == "Bearer"
