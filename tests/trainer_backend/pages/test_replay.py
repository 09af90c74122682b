"""Pictures of a recorded episode, over HTTP, from a task app of our own."""

import io

import pytest
from PIL import Image

from trainer_backend.collect.task_apps import task_apps
from trainer_backend.errors import TaskAppError
from trainer_backend.pages.report import best_episode
from trainer_backend.pages.stored import FRAME_SIDE, replay


def with_other_actions(episode):
    step = episode.steps[-1]
    info = step.step_info.model_copy(update={"executed_actions": ("sleep",) * 9})
    changed = step.model_copy(update={"step_info": info})
    return episode.model_copy(update={"steps": (*episode.steps[:-1], changed)})


async def test_an_episode_is_played_again_and_drawn_and_one_that_departs_is_refused(trained, tmp_path):
    directory = trained[0]
    job, episode = directory.job(), best_episode(directory.rollouts_file("evaluation_2")).trajectory
    last = len(episode.steps)
    async with task_apps(job, tmp_path / "log") as clients:

        async def frames_of(played, config):
            return await replay(clients[0], played, {0, last}, config=config, timeout_s=20.0)

        frames = await frames_of(episode, job.rollout.env_config)
        with pytest.raises(TaskAppError, match=f"departed from the recorded episode at decision {last}"):
            await frames_of(with_other_actions(episode), job.rollout.env_config)
        with pytest.raises(TaskAppError, match=r"POST /env/create: status 422"):
            await frames_of(episode, {"text": "no such style"})
    assert [frame.turn for frame in frames] == [0, last]
    for frame in frames:
        picture = Image.open(io.BytesIO(frame.png))
        assert (picture.format, picture.size) == ("PNG", (FRAME_SIDE, FRAME_SIDE))
        assert len(picture.convert("RGB").getcolors(1 << 16)) > 20


async def test_a_task_app_that_is_gone_is_a_sentence(trained, tmp_path):
    directory = trained[0]
    job, episode = directory.job(), best_episode(directory.rollouts_file("evaluation_2")).trajectory
    async with task_apps(job, tmp_path / "log") as clients:
        client = clients[0]
    with pytest.raises(TaskAppError, match=r"POST /env/create"):
        await replay(client, episode, {0}, config={}, timeout_s=5.0)
