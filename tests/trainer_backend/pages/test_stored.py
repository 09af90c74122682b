"""What is kept of rollouts and pictures."""

import asyncio
import re
from threading import Event

import httpx
import pytest

from shared_schemas.problem import Problem
from task_app.captures.agents import PREFIX as AGENT
from task_app.environments.foreign.kinds import FOREIGN
from task_app.observing.replaying import Pictured
from task_app.plugins import default_plug_boards
from tests.conftest import tiny_job
from tests.trainer_backend.pages.hand_made import WOOD, rollout, small_run
from tests.trainer_backend.pages.shown import Shown
from tests.trainer_backend.pages.test_pages import FIRST_ROLLOUT
from trainer_backend.collect.wire import NoPictures, Refused, ReplayDeparts
from trainer_backend.errors import RunDirectoryError, TaskAppError
from trainer_backend.job.tables import ServicesTable
from trainer_backend.pages.stored import PREFIXES_OF_WORDS, WORDS, Frames, read_stored, why_undrawn

ONE, OTHER = rollout(1, [WOOD]), rollout(2, [WOOD])
DRAWN = {0: b"png"}


def test_a_file_that_was_written_again_is_read_again(tmp_path):
    run = small_run(tiny_job(), tmp_path / "tiny")
    path = run.rollouts_file("iteration_1")
    first = read_stored(path, "r/g0/1/0")
    assert first is read_stored(path, "r/g0/1/0")
    assert [columns["reward"] for columns in first[1]] == [1.0, 0.5]
    path.write_bytes(run.rollouts_file("iteration_2").read_bytes())
    assert [columns["reward"] for columns in read_stored(path, "r/g0/1/0")[1]] == [1.0, 1.0]


@pytest.mark.parametrize("what", ["gone", "no parquet", "without it"])
def test_a_rollout_that_cannot_be_read_is_said_with_its_file(tmp_path, what):
    run = small_run(tiny_job(), tmp_path / "tiny")
    path = run.rollouts_file("iteration_1")
    if what == "gone":
        path.unlink()
    elif what == "no parquet":
        path.write_bytes(b"PAR1 no")
    with pytest.raises(RunDirectoryError, match=r"iteration_1\.parquet cannot be read for rollout r/none"):
        read_stored(path, "r/none")


def changed(item, **changes):
    return item.model_copy(update={"trajectory": item.trajectory.model_copy(update=changes)})


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        (ONE.model_copy(update={"trajectory": None}), "the rollout has no episode"),
        (changed(ONE, parent_rollout_id="r/0"), "began at a snapshot of rollout r/0"),
        (rollout(1, [WOOD], group="train/1/0/maze 7"), "began at row 'maze 7' of the data set"),
        (changed(ONE, env_name="dialogue"), "'dialogue' draws none; pictures come from"),
        (changed(ONE, env_name="mcp:http://h:1/mcp"), "'mcp:http://h:1/mcp' draws none"),
    ],
)
async def test_what_is_not_played_again_is_said_in_a_sentence(tmp_path, item, sentence):
    assert sentence in why_undrawn(item)
    if item.trajectory is not None:
        with pytest.raises(NoPictures, match=re.escape(sentence)):
            await Frames(lambda *_: pytest.fail("nobody plays it")).of(tmp_path, item)


def test_the_environments_of_words_are_those_of_the_task_app_that_draw_nothing():
    boards = default_plug_boards()
    configs = {"dialogue": {"prompt": "?"}}
    made = {name: boards.environment(name, configs.get(name, {})) for name in boards.environments}
    assert {*WORDS} <= {name for name, one in made.items() if not isinstance(one, Pictured)}
    assert {*PREFIXES_OF_WORDS} == {AGENT, *(f"{kind}:" for kind in FOREIGN)} - {"gymnasium:"}


