"""What an interaction costs an episode, and that one which blocks stalls nobody else.

    python -m bench.interaction_speed [--episodes 1000]

All episodes live at once. Wall time and resident memory an episode (start, two answers, finalise), for a
class that promises not to block (on the service's loop) and one that does not (a thread and a loop of its
own). Then half of the episodes block for 20 ms in each answer: the longest pause of the service's loop in
the meantime must be shorter than what they block together by a factor of 10. Exit code 1 when it is not.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import kit
from service_kit.logs import configure_logs
from shared_schemas.messages import Message
from task_app.interactions.service import Interactions
from task_app.plugins import InteractionEntry, PolicyContext
from task_app.protocols import BaseInteraction
from task_app.settings import Settings

BLOCK_S, ANSWERS, LIMIT = 0.02, 2, 10.0
MESSAGES = (Message(role="user", content="6 x 7?"), Message(role="assistant", content="#### 42"))


class Echo(BaseInteraction):
    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        return False, messages[-1]["content"], 1.0, {}


class Promising(Echo):
    never_blocks = True


class Blocking(Echo):
    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        time.sleep(BLOCK_S)
        return await super().generate_response(instance_id, messages, **kwargs)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


async def played(kinds: Sequence[type[BaseInteraction]]) -> tuple[float, float]:
    """Seconds and megabytes of this many concurrent episodes."""
    settings = Settings(interaction_deadline_s=600.0)
    entries = {kind.__name__: InteractionEntry(kind.__name__, kind, {}) for kind in set(kinds)}
    context = PolicyContext(settings=settings, open_session=None)  # type: ignore[arg-type]
    room = Interactions(entries, settings, lambda rollout_id: context)
    everybody, before, most = asyncio.Barrier(len(kinds)), resident_mb(), 0.0

    async def episode(number: int, name: str) -> None:
        nonlocal most
        async with room.open(name, {}, rollout_id=f"r{number}") as live:
            await everybody.wait()
            most = max(most, resident_mb()) if number == 0 else most
            for _ in range(ANSWERS):
                await live.respond(MESSAGES)

    start = time.perf_counter()
    await asyncio.gather(*(episode(number, kind.__name__) for number, kind in enumerate(kinds)))
    assert len(room) == 0
    return time.perf_counter() - start, most - before


async def longest_pause(done: asyncio.Event) -> float:
    """The longest pause of the service's event loop, in seconds."""
    longest, last = 0.0, time.perf_counter()
    while not done.is_set():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


async def main(episodes: int) -> int:
    for kind in (Promising, Echo):
        took_s, mb = await played([kind] * episodes)
        print(
            f"{kind.__name__}: {1e6 * took_s / episodes:.0f} us and {1e3 * mb / episodes:.0f} KB an episode"
        )
    done = asyncio.Event()
    watching = asyncio.create_task(longest_pause(done))
    took_s, _ = await played([Blocking, Echo] * (episodes // 2))
    done.set()
    pause_s, blocked_s = await watching, BLOCK_S * ANSWERS * (episodes // 2)
    ratio = blocked_s / pause_s
    print(f"{blocked_s:.1f} s blocked in {took_s:.2f} s; the service paused {1e3 * pause_s:.0f} ms at most")
    print(f"blocked / paused: x{ratio:.0f} (at least x{LIMIT:.0f})")
    return 0 if ratio >= LIMIT else 1


if __name__ == "__main__":
    configure_logs("warning")  # structlog alone prints every interaction, which costs more than it
    sys.exit(asyncio.run(main(kit.options(__doc__, ("--episodes", 1_000)).episodes)))
