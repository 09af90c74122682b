"""What a person reads in the terminal. Nothing that is told may be taken for markup."""

import io

import pytest
from rich.console import Console

from tests.conftest import tiny_job
from tests.trainer_backend.pages.hand_made import (
    FIRST,
    LAST,
    empty_run,
    evaluation_row,
    iteration_row,
    small_run,
)
from trainer_backend.pages.story import read_story
from trainer_backend.run.reporters import RecordingReporter
from trainer_backend.run.row_lines import Pace, word_evaluation, word_iteration
from trainer_backend.rundir.state import read_log
from trainer_backend.terminal.progress import ConsoleReporter, closing_lines

BRACKETS = "[vllm] in /runs/[/x]/:bug:"


def said(*, terminal: bool, line: str) -> str:
    out = io.StringIO()
    with ConsoleReporter(Console(file=out, force_terminal=terminal, width=60)) as reporter:
        reporter.say(line)
    return out.getvalue()


def test_what_stands_in_brackets_is_told_as_it_is_and_a_long_line_stays_a_line_in_a_log():
    assert all(BRACKETS in said(terminal=terminal, line=BRACKETS) for terminal in (False, True))
    assert said(terminal=False, line="x" * 200).count("\n") == 1


def test_a_log_names_the_stage_after_a_silent_minute_and_a_live_table_prints_no_line_of_it():
    for terminal, lines in ((False, ["01:00 warm-up  2/9", "02:01 warm-up  5/9"]), (True, [])):
        now = [0.0]
        out = io.StringIO()
        reporter = ConsoleReporter(Console(file=out, force_terminal=terminal), clock=lambda now=now: now[0])
        for done, second in enumerate((0, 59, 60, 61, 119, 121)):
            now[0] = float(second)
            reporter.stage("warm-up", done, 9)
        assert out.getvalue().splitlines() == lines


def test_an_evaluation_is_told_with_its_achievements_and_with_the_figures_that_it_has():
    out = io.StringIO()
    row = evaluation_row(3, LAST, 1.0, 3.0)
    row["eval/success_rates"]["[/odd]"] = 0.25
    ConsoleReporter(Console(file=out)).metrics(row, word_evaluation(row))
    assert "held-out after iteration 3: 2.00 (95 % 1.00 to 3.00) unique achievements" in out.getvalue()
    assert "eat_cow 100%, collect_wood 50%, place_table 50%, [/odd] 25%" in out.getvalue()
    row = evaluation_row(0, FIRST[1:], None, None)
    row["eval/success_rates"] = {"eat_cow": 0.0}
    assert word_evaluation(row).endswith("progress 0.0 %, 1 episodes")
    del row["eval/crafter_score"]
    assert "progress 0.0 %" in word_evaluation(row) and "score" not in word_evaluation(row)
    del row["eval/progress"], row["eval/success_rates"]
    assert "progress" not in word_evaluation(row)


def test_the_last_evaluation_is_the_result_and_the_best_is_named_apart(tmp_path):
    run = small_run(tiny_job(), tmp_path / "run")
    best = {**evaluation_row(1, LAST, 1.0, 3.0), "eval/outcome_reward": 9.0}
    rows = run.metrics()
    run.metrics_file.unlink()
    for row in (*rows[:2], best, *rows[2:]):
        run.append_metrics(row)
    before, after, difference, chosen = closing_lines(read_story(run))
    # worlds with 1 and 0 of 3 achievements, then 3 and 1
    head = "before RL: 0.50 unique achievements; Crafter score 12.5 %, progress 16.7 %"
    assert before.strip() == f"{head}, 2 episodes"
    assert after.strip() == (
        "after iteration 2: 2.00 (95 % 1.00 to 3.00) unique achievements; Crafter score 12.5 %, "
        "progress 66.7 %, 2 episodes"
    )
    # world 10: 3 - 1, world 11: 1 - 0; mean 1.5, standard error 0.5, t of one degree of freedom 12.706
    assert difference.strip() == "difference, world by world: +1.50 (95 % -4.85 to +7.85), 2 worlds"
    assert chosen.strip() == "best checkpoint: iteration 1, 9.00 (chosen on these worlds: not a result)"


def test_a_run_with_one_evaluation_has_nothing_to_compare(tmp_path):
    run = empty_run(tiny_job(), tmp_path / "run")
    assert closing_lines(read_story(run)) == []
    run.append_metrics(evaluation_row(0, FIRST, None, None))
    (line,) = closing_lines(read_story(run))
    assert line.strip().startswith("before RL: 0.50 unique achievements; Crafter score 12.5 %")


@pytest.mark.parametrize("terminal", [False, True])
def test_an_iteration_is_a_line_or_a_row_of_a_live_table_and_in_the_log_the_same_line(tmp_path, terminal):
    run, out, pace = empty_run(tiny_job(), tmp_path / "run"), io.StringIO(), Pace()
    reporter = RecordingReporter(run, ConsoleReporter(Console(file=out, force_terminal=terminal, width=160)))
    row = iteration_row(3, 2.0)
    pace.finish(3, 8)
    reporter.metrics(row, line := word_iteration(row, pace))
    assert line.startswith("iteration 3 of 8  unique achievements 2.00  ")
    assert (line in out.getvalue()) is not terminal
    assert [kept.text for kept in read_log(run.path)[0]] == [line]


def test_a_column_grows_with_its_numbers_and_the_titles_are_told_again():
    out = io.StringIO()
    reporter = ConsoleReporter(Console(file=out, force_terminal=True, width=160, color_system=None))
    for reward in (1.0, -104.25, -1.0):
        reporter.metrics({**iteration_row(1, 2.0), "reward/mean": reward}, "")
    assert "-104.25" in out.getvalue()
    assert out.getvalue().count("entropy") == 2


def test_rows_stay_above_the_live_line_under_titles_that_come_again():
    seconds = iter(range(0, 100_000, 30))
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    reporter = ConsoleReporter(console, iterations=40, clock=lambda: float(next(seconds)))
    for iteration in range(1, 25):
        reporter.metrics(iteration_row(iteration, 2.0), "")
    told = out.getvalue()
    assert [line.split()[0] for line in told.splitlines() if line.split()[0].isdigit()] == [
        str(number) for number in range(1, 25)
    ]
    assert told.count("entropy") == 2  # before rows 1 and 21
    console.print(reporter._render())
    # 23 intervals of 30 s, 16 iterations left
    assert "iteration 24 of 40" in out.getvalue() and "about 8 min left" in out.getvalue()
