"""Pictures of a recorded episode, over HTTP, from a task app of our own."""

import io
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image
from pydantic import SecretStr

from shared_schemas.replay import FRAME_SIDE
from tests.conftest import at_the_task_app
from tests.trainer_backend.pages.hand_made import WOOD, rollout
from trainer_backend import job_parts
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.task_apps import OWN_BODY_BYTES
from trainer_backend.collect.wire import NoPictures, Refused, TaskAppLost
from trainer_backend.pages.report import best_episode
from trainer_backend.pages.stored import replay


def with_other_actions(episode):
    step = episode.steps[-1]
    info = step.step_info.model_copy(update={"executed_actions": ("sleep",) * 9})
    changed = step.model_copy(update={"step_info": info})
    return episode.model_copy(update={"steps": (*episode.steps[:-1], changed)})


async def test_an_episode_is_played_again_and_drawn_and_one_that_departs_is_refused(trained, tmp_path):
    directory = trained[0]
    job, episode = directory.job(), best_episode(directory.rollouts_file("evaluation_2")).trajectory
    last = len(episode.steps)
    async with job_parts.task_apps(at_the_task_app(job), tmp_path / "log") as apps:

        async def frames_of(played, config):
            return await replay(apps.serving[0], played, {0, last}, config=config)

        frames = await frames_of(episode, job.rollout.env_config)
        with pytest.raises(NoPictures, match=f"departed from the recorded episode at decision {last}"):
            await frames_of(with_other_actions(episode), job.rollout.env_config)
        with pytest.raises(Refused, match=r"POST /replay: status 422: .* at config.text"):
            await frames_of(episode, {"text": "no such style"})
    assert [*frames] == [0, last]
    for png in frames.values():
        picture = Image.open(io.BytesIO(png))
        assert (picture.format, picture.size) == ("PNG", (FRAME_SIDE, FRAME_SIDE))
        assert len(picture.convert("RGB").getcolors(1 << 16)) > 20


async def test_a_task_app_that_is_gone_is_a_sentence():
    episode = rollout(1, [WOOD]).trajectory
    async with TaskAppClient("http://127.0.0.1:9", SecretStr("key"), timeout_s=5.0) as client:
        with pytest.raises(TaskAppLost, match=r"POST /replay"):
            await replay(client, episode, {0}, config={})


async def test_a_long_episode_is_drawn_in_several_requests_of_as_many_frames_as_the_task_app_allows():
    requests = []

    async def draw(request):
        body = await request.json()
        requests.append(body["frames"])
        return web.json_response({"frames": [{"turn": turn, "png": "UE5H"} for turn in body["frames"]]})

    async def about(_request):
        limits = {"max_concurrent_rollouts": 1, "max_frames": 3}
        return web.json_response({"service": {"instance_id": "i"}, "limits": limits, "capabilities": {}})

    server = web.Application()
    server.add_routes([web.post("/replay", draw), web.get("/info", about)])
    episode = rollout(1, [WOOD] * 6).trajectory
    async with (
        TestServer(server) as app,
        TaskAppClient(str(app.make_url("")), SecretStr("key"), timeout_s=5.0) as client,
    ):
        await client.about()
        frames = await replay(client, episode, range(7), config={})
    assert requests == [[0, 1, 2], [3, 4, 5], [6]]
    assert frames == dict.fromkeys(range(7), b"PNG")


def test_the_longest_episode_fits_a_request_to_the_jobs_own_task_app():
    actions = ["interact_left"] * 4
    call = {
        "id": "call_0",
        "function": {"name": "interact_many", "arguments": json.dumps({"actions": actions})},
    }
    turn = {"tool_calls": [call], "executed_actions": actions, "env_rewards": [0.0] * 4}
    body = {"env_name": "crafter", "seed": 1, "turns": [turn] * 10_000, "frames": [0]}
    assert len(json.dumps(body)) < OWN_BODY_BYTES