async def test_an_episode_is_played_once_for_all_its_pictures_and_who_waits_holds_no_thread(tmp_path):
    played, begun, go_on = [], Event(), Event()

    def source(_services, _config, episode, turns):
        played.append(list(turns))
        begun.set()
        assert go_on.wait(20)
        return dict.fromkeys(turns, b"png")

    shown = Shown(tmp_path, source=source)
    job_id = shown.small(tmp_path / "run")
    transport = httpx.ASGITransport(shown.client.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://d") as client:
        address = f"/runs/{job_id}/frame.png?rollout={FIRST_ROLLOUT}&turn=1"
        # Starlette has 40 threads for all pages.
        asked = [asyncio.create_task(client.get(address)) for _ in range(60)]
        assert await asyncio.to_thread(begun.wait, 20)
        async with asyncio.timeout(20):
            assert (await client.get(f"/runs/{job_id}")).status_code == 200
        go_on.set()
        assert {(await one).content for one in asked} == {b"png"}
    shown.store.close()
    assert played == [[0, 1, 2]]


class Source:
    """Answers each episode that it is to draw with the next of these: pictures, or an error."""

    def __init__(self, *answers):
        self.answers, self.played = list(answers), []

    def __call__(self, services, config, episode, turns):
        self.played.append((services, config, episode.seed))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    "named", [{"services__task_url": ["https://elsewhere:1"]}, {"services__task_plugins": ["code.py"]}]
)
async def test_looking_at_a_run_runs_no_code_and_asks_no_host_that_its_job_names(tmp_path, named):
    job, source = tiny_job(**named), Source(DRAWN)
    await Frames(source).of(small_run(job, tmp_path / "tiny").path, ONE)
    assert source.played == [(ServicesTable(), job.rollout.env_config, 1)]


async def test_plug_ins_that_may_be_run_are_those_of_the_replay_and_others_are_told_in_a_sentence(tmp_path):
    mine, theirs = tmp_path / "mine/maze.py", tmp_path / "theirs/maze.py"
    run = small_run(tiny_job(services__task_plugins=[str(mine), str(theirs)]), tmp_path / "tiny")
    problem = Problem(title="no", status=422, code="unknown", detail="unknown environment", hint="install it")
    source = Source(*[Refused(problem.model_dump_json(), problem)] * 2)
    with pytest.raises(NoPictures) as told:
        await Frames(source, may_run=lambda file: file == mine).of(run.path, ONE)
    ((services, _, _),) = source.played
    assert services.task_plugins == (mine,)
    assert str(told.value) == (
        f"'crafter' comes from {theirs}, and a page runs code from the folders of --allow-root alone: "
        f"turnwise trainer --allow-root {theirs.parent}"
    )
    with pytest.raises(NoPictures, match="cannot play 'crafter': unknown environment; install it"):
        await Frames(source, may_run=lambda file: True).of(run.path, ONE)


@pytest.fixture
def run_dir(tmp_path):
    return small_run(tiny_job(), tmp_path / "tiny").path


async def test_pictures_that_could_not_be_drawn_are_tried_again(run_dir):
    frames = Frames(Source(TaskAppError("away"), DRAWN))
    with pytest.raises(TaskAppError, match="away"):
        await frames.of(run_dir, ONE)
    assert await frames.of(run_dir, ONE) == DRAWN


async def test_an_episode_that_cannot_be_drawn_is_not_played_again_and_the_reason_stays(run_dir):
    frames = Frames(Source(ReplayDeparts("the replay departed"), DRAWN))
    for _ in range(2):
        with pytest.raises(NoPictures, match="departed"):
            await frames.of(run_dir, ONE)
    assert frames.cached(run_dir, ONE) == "the replay departed"
    # It says nothing about other episodes of its run.
    assert await frames.of(run_dir, OTHER) == DRAWN


async def test_an_environment_that_draws_nothing_is_asked_once_for_all_episodes_of_a_run(run_dir):
    frames = Frames(Source(NoPictures("it draws none")))
    assert frames.cached(run_dir, OTHER) is None
    for one in (ONE, OTHER):
        with pytest.raises(NoPictures, match="it draws none"):
            await frames.of(run_dir, one)
    assert frames.cached(run_dir, rollout(3, [WOOD])) == "it draws none"
