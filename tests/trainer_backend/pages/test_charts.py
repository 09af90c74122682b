"""Which metrics are drawn together, and what a chart says of them."""

import pytest

from tests.trainer_backend.pages.test_run_views import JOB
from trainer_backend.core.metric import Line, Metric, Panel
from trainer_backend.pages.panels import (
    PANELS,
    fill,
    make_other_panels,
    merge_outcome,
    restrict,
    split_by_line,
)
from trainer_backend.pages.run_data import Run, run_data
from trainer_backend.pages.series import add_up_axes, draw_chart, place_on_axes, table
from trainer_backend.store.rows import Curve

PLAIN = Panel("p", "", "Thing", "", (Line("a/x", "x"), Line("a/e", "e", "evaluation")))


def series(points, low=None, high=None):
    at, values = zip(*points, strict=True)
    return Curve(at, values, low or values, high or values)


EVENTS = ["decision/nonzero_frac", "reward/nonzero_episode_frac"]


@pytest.mark.parametrize(
    ("names", "panels"),
    [
        # A star stands for all that begin so, and in the middle for what the legend says.
        (["stop/max_decisions", "stop/deadline"], {"endings": ["deadline", "max decisions"]}),
        (
            ["mixture/actor/episodes", "mixture/big_one/episodes", "mixture/episodes", "mixture/actor/ess"],
            {"mix": ["actor", "big one"], "ess": ["actor"]},
        ),
        (["loss/policy"], {"loss": ["policy"]}),  # no critic
        (EVENTS, {"event_reward": ["episodes"]}),  # without achievements, decisions would say nothing
        (
            [*EVENTS, "episode/unique_achievements"],
            {"unique": ["training"], "event_reward": ["decisions", "episodes"]},
        ),
    ],
)
def test_panels_and_lines_are_those_of_metrics_of_the_run_that_say_something(names, panels):
    found = restrict(PANELS, [("iteration", name) for name in names])
    assert {panel.key: [line.label for line in panel.lines] for panel in found} == panels


def test_what_stands_in_no_panel_is_drawn_alone_so_nothing_measured_is_hidden():
    known = [
        ("iteration", "loss/policy"), ("iteration", "my/own"), ("evaluation", "eval/decisions"),
        ("iteration", "episode/outcome_reward_low"), ("iteration", "episode/outcome_reward"),
        ("iteration", "timeline/learn_end"),  # a time of day makes no curve; it is drawn in the two lanes
    ]  # fmt: skip
    assert [panel.key for panel in make_other_panels(known)] == ["rest:my/own"]


def test_unique_achievements_are_a_chart_with_their_band_and_one_where_they_are_the_outcome():
    known = [
        ("iteration", "episode/outcome_reward"), ("iteration", "episode/unique_achievements"),
        ("evaluation", "eval/outcome_reward"), ("evaluation", "eval/unique_achievements"),
    ]  # fmt: skip
    both = merge_outcome(restrict(PANELS, known), "score of a judge")
    assert [(panel.key, panel.title) for panel in both] == [
        ("outcome", "Outcome an episode"), ("unique", "Unique achievements an episode"),
    ]  # fmt: skip
    assert [line.label for line in both[1].lines] == ["training", "held-out"]
    assert both[1].lines[1].bounds == ("eval/unique_achievements_low", "eval/unique_achievements_high")
    (one,) = merge_outcome(restrict(PANELS, known), "unique achievements")
    assert (one.key, one.title, one.lines) == ("outcome", "Unique achievements an episode", both[0].lines)


def test_keys_of_panels_are_different_and_each_has_a_metric():
    keys = [panel.key for panel in PANELS]
    assert len(set(keys)) == len(keys)
    assert [panel.key for panel in PANELS if not panel.lines] == []


def test_a_metric_is_drawn_where_its_declaration_says():
    table = (Panel("kl", "Episodes", "KL", ""), Panel("speed", "Speed", "Speed", ""))
    alone = Panel("x", "Episodes", "Thing", "In things.")
    panels = fill(
        table,
        [
            Metric("a/x", "a thing", alone, {"evaluation": "held-out", "iteration": "training"}),
            Metric("a/kl", "a distance", "kl", "moved"),
            Metric("a/y", "without a chart of a title"),
        ],
    )
    assert [(panel.title, panel.lines) for panel in panels] == [
        ("KL", (Line("a/kl", "moved"),)),
        ("Thing", (Line("a/x", "training"), Line("a/x", "held-out", "evaluation"))),
        ("Speed", ()),
    ]
    with pytest.raises(ValueError, match="a/x: panel 'kll' is not one of kl, speed"):
        fill(table, [Metric("a/x", "a thing", "kll")])


