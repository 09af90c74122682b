"""GET /env/{env_id}/frame and /view: pictures of an environment, and its page without a browser."""

import asyncio
import io
import re
import threading

import numpy as np
from PIL import Image

from task_app.plugins import EnvironmentPlugin, PlugBoards
from tests.task_app.counting import CountingConfig, CountingEnvironment, running_app
from tests.task_app.playing import new_env, post, step


async def created(client, env_name="counting"):
    return (await post(client, "/env/create", env_name=env_name))["env_id"]


async def test_crafter_is_drawn_as_a_png_of_the_size_asked_for(real):
    env_id = await created(real, "crafter")
    answer = await real.get(f"/env/{env_id}/frame", params={"width": 144, "height": 90})
    sides = (0, 15, 1025, "wide")
    refused = [await real.get(f"/env/{env_id}/frame", params={"width": side}) for side in sides]
    assert answer.headers["content-type"] == "image/png"
    picture = Image.open(io.BytesIO(answer.content))
    assert (picture.format, picture.size) == ("PNG", (144, 90))
    assert len(picture.convert("RGB").getcolors(1 << 16)) > 20
    assert {(one.status_code, one.json()["where"]) for one in refused} == {(422, "width")}


async def test_an_environment_without_pictures_and_an_unknown_one_are_404(client):
    env_id = await created(client)
    undrawn = await client.get(f"/env/{env_id}/frame")
    unknown = await client.get("/env/env_0/frame")
    assert (undrawn.status_code, unknown.status_code) == (404, 404)
    assert undrawn.json()["code"] == "unknown_id"
    assert undrawn.json()["hint"] == "environment 'counting' draws none"
    assert unknown.headers["content-type"] == "application/problem+json"


async def test_pictures_wait_for_one_another_and_leave_threads_and_sessions_to_those_who_play():
    begun, go_on = threading.Event(), threading.Event()

    class Drawn(CountingEnvironment):
        def frame(self, width, height):
            begun.set()
            assert go_on.wait(20.0)
            return np.zeros((height, width, 3), np.uint8)

    plug_boards = PlugBoards({"counting": EnvironmentPlugin(CountingConfig, Drawn)}, {})
    async with running_app(plug_boards, max_plugin_threads=2) as client, asyncio.timeout(20.0):
        drawn = [await created(client) for _ in range(3)]
        asked = [asyncio.create_task(client.get(f"/env/{env_id}/frame")) for env_id in drawn]
        asked += [asyncio.create_task(client.get(f"/env/{env_id}/view")) for env_id in drawn]
        await asyncio.to_thread(begun.wait, 20.0)
        # A reset needs a thread, a step the session: the pictures that wait hold neither.
        fresh = await created(client)
        calls = [{"tool": "add", "args": {"names": ["a"]}}]
        for env_id in (fresh, drawn[2]):
            await post(client, "/env/step", env_id=env_id, tool_calls=calls)
        go_on.set()
        assert {(await one).status_code for one in asked} == {200}


async def test_the_page_shows_picture_text_vitals_and_what_each_decision_achieved(real):
    env_id = await new_env(real)
    await step(real, env_id, "move_right", "move_right", "move_right", "do")
    await step(real, env_id, "move_down", "move_right", "do")
    await step(real, env_id, "fly")
    page = (await real.get(f"/env/{env_id}/view")).text
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


async def test_an_environment_without_pictures_or_achievements_has_a_page_too(client):
    env_id = await created(client)
    page = (await client.get(f"/env/{env_id}/view")).text
    assert "<img" not in page
    assert "step 0" in page
    assert "None yet." in page


async def test_a_page_is_sent_again_only_when_something_happened(real):
    env_id = await new_env(real)
    first = await real.get(f"/env/{env_id}/view")
    same = await real.get(f"/env/{env_id}/view", headers={"If-None-Match": first.headers["etag"]})
    await step(real, env_id, "noop")
    other = await real.get(f"/env/{env_id}/view", headers={"If-None-Match": first.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    assert other.status_code == 200
    assert other.headers["etag"] != first.headers["etag"]


async def test_the_page_loads_nothing_from_elsewhere_and_runs_only_its_own_script(real):
    answer = await real.get(f"/env/{await new_env(real)}/view")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", answer.text)


async def test_what_an_environment_writes_is_text_and_never_markup(client):
    # the counting environment repeats the name of an unknown tool
    env_id = await created(client)
    evil = "<script>alert(1)</script>"
    await client.post("/env/step", json={"env_id": env_id, "tool_calls": [{"tool": evil, "args": {}}]})
    page = (await client.get(f"/env/{env_id}/view")).text
    assert evil not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


async def test_watching_keeps_nothing_alive():
    async with running_app(session_idle_s=1e-9, sweep_every_s=1e6) as client:
        env_id = await created(client)
        services = client._transport.app.state.services
        assert (await client.get(f"/env/{env_id}/view")).status_code == 200
        services.expire()
        gone = await client.get(f"/env/{env_id}/view")
    assert (gone.status_code, gone.json()["code"]) == (404, "unknown_id")
