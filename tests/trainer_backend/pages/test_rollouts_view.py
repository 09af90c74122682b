"""What an address asks of the list of rollouts."""

import pytest

from trainer_backend.pages.figures import rollout_address, short_id
from trainer_backend.pages.page import BadAddress
from trainer_backend.pages.rollouts import caption, query_of
from trainer_backend.store.reads_rollouts import RolloutFilter


def test_a_form_s_empty_fields_narrow_nothing():
    asked = query_of({"stage": "", "iteration": " ", "text": "", "sort": "", "down": "1"})
    assert (asked.where, asked.sort, asked.down, asked.filtered) == (RolloutFilter(), "newest", True, False)


def test_numbers_are_read_and_go_back_into_the_address_with_all_else():
    asked = query_of({"iteration": "3", "min_reward": "-0.5", "policy": "a b", "sort": "reward", "down": "0"})
    assert asked.where == RolloutFilter(iteration=3, min_reward=-0.5, policy="a b")
    assert asked.query() == "iteration=3&policy=a+b&min_reward=-0.5&sort=reward&down=0"
    assert asked.query(cursor="c", sort="newest").endswith("sort=newest&down=0&cursor=c")
    again = query_of(dict(pair.split("=") for pair in asked.query().replace("+", " ").split("&")))
    assert again == asked


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"iteration": "three"}, "iteration is 'three'; it must be a whole number"),
        ({"min_reward": "much"}, "min_reward is 'much'; it must be a number"),
        ({"sort": "luck"}, "sort is 'luck'; known: newest, outcome_reward, reward"),
    ],
)
def test_what_cannot_be_read_is_said(params, told):
    with pytest.raises(BadAddress, match=told):
        query_of(params)


def test_an_id_keeps_its_slashes_and_nothing_else_that_means_something_in_an_address():
    assert rollout_address("j", "r.1/train/3/0?x", 4) == "/runs/j/rollouts/r.1/train/3/0%3Fx?turn=4"
    assert (short_id("r.1/train/3/0"), short_id("alone")) == ("train/3/0", "alone")


def test_the_caption_says_how_many_there_are_and_their_order():
    told = [caption([], 1234, query_of(params)) for params in ({}, {"sort": "reward"}, {"down": "0"})]
    assert told == [
        "0 of 1,234 rollouts, newest first",
        "0 of 1,234 rollouts, by reward, highest first",
        "0 of 1,234 rollouts, by newest, lowest first",
    ]
