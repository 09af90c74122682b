"""Entries by name, each loaded when it is first looked up: a task app imports only what requests name."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

P = TypeVar("P")


class Board(Mapping[str, P]):
    """The entries that these functions make, in this order. Names and length load nothing."""

    def __init__(self, loaders: Mapping[str, Callable[[], P]]) -> None:
        self._loaders = dict(loaders)
        self._loaded: dict[str, P] = {}

    def __getitem__(self, name: str) -> P:
        if name not in self._loaded:
            # Two threads may load it at once; all get the first one's entry.
            self._loaded.setdefault(name, self._loaders[name]())
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaders

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)
