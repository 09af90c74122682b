"""The two lanes of a run's last iterations: when it collected, when it learned, and who waited."""

from trainer_backend.pages.timeline import SHOWN, draw_timeline

NOON = 1_795_348_800.0  # 2026-11-22, 12:00 UTC


def row(iteration, collect, learn, *, waits=(0.0, 0.0), overlap=0.0, resumes=0.0):
    """A row of an iteration; spans in seconds after noon, waits for rollouts and for the learner."""
    return {
        "kind": "iteration",
        "iteration": iteration,
        "timeline/collect_start": NOON + collect[0],
        "timeline/collect_end": NOON + collect[1],
        "timeline/learn_start": NOON + learn[0],
        "timeline/learn_end": NOON + learn[1],
        "time/wait_collect_s": waits[0],
        "time/wait_learner_s": waits[1],
        "perf/overlap": overlap,
        "recovery/resumes": resumes,
    }


def evaluation(iteration, start, end):
    times = {"timeline/collect_start": NOON + start, "timeline/collect_end": NOON + end}
    return {"kind": "evaluation", "iteration": iteration, **times}


# The second is collected while the first is learned from: 40 s in all, both work from 10 to 20.
AHEAD = [
    row(1, (0.0, 10.0), (10.0, 20.0), waits=(10.0, 0.0), overlap=0.5),
    row(2, (10.0, 30.0), (30.0, 40.0), waits=(10.0, 10.0), overlap=0.0),
]


def test_a_bar_lies_where_its_work_lay_and_the_axis_counts_back_from_the_end():
    view = draw_timeline(AHEAD, [])
    assert [(bar["work"], bar["label"], bar["start"], bar["width"]) for bar in view["bars"]] == [
        ("collect", "1", 0.0, 25.0), ("collect", "2", 25.0, 50.0),
        ("learn", "1", 25.0, 25.0), ("learn", "2", 75.0, 25.0),
    ]  # fmt: skip
    assert view["bars"][1]["words"] == "iteration 2, collected: 12:00:10, 20 s"
    assert [(tick["at"], tick["label"]) for tick in view["ticks"]] == [
        (0.0, "\N{MINUS SIGN}40 s"), (25.0, "\N{MINUS SIGN}30 s"), (50.0, "\N{MINUS SIGN}20 s"),
        (75.0, "\N{MINUS SIGN}10 s"), (100.0, "0"),
    ]  # fmt: skip
    assert view["end"] == "12:00:40 UTC"
    assert view["table"][0] == ("2", "12:00:10, 20 s", "12:00:30, 10 s")
    assert view["summary"].startswith("Iterations 1 to 2 in two lanes over 40 s")


def test_it_says_which_share_of_the_time_both_worked_and_who_waited():
    # both 10 s (half of the 20 s of the first row), rollouts awaited 20 s, nothing collected 10 s
    assert draw_timeline(AHEAD, [])["words"] == (
        "Both worked 25 % of the time; 50 % of it the learner waited for rollouts, and 25 % nothing was "
        "collected while it worked."
    )
    in_turns = [row(1, (0.0, 30.0), (30.0, 40.0), waits=(30.0, 10.0))]
    assert draw_timeline(in_turns, [])["words"] == (
        "They took turns: 75 % of the time was collecting, 25 % learning."
    )
    always = [row(1, (0.0, 10.0), (0.0, 10.0), overlap=1.0)]  # the share alone does not tell of how much
    assert draw_timeline(always, [])["words"].startswith("Both worked 100 % of the time")


def test_evaluations_in_this_time_are_in_the_lane_of_collecting():
    before, across, after = evaluation(0, -9.0, -1.0), evaluation(1, -10.0, 5.0), evaluation(2, 40.0, 50.0)
    view = draw_timeline(AHEAD, [before, across, after])
    held_out = [
        (bar["label"], bar["start"], bar["width"]) for bar in view["bars"] if bar["work"] == "evaluate"
    ]
    assert held_out == [("E", 0.0, 10.0), ("E", 80.0, 20.0)]  # of 50 s; the first began before the picture
    assert view["evaluates"] and not draw_timeline(AHEAD, [before, {"iteration": 1}])["evaluates"]


def test_it_shows_the_last_dozen_of_the_newest_start_and_rows_without_times_not_at_all():
    rows = [row(n, (10.0 * n, 10.0 * n + 5), (10.0 * n + 5, 10.0 * n + 10)) for n in range(1, 21)]
    shown = [bar["label"] for bar in draw_timeline(rows, [])["bars"] if bar["work"] == "learn"]
    assert shown == [str(n) for n in range(21 - SHOWN, 21)]
    day = 86_400.0
    resumed = [*rows, row(21, (day, day + 5.0), (day + 5.0, day + 10.0), resumes=1.0)]
    assert [bar["label"] for bar in draw_timeline(resumed, [])["bars"]] == ["21", "21"]
    assert draw_timeline([{"kind": "iteration", "iteration": 1}], []) == {}
    assert draw_timeline([], [evaluation(0, 0.0, 1.0)]) == {}


def test_a_number_stands_where_its_bar_has_room():
    for width, label, roomy in ((5.0, "7", True), (2.0, "7", False), (0.5, "", False), (0.0, "", False)):
        bar = draw_timeline([row(7, (0.0, width), (width, 100.0))], [])["bars"][0]
        assert (bar["label"], bar["roomy"], bar["width"]) == (label, roomy, max(width, 0.2))
