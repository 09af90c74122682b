"""Who may come in: DESIGN.md section 6. No reply and no log holds a part of a key."""

import base64
import re

import httpx

from task_app.app import create_app
from task_app.settings import Settings
from tests.task_app.counting import KEY, boards, openapi

ALIAS = "an-alias-of-the-key"


def basic(user, password):
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


# Every form of a key is in tests/service_kit/test_gate.py.
GOOD = {
    "x-api-key": {"X-API-Key": KEY},
    "an alias in a list": {"X-API-Keys": f"nope, {ALIAS} ,other"},
    "one good among bad": {"X-API-Key": "nope", "Authorization": f"Bearer {KEY}"},
    "as the password": basic("me", KEY),
    "as the user without a password": basic(KEY, ""),
}
BAD = {
    "none": {},
    "a prefix": {"X-API-Key": KEY[:-1]},
    "bytes": {"X-API-Key": b"\xff\xfe"},
    "a wrong password": basic("me", "no"),
    "as the user with a password": basic(KEY, "no"),
    **{value: {"Authorization": value} for value in ("Basic", "Basic ", "Basic !!!", "Basic Og==")},
    "padding alone": {"Authorization": "Basic " + "=" * 9},
}
OPEN = {("GET", "/"), ("GET", "/health")}


def documented():
    """Method and path of every route, `a` for each parameter."""
    paths = openapi().document["paths"]
    return {(method.upper(), re.sub("{.*?}", "a", path)) for path, item in paths.items() for method in item}


def plain_client(*keys, url="http://task-app", needs_key=True):
    app = create_app(Settings(api_keys=keys), boards=boards(), needs_key=needs_key)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url)


async def test_every_known_way_to_present_a_good_key_opens():
    async with plain_client(KEY, ALIAS) as client:
        for way, headers in GOOD.items():
            assert (await client.get("/info", headers=headers)).status_code == 200, way


async def test_a_missing_or_wrong_key_is_a_401_problem_without_any_part_of_a_key():
    async with plain_client(KEY, ALIAS) as client:
        for way, headers in BAD.items():
            answer = await client.get("/info", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorised"), way
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert not any(part in answer.text for part in (KEY[:6], KEY[-6:], ALIAS[:6], ALIAS[-6:])), way


async def test_every_route_but_two_is_closed_even_one_that_does_not_exist():
    unknown = {("GET", "/openapi.json"), ("GET", "/no/such/route"), ("GET", "/health/")}
    async with plain_client(KEY) as client, plain_client() as keyless:
        for method, path in unknown:
            assert (await client.request(method, path, json={})).status_code == 401, (method, path)
        for method, path in (documented() - OPEN) | unknown:
            answer = await keyless.request(method, path, json={}, headers={"X-API-Key": KEY})
            assert answer.status_code == 503, (method, path)
            assert "missing_environment_api_key" in answer.text, "also in the forms of a capture's libraries"


async def test_the_root_and_the_bare_health_answer_are_open():
    async with plain_client(KEY) as client:
        assert (await client.get("/")).json()["status"] == "ok"
        assert (await client.head("/")).status_code == 200
        bare = (await client.get("/health")).json()
        assert bare["healthy"] is True
        assert "authorized" not in bare
        wrong = await client.get("/health", headers={"X-API-Key": "nope"})
        assert (wrong.status_code, wrong.json()["authorized"]) == (200, False)
        good = await client.get("/health", headers={"X-API-Key": KEY})
        assert good.json()["authorized"] is True
    async with plain_client() as client:
        assert (await client.get("/health")).json()["code"] == "missing_environment_api_key"
        assert (await client.get("/")).status_code == 200


async def test_on_the_loopback_without_a_key_this_machine_is_answered_and_no_foreign_page():
    new = {"env_name": "counting", "seed": 1}
    for name in ("127.0.0.1:8001", "localhost:8001", "[::1]:8001"):
        async with plain_client(url=f"http://{name}", needs_key=False) as client:
            assert (await client.get("/info")).status_code == 200
            assert (await client.get("/health", headers={"X-API-Key": "any"})).json()["authorized"] is True
            foreign = {"Origin": "http://elsewhere.example", "Content-Type": "text/plain"}
            refused = await client.post("/env/create", headers=foreign, json=new)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
            proxied = await client.get("/info", headers={"X-Forwarded-For": "192.0.2.1"})
            assert (proxied.status_code, proxied.json()["where"]) == (403, "header x-forwarded-for")
    async with plain_client(url="http://rebound.example", needs_key=False) as client:
        assert (await client.get("/info")).json()["where"] == "header Host"
    async with plain_client(KEY, url="http://127.0.0.1", needs_key=False) as client:
        assert (await client.get("/info")).status_code == 401  # one that is set counts


def test_settings_do_not_show_their_keys():
    settings = Settings(api_keys=(KEY,))
    assert KEY[:6] not in f"{settings!r} {settings} {settings.limits()} {settings.model_dump_json()}"


async def test_a_browser_that_another_site_commands_can_read_nothing_and_do_nothing():
    # It adds the password to a form that a page elsewhere makes it send.
    async with plain_client(KEY) as client:
        headers = basic("me", KEY)
        assert (await client.post("/env/create", json={}, headers=headers)).status_code == 401
        assert (await client.delete("/rollouts/a", headers=headers)).status_code == 401


async def test_a_program_that_knows_an_address_alone_calls_tools():
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    async with plain_client(KEY, url=f"http://any:{KEY}@task-app") as client:
        answer = await client.post("/openenv/counting/mcp", json=call)
        assert answer.json()["result"]["tools"][0]["name"] == "add", answer.text
        for header in ("Origin", "Sec-Fetch-Site"):
            page = await client.post("/openenv/counting/mcp", json=call, headers={header: "cross-site"})
            assert page.status_code == 401
        elsewhere = await client.post("/env/create", json={"env_name": "counting"})
    assert elsewhere.status_code == 401


async def test_only_a_person_is_asked_for_a_password():
    async with plain_client(KEY) as client:
        page = await client.get("/env/x/view", headers={"Accept": "text/html,*/*"})
        program = await client.get("/env/x/view")
    assert page.headers["www-authenticate"].startswith("Basic realm=")
    assert program.headers["www-authenticate"] == "Bearer"
