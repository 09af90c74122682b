"""An `Environment` in which the model carries out requests of a shop's customers.

Its tools change a database. The outcome reward compares the final database with the correct one.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from shared_schemas.base import Body
from shared_schemas.messages import Message
from task_app.complaints import state_in
from task_app.environments.orders.shop import (
    CUSTOMERS,
    City,
    Count,
    Customer,
    Order,
    OrderId,
    Request,
    Shop,
    Status,
    draw_request,
    draw_shop,
)
from task_app.episode.state_keys import StateKey
from task_app.plugins import EnvironmentPlugin
from task_app.protocols import Observation, PastDecision
from task_app.tools import ToolEnvironment

SYSTEM = """\
You are at the desk of a shop. Carry out the requests of its customers, and nothing else, then call `done`.
`find` shows a customer's city and orders. "no lamp": cancel the order if it is open, refund it if it was
sent. "3 lamp": set the count of an open order. What is changed wrongly counts against you."""

_ROWS_OF_ORDER = 2  # the order's own row, and the stock of its product


class OrdersConfig(Body):
    """Settings of an `orders` environment."""

    requests: int = Field(default=2, ge=1, le=4, description="how many, each of another customer")
    rules: bool = Field(default=True, description="tell the rules of the desk before each prompt")
    marks: bool = Field(default=False, description="put a * before each order that a request is about")


class OrdersState(Body):
    """The state of an episode: the database `shop`, the correct database `goal`, and what was done."""

    shop: Shop
    goal: Shop
    requests: tuple[Request, ...]
    lookups: tuple[Customer, ...] = ()
    """Customers that the model has looked up, in the order in which the prompt lists them."""
    best: int = Field(default=0, ge=0)
    """Largest number of requests that were fulfilled in the database at the same time so far."""
    note: str = Field(default="", max_length=100)
    """Why the last call was refused; "" if it was not."""
    done: bool = False

    @model_validator(mode="after")
    def _refuse_other_orders(self) -> "OrdersState":
        rows, goals = (
            [(row.id, row.customer, row.product) for row in one.orders] for one in (self.shop, self.goal)
        )
        if rows != goals:
            raise ValueError("shop and goal have different orders")
        missing = [one.words() for one in self.requests if one.product and one.target(self.shop) is None]
        if missing:
            raise ValueError(f"no order is the one of the request {missing[0]!r}")
        if len(set(self.lookups)) < len(self.lookups):
            raise ValueError("lookups names a customer twice")
        if self.best > len(self.requests):
            raise ValueError(f"best is {self.best}; there are {len(self.requests)} requests")
        return self


class OrdersEnvironment(ToolEnvironment[OrdersState]):
    """Lets the model work at a shop's desk.

    Equal seeds and calls give equal episodes in every process; steps use no randomness. An env step earns
    1 / (2 * requests) for each database row that it corrects, and loses the same amount for each row that it
    makes wrong. These rewards add up to at most 1. `done` earns another 1 if the whole database is correct.
    """

    name = "orders"
    quick_step = True
    outcome_definition = "exact: 1 when the desk is done and every row of the database is as it should be"
    state_model = OrdersState

    def __init__(self, config: OrdersConfig | None = None) -> None:
        self.config = config or OrdersConfig()
        super().__init__([self.find, self.cancel, self.refund, self.count, self.move, self.done])

    def begin(self, seed: int) -> OrdersState:
        source = random.Random(seed)
        goal = shop = draw_shop(source)
        customers = source.sample(CUSTOMERS, self.config.requests)
        requests = tuple(draw_request(source, shop, customer) for customer in customers)
        for request in requests:
            goal = request.granted(goal)
        return OrdersState(shop=shop, goal=goal, requests=requests)

    def find(self, customer: Customer) -> str:
        """Find a customer's city and orders."""
        lookups = (*(name for name in self.state.lookups if name != customer), customer)
        self.run("find", self.state.model_copy(update={"lookups": lookups, "note": ""}))
        return customer_text(self.state.shop, customer, self._marks())

    def cancel(self, order: OrderId) -> str:
        """Cancel an open order."""
        return self._end_order("cancel", order, "open", "cancelled")

    def refund(self, order: OrderId) -> str:
        """Take an order back that was sent."""
        return self._end_order("refund", order, "sent", "refunded")

    def count(self, order: OrderId, count: Count) -> str:
        """Set the count of an open order."""
        row = self._find_order("count", order, "open")
        if row is None:
            return self.state.note
        if row.count == count:
            return self._refuse("count", f"order {order} has count {count} already")
        shop = self.state.shop.changed(row.model_copy(update={"count": count}), back=row.count - count)
        return self._change("count", shop)

    def move(self, customer: Customer, city: City) -> str:
        """Move a customer to a city."""
        if self.state.shop.cities[customer] == city:
            return self._refuse("move", f"{customer} is in {city} already")
        return self._change("move", self.state.shop.moved(customer, city))

    def done(self) -> str:
        """Say that all requests are carried out."""
        state = self.state.model_copy(update={"done": True})
        self.run("done", state, reward=float(state.shop == state.goal))
        return "done"

    def restore(self, state: bytes) -> Observation:
        count = len(state_in(self._moment_model(), state).state.requests)
        if count != self.config.requests:
            raise ValueError(
                f"the snapshot has {count} requests; this environment's config has {self.config.requests}"
            )
        return super().restore(state)

    def over(self) -> bool:
        return self.state.done

    def counts(self) -> Mapping[str, int]:
        granted = {f"request_{k}": int(self.state.best >= k) for k in range(1, self.config.requests + 1)}
        return {**granted, "exact": int(self.outcome_reward())}

    def outcome_reward(self) -> float:
        return float(self._state is not None and self.state.done and self.state.shop == self.state.goal)

    def show(self) -> tuple[str, Mapping[str, Any]]:
        shop, lookups = self.state.shop, self.state.lookups
        lines = [" ".join(request.words() for request in self.state.requests)]
        lines += [customer_text(shop, customer, self._marks()) for customer in lookups]
        lines += [self.state.note] if self.state.note else []
        data = {
            "requests": [request.model_dump() for request in self.state.requests],
            "cities": {customer: shop.cities[customer] for customer in lookups},
            "orders": [order.model_dump() for order in shop.orders if order.customer in lookups],
            "digest": hashlib.blake2b(shop.model_dump_json().encode(), digest_size=16).hexdigest(),
        }
        return "\n".join(lines), data

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        user = Message(role="user", content=observation.text)
        return (Message(role="system", content=SYSTEM), user) if self.config.rules else (user,)

    def _marks(self) -> Sequence[Request]:
        return self.state.requests if self.config.marks else ()

    def _end_order(self, action: str, order_id: int, before: Status, after: Status) -> str:
        row = self._find_order(action, order_id, before)
        if row is None:
            return self.state.note
        shop = self.state.shop.changed(row.model_copy(update={"status": after}), back=row.count)
        return self._change(action, shop)

    def _find_order(self, action: str, order_id: int, status: Status) -> Order | None:
        """Return the order if it exists and has this status; otherwise refuse `action`, and return None."""
        row = self.state.shop.order(order_id)
        if row is not None and row.status == status:
            return row
        note = f"order {order_id} is {row.status}" if row is not None else f"there is no order {order_id}"
        self._refuse(action, note)
        return None

    def _refuse(self, action: str, note: str) -> str:
        """Take an env step that leaves the database as it is; the next prompt shows `note`, the reason."""
        self.run(action, self.state.model_copy(update={"note": note}))
        return note

    def _change(self, action: str, shop: Shop) -> str:
        state = self.state
        rows = state.shop.differing_rows(state.goal) - shop.differing_rows(state.goal)
        granted = sum(request.is_granted(shop) for request in state.requests)
        state = state.model_copy(update={"shop": shop, "best": max(state.best, granted), "note": ""})
        self.run(action, state, reward=rows / (_ROWS_OF_ORDER * len(state.requests)))
        return f"{action}: changed"


def customer_text(shop: Shop, customer: Customer, requests: Sequence[Request] = ()) -> str:
    """Write a customer's city and orders: `Ann Oslo ; * lamp #4 open 2 ; desk #7 sent 1`.

    A `*` marks an order that one of the `requests` is about.
    """
    marked = {request.target(shop) for request in requests if request.product}
    rows = [
        f"; {'* ' if order in marked else ''}{order.product} #{order.id} {order.status} {order.count}"
        for order in shop.orders
        if order.customer == customer
    ]
    return " ".join([customer, shop.cities[customer], *rows])


def database_key(observation: Observation) -> Any:
    """Return a state key that contains everything on which the rest of the episode depends.

    It contains the database's digest, the requests, the customers that were looked up, and the number of
    achievements, because an achievement is rewarded only once.
    """
    data, achieved = observation.data, sum(observation.achievements_counts.values())
    return [data["digest"], data["requests"], list(data["cities"]), achieved]


ORDERS_STATE_KEYS: Mapping[str, StateKey] = {"database": StateKey(database_key, version=2)}
PLUGIN = EnvironmentPlugin(OrdersConfig, OrdersEnvironment, ORDERS_STATE_KEYS)
