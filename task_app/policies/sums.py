"""A teacher of short sums in words, as `trainer_backend.data.arithmetic` writes them; no model."""

import re
from collections.abc import Callable
from itertools import islice
from typing import Any

from pydantic import Field

from shared_schemas.base import Body
from task_app.policies.random_calls import ByChance
from task_app.protocols import PolicyAnswer

# A sentence, the sign of its calculation, and the number beside what there was.
_SENTENCES = re.compile(
    r"has (?P<has>\d{1,15})\b|finds (?P<more>\d{1,15}) more|gives away (?P<fewer>\d{1,15})\b"
    r"|(?P<times>doubles|triples) them"
)
# Numbers double with each sentence; a text of a caller's may have ten thousands of them.
_MOST_SENTENCES = 100
_SIGNS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "more": ("+", lambda have, count: have + count),
    "fewer": ("-", lambda have, count: have - count),
    "times": ("*", lambda have, count: have * count),
}
_FACTORS = {"doubles": 2, "triples": 3}
# How far a slip is off.
_SLIPS = (-2, -1, 1, 2)


class SumsTeacherConfig(Body):
    """Settings of the teacher of sums."""

    right: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="share of right answers; the others slip by 1 or 2",
    )
    seed: int = Field(default=0, ge=0, strict=True, description="of the slips")


class SumsTeacher(ByChance):
    """Writes out each step, and `#### n`. Told that it was wrong, it tries again."""

    name = "sums_teacher"

    def __init__(self, config: SumsTeacherConfig | None = None) -> None:
        self.config = config or SumsTeacherConfig()
        super().__init__(self.config.seed)

    async def get_action(
        self, observation: Any, available_tools_specs: list[dict[str, Any]] | None = None
    ) -> PolicyAnswer:
        question = next((m.content or "" for m in observation if m.role == "user"), "")
        slip = 0 if self._random.random() < self.config.right else self._random.choice(_SLIPS)
        return {"type": "text", "content": worked_out(question, slip=slip)}, None, None, None


def worked_out(question: str, *, slip: int = 0) -> str:
    """The answer in GSM8K's form; its last step is off by `slip`, but never below 0.

    A question without a number that it knows gets `#### 0`; of a long one the beginning is worked out.
    """
    have, lines = 0, []
    found = list(islice(_SENTENCES.finditer(question), _MOST_SENTENCES))
    for place, sentence in enumerate(found, start=1):
        kind = sentence.lastgroup or ""
        text = sentence[kind]
        count = _FACTORS[text] if text in _FACTORS else int(text)
        if kind == "has":
            have = count
            continue
        sign, calculate = _SIGNS[kind]
        after = max(0, calculate(have, count) + (slip if place == len(found) else 0))
        lines.append(f"{have} {sign} {count} = {after}")
        have = after
    return "\n".join([*lines, f"#### {have}"])
