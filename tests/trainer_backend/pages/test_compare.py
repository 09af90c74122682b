import io
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.conftest import tiny_job
from tests.trainer_backend.pages.hand_made import (
    COW,
    FIRST,
    LAST,
    WOOD,
    empty_run,
    evaluation_row,
    rollout,
    small_run,
)
from tests.trainer_backend.pages.test_report import charts, told
from trainer_backend.__main__ import app
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.evaluation.best import paired_difference
from trainer_backend.pages.compare import (
    ONE_SEED,
    doubts,
    read_sides,
    setting_differences,
    summary_rows,
    write_comparison,
)
from trainer_backend.pages.report import best_episode, reward_by_turn
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.terminal.evaluation_tables import comparison_table


def another_run(job, path):
    """Its last evaluation unlocked 2 in world 10, where `small_run` has 3, and nothing in world 12."""
    run = small_run(job, path)
    played = (rollout(10, [WOOD, COW]), rollout(12, [()]))
    run.append_metrics(evaluation_row(3, played, 0.5, 1.5))
    write_rollouts(run.rollouts_file("evaluation_3"), played)
    return run


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    first = small_run(tiny_job(), folder / "first")
    second = another_run(tiny_job(algorithm__gamma=0.5), folder / "second")
    return [first.path, second.path]


def test_only_keys_that_differ_are_told_with_the_values_of_each_run(two, tmp_path):
    assert setting_differences(read_sides(two)) == [("algorithm.gamma", ["0.97", "0.5"])]
    job = tiny_job(rollout__env_config={"text": "full"})
    third = small_run(job.model_copy(update={"warmup": None}), tmp_path / "third").path
    found = dict(setting_differences(read_sides([two[0], third])))
    assert found["rollout.env_config.text"] == ['"compact"', '"full"']
    assert found["rollout.env_config.max_actions"] == ["4", "absent"]
    assert found["warmup.epochs"] == ["3", "absent"]
    keys = ("key-one", "key-two")  # which are no settings
    runs = [small_run(tiny_job(services__task_api_key=key), tmp_path / key).path for key in keys]
    assert setting_differences(read_sides(runs)) == []


def test_the_difference_is_over_the_worlds_that_both_played(two):
    sides = read_sides(two)
    # world 10 alone: 2 - 3
    assert summary_rows(sides) == [
        ("first", "2 of 2", "2", "2.00 (1.00 to 3.00)", "12.5 %", "-", "2"),
        ("second", "2 of 2", "3", "1.00 (0.50 to 1.50)", "12.5 %", "-1.00", "1"),
    ]


def test_what_makes_the_same_world_another_task_is_told(two, tmp_path):
    longer = small_run(tiny_job(rollout__max_turns=9, evaluation__temperature=0.5), tmp_path / "longer").path
    assert doubts(read_sides([two[0], longer])) == [
        "longer against first: rollout.max_turns, evaluation.temperature differ, so the same world is "
        "another task, and the difference is not the policy's alone",
        ONE_SEED,
    ]
    harder = small_run(tiny_job(multi_turn__enable=True, multi_turn__max_user_turns=1), tmp_path / "harder")
    doubt, _ = doubts(read_sides([two[0], harder.path]))
    assert doubt.startswith("harder against first: multi_turn.enable, multi_turn.max_user_turns differ")
    assert doubts(read_sides(two)) == [
        "the last evaluations are after different numbers of iterations",
        ONE_SEED,
    ]


def test_the_intervals_are_said_to_hold_no_seeds_once_two_runs_are_evaluated(two, tmp_path):
    sides = read_sides(two)
    out = io.StringIO()
    Console(file=out, width=400).print(comparison_table(sides))
    html = write_comparison(sides, tmp_path / "out").read_text()
    for shown in (out.getvalue(), told(html)):
        assert "one seed; the intervals are over the held-out worlds alone and do not include" in shown
    begun = empty_run(tiny_job(), tmp_path / "begun")
    assert ONE_SEED not in doubts(read_sides([two[0], begun.path]))


def test_runs_of_one_setting_with_several_seeds_are_named_as_such(tmp_path):
    def run(name: str, seed: int, **settings):
        job = tiny_job(job={"name": name, "seed": seed}, **settings)
        return small_run(job, tmp_path / name).path

    runs = [run("a0", 0), run("a1", 1), run("b0", 0, algorithm__gamma=0.5)]
    (sentence,) = doubts(read_sides(runs))
    assert sentence.startswith("a0, a1 are of one setting with different seeds: they are as far apart as ")
    for others in ([runs[0], runs[2]], [runs[1], runs[2]]):  # of the same seed, and of two
        assert doubts(read_sides(others)) == [ONE_SEED]


def test_runs_are_named_by_what_tells_them_apart(tmp_path):
    paths = [small_run(tiny_job(), tmp_path / seed / "off").path for seed in ("seed_0", "seed_1")]
    assert [side.name for side in read_sides(paths)] == ["seed_0/off", "seed_1/off"]


