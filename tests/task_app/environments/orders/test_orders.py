"""The shop's desk: a database worked by hand, its rewards, its refusals, its worlds, and the teacher."""

import asyncio
import json
import random
from typing import Any

import pytest

from task_app.environments.orders.environment import (
    OrdersConfig,
    OrdersEnvironment,
    OrdersState,
    database_key,
)
from task_app.environments.orders.shop import CITIES, CUSTOMERS, PRODUCTS, Order, Request, Shop, draw_shop
from task_app.policies.random_calls import DetourConfig
from task_app.policies.teachers import OrdersTeacher, next_call
from task_app.protocols import DecisionOutcome, Observation, PolicyObservation, ToolRequest

SHOP = Shop(
    cities=dict.fromkeys(CUSTOMERS, CITIES[0]),
    orders=(
        Order(id=4, customer="Ann", product="lamp", count=2, status="open"),
        Order(id=7, customer="Ann", product="desk", count=1, status="sent"),
        Order(id=10, customer="Bob", product="rug", count=3, status="open"),
    ),
    stock=dict.fromkeys(PRODUCTS, 10),
)


def desk(*requests: Request) -> OrdersEnvironment:
    """A desk at SHOP with these requests."""
    goal = SHOP
    for request in requests:
        goal = request.granted(goal)
    state = OrdersState(shop=SHOP, goal=goal, requests=requests)
    environment = OrdersEnvironment(OrdersConfig(requests=len(requests), rules=False))
    environment.restore(json.dumps({"reward": 0.0, "state": state.model_dump(mode="json")}).encode())
    return environment


def call(environment: OrdersEnvironment, name: str, **arguments: Any) -> DecisionOutcome:
    return environment.step([ToolRequest(name, arguments, json.dumps(arguments))])


NO_LAMP = Request(customer="Ann", product="lamp")


def test_a_cancelled_order_sets_its_row_and_its_products_stock_right():
    environment = desk(NO_LAMP)
    outcome = call(environment, "cancel", order=4)
    assert outcome.env_rewards == (1.0,)
    assert environment.state.shop.stock["lamp"] == 12
    assert outcome.observation.achievements_counts == {"request_1": 1, "exact": 0}
    done = call(environment, "done")
    assert (done.env_rewards, done.terminated, environment.outcome_reward()) == ((1.0,), True, 1.0)


def test_a_wrong_change_costs_its_rows_and_the_exact_database():
    environment = desk(NO_LAMP)
    assert call(environment, "cancel", order=10).env_rewards == (-1.0,)  # Bob's rug, and the stock of rugs
    assert call(environment, "cancel", order=4).env_rewards == (1.0,)
    done = call(environment, "done")
    assert (done.env_rewards, environment.outcome_reward()) == ((0.0,), 0.0)
    assert done.observation.achievements_counts == {"request_1": 1, "exact": 0}


def test_a_count_that_is_wrong_first_and_right_then_pays_what_it_cost():
    environment = desk(Request(customer="Bob", product="rug", count=5))
    # Both rows, order and stock, differ from the goal before and after a wrong count.
    assert call(environment, "count", order=10, count=1).env_rewards == (0.0,)
    assert call(environment, "count", order=10, count=5).env_rewards == (1.0,)
    assert environment.state.shop.stock["rug"] == 8


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("cancel", {"order": 7}, "order 7 is sent"),
        ("refund", {"order": 4}, "order 4 is open"),
        ("count", {"order": 7, "count": 2}, "order 7 is sent"),
        ("cancel", {"order": 12}, "there is no order 12"),
        ("count", {"order": 4, "count": 2}, "order 4 has count 2 already"),
        ("move", {"customer": "Bob", "city": "Oslo"}, "Bob is in Oslo already"),
    ],
)
def test_what_the_desk_may_not_do_changes_nothing_and_is_told_once(name, arguments, reason):
    environment = desk(NO_LAMP)
    outcome = call(environment, name, **arguments)
    assert (outcome.env_rewards, outcome.result, environment.state.shop) == ((0.0,), reason, SHOP)
    assert outcome.observation.text == f"Ann: no lamp .\n{reason}"
    assert reason not in call(environment, "find", customer="Ann").observation.text


def test_the_text_is_the_requests_and_what_was_looked_up_as_it_is_now():
    environment = desk(
        NO_LAMP, Request(customer="Bob", city="Rome"), Request(customer="Bob", product="rug", count=1)
    )
    call(environment, "find", customer="Ann")
    text = call(environment, "cancel", order=4).observation.text
    assert text == (
        "Ann: no lamp . Bob: move to Rome . Bob: 1 rug .\nAnn Oslo ; lamp #4 cancelled 2 ; desk #7 sent 1"
    )


