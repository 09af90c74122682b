"""Interactions of the tests, opened without a service around them."""

import asyncio
from typing import Any

from shared_schemas.messages import Message
from task_app.interactions.service import Interactions
from task_app.plugins import InteractionEntry, PolicyContext
from task_app.settings import Settings


def interactions(*kinds: type[Any], config: dict[str, Any] | None = None, **settings: Any) -> Interactions:
    """A room with these classes, each under its name in lower case; deadlines of a second."""
    bounds = Settings(**{"interaction_deadline_s": 1.0, **settings})
    entries = {
        kind.__name__.lower(): InteractionEntry(kind.__name__.lower(), kind, config or {}) for kind in kinds
    }
    context = PolicyContext(settings=bounds, open_session=None)  # type: ignore[arg-type]
    return Interactions(entries, bounds, lambda rollout_id: context)


def said(*texts: str) -> list[Message]:
    """A question, and answers of the assistant with a user's `go on` between them."""
    found = [Message(role="user", content="What is 6 x 7?")]
    for text in texts:
        if found[-1].role == "assistant":
            found.append(Message(role="user", content="go on"))
        found.append(Message(role="assistant", content=text))
    return found


async def entered(event: Any) -> None:
    """Until a class's thread says that it is there."""
    assert await asyncio.to_thread(event.wait, 20.0)
