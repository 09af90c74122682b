"""Pictures of a recorded episode, over HTTP, from a task app of our own."""

import io
import json
import re
from html import unescape
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image
from pydantic import SecretStr

from shared_schemas.replay import FRAME_SIDE
from shared_schemas.trajectory import ObservationData, StepData, StepInfo
from tests.conftest import at_the_task_app, tiny_job
from tests.task_app.environments.foreign.test_gymnasium import NAMES
from tests.trainer_backend.pages.hand_made import WOOD, empty_run, rollout
from tests.trainer_backend.pages.shown import Shown
from tests.trainer_backend.pages.test_report import told
from trainer_backend import job_parts
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.task_apps import OWN_BODY_BYTES
from trainer_backend.collect.wire import NoPictures, PluginFailed, Refused, ReplayDeparts, TaskAppLost
from trainer_backend.pages.report import best_episode
from trainer_backend.pages.stored import played_frames, replay, why_undrawn
from trainer_backend.rundir.rollout_files import write_rollouts


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


def called(name, **arguments):
    return {"id": "call_0", "function": {"name": name, "arguments": json.dumps(arguments)}}


def test_the_longest_episode_fits_a_request_to_the_jobs_own_task_app():
    actions = ["interact_left"] * 4
    call = called("interact_many", actions=actions)
    turn = {"tool_calls": [call], "executed_actions": actions, "env_rewards": [0.0] * 4}
    body = {"env_name": "crafter", "seed": 1, "turns": [turn] * 10_000, "frames": [0]}
    assert len(json.dumps(body)) < OWN_BODY_BYTES


# FrozenLake counts no achievements. H is a hole, G the goal; fields are numbered row by row.
LAKE = {"kwargs": {"is_slippery": False, "desc": ["SFF", "FHF", "FFG"]}}
LAKE_NAME, WORDS_NAME = "gymnasium:FrozenLake-v1", "openenv:http://127.0.0.1:9"
DOWN, RIGHT = 1, 2
# Down two fields, then right two, with the reward and what the environment answered: the goal pays 1.
TO_THE_GOAL = ((DOWN, 0.0, "3"), (DOWN, 0.0, "6"), (RIGHT, 0.0, "7"), (RIGHT, 1.0, "8"))
GOAL = 4  # its turn


def lake(*moves, env_name=LAKE_NAME):
    """A stored rollout of moves."""
    steps = [
        StepData(
            turn=turn,
            observation_data=ObservationData(),
            next_observation=ObservationData(),
            action_taken={"type": "tool_call"},
            tool_calls=(called("act", action=action),),
            env_rewards=(reward,),
            step_info=StepInfo(executed_actions=("act",), tool_result=result),
        )
        for turn, (action, reward, result) in enumerate(moves, start=1)
    ]
    played = rollout(1, [])
    changes = {"env_name": env_name, "steps": tuple(steps), "achievements_counts": {}}
    return played.model_copy(
        update={
            "rollout_id": "r/train/1/0/0", "trajectory": played.trajectory.model_copy(update=changes),
        }
    )  # fmt: skip


def drawn(_services, config, episode, turns):
    """The frames of the task app of the tests."""
    return played_frames(at_the_task_app(tiny_job()).services, config, episode, turns)


def test_another_answer_than_recorded_is_another_episode_also_where_nothing_is_counted():
    moves = [TO_THE_GOAL[0], (DOWN, 0.0, "5"), *TO_THE_GOAL[2:]]  # rewards and names of actions agree
    with pytest.raises(ReplayDeparts, match="departed from the recorded episode at decision 2"):
        drawn(None, LAKE, lake(*moves).trajectory, [len(moves)])


BLIND = """
from task_app.environments.sokoban.environment import SokobanConfig, SokobanEnvironment
from task_app.plugins import EnvironmentPlugin

class Blind(SokobanEnvironment):
    def frame(self, width, height):
        raise RuntimeError("no pencil here")

ENVIRONMENTS = {"blind": EnvironmentPlugin(SokobanConfig, Blind)}
"""


def test_what_an_environment_raised_is_told_with_its_line(tmp_path):
    plugin = tmp_path / "blind.py"
    plugin.write_text(BLIND)
    services = tiny_job(services__task_plugins=[str(plugin)]).services
    with pytest.raises(PluginFailed, match=r"raised RuntimeError: no pencil here \("):
        played_frames(services, {}, lake(env_name="blind").trajectory, [0])


def shown_run(tmp_path, env_name, config, source):
    """A dashboard with one run of one episode, and the address of that."""
    run = empty_run(tiny_job(rollout__env_name=env_name, rollout__env_config=config), tmp_path / "run")
    write_rollouts(run.rollouts_file("iteration_1"), [lake(*TO_THE_GOAL, env_name=env_name)])
    shown = Shown(tmp_path, source=source)
    return shown, f"/runs/{shown.add(run)}"


@pytest.mark.parametrize(
    ("config", "pictures", "sentence"),
    [(LAKE, 2, ""), ({**LAKE, "text": "ansi"}, 0, f"No pictures: {LAKE_NAME!r} draws none; pictures come")],
)
def test_the_page_of_a_decision_shows_its_frames_or_the_reason(tmp_path, config, pictures, sentence):
    shown, run = shown_run(tmp_path, LAKE_NAME, config, drawn)
    address = f"{run}/rollouts/r/train/1/0/0?turn={GOAL}"
    assert "played again to draw it" in shown.page(address)
    for text in (shown.page(f"{run}/frames?rollout=r/train/1/0/0&turn={GOAL}"), shown.page(address)):
        assert text.count("/frame.png?") == pictures
        assert sentence in unescape(told(text)) and "played again to draw it" not in text
    frames = [
        shown.client.get(f"{run}/frame.png?rollout=r/train/1/0/0&turn={turn}").content for turn in range(5)
    ]
    assert len({*frames}) == (5 if pictures else 1)
    shown.store.close()


def test_the_page_of_an_episode_of_words_says_at_once_why_it_has_no_pictures(tmp_path):
    shown, run = shown_run(tmp_path, WORDS_NAME, {}, lambda *_: pytest.fail("nobody plays it"))
    page = shown.page(f"{run}/rollouts/r/train/1/0/0")
    shown.store.close()
    assert f"No pictures: {why_undrawn(lake(env_name=WORDS_NAME))}" in unescape(told(page))


def test_the_docs_name_each_environment_of_gymnasium_that_keeps_the_contract():
    page = (Path(__file__).parents[3] / "docs/foreign.md").read_text()
    (item,) = re.findall(r"^- \*\*gymnasium\*\*: (.*?)\n- ", page, re.M | re.S)
    assert re.findall(r"`(\w[\w-]+-v\d)`", item) == NAMES
