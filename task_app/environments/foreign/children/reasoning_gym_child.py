"""Plays a data set of the package `reasoning_gym`: an episode is one question and one answer in words.

Each episode creates the data set with the episode's seed, and asks its first question. The reward is what the
data set's `score_answer` returns for the text between <answer> and </answer>, as the package extracts it. If
there is no such text, the whole answer is scored.
"""

import sys
from typing import Any

try:
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import extract_answer
except ImportError as exc:
    sys.exit(f"{sys.executable} has no reasoning_gym ({exc}): pip install reasoning-gym")

# Errors that some scorers raise for an answer that they cannot parse; the answer then counts as wrong. Most
# scorers return 0 for such an answer.
_UNREAD = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, SyntaxError)
# Seeds of generators are 32 bits wide.
_SEEDS = 2**32

NAMES, KIND = DATASETS, "data sets of reasoning_gym"


class World:
    """Plays the questions of a data set, one at a time."""

    tools: tuple[Any, ...] = ()

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self._name = name
        self._config = config

    def reset(self, seed: int) -> dict[str, Any]:
        try:
            self._dataset = create_dataset(self._name, seed=seed % _SEEDS, size=1, **self._config)
        except (TypeError, ValueError, AssertionError) as exc:
            sys.exit(f"config.dataset is no config of {self._name!r}: {type(exc).__name__}: {exc}")
        self._entry = self._dataset[0]
        return {"prompt": str(self._entry["question"])}

    def say(self, text: str) -> list[dict[str, Any]]:
        answer = extract_answer(text)
        try:
            score = self._dataset.score_answer(text.strip() if answer is None else answer, self._entry)
        except _UNREAD as exc:
            return [{"terminated": True, "data": {"unread": f"{type(exc).__name__}: {exc}"[:300]}}]
        return [{"reward": float(score), "terminated": True}]


open_world = World