def test_the_curves_of_a_chart_share_their_iterations_and_have_gaps_where_they_have_no_value():
    curves = {
        ("iteration", "a/x"): series([(1, 0.5), (2, 0.75)]),
        ("evaluation", "a/e"): series([(0, 3.0), (2, 4.0)]),
        ("evaluation", "a/e_low"): series([(2, 3.5)]),
        ("evaluation", "a/e_high"): series([(2, 4.5)]),
    }
    chart = draw_chart(PLAIN, [("run", curves)])
    assert chart["x"] == [0, 1, 2]
    x, e = chart["curves"]
    assert (x["y"], "low" in x) == ([None, 0.5, 0.75], False)
    assert (e["y"], e["low"], e["high"]) == ([3.0, None, 4.0], [None, None, 3.5], [None, None, 4.5])
    assert table(chart) == [(2, ["0.75", "4 (3.5 to 4.5)"]), (1, ["0.5", "–"]), (0, ["–", "3"])]  # noqa: RUF001


def test_a_thinned_curve_shows_how_far_its_stretches_reach():
    curves = {("iteration", "a/x"): series([(10, 0.5), (20, 0.5)], low=(0.1, 0.2), high=(0.9, 0.8))}
    (curve,) = draw_chart(PLAIN, [("run", curves)])["curves"]
    assert (curve["low"], curve["high"]) == ([0.1, 0.2], [0.9, 0.8])


def test_runs_laid_over_one_another_are_told_apart_by_their_names_in_a_chart_for_each_line():
    first, second = split_by_line([PLAIN])
    assert (first.title, second.title) == ("Thing: x", "Thing: e")
    runs = [
        (name, {("iteration", "a/x"): series([(1, value)])}) for name, value in (("one", 1.0), ("two", 2.0))
    ]
    chart = draw_chart(first, runs)
    assert [(curve["label"], curve["run"], curve["y"]) for curve in chart["curves"]] == [
        ("one", 0, [1.0]), ("two", 1, [2.0]),
    ]  # fmt: skip
    assert draw_chart(second, runs) is None


def test_what_goes_to_the_page_is_rounded_and_has_no_bounds_where_there_are_none():
    told = draw_chart(PLAIN, [("run", {("iteration", "a/x"): series([(1, 1 / 3)])})])
    assert told["curves"] == [{"label": "x", "run": 0, "line": 0, "dots": False, "y": [0.33333333]}]


def test_an_axis_adds_up_what_each_iteration_did_and_leaves_out_pauses_between_starts():
    def row(begin_s, end_s, start, **more):
        times = {"timeline/collect_start": begin_s, "timeline/learn_end": end_s, "recovery/resumes": start}
        return {**times, "episode/env_steps": 10.0, "episode/count": 4.0, **more}

    rows = {1: row(0.0, 3600.0, 0.0), 2: row(1800.0, 7200.0, 0.0), 3: row(90_000.0, 91_800.0, 1.0)}
    axes = add_up_axes(rows)
    assert axes == {"steps": {1: 40.0, 2: 80.0, 3: 120.0}, "hours": {1: 1.0, 2: 2.0, 3: 2.5}}
    chart = draw_chart(PLAIN, [("run", {("evaluation", "a/e"): series([(0, 1.0), (3, 2.0)])})])
    assert place_on_axes([axes], [chart]) == {
        "at": [0, 3],
        "axes": {
            "steps": {"name": "env steps", "x": [[0.0, 120.0]]},
            "hours": {"name": "hours of training", "x": [[0.0, 2.5]]},
        },
    }


def test_the_last_figures_of_seeds_are_their_mean_and_those_of_others_are_told_from_the_pinned_run():
    def run(name, seed, gamma, outcome):
        text = f"[job]\nseed = {seed}\n[algorithm]\ngamma = {gamma}\n"
        row = {"kind": "iteration", "iteration": 1, "episode/outcome_reward": outcome}
        row["episode/outcome_definition"] = "score: how well"
        return Run(JOB.model_copy(update={"id": name, "name": name, "config": text}), name, [row])

    runs = [run("a_1", 1, 0.5, 1.0), run("b", 1, 0.9, 4.0), run("a_2", 2, 0.5, 2.0)]
    metrics = {("iteration", "episode/outcome_reward")}
    data = run_data(runs, metrics, pin="b")
    assert [(row["name"], row["pinned"]) for row in data["last"]["rows"]] == [
        ("a (2 seeds)", False),
        ("b", True),
    ]
    assert data["last"]["figures"] == ["training score"]
    assert [row["cells"] for row in data["last"]["rows"]] == [
        [{"value": "1.5", "reach": "1 to 2", "difference": "\N{MINUS SIGN}2.5"}],
        [{"value": "4", "reach": "", "difference": ""}],
    ]
    apart = run_data(runs, metrics, apart=True)
    assert [row["name"] for row in apart["last"]["rows"]] == ["a_1", "b", "a_2"]
    assert ([one["sign"] for one in data["runs"]], [one["sign"] for one in apart["runs"]]) == (
        [0, 1, 0],
        [0, 1, 2],
    )
