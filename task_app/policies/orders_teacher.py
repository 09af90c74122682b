"""A teacher of the shop's desk: looks customers up one by one, and grants what they ask for."""

from collections.abc import Mapping
from typing import Any

from task_app.policies.random_calls import DetourConfig, DetourTeacher, Tools, call_answer, random_call
from task_app.protocols import PolicyAnswer

Call = tuple[str, dict[str, Any]]


class OrdersTeacher(DetourTeacher[DetourConfig]):
    """Reads the prompt's data alone, and remembers nothing."""

    name = "orders_teacher"
    config_type = DetourConfig

    async def choose(self, observation: Any, tools: Tools) -> PolicyAnswer:
        detour = self.makes_detour()
        if detour and tools:
            name, arguments = random_call(tools, self._random, longest=1)
        else:
            name, arguments = next_call(observation.data)
        return call_answer(name, arguments, exploratory=detour)


def next_call(data: Mapping[str, Any]) -> Call:
    """The call for the first request that is not granted yet, or `done`."""
    calls = (_call_for(request, data) for request in data["requests"])
    return next(filter(None, calls), ("done", {}))


def _call_for(request: Mapping[str, Any], data: Mapping[str, Any]) -> Call | None:
    customer = request["customer"]
    if customer not in data["cities"]:
        return "find", {"customer": customer}
    if request["city"] is not None:
        moved = data["cities"][customer] == request["city"]
        return None if moved else ("move", {"customer": customer, "city": request["city"]})
    order = next(
        row for row in data["orders"] if (row["customer"], row["product"]) == (customer, request["product"])
    )
    if request["count"] is not None:
        # An order that was ended by mistake keeps its count.
        if order["count"] == request["count"] or order["status"] != "open":
            return None
        return "count", {"order": order["id"], "count": request["count"]}
    tool = {"open": "cancel", "sent": "refund"}.get(order["status"])
    return (tool, {"order": order["id"]}) if tool else None
