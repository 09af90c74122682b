"""An advantage told by its parts."""

import re

import pytest

from trainer_backend.core.advantages.derivation import PARTS, Derivation
from trainer_backend.plugins import ESTIMATORS

SIBLINGS = ("baseline", "mean of {compared} sibling[s] at this turn")
STEPWISE = Derivation(("advantage = return - baseline",), (SIBLINGS,))


def lines(derivation, **numbers):
    return derivation.lines(numbers, lambda value: f"{value:g}")


def test_a_line_has_the_numbers_and_says_what_the_baseline_is():
    numbers = {"return": 3.31, "baseline": 2.89, "advantage": 0.42}
    equation = "advantage 0.42 = return 3.31 - baseline 2.89"
    assert lines(STEPWISE, compared=3.0, **numbers) == [
        (equation, "baseline: mean of 3 siblings at this turn")
    ]
    assert lines(STEPWISE, compared=1.0, **numbers) == [
        (equation, "baseline: mean of 1 sibling at this turn")
    ]
    assert lines(STEPWISE, compared=0.0, **numbers) == [
        (equation, "baseline: its own, as there is nothing to compare with")
    ]
    assert lines(STEPWISE, compared=None, **numbers) == [(equation, "")]


def test_a_number_that_is_0_is_said_where_it_counts_no_others():
    # the decision led to the goal itself: 0.5 ** 0 = 1
    numbers = {"step_advantage": 0.5, "closeness": 1.0, "baseline": 0.5, "scale": 1.0, "next_distance": 0.0}
    assert lines(ESTIMATORS["graphgpo"].derivation, compared=0.0, **numbers) == [
        (
            "step_advantage 0.5 = (closeness 1 - baseline 0.5) / scale 1",
            "baseline: its own, as there is nothing to compare with; closeness: 0 decisions from the goal",
        )
    ]


def test_an_equation_without_all_its_numbers_is_left_out():
    numbers = {"advantage": 1.0, "td_error": 0.25, "later": 0.75, "reward": 2.0, "next_value": None}
    assert lines(ESTIMATORS["gae"].derivation, **numbers) == [
        (
            "advantage 1 = td_error 0.25 + later 0.75",
            "later: what later decisions changed, discounted by gamma and lambda",
        )
    ]
    assert lines(STEPWISE, advantage=1.0) == []


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equations_and_words_name_parts_alone(name):
    derivation = ESTIMATORS[name].derivation
    right = " ".join(equation.partition(" = ")[2] for equation in derivation.equations)
    named = set(re.findall(r"[a-z_]+", right))
    assert named <= {*PARTS, "reward"}
    assert derivation.equations[-1].startswith("advantage = ")
    for part, words in derivation.words:
        assert part in named and set(re.findall(r"{(\w+)}", words)) <= PARTS.keys()
