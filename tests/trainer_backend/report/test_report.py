import io
import re

import pytest
from PIL import Image
from rich.console import Console

from tests.conftest import tiny_job
from tests.trainer_backend.report.hand_made import PROMPT, empty_run, small_run, teacher_row
from tests.trainer_backend.rundir.disk import full_disk
from trainer_backend.errors import RunDirectoryError, TaskAppError
from trainer_backend.recredit.episode import find_rollout
from trainer_backend.recredit.estimators import stored_iterations
from trainer_backend.report.replay import Frame
from trainer_backend.report.write import write_report
from trainer_backend.running.train_command import tell_end

CHARTS = {"learning_curve", "success_rates", "reward_per_turn", "update_health", "time_per_stage"}


def no_frames(job, episode, turns):
    raise TaskAppError("no task app <here>")


def grey_frames(job, episode, turns):
    file = io.BytesIO()
    Image.new("RGB", (9, 9), "grey").save(file, "PNG")
    return [Frame(turn, file.getvalue()) for turn in sorted(turns)]


def told(html):
    """The page as a reader sees it: without tags, blanks folded."""
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    run = small_run(tiny_job(), tmp_path_factory.mktemp("report") / "run")
    return write_report(run, frames=grey_frames)


def test_the_figures_are_those_worked_by_hand(report):
    text = told(report.read_text())
    assert "2 of 2 finished" in text
    assert "after iteration 0 (first) 0.50 unique" in text  # worlds with 1 and 0
    assert "after iteration 2 (best, last) 2.00 (95 %: 1.00 to 3.00) unique" in text
    # world 10: 3 - 1, world 11: 1 - 0; mean 1.5, standard error 0.5, t of one degree of freedom 12.706
    assert "last minus first, world by world +1.50 (95 %: -4.85 to +7.85), 2 worlds" in text
    assert "training episodes, first and last iteration 1.00, 2.00 unique" in text
    assert "iterations with any event reward 50%" in text
    assert "time, all stages 1 min 12 s" in text  # 2 x (20 + 1 + 5) + 2 x 10


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
    out = io.StringIO()
    tell_end(Console(file=out, width=500), run, report=True)
    assert "after iteration 2: 2.00" in out.getvalue()
    assert f"has ended and is saved, but not all can be told of it: {damaged} cannot" in out.getvalue()


def test_failures_are_counted_by_cause(report):
    text = told(report.read_text())
    assert "failed: inference_unavailable 4" in text
    assert "rollouts lost for good 2 of 14" in text  # 2 x (4 + 1) + 2 x 2
    assert "ended by max decisions 100.0% of iteration 2" in text


def test_switches_and_seeds_are_told(report):
    text = told(report.read_text())
    assert "step_rewards_mode decision_stepwise" in text
    assert "job seed 1" in text
    assert "4, seeds 1073741824 to 1073741827, temperature 1" in text


def test_the_best_episode_is_shown_decision_by_decision(report):
    html = report.read_text()
    assert "World 10, evaluation after iteration 2: 3 unique achievements in 3 decisions" in html
    for caption in ("0: the start", "1: collect wood", "2: eat cow", "3: place table"):
        assert f"<span>{caption}</span>" in html


def test_what_the_model_saw_is_escaped(report):
    html = report.read_text()
    assert PROMPT not in html
    assert "&lt;script&gt;alert(&#39;saw&#39;)&lt;/script&gt;" in html


def test_the_page_needs_no_other_file_and_every_picture_is_described(report):
    html = report.read_text()
    links = re.findall(r'\b(?:src|srcset|href)="([^"]{0,40})', html)
    assert links
    assert all(link.startswith("data:image/png;base64,") for link in links)
    assert "http" not in re.sub(r'"data:[^"]+"', "", html)
    images = re.findall(r"<img [^>]*>", html)
    assert all(re.search(r'alt="[^"]{10,}"', image) for image in images)


def test_pictures_lie_beside_the_page_for_light_and_dark_and_are_not_blank(report):
    found = {path.name for path in report.parent.glob("*.png")}
    names = CHARTS | {"filmstrip"}
    assert found == {f"{name}.png" for name in names} | {f"{name}.dark.png" for name in names}
    for name in sorted(found):
        picture = Image.open(report.parent / name).convert("RGB")
        assert len(picture.getcolors(1 << 20)) > 20, name
        assert picture.getpixel((0, 0)) == ((22, 27, 34) if "dark" in name else (255, 255, 255))


def test_without_a_task_app_the_strip_is_missing_and_the_reason_is_told(tmp_path):
    run = small_run(tiny_job(), tmp_path / "run")
    html = write_report(run, frames=no_frames).read_text()
    assert "No pictures: no task app &lt;here&gt;" in html
    assert "collect wood" in html
    assert not (run.report / "filmstrip.png").exists()


def test_a_full_disk_is_told_with_the_folder(tmp_path):
    run = small_run(tiny_job(), tmp_path / "run")
    with full_disk(), pytest.raises(RunDirectoryError, match="run/report cannot be written"):
        write_report(run, frames=no_frames)


def test_a_run_that_has_only_begun_says_what_is_missing(tmp_path):
    run = empty_run(tiny_job(training__iterations=7), tmp_path / "run")
    text = told(write_report(run, frames=no_frames).read_text())
    assert "0 of 7 finished" in text
    for missing in (
        "No evaluation has been done yet.",
        "No iteration has finished yet.",
        "No stage has finished yet.",
        "No evaluation has stored an episode yet.",
    ):
        assert missing in text
    assert not list(run.report.glob("*.png"))


def test_metrics_without_their_rollout_files_still_make_a_report(tmp_path):
    run = small_run(tiny_job(), tmp_path / "run")
    for path in (run.path / "rollouts").glob("*.parquet"):
        path.unlink()
    text = told(write_report(run, frames=no_frames).read_text())
    assert "2.00 (95 %: 1.00 to 3.00)" in text
    assert "world by world" not in text
