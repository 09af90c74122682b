"""Interactions that behave as users' classes do; a module that the tests' interaction files name.

`BOOK` is what they did, as (what, instance_id); a test empties it.
"""

import asyncio
import threading
import time
from collections import Counter

from task_app.protocols import BaseInteraction

BOOK: list[tuple[str, str]] = []
ENTERED = threading.Event()
LET_GO = threading.Event()


def counts() -> Counter:
    return Counter(what for what, _ in BOOK)


class Noted(BaseInteraction):
    """Says `turn n of <ground_truth>`, scores n; notes every call."""

    async def start_interaction(self, instance_id=None, **kwargs):
        BOOK.append(("start", instance_id))
        self.kwargs, self.turn = kwargs, 0
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.turn += 1
        await asyncio.sleep(0)
        return False, f"turn {self.turn} of {kwargs.get('ground_truth')}", self.turn, {}

    async def calculate_score(self, instance_id, **kwargs):
        return self.turn

    async def finalize_interaction(self, instance_id, **kwargs):
        BOOK.append(("finalise", instance_id))


class ReadOnly(Noted):
    """Finalise and score as the published base has them: without an id."""

    async def calculate_score(self):
        return True

    async def finalize_interaction(self):
        BOOK.append(("finalise", "?"))


class Unscored(Noted):
    """Gives no score."""

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, "Go on.", None, {}


class StartsLate(Noted):
    """Blocks its thread in the start, until the test lets it go."""

    async def start_interaction(self, instance_id=None, **kwargs):
        BOOK.append(("start", instance_id))
        ENTERED.set()
        LET_GO.wait()
        return instance_id


class StartsNever(Noted):
    """Waits in the start for ever, as an await does."""

    async def start_interaction(self, instance_id=None, **kwargs):
        BOOK.append(("start", instance_id))
        ENTERED.set()
        await asyncio.Event().wait()


class Blocks(Noted):
    """Blocks its thread in every answer, until the test lets it go."""

    async def generate_response(self, instance_id, messages, **kwargs):
        ENTERED.set()
        LET_GO.wait()
        return False, "late", 0.0, {}


class Waits(Noted):
    async def generate_response(self, instance_id, messages, **kwargs):
        ENTERED.set()
        await asyncio.Event().wait()


class Raises(Noted):
    """Raises where `config.where` says, what `config.what` says."""

    async def start_interaction(self, instance_id=None, **kwargs):
        self._raise("start")
        return await super().start_interaction(instance_id, **kwargs)

    async def generate_response(self, instance_id, messages, **kwargs):
        self._raise("respond")
        return await super().generate_response(instance_id, messages, **kwargs)

    async def finalize_interaction(self, instance_id, **kwargs):
        await super().finalize_interaction(instance_id, **kwargs)
        self._raise("finalise")

    def _raise(self, where):
        kinds = {"key": KeyError, "exit": SystemExit, "cancel": asyncio.CancelledError, "time": TimeoutError}
        if where == self.config.get("where"):
            raise kinds[self.config.get("what", "key")]("no such thing")


class Says(Noted):
    """Returns what `config.reply` holds."""

    async def generate_response(self, instance_id, messages, **kwargs):
        reply = self.config["reply"]
        return tuple(reply) if isinstance(reply, list) else reply


class Spoils(Noted):
    """Changes what it is given."""

    async def generate_response(self, instance_id, messages, **kwargs):
        found = [(message["role"], message["content"]) for message in messages]
        messages.clear()
        kwargs["list"].append("more")
        return False, "x", 0.0, {"found": found, "list": len(kwargs["list"]), "thread": {1, 2}}


class Held(Noted):
    """Keeps what is bound to its loop from one call to the next, as client sessions are; blocks a moment."""

    async def start_interaction(self, instance_id=None, **kwargs):
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue()
        self._echo = asyncio.create_task(self._answer())
        self._asked = asyncio.Queue()
        return await super().start_interaction(instance_id, **kwargs)

    async def generate_response(self, instance_id, messages, **kwargs):
        assert asyncio.get_running_loop() is self._loop
        time.sleep(0.001)
        await self._asked.put(messages[-1]["content"])
        return False, await self._queue.get(), 1.0, {}

    async def _answer(self):
        while True:
            await self._queue.put(f"you said {await self._asked.get()}")


class OfTheClass(Noted):
    """Keeps the row on the object in the start, as a published class does."""

    async def start_interaction(self, instance_id=None, **kwargs):
        self.row = kwargs["query"]
        return await super().start_interaction(instance_id, **kwargs)

    async def generate_response(self, instance_id, messages, **kwargs):
        await asyncio.sleep(0)
        return False, f"{instance_id.partition('/')[0]} asked {self.row}", 0.0, {}


def a_function(config):
    return Noted(config)


class NoMethods:
    def __init__(self, config):
        pass


class NoObject(Noted):
    def __init__(self, config):
        raise RuntimeError(f"no {config['thing']}")
