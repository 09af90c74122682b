"""Which metrics are drawn together, and what a chart says of them."""

from trainer_backend.pages.panels import PANELS, Line, Panel, merge_outcome, rest_of, restrict, split_by_line
from trainer_backend.pages.series import chart_of, table
from trainer_backend.store.rows import Series

PLAIN = Panel("p", "", "Thing", "", (Line("a/x", "x"), Line("a/e", "e", "evaluation")))


def series(points, low=None, high=None):
    at, values = zip(*points, strict=True)
    return Series(at, values, low or values, high or values)


def test_a_panel_without_a_metric_of_the_run_is_left_out_and_a_star_stands_for_all_that_begin_so():
    known = [
        ("iteration", "stop/max_decisions"),
        ("iteration", "stop/deadline"),
        ("iteration", "loss/policy"),
    ]
    found = restrict(PANELS, known)
    assert [panel.key for panel in found] == ["endings", "loss"]
    assert [line.label for line in found[0].lines] == ["deadline", "max decisions"]
    assert [line.label for line in found[1].lines] == ["policy"]  # no critic


def test_a_line_that_would_say_nothing_is_left_out():
    known = [("iteration", name) for name in ("decision/nonzero_frac", "reward/nonzero_episode_frac")]
    (panel,) = restrict(PANELS, known)
    assert [line.label for line in panel.lines] == ["episodes"]
    _, panel = restrict(PANELS, [*known, ("iteration", "episode/unique_achievements")])
    assert [line.label for line in panel.lines] == ["decisions", "episodes"]


def test_a_star_in_the_middle_is_what_the_legend_says():
    names = ["mixture/actor/episodes", "mixture/big_one/episodes", "mixture/episodes", "mixture/actor/ess"]
    found = {panel.key: panel for panel in restrict(PANELS, [("iteration", name) for name in names])}
    assert [line.label for line in found["mix"].lines] == ["actor", "big one"]
    assert [line.label for line in found["ess"].lines] == ["actor"]


def test_what_stands_in_no_panel_is_drawn_alone_so_nothing_measured_is_hidden():
    known = [
        ("iteration", "loss/policy"), ("iteration", "my/own"), ("evaluation", "eval/decisions"),
        ("iteration", "episode/outcome_reward_low"), ("iteration", "episode/outcome_reward"),
        ("iteration", "timeline/learn_end"),  # a time of day makes no curve; it is drawn in the two lanes
    ]  # fmt: skip
    assert [panel.key for panel in rest_of(known)] == ["rest:my/own"]


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


def test_keys_of_panels_are_different():
    keys = [panel.key for panel in PANELS]
    assert len(set(keys)) == len(keys)


def test_the_curves_of_a_chart_share_their_iterations_and_have_gaps_where_they_have_no_value():
    curves = {
        ("iteration", "a/x"): series([(1, 0.5), (2, 0.75)]),
        ("evaluation", "a/e"): series([(0, 3.0), (2, 4.0)]),
        ("evaluation", "a/e_low"): series([(2, 3.5)]),
        ("evaluation", "a/e_high"): series([(2, 4.5)]),
    }
    chart = chart_of(PLAIN, [("run", curves)])
    assert chart["x"] == [0, 1, 2]
    x, e = chart["curves"]
    assert (x["y"], "low" in x) == ([None, 0.5, 0.75], False)
    assert (e["y"], e["low"], e["high"]) == ([3.0, None, 4.0], [None, None, 3.5], [None, None, 4.5])
    assert table(chart) == [(2, ["0.75", "4 (3.5 to 4.5)"]), (1, ["0.5", "–"]), (0, ["–", "3"])]  # noqa: RUF001


def test_a_thinned_curve_shows_how_far_its_stretches_reach():
    curves = {("iteration", "a/x"): series([(10, 0.5), (20, 0.5)], low=(0.1, 0.2), high=(0.9, 0.8))}
    (curve,) = chart_of(PLAIN, [("run", curves)])["curves"]
    assert (curve["low"], curve["high"]) == ([0.1, 0.2], [0.9, 0.8])


def test_runs_laid_over_one_another_are_told_apart_by_their_names_in_a_chart_for_each_line():
    first, second = split_by_line([PLAIN])
    assert (first.title, second.title) == ("Thing: x", "Thing: e")
    runs = [
        (name, {("iteration", "a/x"): series([(1, value)])}) for name, value in (("one", 1.0), ("two", 2.0))
    ]
    chart = chart_of(first, runs)
    assert [(curve["label"], curve["run"], curve["y"]) for curve in chart["curves"]] == [
        ("one", 0, [1.0]), ("two", 1, [2.0]),
    ]  # fmt: skip
    assert chart_of(second, runs) is None


def test_what_goes_to_the_page_is_rounded_and_has_no_bounds_where_there_are_none():
    told = chart_of(PLAIN, [("run", {("iteration", "a/x"): series([(1, 1 / 3)])})])
    assert told["curves"] == [{"label": "x", "run": 0, "line": 0, "dots": False, "y": [0.33333333]}]
