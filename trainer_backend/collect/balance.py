"""How work is shared out over task apps: more to the fast ones, the siblings of a group together. Pure."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """A task app that takes work.

    Attributes:
        running: rollouts that it has been given and that have not ended.
        share: how many it should have, of the places of all (`fair_shares`).
        at_most: how many it runs at a time.
    """

    running: int
    share: int
    at_most: int

    @property
    def room(self) -> int:
        return self.at_most - self.running

    @property
    def free(self) -> int:
        return min(self.share - self.running, self.room)


def fair_shares(
    places: int, seconds: Sequence[float | None], at_most: Sequence[int], trust: Sequence[float]
) -> list[int]:
    """Places for each task app, in proportion to its speed and to how far it is trusted.

    One place each first: an app that gets nothing could never show that it has become fast. The others go one
    by one to the app with the least (share + 1) * seconds / trust, the time that it would take for them
    (D'Hondt's rule; of equals the first).

    Args:
        places: rollouts that may run at a time, over all apps.
        seconds: of a decision at each app, as measured; None where nothing was yet: the mean of the others.
        at_most: bound of each app's share.
        trust: in (0, 1]. An app that fails whatever it gets has free places all the time, and would be given
            everything.

    Returns:
        Shares, in the order of the apps; their sum is `places`, or less where every app is at its bound.
    """
    known = [value for value in seconds if value is not None]
    unknown = sum(known) / len(known) if known else 1.0
    cost = [
        max(unknown if value is None else value, 1e-9) / share
        for value, share in zip(seconds, trust, strict=True)
    ]
    shares = [0] * len(cost)
    for app in range(min(places, len(cost))):
        shares[app] = min(1, at_most[app])
    left = places - sum(shares)
    waiting = [((shares[app] + 1) * cost[app], app) for app in range(len(cost)) if shares[app] < at_most[app]]
    heapq.heapify(waiting)
    while left > 0 and waiting:
        _, app = heapq.heappop(waiting)
        shares[app] += 1
        left -= 1
        if shares[app] < at_most[app]:
            heapq.heappush(waiting, ((shares[app] + 1) * cost[app], app))
    return shares


def choose(group: int, home: int | None, loads: Sequence[Load]) -> tuple[int, int] | None:
    """The task app that the next siblings of a group go to, and how many of them it takes.

    Siblings stay together where they can: an app may go beyond its share by one group, if a whole group fits
    into its share at all. A larger group is split, or the other apps would stand idle.

    Args:
        group: how many siblings it has in all.
        home: the app that has siblings of this group.
        loads: of every app that takes work.

    Returns:
        Index and count (at least 1; the caller has a bound of its own), or None: no app has room.
    """
    if home is not None:
        at_home = loads[home]
        if at_home.room > 0 and at_home.share - at_home.running + _beyond(group, at_home) > 0:
            return home, min(at_home.room, at_home.share - at_home.running + _beyond(group, at_home))
    best = max(range(len(loads)), key=lambda app: loads[app].free, default=None)
    if best is None or loads[best].free <= 0:
        return None
    load = loads[best]
    return best, min(load.room, load.free + _beyond(group, load))


def _beyond(group: int, load: Load) -> int:
    return group if group <= load.share else 0
