"""A run's head, key figures and success rates; addresses of a list; numbers as a person reads them."""

import tomllib
from datetime import timedelta

import pytest
from starlette.datastructures import QueryParams

from tests.conftest import tiny_job
from tests.trainer_backend.jobs.rows import NOON, job, replace
from tests.trainer_backend.pages.hand_made import FIRST, LAST, evaluation_row, iteration_row
from trainer_backend.job.load import dump_job, parse_job
from trainer_backend.job.training_table import AlgorithmTable, TrainingTable
from trainer_backend.pages.address import change_query, read_filter, read_order
from trainer_backend.pages.facts import chosen_keys, to_begin_from
from trainer_backend.pages.figures import NONE as NO_VALUE
from trainer_backend.pages.figures import (
    ago,
    duration,
    number,
    rollout_address,
    roughly,
    short_id,
    signed,
    size,
)
from trainer_backend.pages.page import BadAddress
from trainer_backend.pages.run_view import (
    evaluation_table,
    key_figures,
    make_head,
    seconds_an_iteration,
    success_rates,
)
from trainer_backend.pages.series import draw_spark
from trainer_backend.rundir.state import ProcessRecord, RunState
from trainer_backend.store.reads_rollouts import RolloutFilter
from trainer_backend.store.rows import Curve

CONFIG = '[job]\nname = "tiny"\n[model]\npreset = "tiny-0.3m"\n[training]\niterations = 20\n'
JOB = job(config=CONFIG, run_dir="/runs/tiny-2", iteration=4, started=NOON - timedelta(minutes=3))


def head(job=JOB, state=None, **changes):
    given = {"rate_s": None, "place": "0.0", "now": NOON, "can_control": True}
    return make_head(job, state, **(given | changes))


def series(*values):
    return Curve(tuple(range(1, len(values) + 1)), values, values, values)


def test_the_head_of_a_run_says_what_is_under_way_and_how_long_it_may_take():
    state = RunState("training", 1, iteration=5, stage="collect 6", done=3, total=8, starts=2)
    shown = head(state=state, rate_s=9.0)
    assert shown["progress"] == "5 of 20 iterations · collect 6, 3 of 8 · about 2 min left"
    assert (shown["live"], shown["actions"]) == (True, ("pause", "cancel"))
    assert dict(shown["facts"])["starts"] == "2"
    assert dict(shown["facts"])["begun"] == "3 min ago"


def test_what_a_run_wrote_of_itself_is_not_believed_after_its_end():
    state = RunState("training", 1, iteration=5, stage="collect 6", done=3, total=8)
    ended = replace(JOB, state="succeeded", ended=NOON)
    shown = head(ended, state, rate_s=10.0)
    assert (shown["progress"], shown["live"], shown["actions"]) == ("4 of 20 iterations", False, ())
    assert dict(shown["facts"])["took"] == "3 min"


def test_the_head_shows_processes_of_a_live_run_by_role_and_what_it_does_more_slowly_after_its_end_too():
    def record(role, name):
        return ProcessRecord(role, name, "", "serving", None, "", "")

    own, replica, gateway = record("task app", "own"), record("replica", "a"), record("gateway", "g")
    notes = ("kernels do not run: no C compiler",)
    state = RunState("training", 1, processes=(own, replica, gateway), notes=notes)
    live, ended = head(state=state), head(replace(JOB, state="succeeded", ended=NOON), state)
    assert (live["processes"], live["notes"]) == ([gateway, replica, own], notes)
    assert (ended["processes"], ended["notes"]) == ([], notes)


def test_only_what_makes_sense_is_offered():
    offered = {
        "queued": ("pause", "cancel"), "pausing": ("cancel",), "paused": ("resume", "cancel"),
        "failed": ("resume",), "cancelled": ("resume",), "cancelling": (), "succeeded": (),
    }  # fmt: skip
    for state, actions in offered.items():
        assert head(replace(JOB, state=state))["actions"] == actions
        assert head(replace(JOB, state=state), can_control=False)["actions"] == ()
        assert head(replace(JOB, state=state, origin="cli"))["actions"] == ()


def test_an_iteration_takes_what_its_stages_took_of_late_and_a_curve_of_equal_values_is_a_line():
    assert draw_spark((5.0, 5.0), "x")["points"] == "0.0,23.0 100.0,23.0"
    assert draw_spark((5.0,), "x")["points"] == ""
    assert seconds_an_iteration({"a": series(100.0, 1.0, 1.0, 1.0, 1.0, 1.0), "b": series(2.0)}) == 3.0
    assert seconds_an_iteration({}) is None


