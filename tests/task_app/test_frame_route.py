"""GET /env/{env_id}/frame: pictures of an environment that can be drawn."""

import io

import pytest
from PIL import Image

from task_app.plugins import default_plug_boards
from tests.task_app.counting import running_app


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
