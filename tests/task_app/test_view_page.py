"""GET /env/{env_id}/view without a browser: what stands on the page, and what it may not do."""

import re

from task_app.plugins import default_plug_boards
from tests.task_app.counting import running_app
from tests.task_app.playing import new_env, post, step


async def test_the_page_shows_picture_text_vitals_and_what_each_decision_achieved():
    async with running_app(default_plug_boards()) as client:
        env_id = await new_env(client)
        await step(client, env_id, "move_right", "move_right", "move_right", "do")
        await step(client, env_id, "move_down", "move_right", "do")
        await step(client, env_id, "fly")
        page = (await client.get(f"/env/{env_id}/view")).text
    assert '<img alt="the game after decision 3" src="data:image/png;base64,' in page
    assert "=== CRAFTER GAME STATE ===" in page
    assert "<li>health <b>9</b></li>" in page
    assert "<li>achievements <b>1 of 22</b></li>" in page
    # the first wood unlocks the achievement, the second one only counts (docs/http.md)
    rows = re.findall(r"<tr>.*?</tr>", page)[1:]
    assert [re.findall(r'class="(first|again|refused)"', row) for row in rows] == [
        ["refused"],
        ["again"],
        ["first"],
    ]
    assert ["<code>noop</code>" in row for row in rows] == [True, False, False]


async def test_an_environment_without_pictures_or_achievements_has_a_page_too():
    async with running_app() as client:
        env_id = (await post(client, "/env/create", env_name="counting"))["env_id"]
        page = (await client.get(f"/env/{env_id}/view")).text
    assert "<img" not in page
    assert "step 0" in page
    assert "None yet." in page


async def test_a_page_is_sent_again_only_when_something_happened():
    async with running_app(default_plug_boards()) as client:
        env_id = await new_env(client)
        first = await client.get(f"/env/{env_id}/view")
        same = await client.get(f"/env/{env_id}/view", headers={"If-None-Match": first.headers["etag"]})
        await step(client, env_id, "noop")
        other = await client.get(f"/env/{env_id}/view", headers={"If-None-Match": first.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    assert other.status_code == 200
    assert other.headers["etag"] != first.headers["etag"]


async def test_the_page_loads_nothing_from_elsewhere_and_runs_only_its_own_script():
    async with running_app(default_plug_boards()) as client:
        answer = await client.get(f"/env/{await new_env(client)}/view")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", answer.text)


async def test_what_an_environment_writes_is_text_and_never_markup():
    # the counting environment repeats the name of an unknown tool
    async with running_app() as client:
        env_id = (await post(client, "/env/create", env_name="counting"))["env_id"]
        evil = "<script>alert(1)</script>"
        await client.post("/env/step", json={"env_id": env_id, "tool_calls": [{"tool": evil, "args": {}}]})
        page = (await client.get(f"/env/{env_id}/view")).text
    assert evil not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


async def test_watching_keeps_nothing_alive():
    async with running_app(session_idle_s=1e-9, sweep_every_s=1e6) as client:
        env_id = (await post(client, "/env/create", env_name="counting"))["env_id"]
        services = client._transport.app.state.services
        assert (await client.get(f"/env/{env_id}/view")).status_code == 200
        services.expire()
        gone = await client.get(f"/env/{env_id}/view")
    assert (gone.status_code, gone.json()["code"]) == (404, "unknown_id")
