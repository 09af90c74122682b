"""A shop's database and its customers' requests, as immutable objects that are drawn at random."""

import random
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shared_schemas.base import Body

Customer = Literal["Ann", "Bob", "Cleo", "Dan", "Eve", "Finn"]
City = Literal["Oslo", "Rome", "Lima", "Bonn", "Kyoto"]
Product = Literal["lamp", "desk", "chair", "rug", "clock", "vase"]
Status = Literal["open", "sent", "cancelled", "refunded"]
OrderId = Annotated[int, Field(ge=1, le=12)]
Count = Annotated[int, Field(ge=1, le=5)]

CUSTOMERS: tuple[Customer, ...] = Customer.__args__  # type: ignore[attr-defined]  # a Literal's own values
CITIES: tuple[City, ...] = City.__args__  # type: ignore[attr-defined]
PRODUCTS: tuple[Product, ...] = Product.__args__  # type: ignore[attr-defined]


class Order(Body):
    """A row of the table of orders. A customer has at most one order of each product."""

    id: OrderId
    customer: Customer
    product: Product
    count: Count
    status: Status


class Shop(Body):
    """The three tables of the database: the customers' cities, their orders, and each product's stock."""

    cities: dict[Customer, City]
    orders: tuple[Order, ...]
    stock: dict[Product, int]

    @model_validator(mode="after")
    def _refuse_other_rows(self) -> "Shop":
        if self.cities.keys() != set(CUSTOMERS) or self.stock.keys() != set(PRODUCTS):
            raise ValueError("a shop has a city of every customer, and a stock of every product")
        ids = {order.id for order in self.orders}
        if not len(ids) == len({(row.customer, row.product) for row in self.orders}) == len(self.orders):
            raise ValueError("no two orders have one number, or one customer and product")
        return self

    def order(self, order_id: int) -> Order | None:
        return next((order for order in self.orders if order.id == order_id), None)

    def changed(self, order: Order, *, back: int) -> "Shop":
        """Return a shop with `order` in place of the row with this id, and `back` more of its product."""
        orders = tuple(order if row.id == order.id else row for row in self.orders)
        stock = {**self.stock, order.product: self.stock[order.product] + back}
        return self.model_copy(update={"orders": orders, "stock": stock})

    def moved(self, customer: Customer, city: City) -> "Shop":
        return self.model_copy(update={"cities": {**self.cities, customer: city}})

    def differing_rows(self, other: "Shop") -> int:
        """Return the number of rows, over all tables, in which the two shops differ."""
        rows = zip(self._rows(), other._rows(), strict=True)
        return sum(own != others for own, others in rows)

    def _rows(self) -> list[object]:
        return [*self.cities.items(), *self.orders, *self.stock.items()]


class Request(Body):
    """A customer's request: move to `city`, change the order of `product` to `count`, or drop this order.

    Dropping an order means to cancel it if it is open, and to refund it if it was sent.
    """

    customer: Customer
    product: Product | None = None
    count: Count | None = None
    city: City | None = None

    @model_validator(mode="after")
    def _refuse_no_wish(self) -> "Request":
        if (self.product is None) == (self.city is None) or (self.count and self.city):
            raise ValueError("a request has a product, with a count or without, or else a city")
        return self

    def target(self, shop: Shop) -> Order | None:
        """Return the order that the request is about; None if there is no such order."""
        key = self.customer, self.product
        return next((order for order in shop.orders if (order.customer, order.product) == key), None)

    def granted(self, shop: Shop) -> Shop:
        """Return the shop as it is after the request was carried out."""
        if self.city is not None:
            return shop.moved(self.customer, self.city)
        order = self.target(shop)
        assert order is not None, "requests are drawn from orders"
        if self.count is not None:
            return shop.changed(order.model_copy(update={"count": self.count}), back=order.count - self.count)
        status = "cancelled" if order.status == "open" else "refunded"
        return shop.changed(order.model_copy(update={"status": status}), back=order.count)

    def is_granted(self, shop: Shop) -> bool:
        if self.city is not None:
            return shop.cities[self.customer] == self.city
        order = self.target(shop)
        assert order is not None, "orders are never deleted"
        return order.count == self.count if self.count else order.status in ("cancelled", "refunded")

    def words(self) -> str:
        wish = f"move to {self.city}" if self.city is not None else f"{self.count or 'no'} {self.product}"
        return f"{self.customer}: {wish} ."


def draw_shop(source: random.Random) -> Shop:
    """Draw a shop of 24 rows: six customers, six products, and two orders of each customer."""
    ids = source.sample(range(1, 2 * len(CUSTOMERS) + 1), 2 * len(CUSTOMERS))
    orders = [
        Order(
            id=ids.pop(),
            customer=customer,
            product=product,
            count=source.randint(1, 5),
            status=source.choice(["open", "sent"]),
        )
        for customer in CUSTOMERS
        for product in source.sample(PRODUCTS, 2)
    ]
    return Shop(
        cities={customer: source.choice(CITIES) for customer in CUSTOMERS},
        orders=tuple(orders),
        stock={product: source.randint(10, 30) for product in PRODUCTS},
    )


def draw_request(source: random.Random, shop: Shop, customer: Customer) -> Request:
    """Draw a request of the customer; carrying it out always changes the shop."""
    kinds = ["drop", "drop", "count", "move"]  # half of the requests drop an order
    order = source.choice([order for order in shop.orders if order.customer == customer])
    kind = source.choice(kinds if order.status == "open" else ["drop", "drop", "move"])
    if kind == "move":
        other_cities = [city for city in CITIES if city != shop.cities[customer]]
        return Request(customer=customer, city=source.choice(other_cities))
    counts = [count for count in range(1, 6) if count != order.count]
    count = source.choice(counts) if kind == "count" else None
    return Request(customer=customer, product=order.product, count=count)
