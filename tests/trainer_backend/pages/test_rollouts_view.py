"""What an address asks of a list, and what links write."""

import pytest
from starlette.datastructures import QueryParams

from trainer_backend.pages.address import change_query, read_filter, read_order
from trainer_backend.pages.figures import rollout_address, short_id
from trainer_backend.pages.page import BadAddress
from trainer_backend.store.reads_rollouts import RolloutFilter


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
