"""Equations that derive an estimator's advantages from intermediate values, which are called parts.

Tests check the equations. Users see them with the numbers of a decision and an explanation in words.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# The meaning of each part that an estimator may report. Equations use these names, `reward` and `advantage`.
PARTS: dict[str, str] = {
    "return": "discounted sum of rewards from here on, as the estimator compares it",
    "score": "score of the whole episode",
    "baseline": "what the return or score is compared with",
    "compared": "number of others that the baseline is made of; 0: its own return or score stands there",
    "branches": "number of branches that the baseline is the mean of",
    "continuations": "number of others that play on from the same moment and the baseline is the mean of",
    "scale": "divisor; 1 where what is compared has no spread",
    "batch_baseline": "mean over the batch, subtracted in addition to the baseline",
    "value": "V of the state before the decision",
    "state_value": "V of the state before the decision, as the mean return of the group's decisions in it",
    "next_value": "V of the state after it",
    "discount": "weight of next_value",
    "graph_baseline": "mean over the decisions of the group, subtracted",
    "graph_scale": "divisor after graph_baseline; 1 where the group has no spread",
    "distance": "decisions from the state to the goal, on the graph of the group",
    "next_distance": "decisions to the goal from where the decision led",
    "closeness": "distance_discount to the power of next_distance",
    "td_error": "what the decision changed: reward and discounted next_value against value",
    "later": "share of the later decisions' TD errors",
    "episode_advantage": "the whole episode's part, A_E",
    "score_baseline": "what the score is compared with, where the return has a baseline of its own",
    "score_scale": "divisor of the score's difference; 1 where the scores have no spread",
    "episode_weight": "weight of episode_advantage",
    "step_advantage": "the part of this decision alone, A_S",
    "step_weight": "weight of step_advantage",
}
# Explanations that several estimators share.
SPREAD = "their sample standard deviation, or 1 where it is 0"
OF_GROUP = ("baseline", "mean of {compared} sibling[s] and itself")
AT_TURN = ("baseline", "mean of {compared} sibling[s] at this turn (0 for one that has ended)")
LATER = ("later", "what later decisions changed, discounted by gamma and lambda")
AT_STATE = "mean of {compared} other[s] in the same state and itself"
ON_GRAPH = (
    ("state_value", f"return, {AT_STATE}"),
    ("graph_baseline", "mean over the decisions of the group"),
)
TD_ERROR = "td_error = reward + discount * next_value - state_value"
BY_A_STD = "divides by a standard deviation"
BY_STATE = "compares a decision with those that reached its state, itself among them"
BY_MEANS = f"{BY_STATE}, and trusts their mean returns"
_NAME = re.compile(r"[a-z_]+")

Numbers = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Derivation:
    """Describes how an estimator's advantage of a decision follows from the parts of that decision."""

    equations: tuple[str, ...] = ()
    """Texts such as "advantage = return - baseline". The right side of an equation contains names of PARTS,
    `reward` (r_t), the operators + - * / and parentheses. The last equation computes the advantage."""
    words: tuple[tuple[str, str], ...] = ()
    """Pairs of a name and an explanation, such as ("baseline", "mean of {compared} sibling[s]"). The name in
    braces is a part, and the value of that part replaces the braces. [s] becomes s, or is dropped if the
    value is 1. The whole explanation is dropped if the decision lacks the part."""

    def lines(self, numbers: Numbers, show: Callable[[float], str]) -> list[tuple[str, str]]:
        """Return each equation with a decision's numbers filled in, and an explanation of the numbers.

            ("advantage 0.42 = return 3.31 - baseline 2.89", "baseline: mean of 3 siblings at this turn")

        An equation with an unknown number is left out. `numbers` contains one decision's parts, its `reward`
        and its `advantage`, by name. `show` formats a number.
        """
        known = {name: value for name, value in numbers.items() if value is not None}
        phrases = [(name, _phrase(words, known)) for name, words in self.words]
        return [
            (
                substitution(equation, lambda name: f"{name} {show(known[name])}"),
                "; ".join(f"{name}: {phrase}" for name, phrase in phrases if phrase and name in names),
            )
            for equation in self.equations
            if (names := set(_NAME.findall(equation))) <= known.keys()
        ]


# The derivation for the first decision of a continuation, with any estimator (core/forks.py).
AT_FORK = Derivation(
    ("advantage = return - baseline",),
    (("baseline", "mean of {continuations} other[s] from the same moment"),),
)


def two_levels(steps: Sequence[str], *words: tuple[str, str]) -> Derivation:
    """Return the derivation for `levels.summed_levels`, a weighted sum of two advantages.

    `steps` are the equations that derive the decision's own advantage; the last of them computes
    step_advantage. `words` explains the parts in `steps`.
    """
    of_episode = "episode_advantage = (score - score_baseline) / score_scale"
    summed = "advantage = episode_weight * episode_advantage + step_weight * step_advantage"
    return Derivation((of_episode, *steps, summed), (("score_baseline", "mean of the group"), *words))


def substitution(equation: str, number: Callable[[str], str]) -> str:
    """Replace each name in an equation by the text that `number` returns for that name."""
    return _NAME.sub(lambda match: number(match[0]), equation)


def _phrase(words: str, known: Mapping[str, float]) -> str:
    """Fill the known numbers into an explanation; return "" if the explanation needs an unknown number."""
    counts = {name: known.get(name) for name in re.findall(r"{(\w+)}", words)}
    if None in counts.values():
        return ""
    if counts.get("compared") == 0:
        return "its own, as there is nothing to compare with"
    plural = "" if 1 in counts.values() else r"\1"
    return re.sub(r"\[(\w+)\]", plural, words).format_map({name: f"{n:g}" for name, n in counts.items()})
