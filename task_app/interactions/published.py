"""What published interaction classes import, where it is not installed: ours, while they are loaded.

with stand_ins():
    importlib.import_module("theirs")   # from verl.interactions.base import BaseInteraction
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from task_app.interactions import gsm8k, gsm8k_score
from task_app.protocols import BaseInteraction

# Module -> what stands in it; the packages above hold nothing.
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "verl": {},
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": gsm8k.Gsm8kInteraction},
    "verl.utils": {},
    "verl.utils.reward_score": {},
    "verl.utils.reward_score.gsm8k": {
        "compute_score": gsm8k_score.compute_score,
        "extract_solution": gsm8k_score.extract_solution,
    },
}


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let the published modules be imported; afterwards none of ours is left under their names."""
    finder = _StandIns()
    # The last one asked: a verl that is installed wins, also where a newer one lacks some of these modules.
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.take_back()


class _StandIns(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self._made: dict[str, ModuleType] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PUBLISHED:
            return None
        return ModuleSpec(fullname, self, is_package=not _PUBLISHED[fullname])

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_PUBLISHED[module.__name__])
        self._made[module.__name__] = module

    def take_back(self) -> None:
        """Forget the modules, also where an installed package above them got them as attributes."""
        for name, module in self._made.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
            above, _, last = name.rpartition(".")
            if above not in self._made and vars(sys.modules.get(above, module)).get(last) is module:
                delattr(sys.modules[above], last)
