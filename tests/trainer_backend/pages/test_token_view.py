"""Tokens and their colours."""

import math

from tests.trainer_backend.segment_columns import make_segment
from trainer_backend.core.segments import CONTEXT
from trainer_backend.pages.token_view import (
    STEPS,
    advantage_step,
    probability_step,
    segment_view,
    token_advantages,
)


def segment(decision, logprobs=None):
    count = len(decision)
    return make_segment("r", range(count), decision, logprobs or [0.0] * count, versions=[7] * count)


def view(shown, rows, turn=1):
    return segment_view(shown, 0, turn=turn, decode=lambda one: f"<{one}>", advantages=rows)


def test_a_segment_is_cut_where_the_decision_changes_and_says_what_it_trains():
    found = view(segment([CONTEXT, CONTEXT, 0, CONTEXT, 1, 1]), [[1.0], [-0.5]])
    runs = [(run["turn"], len(run["tokens"])) for run in found["runs"]]
    assert runs == [(None, 2), (1, 1), (None, 1), (2, 2)]
    assert (found["number"], found["turns"], found["length"], found["sampled"]) == (1, [1, 2], 6, 3)
    assert found["runs"][0]["tokens"][0]["kind"] == "m0"
    assert found["runs"][1]["tokens"][0]["kind"] == "m1 p0 ap4"
    assert found["runs"][3]["tokens"][1]["kind"] == "m1 p0 an2"


def test_a_token_tells_all_that_is_known_of_it():
    found = view(segment([CONTEXT, 0], [0.0, math.log(0.25)]), [[0.5]])
    assert found["runs"][1]["tokens"][0]["title"] == (
        "id 1, log-prob −1.39, probability 25 %, advantage +0.5, policy version 7"  # noqa: RUF001
    )
    assert found["runs"][0]["tokens"][0]["title"] == "id 0, context: not trained"


def test_advantages_by_token_go_to_their_tokens_and_a_decision_s_to_all_of_its():
    found = view(segment([CONTEXT, 0, 0]), [[1.0, -1.0]])
    assert [token["kind"].split()[-1] for token in found["runs"][1]["tokens"]] == ["ap4", "an4"]
    rows = [{"advantage": 0.5}, {"advantage": 0.5, "token_advantages": [1.0, 0.0]}, {"advantage": None}]
    assert token_advantages(rows) == [[0.5], [1.0, 0.0], []]


def test_long_context_is_folded_but_for_its_ends():
    found = view(segment([CONTEXT] * 1000 + [0]), [[1.0]])
    context = found["runs"][0]
    assert (len(context["tokens"]), context["folded"], len(context["rest"])) == (60, 880, 60)
    assert (context["tokens"][0]["text"], context["rest"][-1]["text"]) == ("<0>", "<999>")


def test_of_a_long_conversation_the_decision_is_shown_with_its_neighbours_and_the_rest_is_counted():
    # six decisions of three tokens, each after two of context: 30 tokens, the fourth begins at 15
    long = segment([one for t in range(6) for one in (CONTEXT, CONTEXT, t, t, t)])
    found = view(long, [[1.0]] * 6, turn=4)
    assert [(run["turn"], len(run["tokens"])) for run in found["runs"]] == [
        (None, 2), (3, 3), (None, 2), (4, 3), (None, 2), (5, 3), (None, 2),
    ]  # fmt: skip
    assert (found["before"], found["after"]) == ({"tokens": 10, "turn": 2}, {"tokens": 3, "turn": 6})
    assert (found["turns"], found["length"], found["sampled"]) == ([1, 2, 3, 4, 5, 6], 30, 18)
    first, last = view(long, [[1.0]] * 6, turn=1), view(long, [[1.0]] * 6, turn=6)
    assert (first["before"], first["after"]) == (None, {"tokens": 18, "turn": 3})
    assert (last["before"], last["after"]) == ({"tokens": 20, "turn": 4}, None)


def test_what_a_page_shows_of_a_segment_is_bounded():
    rows = [[0.5] * 20_000] * 5
    found = view(segment([one for t in range(5) for one in (*[CONTEXT] * 5000, *[t] * 20_000)]), rows, turn=3)
    assert sum(len(run["tokens"]) + len(run["rest"]) for run in found["runs"]) == 4 * 120 + 2 * 120 + 8000
    assert [run["folded"] for run in found["runs"] if run["turn"] == 3] == [12_000]
    assert all(token["kind"] == "m1 p0 ap4" for run in found["runs"] if run["turn"] for token in run["rest"])


def test_the_side_of_an_advantage_is_always_seen_and_an_unlikelier_token_has_a_stronger_colour():
    steps = [advantage_step(value, 2.0) for value in (1e-9, 0.5, 2.0, 9.0, 0.0, -1e-9, -9.0)]
    assert steps == [1, 1, STEPS, STEPS, 0, -1, -STEPS]
    probabilities = (1.0, 0.995, 0.95, 0.6, 0.2, 0.05, 0.001)
    assert [probability_step(math.log(one)) for one in probabilities] == [0, 0, 1, 2, 3, 4, 5]
