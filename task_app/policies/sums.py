"""A teacher that solves the arithmetic word problems of `trainer_backend.data.arithmetic`."""

import re
from collections.abc import Callable
from itertools import islice
from typing import Any

from pydantic import Field

from shared_schemas.base import Body
from task_app.policies.random_calls import ByChance, Tools
from task_app.protocols import PolicyAnswer

# Matches the number (or word) of each sentence; the name of the group tells which calculation it needs.
_SENTENCES = re.compile(
    r"has (?P<has>\d{1,15})\b|finds (?P<more>\d{1,15}) more|gives away (?P<fewer>\d{1,15})\b"
    r"|(?P<times>doubles|triples) them"
)
# Numbers may triple with each sentence, and a caller may send a text with tens of thousands of sentences.
_MOST_SENTENCES = 100
_SIGNS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "more": ("+", lambda have, count: have + count),
    "fewer": ("-", lambda have, count: have - count),
    "times": ("*", lambda have, count: have * count),
}
_FACTORS = {"doubles": 2, "triples": 3}
# A wrong answer differs from the right one by one of these.
_SLIPS = (-2, -1, 1, 2)


class SumsTeacherConfig(Body):
    """Settings of `SumsTeacher`."""

    right: float = Field(
        default=1.0, ge=0.0, le=1.0, description="share of right answers; the others slip by 1 or 2"
    )
    seed: int = Field(default=0, ge=0, strict=True, description="of the slips")


class SumsTeacher(ByChance[SumsTeacherConfig]):
    """Answers a word problem: a line for each calculation, then `#### n`. Solves it again in each turn."""

    name = "sums_teacher"
    config_type = SumsTeacherConfig

    async def choose(self, observation: Any, tools: Tools) -> PolicyAnswer:
        question = next((m.content or "" for m in observation if m.role == "user"), "")
        slip = 0 if self._random.random() < self.config.right else self._random.choice(_SLIPS)
        return {"type": "text", "content": solve(question, slip=slip)}, None, None, None


def solve(question: str, *, slip: int = 0) -> str:
    """Return the answer in GSM8K's form; `slip` is added to the last step's result, which stays at least 0.

    A question in which `_SENTENCES` matches nothing gets `#### 0`. Of a very long question, only the first
    `_MOST_SENTENCES` sentences are used.
    """
    have, lines = 0, []
    sentences = list(islice(_SENTENCES.finditer(question), _MOST_SENTENCES))
    for place, sentence in enumerate(sentences, start=1):
        kind = sentence.lastgroup or ""
        text = sentence[kind]
        count = _FACTORS[text] if text in _FACTORS else int(text)
        if kind == "has":
            have = count
            continue
        sign, calculate = _SIGNS[kind]
        after = max(0, calculate(have, count) + (slip if place == len(sentences) else 0))
        lines.append(f"{have} {sign} {count} = {after}")
        have = after
    return "\n".join([*lines, f"#### {have}"])
