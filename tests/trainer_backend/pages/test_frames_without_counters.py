"""Pictures of FrozenLake and CartPole, which count no achievements, from a task app over HTTP."""

import io
import json
import re
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import ObservationData, StepData, StepInfo, StopReason, Trajectory
from task_app.plugins import default_plug_boards
from task_app.protocols import ToolRequest
from tests.conftest import at_the_task_app, tiny_job
from tests.task_app.environments.foreign.test_gymnasium import NAMES
from tests.trainer_backend.pages.hand_made import empty_run
from tests.trainer_backend.pages.shown import Shown
from tests.trainer_backend.pages.test_report import told
from trainer_backend.collect.wire import PluginFailed, ReplayDeparts
from trainer_backend.pages.stored import played_frames, why_undrawn
from trainer_backend.rundir.rollout_files import write_rollouts

# H is a hole, G the goal; fields are numbered row by row from 0.
LAKE = {"kwargs": {"is_slippery": False, "desc": ["SFF", "FHF", "FFG"]}}
LAKE_NAME, POLE_NAME = "gymnasium:FrozenLake-v1", "gymnasium:CartPole-v1"
LEFT, DOWN, RIGHT, UP = range(4)
# Down two fields, then right two: the goal pays 1.
TO_THE_GOAL = ((DOWN, 0.0, "3"), (DOWN, 0.0, "6"), (RIGHT, 0.0, "7"), (RIGHT, 1.0, "8"))
GOAL = 4  # its turn


def lake(*moves, env_name=LAKE_NAME):
    """A stored episode of moves: action, reward, and what the environment answered."""
    steps = [
        StepData(
            turn=turn,
            observation_data=ObservationData(),
            next_observation=ObservationData(),
            action_taken={"type": "tool_call"},
            tool_calls=(called(action),),
            env_rewards=(reward,),
            step_info=StepInfo(executed_actions=("act",), tool_result=result),
        )
        for turn, (action, reward, result) in enumerate(moves, start=1)
    ]
    outcome = sum(reward for _, reward, _ in moves)
    return Trajectory(
        env_name=env_name, policy_name="openai", seed=1, steps=tuple(steps), outcome_reward=outcome,
        outcome_definition="return", env_steps=len(steps), terminated=True, truncated=False,
        stop_reason=StopReason.ENVIRONMENT_DONE, wall_s=0.1,
    )  # fmt: skip


def called(action):
    return {"id": "call_0", "function": {"name": "act", "arguments": json.dumps({"action": action})}}


def finished(episode):
    return Rollout(
        rollout_id="r/train/1/0/0", run_id="r", iteration=1, group_id="g", sibling=0, attempt=0,
        instance_id="i", status="finished", trajectory=episode,
    )  # fmt: skip


def job_of(config, env_name=LAKE_NAME):
    return tiny_job(rollout__env_name=env_name, rollout__env_config=config)


def pole_says(*actions):
    """What CartPole answers to actions in world 1."""
    pole = default_plug_boards().environment(POLE_NAME, {})
    pole.reset(1)
    return [pole.step((ToolRequest("act", {"action": action}),)).result for action in actions]


def drawn(_services, config, episode, turns):
    """The frames of the task app of the tests."""
    return played_frames(at_the_task_app(tiny_job()).services, config, episode, turns)


def test_each_decision_of_frozen_lake_has_a_frame_of_its_own():
    frames = drawn(None, LAKE, lake(*TO_THE_GOAL), range(GOAL + 1))
    assert list(frames) == [0, 1, 2, 3, 4]
    assert len({*frames.values()}) == 5
    assert Image.open(io.BytesIO(frames[0])).format == "PNG"


def test_cart_pole_has_frames_when_what_it_answered_is_what_it_answers_again():
    moves = [(1, 1.0, result) for result in pole_says(1, 1)]
    frames = drawn(None, {}, lake(*moves, env_name=POLE_NAME), [0, 2])
    assert list(frames) == [0, 2] and frames[0] != frames[2]


@pytest.mark.parametrize(
    ("moves", "turn"),
    [
        ([*TO_THE_GOAL[:1], (DOWN, 0.0, "5"), *TO_THE_GOAL[2:]], 2),  # rewards and names of actions agree
        ([*TO_THE_GOAL[:3], (RIGHT, 0.0, "8")], 4),
        ([*TO_THE_GOAL, (LEFT, 0.0, "7")], 5),  # the goal ends the episode
    ],
)
def test_another_answer_reward_or_length_than_recorded_is_another_episode(moves, turn):
    with pytest.raises(ReplayDeparts, match=f"departed from the recorded episode at decision {turn}"):
        drawn(None, LAKE, lake(*moves), [len(moves)])


def test_what_an_environment_raised_is_told_with_its_line(tmp_path):
    plugin = tmp_path / "blind.py"
    plugin.write_text(BLIND)
    job = tiny_job(
        rollout__env_name="blind", rollout__env_config={}, services={"task_plugins": [str(plugin)]}
    )
    with pytest.raises(PluginFailed, match=r"raised RuntimeError: no pencil here \("):
        played_frames(job.services, {}, lake(env_name="blind"), [0])


BLIND = """
from task_app.environments.sokoban.environment import SokobanConfig, SokobanEnvironment
from task_app.plugins import EnvironmentPlugin

class Blind(SokobanEnvironment):
    def frame(self, width, height):
        raise RuntimeError("no pencil here")

ENVIRONMENTS = {"blind": EnvironmentPlugin(SokobanConfig, Blind)}
"""


@pytest.mark.parametrize(
    ("config", "pictures", "sentence"),
    [(LAKE, 2, ""), ({**LAKE, "text": "ansi"}, 0, f"No pictures: {LAKE_NAME!r} draws none; pictures come")],
)
def test_the_page_of_a_decision_shows_its_frames_or_the_reason(tmp_path, config, pictures, sentence):
    run = empty_run(job_of(config), tmp_path / "run")
    write_rollouts(run.rollouts_file("iteration_1"), [finished(lake(*TO_THE_GOAL))])
    shown = Shown(tmp_path, source=drawn)
    job_id = shown.add(run)
    address = f"/runs/{job_id}/rollouts/r/train/1/0/0?turn={GOAL}"
    assert "played again to draw it" in shown.page(address)
    for text in (shown.page(f"/runs/{job_id}/frames?rollout=r/train/1/0/0&turn={GOAL}"), shown.page(address)):
        assert text.count("/frame.png?") == pictures
        assert sentence in unescape(told(text)) and "played again to draw it" not in text
    shown.store.close()


def test_the_page_of_an_episode_of_words_says_at_once_why_it_has_no_pictures(tmp_path):
    run = empty_run(job_of({}, "openenv:http://127.0.0.1:9"), tmp_path / "run")
    item = finished(lake(*TO_THE_GOAL, env_name="openenv:http://127.0.0.1:9"))
    write_rollouts(run.rollouts_file("iteration_1"), [item])
    shown = Shown(tmp_path, source=lambda *_: pytest.fail("nobody plays it"))
    page = shown.page(f"/runs/{shown.add(run)}/rollouts/r/train/1/0/0")
    shown.store.close()
    assert f"No pictures: {why_undrawn(item)}" in unescape(told(page))


def test_the_docs_name_each_environment_of_gymnasium_that_keeps_the_contract():
    page = (Path(__file__).parents[3] / "docs/foreign.md").read_text()
    (item,) = re.findall(r"^- \*\*gymnasium\*\*: (.*?)\n- ", page, re.M | re.S)
    assert re.findall(r"`(\w[\w-]+-v\d)`", item) == NAMES
