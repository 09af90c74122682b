"""The report of a run, also of a mixture, on figures worked by hand."""

import base64
import hashlib
import io
import json
import re
from html import unescape

import pytest
from PIL import Image

from tests.conftest import tiny_job
from tests.trainer_backend.pages.hand_made import (
    COW,
    FIRST,
    PROMPT,
    TABLE,
    WOOD,
    empty_run,
    evaluation_row,
    iteration_row,
    rollout,
    small_run,
    teacher_row,
)
from tests.trainer_backend.rundir.disk import full_disk
from trainer_backend.credit.inspect import find_rollout
from trainer_backend.credit.recredit import stored_iterations
from trainer_backend.errors import RunDirectoryError, TaskAppError
from trainer_backend.pages.compare import read_sides, setting_differences, write_comparison
from trainer_backend.pages.report import figure_lines, write_report
from trainer_backend.pages.story import read_story
from trainer_backend.run.row_lines import Pace, word_iteration
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.terminal.train_command import tell_end


def no_frames(services, config, episode, turns):
    raise TaskAppError("no task app <here>")


def grey_frames(services, config, episode, turns):
    file = io.BytesIO()
    Image.new("RGB", (9, 9), "grey").save(file, "PNG")
    return dict.fromkeys(sorted(turns), file.getvalue())


def told(html):
    """The page as a reader sees it: without tags, blanks folded."""
    shown = re.sub(r"<(style|script)\b.*?</\1>", " ", html, flags=re.S)
    return " ".join(re.sub(r"<[^>]+>", " ", shown).split())


def charts(html):
    """The charts that a saved page draws, by key."""
    (text,) = re.findall(r'<script type="application/json" id="saved-charts">(.*?)</script>', html, re.S)
    return {chart["key"]: chart for chart in json.loads(text)["charts"]}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    run = small_run(tiny_job(), tmp_path_factory.mktemp("report") / "run")
    return write_report(run, frames=grey_frames)


def test_the_figures_are_those_worked_by_hand(report):
    text = unescape(told(report.read_text()))
    assert "2 of 2 iterations" in text
    assert "after iteration 0 (first) 0.50 unique" in text  # worlds with 1 and 0
    assert "after iteration 2 (best, last) 2.00 (95 %: 1.00 to 3.00) unique" in text
    # world 10: 3 - 1, world 11: 1 - 0; mean 1.5, standard error 0.5, t of one degree of freedom 12.706
    assert "last minus first, world by world +1.50 (95 %: -4.85 to +7.85), 2 worlds" in text
    assert "training unique achievements 2 1 at iteration 1" in text
    assert "iterations with any event reward 50%" in text
    assert "time, all stages 1 min 12 s" in text  # 2 x (20 + 1 + 5) + 2 x 10
    assert "failed: inference_unavailable 4" in text
    assert "rollouts lost for good 2 of 14" in text  # 2 x (4 + 1) + 2 x 2
    assert 'step_rewards_mode = "decision_stepwise"' in text
    assert "job.seed 1 0" in text  # chosen, and its default
    assert "4, seeds 1073741824 to 1073741827, temperature 1" in text


def test_the_teacher_is_told_with_its_episodes_and_its_time(tmp_path):
    run = small_run(tiny_job(), tmp_path / "run")
    run.append_metrics(teacher_row())
    run.append_metrics({"kind": "warmup", "iteration": 0, "warmup/loss": 1.0, "time/warmup_s": 5.0})
    text = told(write_report(run, frames=no_frames).read_text())
    assert "imitated in the warm-up: crafter_teacher 2.00 (95 %: 1.00 to 3.00) unique" in text
    # 52 of RL, 20 of evaluations, 7 of collecting and 5 of learning
    assert "time, all stages 1 min 24 s" in text


def test_one_old_file_that_cannot_be_read_is_told_and_the_run_stays_ended(tmp_path):
    run = small_run(tiny_job(), tmp_path / "run")
    damaged = run.rollouts_file("iteration_1")
    damaged.write_bytes(damaged.read_bytes()[:-100])
    for tell in (
        lambda: write_report(run, frames=no_frames),
        lambda: find_rollout([run], "10"),
        lambda: stored_iterations(run, ()),
    ):  # of `turnwise report`, `inspect`, `recredit`
        with pytest.raises(RunDirectoryError, match=f"{damaged} cannot be read"):
            tell()
    lines: list[str] = []
    tell_end(lines.append, run, report=True)
    assert "after iteration 2: 2.00" in lines[1]
    assert f"has ended and is saved, but not all can be told of it: {damaged} cannot" in lines[-1]


