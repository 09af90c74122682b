"""A mapping that loads each entry at its first look-up: a task app imports only requested plug-ins."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

P = TypeVar("P")


class Board(Mapping[str, P]):
    """Entries that are made by functions, in the given order. Names and length load nothing."""

    def __init__(self, loaders: Mapping[str, Callable[[], P]]) -> None:
        self._loaders = dict(loaders)
        self._loaded: dict[str, P] = {}

    def __getitem__(self, name: str) -> P:
        if name not in self._loaded:
            # If two threads load an entry at the same time, both get the first one.
            self._loaded.setdefault(name, self._loaders[name]())
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaders

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)
