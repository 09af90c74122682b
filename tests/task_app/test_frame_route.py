"""GET /env/{env_id}/frame: pictures of an environment that can be drawn."""

import asyncio
import io
import threading

import numpy as np
import pytest
from PIL import Image

from task_app.plugins import EnvironmentPlugin, PlugBoards, default_plug_boards
from tests.task_app.counting import CountingConfig, CountingEnvironment, running_app


async def created(client, env_name):
    answer = await client.post("/env/create", json={"env_name": env_name, "seed": 3})
    return answer.json()["env_id"]


async def test_crafter_is_drawn_as_a_png_of_the_size_asked_for():
    async with running_app(default_plug_boards()) as client:
        env_id = await created(client, "crafter")
        answer = await client.get(f"/env/{env_id}/frame", params={"width": 144, "height": 90})
    assert answer.headers["content-type"] == "image/png"
    picture = Image.open(io.BytesIO(answer.content))
    assert (picture.format, picture.size) == ("PNG", (144, 90))
    assert len(picture.convert("RGB").getcolors(1 << 16)) > 20


async def test_a_picture_changes_nothing_in_the_game():
    body = {"tool_calls": [{"tool": "interact_many", "args": {"actions": ["sleep"] * 8}}]}
    async with running_app(default_plug_boards()) as client:
        drawn, plain = await created(client, "crafter"), await created(client, "crafter")
        for _ in range(40):  # into the night, where stock draws its noise from the game's own generator
            await client.get(f"/env/{drawn}/frame", params={"width": 18, "height": 18})
            answers = [
                (await client.post("/env/step", json={"env_id": env_id, **body})).json()
                for env_id in (drawn, plain)
            ]
    assert answers[0] == answers[1]


async def test_an_environment_without_pictures_and_an_unknown_one_are_404():
    async with running_app() as client:
        env_id = await created(client, "counting")
        undrawn = await client.get(f"/env/{env_id}/frame")
        unknown = await client.get("/env/env_0/frame")
    assert (undrawn.status_code, unknown.status_code) == (404, 404)
    assert undrawn.json()["code"] == "unknown_id"
    assert undrawn.json()["hint"] == "environment 'counting' draws none"
    assert unknown.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("side", [0, 15, 1025, "wide"])
async def test_the_size_is_bounded(side):
    async with running_app(default_plug_boards()) as client:
        env_id = await created(client, "crafter")
        answer = await client.get(f"/env/{env_id}/frame", params={"width": side})
    assert answer.status_code == 422
    assert answer.json()["where"] == "width"


async def test_pictures_wait_for_one_another_and_leave_threads_and_sessions_to_those_who_play():
    begun, go_on = threading.Event(), threading.Event()

    class Drawn(CountingEnvironment):
        def frame(self, width, height):
            begun.set()
            assert go_on.wait(20.0)
            return np.zeros((height, width, 3), np.uint8)

    plug_boards = PlugBoards({"counting": EnvironmentPlugin(CountingConfig, Drawn)}, {})
    async with running_app(plug_boards, max_plugin_threads=2) as client, asyncio.timeout(20.0):
        drawn = [await created(client, "counting") for _ in range(3)]
        asked = [asyncio.create_task(client.get(f"/env/{env_id}/frame")) for env_id in drawn]
        asked += [asyncio.create_task(client.get(f"/env/{env_id}/view")) for env_id in drawn]
        await asyncio.to_thread(begun.wait, 20.0)
        # A reset needs a thread, a step the session: the pictures that wait hold neither.
        fresh = await created(client, "counting")
        calls = [{"tool": "add", "args": {"names": ["a"]}}]
        for env_id in (fresh, drawn[2]):
            body = {"env_id": env_id, "tool_calls": calls}
            assert (await client.post("/env/step", json=body)).status_code == 200
        go_on.set()
        assert {(await one).status_code for one in asked} == {200}
