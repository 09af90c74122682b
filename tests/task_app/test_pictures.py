"""Pictures of sessions, the page that shows them, and pictures of an episode that is played again."""

import asyncio
import base64
import io
import re
import threading
from math import inf

import numpy as np
import pytest
from PIL import Image, ImageSequence

from service_kit.errors import RequestDeadline
from shared_schemas.replay import ReplayRequest, ReplayTurn
from shared_schemas.rollouts import EnvSpec
from shared_schemas.task_definition import TaskDefinitionModel
from task_app.environments.crafter.balrog import BalrogEnvironment
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.episode.worker import RLRolloutWorker
from task_app.observing.replaying import Replay
from task_app.plugins import EnvironmentPlugin, PlugBoards, default_plug_boards
from tests.task_app.counting import CountingConfig, CountingEnvironment, boards, rollout, running_app
from tests.task_app.playing import new_env, post, refused, refused_at, step
from tests.task_app.rollout_client import WAITING, accept, play, waiting_app


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
    classes = [re.findall(r'class="(first|again|refused)"', row) for row in rows]
    assert classes == [["refused"], ["again"], ["first"]]
    assert ["<code>noop</code>" in row for row in rows] == [True, False, False]


async def test_a_page_is_sent_again_only_when_something_happened_and_loads_nothing_from_elsewhere(real):
    env_id = await new_env(real)
    first = await real.get(f"/env/{env_id}/view")
    same = await real.get(f"/env/{env_id}/view", headers={"If-None-Match": first.headers["etag"]})
    await step(real, env_id, "noop")
    other = await real.get(f"/env/{env_id}/view", headers={"If-None-Match": first.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    assert other.status_code == 200
    assert other.headers["etag"] != first.headers["etag"]
    policy = first.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert policy.count("'sha256-") == 2, "its own script and style"
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", first.text)


async def test_an_environment_without_pictures_has_a_page_too_and_what_it_writes_is_never_markup(client):
    env_id = await created(client)
    page = (await client.get(f"/env/{env_id}/view")).text
    assert "<img" not in page and "step 0" in page and "None yet." in page
    # the counting environment repeats the name of an unknown tool
    evil = "<script>alert(1)</script>"
    await client.post("/env/step", json={"env_id": env_id, "tool_calls": [{"tool": evil, "args": {}}]})
    page = (await client.get(f"/env/{env_id}/view")).text
    assert evil not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page


async def test_watching_keeps_nothing_alive():
    async with running_app(session_idle_s=1e-9, sweep_every_s=1e6) as client:
        env_id = await created(client)
        services = client._transport.app.state.services
        assert (await client.get(f"/env/{env_id}/view")).status_code == 200
        services.expire()
        gone = await client.get(f"/env/{env_id}/view")
    assert (gone.status_code, gone.json()["code"]) == (404, "unknown_id")


CRAFTER = {
    "start": {"seed": 17},
    "env": {"env_name": "crafter", "config": {"text": "compact", "max_actions": 4}},
    "policy": {"policy_name": "crafter_teacher", "config": {"max_actions": 4}},
    "limits": {"max_decisions": 6},
}


class PicturedCounting(CountingEnvironment):
    """Its picture is the brighter, the more env steps ran: 30 a step."""

    def frame(self, width, height):
        return np.full((height, width, 3), 30 * self._steps, np.uint8)


def pictured():
    default = default_plug_boards()
    environments = {"counting": EnvironmentPlugin(CountingConfig, PicturedCounting), **default.environments}
    return PlugBoards(environments, {**default.policies, "planned": boards().policies["planned"]})


async def test_an_episode_is_drawn_as_a_gif_by_its_turns_and_from_a_body_that_records_it(real):
    trajectory, body = await played(real, **CRAFTER)

    async def drawn(**params):
        return await real.get("/rollouts/a/frames", params=params)

    answer = await drawn(side=90, frame_s=0.25)
    gif = Image.open(io.BytesIO(answer.content))
    assert (answer.headers["content-type"], answer.headers["x-frames-every"]) == ("image/gif", "1")
    assert (gif.size, gif.n_frames, gif.info["duration"], gif.info["loop"]) == ((90, 90), 7, 250, 0)
    env_id = await new_env(real)
    for decision in trajectory.steps[:3]:
        calls = [call.model_dump() for call in decision.tool_calls]
        await post(real, "/env/step", env_id=env_id, tool_calls=calls)
    shown = await real.get(f"/env/{env_id}/frame", params={"width": 144, "height": 144})
    assert (await drawn(turn=3)).content == shown.content, "what the environment showed then"
    frames = (await post(real, "/replay", **body | {"frames": [6, 0, 3, 6], "side": 90}))["frames"]
    assert [frame["turn"] for frame in frames] == [0, 3, 6]
    for frame in frames:
        assert base64.b64decode(frame["png"]) == (await drawn(turn=frame["turn"], side=90)).content


async def test_decisions_in_words_are_replayed():
    # the random policy names actions of BALROG's text; the planned one says nothing that is one
    in_words = {**CRAFTER["env"], "config": {"text": "balrog"}}
    async with running_app(pictured()) as client:
        random = rollout("a", **CRAFTER | {"env": in_words, "policy": {"policy_name": "random"}})
        played = await play(client, random, rollout("b", env=in_words))
        answers = [await client.get(f"/rollouts/{name}/frames") for name in ("a", "b")]
    assert not any(step.step_info.invalid_reason for step in played["a"].trajectory.steps)
    assert all(step.step_info.invalid_reason for step in played["b"].trajectory.steps)
    assert [answer.status_code for answer in answers] == [200, 200]


class Says:
    """Answers with these words, one after another."""

    def __init__(self, *words):
        self._words = iter(words)

    async def get_action(self, observation, available_tools_specs=None):
        return {"type": "text", "content": next(self._words)}, None, None, None


async def test_words_that_name_no_action_stay_in_a_replayed_history():
    config, words = CrafterConfig(text="balrog"), ("Move West", "fly", "", "Do it!", "Noop")
    environment, again = BalrogEnvironment(config), BalrogEnvironment(config)
    task = TaskDefinitionModel(resource_type="crafter", max_episode_steps=len(words))
    worker = RLRolloutWorker(task, Says(*words), environment=environment, seed=17)
    steps, *_ = await worker.run_episode()
    record = [ReplayTurn.of(step) for step in steps]
    replay = Replay(again, EnvSpec(env_name="crafter"), record, 17)
    assert [moment.turn for moment in replay.moments([len(words)], until_s=inf)] == [len(words)]
    assert again.snapshot() == environment.snapshot()


async def test_a_long_episode_shows_every_nth_decision_and_the_last():
    # 7 decisions are 8 pictures; of at most 4: the start, 3, 6 and the last, 7
    async with running_app(pictured(), max_frames=4) as client:
        await play(client, rollout("a", limits={"max_decisions": 7}))
        answer = await client.get("/rollouts/a/frames")
    gif = Image.open(io.BytesIO(answer.content))
    shown = [np.asarray(frame.convert("RGB"))[0, 0, 0] for frame in ImageSequence.Iterator(gif)]
    assert answer.headers["x-frames-every"] == "3"
    assert shown == [30 * turn for turn in (0, 3, 6, 7)]


async def test_what_has_not_finished_or_cannot_be_drawn_has_no_frames_and_bad_questions_are_told_so():
    async with waiting_app(1) as (client, _):
        await accept(client, rollout("done"), rollout("open", **WAITING))
        await client.get("/rollouts", params={"run_id": "r", "wait_s": 20})
        answers = [await client.get(f"/rollouts/{name}/frames") for name in ("done", "open", "none")]
    assert [answer.status_code for answer in answers] == [404, 409, 404]
    assert answers[0].json()["hint"] == "environment 'counting' draws none"
    assert "is running" in answers[1].json()["detail"]
    async with running_app(pictured()) as client:
        await play(client, rollout("a"))
        for where, value in (("turn", 3), ("side", 4096), ("frame_s", 0)):
            answer = await client.get("/rollouts/a/frames", params={where: value})
            assert (answer.status_code, answer.json()["where"]) == (422, where)


async def test_a_rollout_whose_id_ends_like_the_route_is_still_reached():
    async with running_app(pictured()) as client:
        await play(client, rollout("a/frames"))
        state = (await client.get("/rollouts/a/frames")).json()
        gif = await client.get("/rollouts/a/frames/frames")
    assert (state["rollout_id"], state["status"]) == ("a/frames", "finished")
    assert gif.headers["content-type"] == "image/gif"


async def test_a_replay_ends_when_its_time_is_over(real):
    trajectory = (await play(real, rollout("a", **CRAFTER)))["a"].trajectory
    turns = [ReplayTurn.of(step) for step in trajectory.steps]
    replay = Replay(CrafterEnvironment(), EnvSpec(env_name="crafter"), turns, 17)
    ticks = iter(range(100))
    with pytest.raises(RequestDeadline, match="decision 3"):
        list(replay.moments([6], until_s=1.0, clock=lambda: next(ticks)))
    assert [moment.turn for moment in replay.moments([0, 6], until_s=1.0, clock=lambda: 0.0)] == [0, 6]


async def played(client, **changes):
    """A finished rollout, and the body that records it for POST /replay."""
    trajectory = (await play(client, rollout("a", **changes)))["a"].trajectory
    episode = ReplayRequest(
        env_name=trajectory.env_name,
        config=changes.get("env", {}).get("config", {}),
        seed=trajectory.seed,
        turns=tuple(ReplayTurn.of(step) for step in trajectory.steps),
        frames=(0,),
    )
    return trajectory, episode.model_dump(mode="json", exclude_defaults=True)


async def test_an_episode_that_departs_from_its_record_ends_before_it_or_cannot_be_drawn_has_no_frames():
    async with running_app(pictured(), max_frames=2) as client:
        _, body = await played(client)
        body |= {"frames": [2]}
        first, last = [turn | {"result": "did 1"} for turn in body["turns"]]
        await post(client, "/replay", **body | {"turns": [first, last]})
        departs = ((409, "replay_departs"), "at decision 2")
        for changes, told, words in (
            ({"turns": [first, last | {"env_rewards": [9.0]}]}, *departs),
            ({"turns": [first, last | {"result": "did 2"}]}, *departs),
            ({"config": {"length": 1}}, *departs),
            ({"env_name": "dialogue", "config": {"prompt": "?"}}, (404, "no_pictures"), ""),
            ({"frames": []}, (422, "invalid_request"), "name turns in frames, in snapshots, or in both"),
        ):
            found = await refused(client, "/replay", **body | changes)
            assert found[:2] == told and words in found[3]
        beyond = {"frames": [len(body["turns"]) + 1]}
        for changes in (beyond, {"frames": [0, 1, 2]}, {"rollout_id": "a"}):
            (where,) = changes
            assert await refused_at(client, "/replay", **body | changes) == (422, where)


async def test_a_rollout_goes_on_from_a_replayed_moment_like_the_record(real):
    trajectory, body = await played(real, **CRAFTER)
    rest = await continued(real, "b", await find_moment(real, body, 3))
    assert did(rest)[:3] == did(trajectory)[3:]


async def test_the_moment_after_the_last_decision_of_a_limit_is_that_of_a_longer_episode(real):
    trajectory, _ = await played(real, **CRAFTER)
    short = {"limits": {"max_decisions": 3}, "snapshot_turns": [4]}
    first = (await play(real, rollout("short", **CRAFTER | short)))["short"].trajectory
    rest = await continued(real, "b", first.final_snapshot)
    assert trajectory.final_snapshot is None
    assert did(first) + did(rest)[:3] == did(trajectory)


async def test_other_draws_make_another_episode_of_a_moment_and_equal_draws_the_same(real):
    night = CRAFTER | {"limits": {"max_decisions": 30}}
    _, body = await played(real, **CRAFTER)
    start = await find_moment(real, body, 0)
    own = await continued(real, "own", start, night)
    one, again, other = [
        await continued(real, name, start, night, draws_seed=seed)
        for name, seed in (("one", 1), ("again", 1), ("other", 2))
    ]
    seeded = rollout("seeded", start={"seed": 17, "draws_seed": 1})
    told = await refused(real, "/rollouts", rollouts=[seeded])
    assert seen(one) == seen(again)
    assert seen(one)[0] == seen(other)[0] == seen(own)[0], "what was seen stays"
    assert seen(own) != seen(one) != seen(other)
    assert "draws_seed goes with a snapshot" in told[3]


async def test_an_episode_that_began_at_a_snapshot_is_replayed_from_there_with_its_draws(real):
    night = CRAFTER | {"limits": {"max_decisions": 30}}
    trajectory, body = await played(real, **CRAFTER)
    start = {"snapshot": await find_moment(real, body, 3), "draws_seed": 1}
    rest = await continued(real, "b", start["snapshot"], night, draws_seed=1)
    turns = [ReplayTurn.of(step).model_dump(mode="json") for step in rest.steps]
    body |= {"turns": turns, "start": start}
    last = await continued(real, "c", await find_moment(real, body, 20), night)
    departs = await refused(real, "/replay", **body | {"start": start | {"draws_seed": 2}, "frames": [20]})
    other = await refused_at(real, "/replay", **body | {"config": {"text": "compact", "max_actions": 3}})
    before = trajectory.steps[3].observation_data.achievements_counts
    assert rest.outcome_before == sum(count > 0 for count in before.values())
    assert trajectory.outcome_before == 0
    assert did(last)[:10] == did(rest)[20:]
    assert departs[:2] == (409, "replay_departs")
    assert other == (422, "start.snapshot")


async def test_other_draws_of_an_environment_without_reseed_are_refused(client):
    start = {"snapshot": "any", "parent_rollout_id": "a", "parent_turn": 1, "draws_seed": 1}
    told = await refused(client, "/rollouts", rollouts=[rollout("a"), rollout("b", start=start)])
    assert told[:3] == (422, "not_reseedable", "rollouts.1.start.draws_seed")
    detail, _, hint = told[3].partition(" | ")
    assert detail == "environment 'counting' cannot be given other draws: it has no reseed()"
    assert "leave draws_seed out" in hint


async def find_moment(client, body, turn):
    """A snapshot of the replayed episode at this turn."""
    (moment,) = (await post(client, "/replay", **body | {"frames": [], "snapshots": [turn]}))["snapshots"]
    assert moment["turn"] == turn
    return moment["snapshot"]


async def continued(client, name, snapshot, changes=CRAFTER, **draws):
    start = {"snapshot": snapshot, "parent_rollout_id": "a", "parent_turn": 3, **draws}
    return (await play(client, rollout(name, **changes | {"start": start})))[name].trajectory


def did(trajectory):
    return [
        (step.step_info.executed_actions, step.env_rewards, step.observation_data.messages)
        for step in trajectory.steps
    ]


def seen(trajectory):
    return [step.observation_data.messages for step in trajectory.steps]


def test_a_turn_in_which_the_policy_ended_the_episode_plays_nothing():
    environment = PicturedCounting()
    replay = Replay(environment, EnvSpec(env_name="counting"), [ReplayTurn(terminate=True)], 3)
    first, last = [replay.picture(18) for _ in replay.moments([0, 1], until_s=1.0, clock=lambda: 0.0)]
    assert np.array_equal(first, last)