def test_key_figures_compare_with_the_first_row_and_leave_out_what_there_is_not():
    iterations = [iteration_row(1, 1.0), iteration_row(2, 2.0)]
    held_out = [evaluation_row(0, FIRST, None, None), evaluation_row(2, LAST, 1.0, 3.0)]
    found = {name: texts for name, *texts in key_figures(iterations, held_out, "score")}
    assert found == {
        "held-out score": ["2", "95 % 1 to 3, 0.5 at iteration 0"],
        "Crafter score": ["12.5 %", "geometric mean of success rates"],
        "progress": ["66.7 %", "95 % 33.3 to 100, mean share of the achievements"],
        "environment's reward": ["1.5", "summed over an episode"],
        "training score": ["2", "1 at iteration 1"],
        "reward an episode": ["2", "1 at iteration 1"],
        "decisions with event reward": ["50 %", "50 % at iteration 1"],
        "entropy": ["1.5", "1.5 at iteration 1"],
    }
    assert key_figures([], [], "score") == []
    plain = {name: value for name, value in iteration_row(1, 1.0).items() if "unique" not in name}
    names = [name for name, *_ in key_figures([plain, plain], [], "score")]
    assert names == ["training score", "reward an episode", "entropy"]


def test_the_table_of_evaluations_has_score_and_progress_after_the_outcome():
    older = {
        name: value for name, value in evaluation_row(0, FIRST, None, None).items() if "progress" not in name
    }
    head, first, last = evaluation_table([older, evaluation_row(2, LAST, 1.0, 3.0)], best=2)
    assert head[1:5] == ("unique achievements", "Crafter score", "progress", "environment's reward")
    assert first[:5] == ("0", "0.50", "12.5 %", NO_VALUE, "1.5")
    assert last[:5] == ("2 (best)", "2.00 (95 %: 1.00 to 3.00)", "12.5 %", "66.7 %", "1.5")


def test_success_rates_are_shown_with_those_of_the_first_evaluation_the_most_frequent_first():
    first, last = evaluation_row(0, FIRST, None, None), evaluation_row(2, LAST, 1.0, 3.0)
    rates = success_rates([first, last], {"eval/success_rates/eat_cow": series(0.0, 1.0)})
    assert (rates["before"], rates["after"]) == ("iteration 0", "iteration 2")
    assert [(row["name"], row["before"], row["after"]) for row in rates["rows"]] == [
        ("eat cow", "0%", "100%"), ("collect wood", "50%", "50%"), ("place table", "0%", "50%"),
    ]  # fmt: skip
    assert all(row["low"] <= row["last"] <= row["high"] for row in rates["rows"])
    assert [row["spark"]["points"] for row in rates["rows"]] == ["0.0,23.0 100.0,1.0", "", ""]
    alone = success_rates([first, first], {})
    assert (alone["before"], alone["rows"][0]["before"]) == ("", "–")  # noqa: RUF001
    assert success_rates([], {}) == {}


def test_of_a_job_the_keys_are_shown_that_were_chosen():
    default = str(TrainingTable.model_fields["iterations"].default)
    gamma = AlgorithmTable.model_fields["gamma"].default
    config = CONFIG.replace("20", "21") + f"[algorithm]\ngamma = {gamma}\n"
    found = {key: rest for key, *rest in chosen_keys(replace(JOB, config=config))}
    assert found["training.iterations"] == ["21", default]
    assert found["model.preset"] == ['"tiny-0.3m"', "–"]  # noqa: RUF001
    assert "algorithm.gamma" not in found  # as it is by itself


def test_a_job_to_begin_from_has_what_was_chosen_and_reads_back_to_the_same_job():
    job = tiny_job(training__iterations=21, job__runs_dir="elsewhere", services__gateway_host="0.0.0.0")
    text = to_begin_from(replace(JOB, config=dump_job(job)))
    assert "checkpoint_every = 1" in text and "iterations = 21" in text
    assert "runs_dir" not in text and "gateway_host" not in text and "entropy_coef" not in text
    again = parse_job(tomllib.loads(text), where="test").config
    own = {"job": job.job.model_copy(update={"runs_dir": again.job.runs_dir}), "services": again.services}
    assert again == job.model_copy(update=own)
    every_default = replace(JOB, config=CONFIG + "[warmup]\n")
    assert "[warmup]" in to_begin_from(every_default)


