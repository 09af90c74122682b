"""Equations that derive an advantage from its parts: tests check them, users see them with words."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Every part that an estimator may report, and its meaning. Equations use no other names.
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
# Words that several estimators share.
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
    """An estimator's derivation of an advantage from the parts of a decision."""

    equations: tuple[str, ...] = ()
    """Texts such as "advantage = return - baseline". A right side has names of PARTS, `reward` (r_t), + - * /
    and parentheses; the last equation gives the advantage."""
    words: tuple[tuple[str, str], ...] = ()
    """Pairs of a name and the meaning of its number, such as ("baseline", "mean of {compared} sibling[s]").
    The value of the part in braces replaces the braces; [s] is dropped if that value is 1. The whole phrase
    is dropped if the decision lacks the part."""

    def lines(self, numbers: Numbers, show: Callable[[float], str]) -> list[tuple[str, str]]:
        """Write each equation whose numbers are all known with its numbers, and say what these mean.

        ("advantage 0.42 = return 3.31 - baseline 2.89", "baseline: mean of 3 siblings at this turn")

        `numbers` are one decision's parts, `reward` and `advantage`, by name. `show` formats a number.
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


# For the first decision of a continuation, whichever estimator credits the later ones (core/forks.py).
AT_FORK = Derivation(
    ("advantage = return - baseline",),
    (("baseline", "mean of {continuations} other[s] from the same moment"),),
)


def two_levels(steps: Sequence[str], *words: tuple[str, str]) -> Derivation:
    """Return the derivation of `levels.summed_levels`; the last equation of `steps` gives step_advantage."""
    of_episode = "episode_advantage = (score - score_baseline) / score_scale"
    summed = "advantage = episode_weight * episode_advantage + step_weight * step_advantage"
    return Derivation((of_episode, *steps, summed), (("score_baseline", "mean of the group"), *words))


def substitution(equation: str, number: Callable[[str], str]) -> str:
    """Replace each name in an equation by the text that `number` returns for it."""
    return _NAME.sub(lambda match: number(match[0]), equation)


def _phrase(words: str, known: Mapping[str, float]) -> str:
    """Fill the numbers into the words; return "" if a number is unknown."""
    counts = {name: known.get(name) for name in re.findall(r"{(\w+)}", words)}
    if None in counts.values():
        return ""
    if counts.get("compared") == 0:
        return "its own, as there is nothing to compare with"
    plural = "" if 1 in counts.values() else r"\1"
    return re.sub(r"\[(\w+)\]", plural, words).format_map({name: f"{n:g}" for name, n in counts.items()})