def test_the_best_episode_is_shown_decision_by_decision_and_what_the_model_saw_is_escaped(report):
    html = report.read_text()
    assert "World 10, evaluation after iteration 2: 3 unique achievements in 3 decisions" in html
    for caption in ("0: the start", "1: collect wood", "2: eat cow", "3: place table"):
        assert f"<figcaption>{caption}</figcaption>" in html
    assert PROMPT not in html
    assert "&lt;script&gt;alert(&#39;saw&#39;)&lt;/script&gt;" in html


def test_the_page_needs_no_other_file_and_runs_nothing_but_its_own_scripts(report):
    html = report.read_text()
    assert [path.name for path in report.parent.iterdir()] == ["report.html"]
    links = re.findall(r'\b(?:src|href)="([^"]{0,40})', html)
    assert {link.split(",")[0] for link in links if link[0] != "#"} == {"data:image/png;base64"}
    assert all(f'id="{link[1:]}"' in html for link in links if link[0] == "#")  # its table of contents too
    assert not re.search(
        r"\b(?:hx|data-live|data-charts)\b", html.partition("<body>")[2].partition("<script")[0]
    )
    assert all(re.search(r'alt="[^"]{10,}"', image) for image in re.findall(r"<img [^>]*>", html))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    policy = unescape(policy)
    scripts = re.findall(r'<script(?: type="module")?>(.*?)</script>', html, re.S)
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert re.findall(r"script-src (.*?);", policy) == [" ".join(f"'sha256-{one}'" for one in digests)]


def test_curves_by_decision_turn_are_those_worked_by_hand(report):
    found = charts(report.read_text())
    assert found["achieved_by_turn"]["unit"] == "decision turn"
    assert found["endings"]["curves"][0]["label"] == "max decisions"
    assert [curve["y"] for curve in found["achieved_by_turn"]["curves"]] == [[1.0, 0.0], [2.0, 0.0]]
    # two episodes of iteration 1: r_t of 1.0, 0.5 and of 3.0; in iteration 2 the first has 1.0, 1.0
    first, last = found["reward_by_turn"]["curves"]
    assert (first["label"], first["y"]) == ("iteration 1", [2.0, 0.25])
    assert (last["label"], last["y"]) == ("iteration 2", [2.0, 0.5])
    assert (found["outcome"]["x"], found["outcome"]["curves"][0]["y"]) == ([0, 1, 2], [None, 1.0, 2.0])


def test_a_run_that_has_only_begun_says_what_is_missing(tmp_path):
    run = empty_run(tiny_job(training__iterations=7), tmp_path / "run")
    text = told(write_report(run, frames=no_frames).read_text())
    assert "0 of 7 iterations" in text and "No iteration has finished yet." in text
    assert "No evaluation has been done yet." in text and "No evaluation has stored an episode yet." in text


def test_without_a_task_app_room_on_the_disk_or_rollout_files_it_is_told_what_is_missing(tmp_path):
    run = small_run(tiny_job(), tmp_path / "run")
    html = write_report(run, frames=no_frames).read_text()
    assert "No pictures: no task app &lt;here&gt;" in html and "collect wood" in html
    with full_disk(), pytest.raises(RunDirectoryError, match=r"report/report\.html cannot be written"):
        write_report(run, frames=no_frames)
    for path in (run.path / "rollouts").glob("*.parquet"):
        path.unlink()
    text = told(write_report(run, frames=no_frames).read_text())
    assert "2.00 (95 %: 1.00 to 3.00)" in text and "world by world" not in text


def job_of_mixture(**fixed):
    schedule = {"type": "constant", "alpha": 0.25, "unit": "rollout"}
    fixed_policy = {"model_path": "teacher", **fixed}
    return tiny_job(rollout_only=fixed_policy, rollout_allocation_schedule=schedule)


JOB = job_of_mixture(behaviour_weight_cap=4.0)


def by(policy, *args, **kwargs):
    played = rollout(*args, **kwargs)
    named = played.trajectory.model_copy(update={"model": f"tiny/{policy}"})
    return played.model_copy(update={"trajectory": named})