def test_a_job_with_two_fixed_policies_and_a_schedule_begins_another_as_it_is():
    written = """
[model]
preset = "tiny-0.3m"
[[rollout_only]]
name = "strong-1"
inference_url = "http://127.0.0.1:8000/v1"
model = "big"
weight = 3.0
objective = "single_ratio"
[[rollout_only]]
name = "clone_2"
model_path = "runs/clone"
baseline = "per_policy"
[rollout_allocation_schedule]
type = "step"
switch_steps = [2, 7]
initial_policy = "actor"
unit = "group"
"""
    job = parse_job(tomllib.loads(written), where="test").config
    stored = replace(JOB, config=dump_job(job))
    text = to_begin_from(stored)
    assert parse_job(tomllib.loads(text), where="test").config == job
    assert text.count("[[rollout_only]]") == 2 and "switch_steps" in text
    again = replace(JOB, config=dump_job(parse_job(tomllib.loads(text), where="test").config))
    assert to_begin_from(again) == text
    chosen = {key: value for key, value, _ in chosen_keys(stored)}
    assert chosen["rollout_only.strong-1.weight"] == "3.0"
    assert chosen["rollout_only.clone_2.model_path"] == '"runs/clone"'
    assert "rollout_only.clone_2.weight" not in chosen  # as it is by itself


def test_numbers_are_read_and_go_back_into_the_address_and_empty_fields_narrow_nothing():
    params = QueryParams("stage=&iteration=+&text=&lost=&sort=&down=1")
    assert read_filter(RolloutFilter, params) == RolloutFilter()
    assert read_order(params, ("newest", "reward"), "newest") == ("newest", True)
    query = "iteration=3&policy=a+b&min_reward=-0.5&lost=1&sort=reward&down=0"
    params = QueryParams(f"stage=&{query}&cursor=c")
    assert read_filter(RolloutFilter, params) == RolloutFilter(
        iteration=3, min_reward=-0.5, policy="a b", lost=True
    )
    assert read_order(params, ("newest", "reward"), "newest") == ("reward", False)
    assert change_query(params, cursor=None) == query
    assert change_query(params, cursor="d", sort="newest").endswith("&lost=1&down=0&cursor=d&sort=newest")


def test_a_number_or_an_order_that_cannot_be_read_is_named():
    for params, told in (
        ({"iteration": "three"}, "iteration is 'three'; it must be a whole number"),
        ({"iteration": "9" * 20}, "it must be a whole number of at most 2147483647"),
        ({"min_reward": "much"}, "min_reward is 'much'; it must be a number"),
        ({"max_decisions": "nan"}, "max_decisions is 'nan'; it must be a whole number"),
    ):
        with pytest.raises(BadAddress, match=told):
            read_filter(RolloutFilter, params)
    with pytest.raises(BadAddress, match="sort is 'luck'; known: newest, reward"):
        read_order({"sort": "luck"}, ("newest", "reward"), "newest")


def test_an_id_keeps_its_slashes_and_nothing_else_that_means_something_in_an_address():
    assert rollout_address("j", "r.1/train/3/0?x", 4) == "/runs/j/rollouts/r.1/train/3/0%3Fx?turn=4"
    assert (short_id("r.1/train/3/0"), short_id("alone")) == ("train/3/0", "alone")


@pytest.mark.parametrize(
    ("value", "form", "told"),
    [
        (None, "number", "–"),  # noqa: RUF001
        (0.0, "number", "0"),
        (8.484375, "number", "8.48"),
        (0.0312, "number", "0.0312"),
        (10.0, "number", "10"),
        (100.0, "number", "100"),
        (999.6, "number", "1000"),
        (2932.0, "number", "2,932"),
        (-0.5, "number", "-0.5"),
        (7.625, "number", "7.63"),  # as in JavaScript
        (1234.5, "number", "1,235"),
        (2.0**70, "number", "1,180,591,620,717,411,303,424"),
        (2.3e-7, "number", "2.3e-07"),
        (0.1524, "percent", "15.2 %"),
        (1.0, "percent", "100 %"),
        (12.2995, "seconds", "12.3 s"),
    ],
)
def test_a_value_has_three_digits_that_count(value, form, told):
    assert number(value, form) == told


def test_rewards_show_their_sign_and_a_zero_has_none():
    assert [signed(value) for value in (0.5, -2.0, 0.0, None)] == ["+0.5", "−2", "0", "–"]  # noqa: RUF001


def test_a_duration_has_its_two_largest_units_an_estimate_one_and_bytes_one():
    assert [duration(seconds) for seconds in (0, 45, 200, 3600, 7500, 273_600)] == [
        "0 s", "45 s", "3 min 20 s", "1 h", "2 h 5 min", "3 d 4 h",
    ]  # fmt: skip
    estimates = [roughly(seconds) for seconds in (45, 119, 120, 1435, 9_000)]
    assert estimates == ["45 s", "119 s", "2 min", "24 min", "2 h"]
    assert [size(count) for count in (512, 1_258_291, 3 * 2**30)] == ["512 B", "1.2 MiB", "3.0 GiB"]


def test_a_moment_is_told_by_its_largest_unit_and_one_that_is_yet_to_come_is_just_now():
    told = [ago(NOON - timedelta(seconds=seconds), NOON) for seconds in (-10, 2, 45, 200, 7500)]
    assert told == ["just now", "just now", "45 s ago", "3 min ago", "2 h ago"]
