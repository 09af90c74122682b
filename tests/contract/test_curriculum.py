"""Groups that start at snapshots of the run's own games, for real: HTTP, engine, replays, files, resume."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tests.conftest import rows_of, tiny_job, train_job, warmed_up
from trainer_backend import job_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.core.starts import CurriculumKeys
from trainer_backend.credit.inspect import episode_view
from trainer_backend.run.curriculum import Curriculum
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.spool import plan_id

SETTINGS: dict[str, Any] = {
    "curriculum": {"share": 0.5},
    "inference__deterministic": True,
    "training__learning_rate_schedule": "constant",
    "training__step_rewards_mode": "off",
    "evaluation__instances": 1,
}
NOWHERE = Inference("http://127.0.0.1:9", "tiny/actor", SecretStr(""))


@pytest.fixture(scope="module")
def job(trained):
    return tiny_job(**warmed_up(trained), **SETTINGS, training__iterations=3)


@pytest.fixture(scope="module")
def run(job, tmp_path_factory):
    directory, _, progress = train_job(job, tmp_path_factory.mktemp("runs") / "starts")
    assert progress.iteration == 3
    return directory


def stored(directory, iteration: int):
    return {
        plan_id(item.rollout_id): item
        for item in read_rollouts(directory.rollouts_file(f"iteration_{iteration}"))
    }


def moments(directory, iteration: int) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in directory.curriculum_file(iteration).read_text().splitlines()]
    return [row for row in rows if "key" in row]


def test_the_last_groups_play_on_from_what_earlier_iterations_have_reached(run):
    first, second = stored(run, 1), stored(run, 2)
    assert not any(item.trajectory.is_continued for item in first.values())
    begun = {place: item.trajectory.is_continued for place, item in second.items()}
    assert begun == {place: place.startswith("train/2/1/") for place in second}
    known = {item["key"]: item for item in moments(run, 1)}
    for item in second.values():
        episode = item.trajectory
        if episode.is_continued:
            parent = first[plan_id(episode.parent_rollout_id)].trajectory
            left = parent.steps[episode.parent_turn].observation_data
            assert episode.steps[0].observation_data.messages == left.messages
            assert len(episode.steps) <= 8 - episode.parent_turn, "the rest of the game's limit"
            at = known[f"{plan_id(episode.parent_rollout_id)}:{episode.parent_turn}"]
            assert len(at["achieved"]) == episode.outcome_before


def test_what_the_snapshot_had_unlocked_earns_nothing_again(run):
    for item in (*stored(run, 2).values(), *stored(run, 3).values()):
        episode = item.trajectory
        before = episode.steps[0].observation_data.achievements_counts
        unlocked = {name for name, count in episode.achievements_counts.items() if count and not before[name]}
        assert episode.outcome_reward == len(unlocked)


def test_games_that_began_at_a_snapshot_are_kept_too_and_are_no_whole_episodes(run):
    again = [item for item in moments(run, 2) if item["key"].startswith("train/2/1/")]
    assert again, "their replay begins at the snapshot"
    for item in again:
        parent = stored(run, 2)[item["key"].partition(":")[0]].trajectory
        assert item["turn"] > parent.parent_turn
    row = rows_of(run, "iteration")[1]
    assert row["episode/count"] == 4.0 and row["starts/share"] == 0.5
    assert row["rollout/finished"] == 8.0, "which cost steps all the same"
    counts = {name: value for name, value in row.items() if name.endswith("/kept")}
    depths = Counter(len(item["achieved"]) for number in (1, 2) for item in moments(run, number))
    assert counts == {f"starts/{depth:02d}/kept": count for depth, count in depths.items()}
    assert row["starts/pool"] == sum(counts.values())


def test_an_evaluation_begins_at_the_beginning(run):
    games = [item for path in run.rollouts.glob("evaluation_*.parquet") for item in read_rollouts(path)]
    assert games and not any(item.trajectory.is_continued for item in games)


def planned(run, job, iteration: int):
    planner = job_parts.planner(job, "again", NOWHERE)
    assert isinstance(planner.curriculum, CurriculumKeys)
    again = Curriculum(planner.curriculum, planner, None, run, print, reseedable=True)  # type: ignore[arg-type]
    return replace(planner, starts=again.starts(iteration)).training(iteration)


def test_a_plan_follows_from_the_job_and_the_files(run, job):
    for iteration in (2, 3):
        asked = {plan_id(item.rollout_id): item.start for item in planned(run, job, iteration)}
        found = {place: item.trajectory for place, item in stored(run, iteration).items()}
        assert {place: (start.parent_rollout_id, start.parent_turn) for place, start in asked.items()} == {
            place: (item.parent_rollout_id, item.parent_turn) for place, item in found.items()
        }
    assert len({item.start.draws_seed for item in planned(run, job, 3)}) == 2, "one a group, and none"


def test_a_resume_drops_what_came_after_its_checkpoint_and_plays_the_same(run, job, tmp_path: Path):
    first = tiny_job(**job_of(job), training__iterations=2)
    directory, _, _ = train_job(first, tmp_path / "resumed")
    late = directory.curriculum_file(7)
    late.write_text(directory.curriculum_file(1).read_text())
    train_job(job, tmp_path, resume=directory)
    assert not late.exists()
    for iteration in (1, 2, 3):
        one, other = moments(run, iteration), moments(directory, iteration)
        apart = {"rollout_id": ""}
        assert [item | apart for item in one] == [item | apart for item in other]


def job_of(job) -> dict[str, Any]:
    return {"model": {"path": str(job.model.path), "device": "cpu"}, "warmup": None, **SETTINGS}


def test_inspect_says_where_an_episode_began(run):
    item = stored(run, 2)["train/2/1/0"]
    lines = [str(part) for part in episode_view(item, [], full=False).renderables]
    assert any(f"began at a snapshot of {item.trajectory.parent_rollout_id}" in line for line in lines)


def test_games_that_began_at_a_snapshot_are_left_out_of_forks_and_all_others_are_forked(trained, tmp_path):
    forks = {"algorithm__train_branches": True, "algorithm__fork_rule": "surprise"}
    forks |= {"algorithm__branches_per_episode": 1}
    directory, _, progress = train_job(
        tiny_job(**warmed_up(trained), **SETTINGS, **forks, training__iterations=2), tmp_path / "run"
    )
    assert progress.iteration == 2
    games = stored(directory, 2)
    whole = {place for place, item in games.items() if not item.trajectory.is_continued}
    branches = read_rollouts(directory.rollouts_file("branches_2"))
    parents = {plan_id(item.trajectory.parent_rollout_id) for item in branches}
    assert parents and parents <= whole and len(whole) == 4
    first, second = rows_of(directory, "iteration")
    assert (first["forks/left_out"], second["forks/left_out"]) == (0.0, 4.0)
    assert first["starts/share"] == 0.0 and second["starts/share"] == 0.5, (
        "of games that are no continuations"
    )
    assert second["forks/rollouts"] == len(branches) > 0 and second["branch/failed"] == 0.0
    places = {row["key"].partition(":")[0] for row in moments(directory, 2)}
    assert places <= games.keys(), "continuations leave no snapshots"
