"""Warns that a run may not learn: no learning signal, a policy that forgets tool calls, or too large steps.

Arguments named `rows` are the metrics rows of all iterations, oldest first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

_TOLD_AGAIN = 25  # iterations between two warnings
_FAR_STEPS = 3  # a single one may be chance: a token that the sampler found unlikely can cause it
_MOVED, _LEAP = "loss/kl_to_proximal", 0.5  # nats a token; a healthy iteration has less than 0.1
# A policy forgets tool calls if its share of refused decisions rises from the first limit to the second.
_REFUSED, _FEW_REFUSED, _MOST_REFUSED = "episode/invalid_frac", 0.1, 0.5


def find_warnings(
    row: Mapping[str, Any],
    read_rows: Callable[[], Iterable[Mapping[str, Any]]],
    *,
    compares_siblings: bool,
) -> Iterator[str]:
    """Yield the warnings after the iteration whose metrics are `row`.

    `read_rows` returns all rows of metrics. It is called only if `row` shows a problem.
    """
    tests = [loses_calls, steps_too_far, leaps, _is_flat, *([] if compares_siblings else [_is_unpaid])]
    if not any(test(row) for test in tests):
        return
    rows = [earlier for earlier in read_rows() if earlier["kind"] == "iteration"]
    yield from filter(
        None,
        (
            nothing_to_learn(rows, compares_siblings=compares_siblings),
            warn_of_lost_calls(rows),
            warn_of_far_steps(rows),
            warn_of_leap(rows),
        ),
    )


def nothing_to_learn(rows: Sequence[Mapping[str, Any]], *, compares_siblings: bool) -> str | None:
    """Return a warning if exactly the last 2, 25, 50, 75 ... iterations had no learning signal.

    An iteration has no signal if the advantages of all groups are 0. A critic's advantages are never exactly
    0, so with a critic, an iteration in which no decision earned a reward has no signal either.

    Args:
        rows: a row that lacks the metrics needed for this counts as having a signal.
        compares_siblings: whether the estimator gives a group of equal episodes advantages of 0.
    """
    unpaid, flat = (_count_last(rows, test) for test in (_is_unpaid, _is_flat))
    count = flat if compares_siblings else max(unpaid, flat)
    if count < 2 or (count != 2 and count % _TOLD_AGAIN):
        return None
    since = f"since iteration {rows[-count]['iteration']:.0f}"
    if unpaid >= count:
        return (
            f"no decision has earned anything {since}, so there is nothing to learn from. Look at an episode "
            "(turnwise inspect): a warm-up, an easier start or a denser reward (step_rewards_mode) may help"
        )
    return (
        f"no group has any spread {since}: its episodes earn the same, so every advantage is 0. More "
        "episodes a group (training.group_size), a higher temperature, harder or easier worlds may help"
    )


def loses_calls(row: Mapping[str, Any]) -> bool:
    """Return whether half or more of an iteration's decisions were refused."""
    return bool(row.get(_REFUSED, 0.0) >= _MOST_REFUSED)


def warn_of_lost_calls(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning if most decisions are refused, although few were in some earlier iteration.

    If further iterations follow with most decisions refused, the warning is repeated at every 25th of them.
    """
    count = _count_last(rows, loses_calls)
    before = [row for row in rows[: len(rows) - count] if _REFUSED in row]
    best = min(before, key=lambda row: float(row[_REFUSED]), default=None)
    if not count or (count - 1) % _TOLD_AGAIN or best is None or best[_REFUSED] > _FEW_REFUSED:
        return None
    last = rows[-1]
    return (
        f"{last[_REFUSED]:.0%} of the decisions of iteration {last['iteration']:.0f} were refused, and "
        f"{best[_REFUSED]:.1%} of iteration {best['iteration']:.0f}: the policy forgets how a call is "
        f"written, and cannot learn{_blame_critic(last)}. Stop, and start a run from an earlier checkpoint "
        '(model.path) with calls that begin in the prompt (rollout.policy_config.tool_choice = "required"), '
        "for a preset of tool words alone (model.only_tool_words), a lower training.learning_rate or a "
        "higher price of such calls (rollout.invalid_action_penalty), or one with a longer [warmup], which "
        "writes calls more surely"
    )


def steps_too_far(row: Mapping[str, Any]) -> bool:
    """Return whether an iteration's first step alone moved the policy farther than `target_kl`."""
    return row.get("optim/steps") == 1.0 and row.get("optim/steps_skipped", 0.0) > 0.0


def warn_of_far_steps(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning if `target_kl` ended each of the last three iterations after one optimizer step.

    If further iterations end in this way, the warning is repeated at every 25th of them.
    """
    count = _count_last(rows, steps_too_far)
    if count < _FAR_STEPS or (count - _FAR_STEPS) % _TOLD_AGAIN:
        return None
    return (
        f"since iteration {rows[-count]['iteration']:.0f} the first step alone moves the policy farther than "
        "training.target_kl. The other steps are left out, and cannot correct it, while AdamW's momentum "
        "carries it on: the policy may forget what it knows. Lower training.learning_rate"
    )


def leaps(row: Mapping[str, Any]) -> bool:
    """Return whether an iteration moved the policy by `_LEAP` nats per token or more."""
    return bool(row.get(_MOVED, 0.0) >= _LEAP)


def warn_of_leap(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning if the last iteration moved the policy much too far.

    If further such iterations follow, the warning is repeated at every 25th of them.
    """
    count, last = _count_last(rows, leaps), rows[-1]
    if not count or (count - 1) % _TOLD_AGAIN:
        return None
    return (
        f"iteration {last['iteration']:.0f} moved the policy by {last[_MOVED]:.2g} nats a token: after so "
        f"large a step it may not know what it knew{_blame_critic(last)}. Start again from an earlier "
        "checkpoint (model.path) with training.target_kl = 0.1 or less, or a lower training.learning_rate"
    )


def _blame_critic(row: Mapping[str, Any]) -> str:
    """Return a sentence on how far the critic's mean value exceeds the mean return; "" if it does not."""
    value, paid = row.get("value/mean"), row.get("value/return_mean")
    if value is None or paid is None or value <= paid:
        return ""
    return (
        f". The critic expects {value:.2g} where decisions return {paid:.2g}, so most of them look bad to it"
    )


def _count_last(rows: Sequence[Mapping[str, Any]], test: Callable[[Mapping[str, Any]], bool]) -> int:
    """Count the rows at the end that all pass the test."""
    return sum(1 for _ in takewhile(test, reversed(rows)))


def _is_unpaid(row: Mapping[str, Any]) -> bool:
    return bool(row.get("reward/batch_nonzero", 1.0) == 0)


def _is_flat(row: Mapping[str, Any]) -> bool:
    groups, flat = ("group/count", "forks/count"), ("group/flat", "forks/flat")
    count = sum(row.get(name, 0.0) for name in groups)
    return bool(0 < count <= sum(row.get(name, 0.0) for name in flat))
