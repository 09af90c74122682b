"""The figures of the pages that have data in bench/results, computed again from the runs in there.

Nothing here calls what wrote those files, or reads their summaries: medians, ranges and intervals come from
the runs, seed by seed. A claim is one line: a page, words that only its row has, and the text that the row
must hold, with the computed numbers formatted as the page formats them. To add a figure, add a line.
bench/claims_check.py compares them with the pages.
"""

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from bench import kit

README, FIGURES, STUDIES = "README.md", "docs/figures.md", "docs/studies.md"
DOCUMENTS, MIXTURE = "docs/documents.md", "docs/mixture.md"
# Student's t, 97.5 %, by the number of values.
_T = {2: 12.70620, 3: 4.302653, 4: 3.182446, 5: 2.776445}


class Claim(NamedTuple):
    """What a row must hold.

    page: its path.
    row: words that no other row of the page has; "" for its text, with single spaces.
    text: the numbers, as the page formats them.
    """

    page: str
    row: str
    text: str


@cache
def data(name: str) -> Any:
    """A file of bench/results, by its name without .json."""
    return json.loads((kit.ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (least to greatest)."""
    middle = statistics.median(values)
    return f"{middle:z.{digits}f} ({min(values):z.{digits}f} to {max(values):z.{digits}f})"


def columns(values: Sequence[float], digits: int = 2) -> str:
    """Figure and spread as two cells: median | least to greatest."""
    return spread(values, digits).replace(" (", " | ").removesuffix(")")


def interval_columns(values: Sequence[float]) -> str:
    """Figure and spread as two cells: median | 95 % interval of the mean."""
    return f"{statistics.median(values):z.2f} | 95 % {interval_text(values)} |"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean over runs, by Student's t."""
    mean, half = statistics.fmean(values), _T[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return mean - half, mean + half


def interval_text(values: Sequence[float]) -> str:
    """The interval, and whether it includes 0."""
    low, high = interval(values)
    return f"{low:z.2f} to {high:z.2f}" + (", which includes 0" if low <= 0 <= high else "")


class Arms:
    """The arms of a study, each with the evaluations of its runs by seed."""

    def __init__(self, study: str, measure: str) -> None:
        self.runs: Mapping[str, Mapping[str, Any]] = data(study)["arms"]
        self.measure = measure

    def at(self, arm: str, index: int) -> dict[str, float]:
        """By seed, the measure at an evaluation: 0 is the first, -1 the last."""
        runs = self.runs[arm].items()
        return {seed: run["evaluations"][index][self.measure] for seed, run in runs}

    def before(self, arm: str) -> list[float]:
        return list(self.at(arm, 0).values())

    def after(self, arm: str) -> list[float]:
        return list(self.at(arm, -1).values())

    def gain(self, arm: str) -> list[float]:
        return [last - first for first, last in zip(self.before(arm), self.after(arm), strict=True)]

    def minus(self, arm: str, other: str, index: int = -1) -> list[float]:
        """Differences of two arms, seed by seed: both began from one checkpoint, and play the same worlds."""
        mine, others = self.at(arm, index), self.at(other, index)
        if mine.keys() != others.keys():
            raise SystemExit(f"{arm} and {other} have other seeds: {sorted(mine)}, {sorted(others)}")
        return [mine[seed] - others[seed] for seed in sorted(mine)]

    def training(self, arm: str, name: str) -> list[float]:
        """A figure of every iteration of every run."""
        return [row[name] for run in self.runs[arm].values() for row in run["training"]]

    def iteration_s(self, arm: str) -> list[float]:
        return [run["iteration_s"] for run in self.runs[arm].values()]


def reward_mode_claims() -> Iterator[Claim]:
    arms = Arms("reward_modes", "unique_achievements")
    stepwise, off = arms.gain("decision_stepwise"), arms.gain("off")
    apart = arms.minus("decision_stepwise", "off")
    yield Claim(README, "gain from rewards for decisions", interval_columns(apart))
    yield Claim(FIGURES, "**Rewards for decisions**", columns(stepwise))
    yield Claim(FIGURES, "**Outcome alone**", columns(off))
    yield Claim(FIGURES, "Rewards for decisions less outcome alone", interval_columns(apart))


def demo_claims() -> Iterator[Claim]:
    arms = Arms("demo", "unique_achievements")
    before, after, gain = arms.before("demo"), arms.after("demo"), arms.gain("demo")
    yield Claim(README, "`make demo`: gain in unique achievements", columns(gain))
    yield Claim(FIGURES, "Unique achievements before RL |", columns(before))
    yield Claim(FIGURES, "Unique achievements after 46 iterations of RL", columns(after))
    yield Claim(FIGURES, "the same gain, median over the seeds", columns(gain))
    yield Claim(FIGURES, "the same gain, worst seed", f"| {min(gain):.2f} |")
    words = f"| {statistics.fmean(gain):.2f} | {min(gain):.2f} to {max(gain):.2f} |"
    yield Claim(FIGURES, "**Gain by RL** in unique achievements, mean", words)
    found = arms.runs["demo"].values()
    clear = sum(run["last_minus_first"]["low"] > 0 for run in found)
    yield Claim(FIGURES, "Seeds whose gain is above 0", f"| {clear} of {len(found)} |")
    by_world = ", ".join(
        f"{one['mean']:+.2f} ({one['low']:.2f} to {one['high']:.2f})"
        for one in (run["last_minus_first"] for run in found)
    )
    yield Claim(STUDIES, "", by_world)


def credit_claims() -> Iterator[Claim]:
    arms = Arms("credit", "unique_achievements")
    decisions = statistics.fmean(arms.training("stepwise", "decisions"))
    start = statistics.median(arms.before("gae"))
    words = f"trained on about {round(decisions, -1):,.0f} decisions an iteration, from {start:z.2f} unique"
    yield Claim(FIGURES, "", words)
    for arm in ("gae", "stepwise", "gigpo", "branch"):
        yield Claim(FIGURES, f"by `{arm}` on decision rewards", columns(arms.gain(arm)))
        yield Claim(FIGURES, f"`{arm}` more than `grpo`", interval_columns(arms.minus(arm, "grpo")))
    yield Claim(FIGURES, "by `grpo` on the outcome alone", columns(arms.gain("grpo")))
    steps = {arm: statistics.fmean(arms.training(arm, "steps")) for arm in arms.runs}
    others = [value for arm, value in steps.items() if arm != "branch"]
    played = statistics.fmean(arms.training("branch", "decisions"))
    words = f"of {round(played, -2):,.0f} decisions in {steps['branch']:.1f} optimizer steps per iteration"
    yield Claim(FIGURES, "", f"{words} instead of {min(others):.1f} to {max(others):.1f}")


def study_claims() -> Iterator[Claim]:
    """Documents, dialogues, mixtures, collecting ahead."""
    yield from statelm_claims()
    yield from dialogue_claims()
    yield from mixture_claims()
    yield from ahead_claims()


def statelm_claims() -> Iterator[Claim]:
    arms = Arms("statelm", "outcome_reward")
    both = arms.before("editing"), arms.after("editing")
    before, after = map(spread, both)
    without = spread(arms.before("no_editing")), spread(arms.after("no_editing"))
    words = " → ".join(f"{statistics.median(values):z.2f}" for values in both)
    text = f"| {words} | after: {min(both[1]):z.2f} to {max(both[1]):z.2f} |"
    yield Claim(README, "documents that do not fit the window", text)
    words = f"from {before} to {after} with deletion, and goes from {without[0]} to {without[1]} without"
    yield Claim(DOCUMENTS, "", words)
    yield Claim(FIGURES, "**Documents larger than the window**", columns(arms.before("editing")))
    yield Claim(FIGURES, "the model may delete, after RL", columns(arms.after("editing")))
    yield Claim(FIGURES, "the model may not delete, before RL", columns(arms.before("no_editing")))
    yield Claim(FIGURES, "the model may not delete, after RL", columns(arms.after("no_editing")))
    row = "with deletion less without, after RL"
    yield Claim(FIGURES, row, columns(arms.minus("editing", "no_editing")))
    row = "with deletion less without, gains"
    yield Claim(FIGURES, row, interval_columns(gain_apart(arms, "editing", "no_editing")))


def gain_apart(arms: Arms, arm: str, other: str) -> list[float]:
    """Differences of two arms' gains, seed by seed."""
    return [mine - theirs for mine, theirs in zip(arms.gain(arm), arms.gain(other), strict=True)]


def dialogue_claims() -> Iterator[Claim]:
    arms = Arms("dialogue", "outcome_reward")
    yield Claim(FIGURES, "**Short sums in dialogue**", columns(arms.gain("turn_scores")))
    yield Claim(FIGURES, "right answers after RL |", columns(arms.after("turn_scores")))
    for arm, name in (("outcome", "grpo"), ("outcome_stepwise", "stepwise")):
        yield Claim(FIGURES, f"dialogue, outcome alone with `{name}`", columns(arms.gain(arm)))
        row = f"dialogue, gain of scores less gain of the outcome with `{name}`"
        yield Claim(FIGURES, row, interval_columns(gain_apart(arms, "turn_scores", arm)))


def mixture_claims() -> Iterator[Claim]:
    mixture = Arms("mixture", "unique_achievements")
    yield Claim(FIGURES, "**A mixture**", columns(mixture.before("alone")))
    yield Claim(FIGURES, "the actor alone, after", columns(mixture.after("alone")))
    for arm, (after, less) in {
        "good": ("with a clone of the teacher", "with the clone less alone"),
        "bad": ("with a policy of random weights", "with random weights less alone"),
    }.items():
        yield Claim(FIGURES, after, columns(mixture.after(arm)))
        yield Claim(FIGURES, less, interval_columns(mixture.minus(arm, "alone")))
    medians_by_arm = {
        "alone": "| alone |",
        "good": "| with the teacher's clone |",
        "bad": "| with random weights |",
    }
    for arm, row in medians_by_arm.items():
        medians = [statistics.median(mixture.at(arm, index).values()) for index in range(5)]
        ends = ", ".join(f"{value:.2f}" for value in mixture.after(arm))
        yield Claim(MIXTURE, row, " | ".join([*(f"{value:.2f}" for value in medians), ends]))
    more = mixture.minus("good", "alone")
    words = f"{spread(more).removesuffix(')')}; 95 % interval of the mean"
    yield Claim(MIXTURE, "", f"{words} {interval_text(more).partition(',')[0]})")
    yield Claim(MIXTURE, "", f"{spread(mixture.minus('bad', 'alone'))} ahead at the end")


def ahead_claims() -> Iterator[Claim]:
    ahead = Arms("ahead", "unique_achievements")
    yield Claim(FIGURES, "**One iteration ahead**", interval_columns(ahead.minus("processes", "turns")))
    row = "one iteration ahead less taking turns, after 12"
    yield Claim(FIGURES, row, columns(ahead.minus("processes", "turns", 1)))
    yield Claim(FIGURES, "one iteration ahead, after 24", columns(ahead.after("processes")))
    yield Claim(FIGURES, "taking turns, after 24", columns(ahead.after("turns")))
    seconds = ahead.iteration_s("processes"), ahead.iteration_s("turns")
    shares = [mine / other for mine, other in zip(*seconds, strict=True)]
    yield Claim(FIGURES, "**The demo in processes**", f"x{columns(shares)}")
    yield Claim(FIGURES, "seconds of that iteration, one iteration ahead", columns(seconds[0], 1))
    yield Claim(FIGURES, "seconds of that iteration, taking turns", columns(seconds[1], 1))


def captured_claims() -> Iterator[Claim]:
    agents = {item["agent"]: item for item in data("captured_agents")}
    rows = {"smolagents": "score of smolagents", "litellm": "score of litellm"}
    for name, row in (rows | {"openai_agents": "score of openai-agents"}).items():
        words = f"| {agents[name]['score_before']:z.2f} → {agents[name]['score_after']:z.2f} |"
        yield Claim(FIGURES, row, words)
    most = max(item["logprob_difference"] for item in agents.values())
    yield Claim(FIGURES, "captured agents: largest difference", f"| {_short(most)} |")
    drifted = sum(item["drifted_tokens"] for item in agents.values())
    yield Claim(FIGURES, "captured agents: drifted tokens", f"| {drifted or 'none'} |")


def _short(value: float, digits: int = 1) -> str:
    """2.5e-5 for 2.5e-05."""
    return re.sub(r"e([+-])0", r"e\1", f"{value:.{digits}e}")


def cost_claims() -> Iterator[Claim]:
    """Tokens of an iteration, and idle sessions."""
    most, tenth = (
        data("segment_cost")["a token"][name] for name in ("nearly all sampled", "a tenth sampled")
    )
    for row, words in {
        "nearly all sampled: memory": f"{most['held']:.0f} bytes",
        "the same token: bytes": f"{most['sent']:z.1f}",
        "the same token: CPU time": f"{most['read']:z.2f} µs",
        "a tenth is sampled: memory": f"{tenth['held']:.0f} bytes",
        "a token in tuples and JSON": f"{most['plain held']:.0f} bytes",
        "a token before a step": f"{most['batch']:z.2f} µs",
        "memory of log-probs and weights": f"{most['rows']:.0f} bytes",
    }.items():
        yield Claim(FIGURES, row, f"| {words} |")
    idle = data("idle_sessions")
    yield Claim(FIGURES, "**1,000 idle Crafter sessions**", f"| {idle['kb_per_session']:.0f} kB |")
    for row, name in (("16 clients, median", "p50_ms"), ("1,000 idle sessions, 99th", "p99_ms")):
        yield Claim(FIGURES, row, f"| {idle['load'][name]:z.1f} ms |")


def cells(card: str, kind: str, shape: str, **has: Any) -> list[Mapping[str, Any]]:
    """Figures of a GPU of this kind, in the order in which they were written."""
    (run,) = (run for run in data("gpu")["runs"] if card in run["machine"]["device"])
    wanted = {"kind": kind, "shape": shape, **has}
    found = [item for item in run["figures"] if wanted.items() <= item.items()]
    if not found:
        raise SystemExit(f"gpu.json: no {kind} of {shape} with {has} on an {card}")
    return found


def both_cards(row: str, words: Sequence[str]) -> Iterator[Claim]:
    """A row of the table of GPUs: a cell for the H100, and one for the H200."""
    yield Claim(FIGURES, row, f"| {' | '.join(words)} |")


def gpu_claims() -> Iterator[Claim]:
    """Decode, prefill and update."""
    both = ("H100", "H200")
    wide = [cells(card, "decode", "4b", rows=64, context=1024)[0] for card in both]
    words = [f"{100 * item['share_of_limit']:z.1f} %" for item in wide]
    yield from both_cards("**Decode, 4B shape**", words)
    row = "decode, 4B shape, 64 rows of 1k tokens: tokens"
    yield from both_cards(row, [f"{item['tokens_per_s']:,.0f}" for item in wide])
    for row, rows, context in (
        ("16 rows of 1k tokens: share", 16, 1024), ("64 rows of 288", 64, 288), ("one row of 288", 1, 288),
    ):  # fmt: skip
        found = [cells(card, "decode", "4b", rows=rows, context=context)[0] for card in both]
        words = [f"{100 * item['share_of_limit']:.0f} %" for item in found]
        yield from both_cards(f"decode, 4B shape, {row}", words)
    small = [cells(card, "decode", "0.6b", rows=16, context=1024)[0] for card in both]
    words = [f"{100 * item['share_of_limit']:z.1f} %" for item in small]
    yield from both_cards("**Decode, 0.6B shape**", words)
    row = "decode, 0.6B shape: tokens a second"
    yield from both_cards(row, [f"{item['tokens_per_s']:,.0f}" for item in small])
    prefill = [cells(card, "prefill", "4b", rows=64, context=1024)[0]["mfu"] for card in both]
    yield from both_cards("**Prefill, 4B shape**", [f"{100 * mfu:.0f} %" for mfu in prefill])
    yield from update_claims()


def update_claims() -> Iterator[Claim]:
    """Seconds of the updates but the first, which compiles; and their share of the card's speed."""

    def seconds(item: Mapping[str, Any]) -> str:
        return spread(item["seconds"][1:], 3)

    large = cells("H200", "update", "4b")[0]
    row = "**Update of the 4B shape**"
    yield from both_cards(row, ["not measured", f"{100 * large['mfu']:z.1f} %"])
    yield from both_cards("update of the 4B shape: seconds", ["not measured", seconds(large)])
    first, second = cells("H100", "update", "0.6b")
    (other,) = cells("H200", "update", "0.6b")
    row = "**Update of the 0.6B shape**"
    yield from both_cards(row, [f"{100 * item['mfu']:z.1f} %" for item in (first, other)])
    yield Claim(FIGURES, "on another H100: MFU of the update", f"| {100 * second['mfu']:z.1f} %")
    row = "| update of the 0.6B shape: seconds"
    yield Claim(FIGURES, row, f"| {seconds(first)} | {other['seconds']:.3f} (")
    yield Claim(FIGURES, "on another H100: seconds", f"| {seconds(second)} |")


def agreement_claims() -> Iterator[Claim]:
    """Log-probs and gradients on GPUs."""
    both, shapes = ("H100", "H200"), {"0.6b": "0.6B", "4b": "4B"}
    for what in ("log-probs", "gradients"):
        small = [cells(card, "attention", "0.6b", what=what)[0] for card in both]
        large = cells("H200", "attention", "4b", what=what)[0]
        rows = f"**{what.capitalize()} by kernels**", f"{what} by torch's operators under a mask, 0.6B"
        for row, side in zip(rows, ("packed", "masked"), strict=True):
            yield from both_cards(row, [_short(item[side]) for item in small])
        for row, side in (
            (f"{what} by kernels, 4B", "packed"),
            (f"{what} by torch's operators, 4B", "masked"),
        ):
            yield Claim(FIGURES, row, f"| | {_short(large[side])} |")
    for shape, name in shapes.items():
        exact, low = (
            [cells(card, "agreement", shape, precision=f"torch.{kind}")[0] for card in both]
            for kind in ("float32", "bfloat16")
        )
        row = f"earner against engine in float32, {name} shape"
        yield from both_cards(row, [_short(item["most"]) for item in exact])
        row = f"earner against engine in bfloat16, {name} shape"
        yield from both_cards(row, [_short(item["rms"]) for item in low])
    (lora,) = cells("H200", "lora", "4b")
    total, held = sum(lora["needs"].values()) - lora["needs"].get("checkpoint", 0), lora["needs"]["cache"]
    yield Claim(FIGURES, "**LoRA of rank 32**", f"| {total / 2**30:.0f} GiB |")
    yield Claim(FIGURES, "LoRA of rank 32: part", f"| {held / 2**30:.0f} GiB |")
    (row_of,) = (item["row"] for item in cells("H100", "iteration", "0.6b"))
    for words, stage in (
        ("**One iteration of `crafter_online`**", "collect"),
        ("`crafter_online`: seconds to update", "update"),
        ("`crafter_online`: seconds to write", "checkpoint"),
    ):
        yield Claim(FIGURES, words, f"| {row_of[f'time/{stage}_s']:z.1f} |")


def gpu_curve_claims() -> Iterator[Claim]:
    """Whole games by 26M parameters."""
    curve = data("gpu_curve")
    first, last = curve["evaluations"][0], curve["evaluations"][-1]
    moved = curve["gains_world_by_world"][str(last["iteration"])]
    low, high = f"{moved['low']:z.2f}", f"{moved['high']:+z.2f}"
    gain = f"{moved['mean']:+z.2f} ({low} to {high})"
    steps = f"{sum(row['optim/steps'] for row in curve['training']):.0f} steps"
    for item, when in ((first, "after imitation"), (last, "after RL")):
        score, unique = f"{item['crafter_score']:z.1f} %", _unique(item)
        yield Claim(FIGURES, f"by 26M parameters: score {when}", f"| {score} |")
        row = f"by 26M parameters: unique achievements {when}"
        yield Claim(FIGURES, row, f"| {_cells_of_unique(item)} |")
        yield Claim(STUDIES, "", f"{unique}; {item['crafter_score']:z.1f}")
    row = "**RL's part of whole games by 26M parameters**"
    yield Claim(FIGURES, row, f"{steps} in 20 iterations")
    yield Claim(FIGURES, row, f"| {moved['mean']:+z.2f} | {low} to {high} |")
    teacher = curve["teacher"][0]
    words = f"| {teacher['crafter_score']:z.1f} % | {_bounds('the teacher, 800 worlds of crafter_gpu')} |"
    yield Claim(FIGURES, "their teacher: score", words)
    yield Claim(FIGURES, "their teacher: unique", f"| {teacher['unique_achievements']:z.2f} |")
    yield Claim(STUDIES, "", gain)
    rows = curve["training"]
    decisions = statistics.fmean(item["decision/count"] for item in rows)
    uncertain = 1 - statistics.fmean(item["optim/certain_frac"] for item in rows)
    words = f"Of {round(decisions, -3):,.0f} decisions some {round(decisions * uncertain, -3):,.0f} are"
    yield Claim(FIGURES, "", f"{words} uncertain ({100 * uncertain:.0f} % of the tokens)")
    other = data("gpu_curve_h200")["evaluations"][0]
    yield Claim(FIGURES, "H200: score after", f"| {other['crafter_score']:z.1f} % |")
    yield Claim(FIGURES, "H200: unique achievements after", f"| {_cells_of_unique(other)} |")
    words = f"{_unique(other)}; {other['crafter_score']:z.1f}"
    yield Claim(STUDIES, "", words)


def _cells_of_unique(item: Mapping[str, float]) -> str:
    return _unique(item).replace(" (", " | ").removesuffix(")")


def _unique(item: Mapping[str, float]) -> str:
    name = "unique_achievements"
    return f"{item[name]:z.2f} ({item[f'{name}_low']:z.2f} to {item[f'{name}_high']:z.2f})"


def coverage_claims() -> Iterator[Claim]:
    """How often intervals contain the Crafter score."""
    scripts, kinds = ("from scratch", "demo", "strong"), {
        "drawn rates": ("drawn",), "beyond the limits": ("beyond",),
    }  # fmt: skip
    shapes = {
        "100": (100, 1), "two in each of 50 worlds": (50, 2), "32": (32, 1), "64": (64, 1), "256": (256, 1),
    }  # fmt: skip
    for population, kind in zip(
        ("scripts from scratch,", "scripts as the demo,", "strong scripts,"), scripts, strict=True
    ):
        yield _coverage(population, (kind,), (100, 1))
    for games, shape in shapes.items():
        if games != "100":
            yield _coverage(f"| all these scripts | {games} |", scripts, shape)
        for population, kind_of in kinds.items():
            yield _coverage(f"| {population} | {games} |", kind_of, shape)
    for name, row in (
        ("random play, 400 held-out worlds", "**Score of random play**"),
        ("the teacher, 800 worlds of crafter_gpu", "**Score of the teacher**"),
    ):
        score = data("score_coverage")["evaluations"][name]["mean"]
        yield Claim(FIGURES, row, f"| {score:.1f} % | 95 % {_bounds(name)} |")
    widths = [
        cell["interval"]["relative_width"]
        for cell in data("score_coverage")["coverage"]
        if (cell["worlds"], cell["plays"]) == (100, 1) and not cell["population"].startswith("beyond")
    ]
    narrow, wide = [w for w in widths if w < 1.8], [w for w in widths if w >= 1.8]
    yield Claim(FIGURES, "**Width** of the interval", f"| x{min(narrow):.1f} to x{max(narrow):.1f} |")
    yield Claim(FIGURES, "its width where six or more", f"| x{min(wide):.1f} to x{max(wide):.1f} |")


def _coverage(row: str, kinds: tuple[str, ...], shape: tuple[int, int]) -> Claim:
    """Cells of the interval and of the delta method: least to greatest over the populations."""
    found = [
        cell
        for cell in data("score_coverage")["coverage"]
        if cell["population"].startswith(kinds) and (cell["worlds"], cell["plays"]) == shape
    ]
    ranges = (_range([cell[method]["coverage"] for cell in found]) for method in ("interval", "delta"))
    return Claim(FIGURES, row, f"| {' | '.join(ranges)} |")


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _bounds(evaluation: str) -> str:
    """The interval of scripted games, computed from score_games.json."""
    found = data("score_coverage")["evaluations"][evaluation]
    return f"{found['low']:.1f} to {found['high']:.1f}"


def recovery(study: str, kind: str) -> tuple[float, float]:
    """Median and longest seconds from a kill of that kind to the first new rollout, over all jobs."""
    jobs = data(study)["jobs"].values()
    seconds = [value for job in jobs for value in job["recovery_s"].get(kind, ())]
    return statistics.median(seconds), max(seconds)


def fault_claims() -> Iterator[Claim]:
    counts, jobs = data("faults")["counts"], data("faults")["jobs"].values()
    kills = sum(counts[f"{kind}_killed"] for kind in ("service", "job", "task_app", "database"))
    wrong = "some" if any(job["wrong"] for job in jobs) else "none"
    yield Claim(README, "random kills of service, job, task app", f"{kills} random kills")
    yield Claim(README, "random kills of service, job, task app", wrong)
    yield Claim(FIGURES, "**Kills**: 20 short jobs", f"killed {kills} times")
    yield Claim(FIGURES, "**Kills**: 20 short jobs", f"| {wrong} |")
    rows = {
        "service": "to the first new rollout after a kill of the service",
        "job": "| seconds after a kill of the job",
        "task_app": "seconds after a kill of the task app",
    }
    for kind, row in rows.items():
        middle, longest = recovery("faults", kind)
        yield Claim(FIGURES, row, f"| {middle:z.1f} | longest {longest:z.1f} |")
    yield from process_fault_claims()


def process_fault_claims() -> Iterator[Claim]:
    counts = data("faults_processes")["counts"]
    kinds = ("service", "job", "task_app", "database", "learner", "gateway")
    killed = sum(counts[f"{kind}_killed"] for kind in kinds)
    yield Claim(FIGURES, "**Kills of a job in processes**", f"killed {killed} times")
    yield Claim(FIGURES, "there, rollouts in flight at a kill", f"| {counts['kept']} |")
    rows = {
        "gateway": "after a kill of a gateway",
        "learner": "there, seconds after a kill of the learner",
        "service": "there, seconds after a kill of the service",
        "job": "there, seconds after a kill of the job",
    }
    for kind, row in rows.items():
        middle, longest = recovery("faults_processes", kind)
        digits = 1 if kind == "gateway" else 0
        yield Claim(FIGURES, row, f"| {middle:.{digits}f} | longest {longest:.0f} |")


def rank_claims() -> Iterator[Claim]:
    """Several ranks, two Ray nodes."""
    ranks = data("ranks")["ranks"].values()
    gradient = max(part["gradient"] for found in ranks for part in found.values() if "gradient" in part)
    update = max(found["update"]["update"] for found in ranks)
    resumed = max(found["resume"]["weights"] for found in ranks)
    for row, value in (
        ("**A learner of 2 and of 3 ranks**", gradient), ("ranks' weights after three passes", update),
        ("ranks' weights when resumed", resumed),
    ):  # fmt: skip
        yield Claim(FIGURES, row, f"| {_short(value)} |")
    faults = data("ranks")["faults"]
    killed = columns([item["others_s"] for item in faults["killed"]])
    yield Claim(FIGURES, "a rank is killed: seconds", f"| {killed} |")
    still = [item["others_s"] for item in faults["stands still"]]
    yield Claim(FIGURES, "a rank stands still", f"| {statistics.median(still):z.1f} |")
    assert max(still) < 10, "the limit of the row"
    ray = data("ray")
    seconds = ray["goes_on_s"]
    words = f"| {statistics.median(seconds):.0f} | {min(seconds):z.1f} to {max(seconds):z.1f} |"
    yield Claim(FIGURES, "Ray: seconds from the kill", words)
    yield Claim(FIGURES, "Ray: a learner on two nodes", f"| {_short(ray['first_update_on_two_nodes'])} |")
    yield Claim(FIGURES, "**Two Ray nodes, one killed**", f"| {ray['rollouts_lost']} |")


def server_claims() -> Iterator[Claim]:
    """vLLM servers, weights sent to them, and the soak."""
    vllm, sent, counts = data("vllm"), data("broadcast"), data("soak")["counts"]
    row = "**vLLM servers of a run on a CPU**"
    yield Claim(FIGURES, row, f"of {vllm['job']['decisions']} decisions")
    yield Claim(FIGURES, row, f"| {_short(vllm['job']['logprob_max'], 0)} |")
    row = "vLLM: log-probs of"
    yield Claim(FIGURES, row, f"of {_requests(vllm)} requests")
    yield Claim(FIGURES, row, f"| {_short(max(way['logprob_max'] for way in _ways(vllm)), 0)} |")
    lost = sum(way["requests_lost"] for way in _ways(vllm))
    yield Claim(FIGURES, "vLLM: requests lost", f"| {lost} |")
    yield Claim(FIGURES, "vLLM: rollouts lost", f"| {vllm['job']['rollouts_lost']} |")
    yield Claim(FIGURES, "vLLM: decisions of old", f"| {vllm['job']['decisions_of_old_weights']} |")
    adapters = vllm["adapters"]
    row = "**Adapters merged by the server**"
    yield Claim(FIGURES, row, f"{adapters['decisions']} decisions")
    yield Claim(FIGURES, row, f"| {_short(adapters['logprob_max'], 0)} |")
    yield Claim(FIGURES, "adapters, rank 2", f"| {adapters['publish_bytes'] / 1e3:.0f} kB |")
    yield Claim(FIGURES, "publish of the merged model", f"| {adapters['merged_bytes'] / 1e3:,.0f} kB |")
    row = "**Weights sent to vLLM servers by the learner**"
    yield Claim(FIGURES, row, f"{sent['job']['decisions']:,} decisions and of {_requests(sent)} requests")
    most = max([sent["job"]["logprob_max"], *(way["logprob_max"] for way in _ways(sent))])
    yield Claim(FIGURES, row, f"| {_short(most, 0)} |")
    yield Claim(FIGURES, "weights sent: decisions of old", f"| {sent['job']['decisions_of_old_weights']} |")
    yield Claim(FIGURES, "weights sent: rollouts lost", f"| {sent['job']['rollouts_lost']} |")
    amid = sent["swap"]["killed_amid_a_pass"]
    yield Claim(FIGURES, "a server killed amid a pass", f"| {amid['seconds']:z.1f} |")
    for row, way, name, digits in (
        ("a publish of 445 MiB", "broadcast", "seconds", 1),
        ("same publish by folder", "folder", "seconds", 1),
        ("learner's memory more", "broadcast", "learner_extra_mib", 0),
        ("learner's memory during", "folder", "learner_extra_mib", 0),
    ):
        one = sent["publish"][way][name]
        cut = [f"{one[key]:z.{digits}f}" for key in ("median", "least", "most")]
        yield Claim(FIGURES, row, f"| {cut[0]} | {cut[1]} to {cut[2]} |")
    words = f"{counts['clients_killed']} clients and {counts['app_killed']} task apps killed"
    yield Claim(FIGURES, "**Ten minutes of load with kills**", words)


def _ways(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [found["swap"][way] for way in ("wait", "keep")]


def _requests(found: Mapping[str, Any]) -> int:
    return sum(way["requests"] for way in _ways(found))


def truth_claims() -> Iterator[Claim]:
    """The measurement's own noise, and what was played for it."""

    def noise(setting: str, figure: str) -> list[float]:
        return [seed["noise"][figure] for seed in data("truth")[setting]["seeds"].values()]

    def pairs(setting: str) -> int:
        """That bring the standard error to 0.3 of the spread: it falls with their root."""
        return math.ceil(16 * (statistics.median(noise(setting, "ratio")) / 0.3) ** 2)

    for setting, row in {
        "crafter": "**Noise of the truth**",
        "one_action": "noise, the demo with one",
        "sokoban": "noise, Sokoban",
        "rooms": "noise, a corridor",
        "whole": "noise, whole games",
    }.items():
        yield Claim(FIGURES, row, f"| {columns(noise(setting, 'ratio'))} |")
    row = "pairs that would bring the noise to 0.3, "
    yield Claim(FIGURES, f"{row}the demo", f"| {pairs('crafter')} |")
    yield Claim(FIGURES, f"{row}one action", f"| {pairs('one_action')} |")
    for setting, words in {
        "crafter": "the demo", "one_action": "one action", "whole": "whole games",
    }.items():  # fmt: skip
        sums = zip(noise(setting, "played"), noise(setting, "decisions"), strict=True)
        played = [one / decisions for one, decisions in sums]
        row = f"decisions played for each measured one, {words}"
        yield Claim(FIGURES, row, f"| {columns(played, 0)} |")


def shared_prefix_claims() -> Iterator[Claim]:
    """Shared beginnings that an update computes once."""
    cases, times = data("shared_prefix")["cases"], {}
    rows = (
        ("**Shared beginnings computed once**", "the same by `trl`'s GRPOTrainer, against sharing"),
        ("shared beginnings, full text, a shape", "the same shape by `trl`'s"),
        ("shared beginnings, dialogues", ""), ("shared beginnings, the demo", ""),
    )  # fmt: skip
    for (name, case), (row, other) in zip(cases.items(), rows, strict=True):
        least = {side: min(case[f"{side}_s"]) for side in ("plain", "shared", "trl") if case[f"{side}_s"]}
        times[name] = f"x{least['plain'] / least['shared']:.2f}"
        yield Claim(FIGURES, row, f"| {times[name]} |")
        if "trl" in least:
            yield Claim(FIGURES, other, f"| x{least['trl'] / least['shared']:.1f} |")
    gradients = [case["gradient"] for case in cases.values()]
    words = f"| {max(gradients):.1e} | {min(gradients):.1e} to {max(gradients):.1e} |"
    yield Claim(FIGURES, "shared beginnings, difference of the gradient", words)
    yield Claim(README, "an update on Crafter's full text", times["full text, tiny-0.8m"])


def start_claims() -> Iterator[Claim]:
    """Starts in the corridor, by the most probable calls at the end."""
    arms = Arms("starts", "unique_achievements")
    rows = (("frontier", "**`frontier` in a corridor"), ("plain", "the same corridor from the beginning"))
    for arm, row in rows:
        ends = arms.after(arm)
        yield Claim(FIGURES, row, f"| {sum(end == 3 for end in ends)} of {len(ends)} |")


def _with_bounds(item: Mapping[str, Any], name: str) -> str:
    """A figure and its 95 % interval, in two cells."""
    return f"{item[name]:.2f} | 95 % {item['low']:.2f} to {item['high']:.2f}"


def babyai_claims() -> Iterator[Claim]:
    """Success on missions that no choice of a setting has seen."""
    runs = data("babyai")["unseen"]["by_seed"].values()
    least = min((run["gain"] for run in runs), key=lambda gain: (gain["mean"], gain["low"]))
    yield Claim(FIGURES, "**BabyAI GoToLocal**", f"| +{_with_bounds(least, 'mean')} |")
    for when, row in (("before", "BabyAI: success after imitation"), ("after", "BabyAI: success after RL")):
        yield Claim(FIGURES, row, columns([run[when]["mean"] for run in runs]))


def sokoban_claims() -> Iterator[Claim]:
    """Boards that are solved before and after RL."""
    arms = Arms("sokoban", "outcome_reward")
    yield Claim(FIGURES, "**Sokoban**, 300 boards of 6 by 6", f"| +{columns(arms.gain('sokoban'))} |")
    for found, row in (
        (arms.before, "Sokoban: solved after imitation"),
        (arms.after, "Sokoban: solved after RL"),
    ):
        yield Claim(FIGURES, row, f"| {columns(found('sokoban'))} |")


def limit_claims() -> Iterator[Claim]:
    """Scripted players of whole games of Crafter."""
    rows = (
        ("view", "**The scripted teacher"), ("memory", "a teacher that remembers"),
        ("whole", "a teacher that sees"),
        ("view, blows do not hurt", "the memoryless teacher where blows"),
    )  # fmt: skip
    players = data("player_limits")["players"]
    for name, row in rows:
        yield Claim(FIGURES, row, f"| {_with_bounds(players[name], 'unique_achievements')} |")


def mutant_claims() -> Iterator[Claim]:
    counted = [row for row in data("mutants")["rows"] if "equivalent" not in row]
    killed = sum(bool(row["killed_by"]) for row in counted) / len(counted)
    row = f"mutants that the tests of `core` and `credit` kill, of {len(counted)}"
    yield Claim(FIGURES, row, f"| {killed:.1%} |".replace("%", " %"))


def claims() -> list[Claim]:
    """All of them."""
    parts = (
        start_claims, babyai_claims, sokoban_claims, limit_claims, shared_prefix_claims, demo_claims,
        reward_mode_claims, credit_claims, study_claims, captured_claims,
        cost_claims, gpu_claims, agreement_claims, gpu_curve_claims, coverage_claims, fault_claims,
        rank_claims, server_claims, truth_claims, mutant_claims,
    )  # fmt: skip
    return [claim for part in parts for claim in part()]
