"""What a service keeps for a while, within a bound: the least recently used goes first."""

from collections import OrderedDict


class Held:
    """Byte strings by name.

    Args:
        at_most: how many.
        at_most_bytes: of all together; a larger one alone is not kept.
    """

    def __init__(self, *, at_most: int, at_most_bytes: int) -> None:
        self._at_most = at_most
        self._at_most_bytes = at_most_bytes
        self._items: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def get(self, name: str) -> bytes | None:
        """The bytes, which count as used now."""
        if name in self._items:
            self._items.move_to_end(name)
        return self._items.get(name)

    def put(self, name: str, data: bytes) -> bool:
        """Keep them, at the cost of what was not used for longest; False when they alone are too many."""
        if len(data) > self._at_most_bytes:
            return False
        self._bytes += len(data) - len(self._items.pop(name, b""))
        self._items[name] = data
        while len(self._items) > self._at_most or self._bytes > self._at_most_bytes:
            _, dropped = self._items.popitem(last=False)
            self._bytes -= len(dropped)
        return True