def mixture(actor, fixed):
    """The columns of an iteration: episodes, mean outcome, and of the fixed one how much it counted."""
    counts = {"mixture/actor/episodes": actor[0], "mixture/fixed/episodes": fixed[0]}
    share = actor[0] / (actor[0] + fixed[0])
    told = {"rollout/policy_choice": share, "mixture/alpha": 0.25, **counts}
    if actor[0]:
        told["mixture/actor/outcome_reward"] = actor[1]
    if fixed[0]:
        told |= {
            "mixture/fixed/outcome_reward": fixed[1],
            "mixture/fixed/counted_share": fixed[2],
            "mixture/counted_share": fixed[2],
        }
    return told


def rows():
    """The first iteration was played by the fixed policy alone, the second by both."""
    first = {name: value for name, value in iteration_row(1, 1.0).items() if not name.startswith(
        ("episode/outcome_r", "episode/unique", "decision/", "reward/", "loss/", "stop/"))}  # fmt: skip
    return [
        first | mixture((0.0, None), (4.0, 3.0, 0.5)),
        iteration_row(2, 1.0) | mixture((2.0, 1.0), (2.0, 6.0, 0.2)),
    ]


@pytest.fixture
def run(tmp_path):
    run = empty_run(JOB, tmp_path / "run")
    run.append_metrics(evaluation_row(0, FIRST, None, None))
    for row in rows():
        run.append_metrics(row)
    fixed = [by("fixed", 1, [WOOD, COW, TABLE]), by("fixed", 2, [WOOD, COW, TABLE], group="g1")]
    write_rollouts(run.rollouts_file("iteration_1"), fixed, [Credit([9.0] * 3, [0.0] * 3)] * 2)
    both = [
        by("actor", 1, [WOOD, ()]),
        by("fixed", 1, [COW, TABLE], sibling=1),
        by("actor", 2, [()], group="g1"),
    ]
    credits = [Credit([1.0, 0.5], [0.0] * 2), Credit([9.0, 9.0], [0.0] * 2), Credit([3.0], [0.0])]
    write_rollouts(run.rollouts_file("iteration_2"), both, credits)
    return run


def test_each_policy_is_told_with_its_episodes_its_outcome_and_how_much_they_counted(run):
    lines = dict(figure_lines(read_story(run)))
    assert lines["training episodes by 'actor'"] == "2, 1.00 unique achievements on average"
    # 4 episodes of 3 and 2 of 6 are 4 on average; (4 * 50 % + 2 * 20 %) / 6 = 40 %
    assert lines["training episodes by 'fixed'"] == (
        "6, 4.00 unique achievements on average; they counted as 40.0% of that many of the actor's"
    )


def test_the_report_lives_with_an_iteration_that_the_actor_did_not_play(run):
    html = write_report(run, frames=no_frames).read_text()
    assert "2 of 2 iterations" in told(html)
    found = charts(html)
    by_policy = {curve["label"]: curve["y"] for curve in found["by_policy"]["curves"]}
    assert by_policy == {"actor": [None, 1.0], "fixed": [3.0, 6.0]}
    assert [curve["y"] for curve in found["counted"]["curves"]] == [[0.5, 0.2]]


def test_a_run_of_a_fixed_policy_alone_has_no_curve_of_the_actor(tmp_path):
    run = empty_run(JOB, tmp_path / "run")
    run.append_metrics(rows()[0])
    assert (
        charts(write_report(run, frames=no_frames).read_text()).keys() & {"outcome", "reward_by_turn"}
        == set()
    )
    other = empty_run(tiny_job(), tmp_path / "other")
    write_comparison(read_sides([run.path, other.path]), tmp_path / "out")


def test_an_iteration_is_told_with_each_fixed_policy_and_without_who_did_not_play():
    first, second = (word_iteration(row, Pace()) for row in rows())
    assert "unique achievements" not in first
    assert "by the actor 0%  fixed counted 50.0%  fixed 3.00" in first
    assert "unique achievements 1.00" in second
    assert "by the actor 50%  fixed counted 20.0%  fixed 6.00" in second


def test_a_comparison_names_each_key_of_a_fixed_policy(run, tmp_path):
    other = empty_run(job_of_mixture(objective="single_ratio"), tmp_path / "other")
    sides = read_sides([run.path, other.path])
    assert setting_differences(sides) == [
        ("rollout_only.fixed.objective", ['"decoupled"', '"single_ratio"']),
        ("rollout_only.fixed.behaviour_weight_cap", ["4.0", "absent"]),
    ]