@pytest.mark.parametrize(("marks", "mark"), [(False, ""), (True, "* ")])
def test_the_prompt_of_the_docs_is_that_of_seed_3_and_marks_stand_before_orders_of_requests(marks, mark):
    environment = OrdersEnvironment(OrdersConfig(marks=marks))
    environment.reset(3)
    assert call(environment, "find", customer="Cleo").observation.text == (
        f"Cleo: no lamp . Ann: move to Oslo .\nCleo Bonn ; vase #7 open 1 ; {mark}lamp #12 open 5"
    )


def test_a_shop_has_24_rows_and_no_two_orders_of_one_number():
    for seed in range(20):
        shop = draw_shop(random.Random(seed))
        assert len({order.id for order in shop.orders}) == 12
        assert len({(order.customer, order.product) for order in shop.orders}) == 12
        assert shop.differing_rows(shop) == 0
        assert len(shop.cities) + len(shop.orders) + len(shop.stock) == 24


@pytest.mark.parametrize("requests", [1, 4])
def test_the_teacher_sets_every_database_right_in_two_calls_a_request_and_one(requests):
    for seed in range(30):
        environment = OrdersEnvironment(OrdersConfig(requests=requests))
        data, decisions = environment.reset(seed).data, 0
        while not environment.over():
            name, arguments = next_call(data)
            outcome = call(environment, name, **arguments)
            data, decisions = outcome.observation.data, decisions + 1
            assert min(outcome.env_rewards) >= 0 or requests > 1  # two requests may share a product's stock
        assert (environment.outcome_reward(), decisions) == (1.0, 2 * requests + 1)


def test_the_teacher_ends_where_an_order_was_ended_by_mistake():
    environment = desk(Request(customer="Bob", product="rug", count=5))
    call(environment, "cancel", order=10)
    observation = call(environment, "find", customer="Bob").observation
    assert next_call(observation.data) == ("done", {})


def test_a_detour_of_the_teacher_is_marked_and_fits_a_tool():
    environment = OrdersEnvironment()
    observation = environment.reset(0)
    tools = [tool.model_dump(mode="json") for tool in environment.tools()]
    teacher = OrdersTeacher(DetourConfig(epsilon=1.0))
    messages = PolicyObservation((), observation.data)
    action, *_ = asyncio.run(teacher.get_action(messages, tools))
    assert action["exploratory"] is True
    assert action["tool_calls"][0]["name"] in [tool["function"]["name"] for tool in tools]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda state: state["shop"]["cities"].pop("Ann"), "state.shop: .*a city of every"),
        (lambda state: state["goal"]["orders"][1].update(id=4), "state.goal: .*no two orders"),
        (lambda state: state["goal"]["orders"].pop(), "shop and goal have different orders"),
        (lambda state: state["requests"][0].update(product="vase"), "the request 'Ann: no vase .'"),
        (
            lambda state: state["requests"][0].update(product=None),
            "snapshot.state.requests.0: .*has a product",
        ),
        (lambda state: state["requests"].extend(state["requests"][:]), "has 2 requests; .* config has 1"),
    ],
)
def test_a_snapshot_that_cannot_be_shown_is_refused(spoil, reason):
    environment = desk(NO_LAMP)
    moment = json.loads(environment.snapshot())
    spoil(moment["state"])
    with pytest.raises(ValueError, match=reason):
        environment.restore(json.dumps(moment).encode())
    assert environment.state.requests == (NO_LAMP,), "the episode is as it was"


def test_states_are_equal_by_the_database_and_by_who_was_looked_up():
    def key(*calls: tuple[str, dict[str, Any]]) -> Any:
        environment = desk(NO_LAMP, Request(customer="Bob", city="Rome"))
        observation: Observation = environment.restore(environment.snapshot())
        for name, arguments in calls:
            observation = call(environment, name, **arguments).observation
        return database_key(observation)

    cancel, move = ("cancel", {"order": 4}), ("move", {"customer": "Bob", "city": "Rome"})
    assert key(cancel, move) == key(move, cancel) != key(cancel)
    assert key(move, ("move", {"customer": "Bob", "city": "Oslo"})) != key(), "it was paid for the move"
    assert key() != key(("find", {"customer": "Ann"}))
