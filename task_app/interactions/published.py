"""What published interaction classes import, where it is not installed: ours, from then on.

offer_stand_ins()
importlib.import_module("theirs")   # from verl.interactions.base import BaseInteraction

A class may import within a method too, whenever that is called, on whatever thread; so they stay.
"""

import sys
from collections.abc import Mapping, Sequence
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


class _StandIns(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PUBLISHED:
            return None
        return ModuleSpec(fullname, self, is_package=not _PUBLISHED[fullname])

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_PUBLISHED[module.__name__])


STAND_INS = _StandIns()


def offer_stand_ins() -> None:
    """Let the published modules be imported in this process; a second call changes nothing."""
    if STAND_INS not in sys.meta_path:
        # The last one asked: a verl that is installed wins, also where a newer one lacks some of these.
        sys.meta_path.append(STAND_INS)