def test_what_cannot_be_compared_is_a_sentence(two, tmp_path):
    with pytest.raises(JobError, match="needs at least two runs"):
        read_sides(two[:1])
    with pytest.raises(JobError, match="first is given twice"):
        read_sides([*two, two[1] / ".." / "first"])
    with pytest.raises(RunDirectoryError, match="holds no run"):
        read_sides([two[0], tmp_path])


def test_the_page_has_charts_tables_and_no_other_file(two, tmp_path):
    path = write_comparison(read_sides(two), tmp_path / "out" / "here")
    html = path.read_text()
    text, found = told(html), charts(html)
    for part in ("algorithm.gamma", "-1.00", "collect wood", "50% (9% to 91%)", "different numbers of iter"):
        assert part in text
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert all(link[0] == "#" for link in re.findall(r'\b(?:src|href)="([^"]*)"', html))
    held_out = found["outcome:1"]
    assert [curve["label"] for curve in held_out["curves"]] == ["first", "second"]
    assert (held_out["x"], held_out["curves"][1]["y"]) == ([0, 2, 3], [0.5, 2.0, 1.0])


def test_odd_names_are_drawn_and_printed_as_they_are_and_runs_that_have_only_begun_say_so(tmp_path):
    begun = [empty_run(tiny_job(job__seed=seed), tmp_path / f"{seed}").path for seed in (1, 2)]
    html = write_comparison(read_sides(begun), tmp_path / "out").read_text()
    assert "No run has finished an iteration, and none has been evaluated." in html
    runs = [small_run(tiny_job(), tmp_path / name).path for name in ("_first", "a$x$", "<b>[red]")]
    sides = read_sides(runs)
    html = write_comparison(sides, tmp_path / "out").read_text()
    assert "&lt;b&gt;[red]" in html and "<b>" not in html
    assert [curve["label"] for curve in charts(html)["entropy"]["curves"]] == ["_first", "a$x$", "<b>[red]"]
    out = io.StringIO()
    Console(file=out, width=120).print(comparison_table(sides))
    assert "<b>[red]" in out.getvalue()


def test_the_command_prints_the_table_and_where_the_page_is(two, tmp_path):
    arguments = ["compare", *map(str, two), "--out", str(tmp_path / "out")]
    answer = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "120"})
    assert answer.exit_code == 0
    assert "2.00 (1.00 to 3.00)" in answer.output and "-1.00" in answer.output
    assert "algorithm.gamma" in answer.output
    assert str(tmp_path / "out" / "comparison.html") in answer.output.replace("\n", "")


def failed(item):
    return item.model_copy(update={"status": "failed", "trajectory": None, "rollout_id": "lost"})


def stored(path, rollouts, credits=None):
    write_rollouts(path, rollouts, credits)
    return path


def test_what_a_server_calls_its_model_takes_no_episode_from_the_actor(tmp_path):
    (played,) = [rollout(1, [WOOD])]
    told = [
        played.model_copy(update={"trajectory": played.trajectory.model_copy(update={"model": model})})
        for model in ("", "Qwen/Qwen3-0.6B", "tiny/actor", "tiny/fixed")
    ]
    named = [item.model_copy(update={"rollout_id": str(i)}) for i, item in enumerate(told)]
    credits = [Credit([float(i)], [0.0]) for i in range(4)]
    assert reward_by_turn([stored(tmp_path / "a.parquet", named, credits)], "tiny") == [1.0], "0, 1 and 2"


def test_an_episode_that_ended_earlier_counts_0_at_later_turns(tmp_path):
    long = stored(tmp_path / "a.parquet", [rollout(1, [(), (), ()])], [Credit([1.0, 0.0, 2.0], [0.0] * 3)])
    short = stored(tmp_path / "b.parquet", [rollout(2, [()])], [Credit([0.5], [0.0])])
    assert reward_by_turn([long, short], "tiny") == [0.75, 0.0, 1.0]
    assert reward_by_turn([], "tiny") == []


def test_differences_are_taken_world_by_world(tmp_path):
    first, last = stored(tmp_path / "a.parquet", FIRST), stored(tmp_path / "b.parquet", LAST)
    assert paired_difference(first, last, without={10}).count == paired_difference(first, last).count - 1
    assert paired_difference(first, stored(tmp_path / "c.parquet", [rollout(99, [WOOD])])) is None


def test_of_equally_good_episodes_the_shorter_one_is_shown(tmp_path):
    episodes = [rollout(1, [WOOD, ()]), rollout(2, [WOOD]), rollout(3, [()])]
    found = best_episode(stored(tmp_path / "a.parquet", [*episodes, failed(episodes[0])]))
    assert (found.trajectory.seed, len(found.trajectory.steps)) == (2, 1)
    assert best_episode(stored(tmp_path / "b.parquet", [failed(episodes[0])])) is None
