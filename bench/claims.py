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
    words = f"{spread(apart)}, 95 % interval of the mean {interval_text(apart)}"
    yield Claim(README, "gain from rewards for decisions", f"{spread(stepwise)} and {spread(off)}")
    yield Claim(README, "gain from rewards for decisions", words)
    yield Claim(FIGURES, "**Rewards for decisions**", spread(stepwise))
    yield Claim(FIGURES, "**Outcome alone**", spread(off))
    yield Claim(FIGURES, "Difference of the two, seed by seed", words)


def demo_claims() -> Iterator[Claim]:
    arms = Arms("demo", "unique_achievements")
    before, after, gain = arms.before("demo"), arms.after("demo"), arms.gain("demo")
    yield Claim(README, "`make demo`: unique achievements", f"{spread(before)} → {spread(after)}")
    row = "**Unique achievements on 128 held-out worlds"
    yield Claim(
        FIGURES, row, f"{spread(before)} before, {spread(after)} after 46 iterations; gain {spread(gain)}"
    )
    found = arms.runs["demo"].values()
    is_clear = all(run["last_minus_first"]["low"] > 0 for run in found)
    yield Claim(
        FIGURES, row, "world by world above 0 on each seed" if is_clear else "not above 0 on each seed"
    )
    yield Claim(
        FIGURES, "**The demo's gain by RL**", f"| {statistics.fmean(gain):.2f}; {min(gain):.2f}. Before"
    )
    by_world = ", ".join(
        f"{one['mean']:+.2f} ({one['low']:.2f} to {one['high']:.2f})"
        for one in (run["last_minus_first"] for run in found)
    )
    yield Claim(STUDIES, "", by_world)


def credit_claims() -> Iterator[Claim]:
    arms = Arms("credit", "unique_achievements")
    decisions = statistics.fmean(arms.training("stepwise", "decisions"))
    yield Claim(FIGURES, "**Five estimators**", f"about {round(decisions, -1):,.0f} decisions")
    yield Claim(FIGURES, "**Five estimators**", f"from {statistics.median(arms.before('gae')):z.2f}")
    rows = {
        "gae": "**Five estimators**", "stepwise": "by `stepwise` on decision rewards",
        "gigpo": "by `gigpo` on decision rewards", "branch": "by `branch` on decision rewards",
    }  # fmt: skip
    for arm, row in rows.items():
        more = arms.minus(arm, "grpo")
        words = f"{spread(arms.gain(arm))}; more than `grpo` by {spread(more)}"
        yield Claim(FIGURES, row, f"{words}, 95 % {interval_text(more)}")
    yield Claim(FIGURES, "by `grpo` on the outcome alone", spread(arms.gain("grpo")))
    steps = {arm: statistics.fmean(arms.training(arm, "steps")) for arm in arms.runs}
    others = [value for arm, value in steps.items() if arm != "branch"]
    words = f"{steps['branch']:.1f} optimizer steps per iteration instead of"
    yield Claim(FIGURES, "by `branch` on decision rewards", f"{words} {min(others):.1f} to {max(others):.1f}")
    played = statistics.fmean(arms.training("branch", "decisions"))
    yield Claim(FIGURES, "by `branch` on decision rewards", f"of {round(played, -2):,.0f} decisions")


def study_claims() -> Iterator[Claim]:
    """Documents, dialogues, mixtures, collecting ahead."""
    statelm = Arms("statelm", "outcome_reward")
    before, after = spread(statelm.before("editing")), spread(statelm.after("editing"))
    without = spread(statelm.before("no_editing")), spread(statelm.after("no_editing"))
    words = f"{before} → {after}; without editing {without[0]} → {without[1]}"
    yield Claim(README, "documents that do not fit the window", words)
    yield Claim(FIGURES, "**Documents that do not fit", f"{before} before, {after} after")
    words = f"from {before} to {after} with deletion, and goes from {without[0]} to {without[1]} without"
    yield Claim(DOCUMENTS, "", words)
    more = spread(statelm.minus("editing", "no_editing"))
    words = f"{without[0]} before, {without[1]} after. Difference after RL, seed by seed: {more}"
    yield Claim(FIGURES, "The same, the model may not delete", words)
    dialogue = Arms("dialogue", "outcome_reward")
    words = f"gain {spread(dialogue.gain('turn_scores'))}, to {spread(dialogue.after('turn_scores'))}"
    yield Claim(FIGURES, "**Short sums in dialogue**", words)
    words = f"gain {spread(dialogue.gain('outcome'))}; {spread(dialogue.gain('outcome_stepwise'))}"
    yield Claim(FIGURES, "The same, outcome alone, with `grpo`", words)
    gains = [
        [mine - theirs for mine, theirs in zip(dialogue.gain("turn_scores"), dialogue.gain(arm), strict=True)]
        for arm in ("outcome", "outcome_stepwise")
    ]
    bounds = " and ".join(interval_text(one).partition(",")[0] for one in gains)
    words = f"gain {' and '.join(map(spread, gains))} more, 95 % intervals of the mean {bounds}"
    yield Claim(FIGURES, "The same, outcome alone, with `grpo`", words)
    editing = zip(statelm.gain("editing"), statelm.gain("no_editing"), strict=True)
    more_gain = [mine - theirs for mine, theirs in editing]
    words = f"difference of the gains: {spread(more_gain)}, 95 % {interval_text(more_gain)}"
    yield Claim(FIGURES, "The same, the model may not delete", words)
    mixture = Arms("mixture", "unique_achievements")
    yield Claim(FIGURES, "**A mixture**", f"from {spread(mixture.before('alone'))}")
    yield Claim(FIGURES, "**A mixture**", spread(mixture.after("alone")))
    for arm, row in {"good": "beside a clone of the teacher", "bad": "beside a policy of random"}.items():
        more = mixture.minus(arm, "alone")
        words = f"{spread(mixture.after(arm))}; more than alone by {spread(more)}, 95 % interval of the mean "
        yield Claim(FIGURES, row, words + interval_text(more))
    rows = {
        "alone": "| alone |",
        "good": "| beside the teacher's clone |",
        "bad": "| beside random weights |",
    }
    for arm, row in rows.items():
        medians = [statistics.median(mixture.at(arm, index).values()) for index in range(5)]
        ends = ", ".join(f"{value:.2f}" for value in mixture.after(arm))
        yield Claim(MIXTURE, row, " | ".join([*(f"{value:.2f}" for value in medians), ends]))
    more = mixture.minus("good", "alone")
    words = f"{spread(more).removesuffix(')')}; 95 % interval of the mean"
    yield Claim(MIXTURE, "", f"{words} {interval_text(more).partition(',')[0]})")
    yield Claim(MIXTURE, "", f"{spread(mixture.minus('bad', 'alone'))} ahead at the end")
    ahead = Arms("ahead", "unique_achievements")
    late, early = ahead.minus("processes", "turns"), ahead.minus("processes", "turns", 1)
    words = f"{spread(ahead.after('processes'))} against {spread(ahead.after('turns'))}: {spread(late)}, 95 %"
    row = "**Learning of the demo one iteration ahead**"
    yield Claim(FIGURES, row, f"{words} interval of the mean {interval_text(late)}")
    yield Claim(FIGURES, row, f"ahead by {spread(early)}")
    seconds = ahead.iteration_s("processes"), ahead.iteration_s("turns")
    shares = [mine / other for mine, other in zip(*seconds, strict=True)]
    yield Claim(FIGURES, row, f"x{statistics.median(shares):z.2f}")
    words = f"x{spread(shares)}: {spread(seconds[0], 1)} against {spread(seconds[1], 1)}"
    yield Claim(FIGURES, "**The demo in processes**", words)


def captured_claims() -> Iterator[Claim]:
    agents = {item["agent"]: item for item in data("captured_agents")}
    order = [agents[name] for name in ("smolagents", "litellm", "openai_agents")]
    scores = "; ".join(f"{item['score_before']:z.2f} to {item['score_after']:z.2f}" for item in order)
    apart = f"log-probs within {_short(max(item['logprob_difference'] for item in order))}"
    drifted = "no drifted token" if not any(item["drifted_tokens"] for item in order) else "drifted tokens"
    yield Claim(FIGURES, "**Agents that others wrote", f"score {scores}; {drifted}, {apart}")


def _short(value: float, digits: int = 1) -> str:
    """2.5e-5 for 2.5e-05."""
    return re.sub(r"e([+-])0", r"e\1", f"{value:.{digits}e}")


def cost_claims() -> Iterator[Claim]:
    """Tokens of an iteration, and idle sessions."""
    tokens = data("segment_cost")["a token"]
    most, tenth = tokens["nearly all sampled"], tokens["a tenth sampled"]

    def cost(of: Mapping[str, float]) -> str:
        return f"{of['held']:.0f} bytes; {of['sent']:z.1f}; {of['read']:z.2f} µs"

    plain = f"{most['plain held']:.0f} bytes; {most['plain sent']:.0f} and {tenth['plain sent']:.0f}"
    row = "**A token of an iteration in a learner's process**"
    yield Claim(FIGURES, row, f"{cost(most)}. {cost(tenth)}. In tuples and JSON: {plain}")
    yield Claim(FIGURES, row, f"{most['plain read']:z.2f} and {tenth['plain read']:z.2f} µs")
    words = [f"{of['batch']:z.2f} µs and {of['rows']:.0f} byte" for of in (most, tenth)]
    yield Claim(FIGURES, "The same, before a step and without forward passes", f"{words[0]}s; {words[1]}")
    idle = data("idle_sessions")
    load = idle["load"]
    words = f"{idle['kb_per_session']:.0f} kB; {load['p50_ms']:z.1f} ms and {load['p99_ms']:z.1f} ms"
    yield Claim(FIGURES, "**1,000 idle Crafter sessions**", words)


def cells(card: str, kind: str, shape: str, **has: Any) -> list[Mapping[str, Any]]:
    """Figures of a GPU of this kind, in the order in which they were written."""
    (run,) = (run for run in data("gpu")["runs"] if card in run["machine"]["device"])
    wanted = {"kind": kind, "shape": shape, **has}
    found = [item for item in run["figures"] if wanted.items() <= item.items()]
    if not found:
        raise SystemExit(f"gpu.json: no {kind} of {shape} with {has} on an {card}")
    return found


def gpu_claims() -> Iterator[Claim]:
    """Decode, prefill and update."""
    row = "**Decode**, 4B shape"
    for card in ("H100", "H200"):
        for item in cells(card, "decode", "4b", rows=64, context=1024):
            yield Claim(FIGURES, row, f"{item['tokens_per_s']:,.0f}")
            yield Claim(FIGURES, row, f"{100 * item['share_of_limit']:z.1f}")
        shares = [
            cells(card, "decode", "4b", rows=rows, context=context)[0]["share_of_limit"]
            for rows, context in ((16, 1024), (64, 288), (1, 288))
        ]
        words = "; ".join(f"{100 * share:.0f} %" for share in shares)
        yield Claim(FIGURES, "the same, 16 rows of 1k; 64 rows of 288", words)
        small = cells(card, "decode", "0.6b", rows=16, context=1024)[0]
        words = f"{small['tokens_per_s']:,.0f}; {100 * small['share_of_limit']:z.1f} %"
        yield Claim(FIGURES, "**Decode**, 0.6B shape", words)
        mfu = cells(card, "prefill", "4b", rows=64, context=1024)[0]["mfu"]
        yield Claim(FIGURES, "**Prefill**, 4B shape", f"{100 * mfu:.0f} %")
    yield Claim(FIGURES, "**Update**, 4B shape", _update(cells("H200", "update", "4b")[0]))
    for item in cells("H100", "update", "0.6b"):
        yield Claim(FIGURES, "**Update**, 0.6B shape", f"{spread(item['seconds'][1:], 3)}")
        yield Claim(FIGURES, "**Update**, 0.6B shape", f"{100 * item['mfu']:z.1f}")
        yield Claim(FIGURES, "**Update of the 0.6B shape on a GPU**", f"{100 * item['mfu']:z.1f}")
    (item,) = cells("H200", "update", "0.6b")
    yield Claim(FIGURES, "**Update**, 0.6B shape", f"{item['seconds']:.3f} (")
    yield Claim(FIGURES, "**Update**, 0.6B shape", f"{100 * item['mfu']:z.1f} %")
    yield Claim(FIGURES, "**Update of the 0.6B shape on a GPU**", f"{100 * item['mfu']:z.1f} %")


def _update(item: Mapping[str, Any]) -> str:
    """Seconds of the updates but the first, which compiles; and their share of the card's speed."""
    return f"{spread(item['seconds'][1:], 3)}; {100 * item['mfu']:z.1f} %"


def agreement_claims() -> Iterator[Claim]:
    """Log-probs and gradients on GPUs."""
    row = "**Log-probs and gradients by kernels**"
    for card, shapes in (("H100", ("0.6b",)), ("H200", ("0.6b", "4b"))):
        parts = []
        for what in ("log-probs", "gradients"):
            items = [cells(card, "attention", shape, what=what)[0] for shape in shapes]
            sides = [" and ".join(_short(item[side]) for item in items) for side in ("packed", "masked")]
            parts.append(f"{sides[0]} ({sides[1]})")
        yield Claim(FIGURES, row, "; ".join(parts))
    for card in ("H100", "H200"):
        exact = [cells(card, "agreement", shape, precision="torch.float32")[0] for shape in ("0.6b", "4b")]
        low = [cells(card, "agreement", shape, precision="torch.bfloat16")[0] for shape in ("0.6b", "4b")]
        words = f"{_short(exact[0]['most'])} and {_short(exact[1]['most'])}; {_short(low[0]['rms'])}"
        yield Claim(FIGURES, "**Learner against engine**", words)
        missed = "**Learner against engine in bfloat16, 4B shape**"
        yield Claim(FIGURES, missed, _short(low[0]["rms"]))
        yield Claim(FIGURES, missed, _short(low[1]["rms"]))
    (lora,) = cells("H200", "lora", "4b")
    total, held = sum(lora["needs"].values()) - lora["needs"].get("checkpoint", 0), lora["needs"]["cache"]
    yield Claim(
        FIGURES, "**LoRA of rank 32**", f"{total / 2**30:.0f} GiB, {held / 2**30:.0f} of them the cache"
    )
    (row_of,) = (item["row"] for item in cells("H100", "iteration", "0.6b"))
    seconds = [row_of[f"time/{stage}_s"] for stage in ("collect", "update", "checkpoint")]
    yield Claim(FIGURES, "**One iteration of `crafter_online`**", "; ".join(f"{one:z.1f}" for one in seconds))


def gpu_curve_claims() -> Iterator[Claim]:
    """Whole games by 26M parameters."""
    curve = data("gpu_curve")
    first, last = curve["evaluations"][0], curve["evaluations"][-1]
    moved = curve["gains_world_by_world"][str(last["iteration"])]
    gain = f"{moved['mean']:+z.2f} ({moved['low']:z.2f} to {moved['high']:+z.2f})"
    steps = f"{sum(row['optim/steps'] for row in curve['training']):.0f} steps"
    row = "**Whole games of Crafter by 26M parameters"
    for item in (first, last):
        score, unique = f"{item['crafter_score']:z.1f} %", _unique(item)
        yield Claim(FIGURES, row, score)
        yield Claim(FIGURES, row, unique)
        yield Claim(STUDIES, "the same on one H100, 53 s", f"{unique}; {item['crafter_score']:z.1f}")
    yield Claim(FIGURES, row, gain)
    teacher = curve["teacher"][0]
    words = f"{teacher['crafter_score']:z.1f} %", f"{teacher['unique_achievements']:z.2f}"
    yield Claim(
        FIGURES,
        row,
        f"Its teacher: {words[0]} ({_bounds('the teacher, 800 worlds of crafter_gpu')}), {words[1]}",
    )
    yield Claim(FIGURES, "**RL's part of whole games by 26M", f"{gain} unique achievements by {steps}")
    yield Claim(STUDIES, "the same on one H100, 53 s", gain)
    rows = curve["training"]
    decisions = statistics.fmean(item["decision/count"] for item in rows)
    uncertain = 1 - statistics.fmean(item["optim/certain_frac"] for item in rows)
    words = (
        f"Of {round(decisions, -3):,.0f} decisions some {round(decisions * uncertain, -3):,.0f} are uncertain"
    )
    yield Claim(
        FIGURES, "**RL's part of whole games by 26M", f"{words} ({100 * uncertain:.0f} % of the tokens)"
    )
    other = data("gpu_curve_h200")["evaluations"][0]
    yield Claim(FIGURES, row, f"{other['crafter_score']:z.1f} %")
    yield Claim(FIGURES, row, _unique(other))
    words = f"{_unique(other)}; {other['crafter_score']:z.1f}"
    yield Claim(STUDIES, "`small-26m` on one H200", words)


def _unique(item: Mapping[str, float]) -> str:
    name = "unique_achievements"
    return f"{item[name]:z.2f} ({item[f'{name}_low']:z.2f} to {item[f'{name}_high']:z.2f})"


def coverage_claims() -> Iterator[Claim]:
    """How often intervals contain the Crafter score."""
    real, drawn = [("from scratch", "demo", "strong"), ("drawn",)]
    shapes = ((50, 2), (32, 1), (64, 1), (256, 1))

    def shares(kinds: tuple[str, ...], method: str, shape: tuple[int, int] = (100, 1)) -> list[float]:
        return [
            cell[method]["coverage"]
            for cell in data("score_coverage")["coverage"]
            if cell["population"].startswith(kinds) and (cell["worlds"], cell["plays"]) == shape
        ]

    def ranges(kinds: tuple[str, ...], method: str) -> str:
        return "; ".join(_range(shares(kinds, method, shape)) for shape in shapes)

    for method in ("interval", "delta"):
        kinds = [", ".join(f"{share:.2f}" for share in shares((kind,), method)) for kind in real]
        yield Claim(FIGURES, "**100 games that scripts played**", f"| {'; '.join(kinds)} |")
        yield Claim(FIGURES, "two in each of 50 worlds; 32 games; 64; 256 |", f"| {ranges(real, method)} |")
        yield Claim(FIGURES, "**100 games with drawn rates**", f"| {_range(shares(drawn, method))} |")
        yield Claim(
            FIGURES, "two in each of 50 worlds; 32 games; 64; 256. The", f"| {ranges(drawn, method)} |"
        )
        words = f"{_range(shares(('beyond',), method))}; {ranges(('beyond',), method)} |"
        yield Claim(FIGURES, "**Beyond its limits**", words)
    for name, words in (
        ("random play, 400 held-out worlds", "95 % {}"), ("the teacher, 800 worlds of crafter_gpu", "{}"),
    ):  # fmt: skip
        score = data("score_coverage")["evaluations"][name]["mean"]
        text = f"{score:.1f} % ({words.format(_bounds(name))})"
        yield Claim(FIGURES, "**Scripts on whole games**", text)
    cells = data("score_coverage")["coverage"]
    widths = [
        cell["interval"]["relative_width"]
        for cell in cells
        if (cell["worlds"], cell["plays"]) == (100, 1) and not cell["population"].startswith("beyond")
    ]
    narrow, wide = [w for w in widths if w < 1.8], [w for w in widths if w >= 1.8]
    words = f"x{min(narrow):.1f} to x{max(narrow):.1f}; x{min(wide):.1f} to x{max(wide):.1f}"
    yield Claim(FIGURES, "**Width** at 100 games", words)


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
    counts = data("faults")["counts"]
    kills = sum(counts[f"{kind}_killed"] for kind in ("service", "job", "task_app", "database"))
    wrong = any(job["wrong"] for job in data("faults")["jobs"].values())
    yield Claim(README, "random kills of service, job, task app", f"{kills} random kills")
    yield Claim(README, "random kills of service, job, task app", "some" if wrong else "none")
    yield Claim(FIGURES, "**Kills**: 20 short jobs", f"killed {kills} times")
    parts = [recovery("faults", kind) for kind in ("service", "job", "task_app")]
    words = [f"{middle:z.1f} s ({longest:z.1f})" for middle, longest in parts]
    words[0] = words[0].replace("(", "(longest ")
    yield Claim(FIGURES, "From a kill to the first new rollout: service", f"median {'; '.join(words)}")
    counts = data("faults_processes")["counts"]
    kinds = ("service", "job", "task_app", "database", "learner", "gateway")
    row = "**Kills of a job in processes**"
    yield Claim(FIGURES, row, f"killed {sum(counts[f'{kind}_killed'] for kind in kinds)} times")
    yield Claim(FIGURES, row, f"{counts['kept']} rollouts")
    parts = [recovery("faults_processes", kind) for kind in ("gateway", "learner", "service", "job")]
    rest = "; ".join(f"{middle:.0f} s (longest {longest:.0f})" for middle, longest in parts[1:])
    words_of_first = f"median {parts[0][0]:z.1f} s (longest {parts[0][1]:.0f})"
    yield Claim(FIGURES, "There, from a kill to the first new rollout", f"{words_of_first}; {rest}")


def rank_claims() -> Iterator[Claim]:
    """Several ranks, two Ray nodes."""
    ranks = data("ranks")["ranks"].values()
    gradient = max(part["gradient"] for found in ranks for part in found.values() if "gradient" in part)
    update = max(found["update"]["update"] for found in ranks)
    resumed = max(found["resume"]["weights"] for found in ranks)
    row = "**A learner of 2 and of 3 ranks**"
    for value in (gradient, update, resumed):
        yield Claim(FIGURES, row, f"{_short(value)} (limit")
    faults = data("ranks")["faults"]
    killed = spread([item["others_s"] for item in faults["killed"]])
    still = max(item["others_s"] for item in faults["stands still"])
    middle = statistics.median(item["others_s"] for item in faults["stands still"])
    yield Claim(
        FIGURES,
        "a rank is killed: until the others have ended",
        killed.replace(" (", " s (").removesuffix(")"),
    )
    yield Claim(FIGURES, "a rank is killed: until the others have ended", f"{middle:z.1f} s (")
    assert still < 10, "the limit of the row"
    ray = data("ray")
    goes_on = ray["goes_on_s"]
    words = f"{statistics.median(goes_on):.0f} s ({min(goes_on):z.1f} to {max(goes_on):z.1f};"
    yield Claim(FIGURES, "There, from the kill to the next update", f"median {words}")
    yield Claim(FIGURES, "There, from the kill to the next update", _short(ray["first_update_on_two_nodes"]))
    yield Claim(FIGURES, "**Two Ray nodes, one killed**", f"; {ray['rollouts_lost']}")


def server_claims() -> Iterator[Claim]:
    """vLLM servers, weights sent to them, and the soak."""
    vllm, sent = data("vllm"), data("broadcast")
    row = "**vLLM servers of a run on a CPU**"
    yield Claim(FIGURES, row, f"{vllm['job']['decisions']} decisions and of {_requests(vllm)} requests")
    most = max(way["logprob_max"] for way in _ways(vllm))
    yield Claim(FIGURES, row, f"{vllm['job']['logprob_max']:.0e} and {most:.0e}".replace("e-0", "e-"))
    lost = sum(way["requests_lost"] for way in _ways(vllm))
    words = f"{lost}; {vllm['job']['rollouts_lost']}; {vllm['job']['decisions_of_old_weights']}"
    yield Claim(FIGURES, "Requests lost at 6 swaps in flight", words)
    adapters = vllm["adapters"]
    words = f"{adapters['publish_bytes'] / 1e3:.0f} kB against {adapters['merged_bytes'] / 1e3:,.0f} kB"
    yield Claim(FIGURES, "**Adapters merged by the server**", f"{adapters['decisions']} decisions")
    row = "**Adapters merged by the server**"
    yield Claim(FIGURES, row, f"{_short(adapters['logprob_max'], 0)} at most; {words}")
    row = "**Weights sent to vLLM servers by the learner**"
    yield Claim(FIGURES, row, f"{sent['job']['decisions']:,} decisions and of {_requests(sent)} requests")
    most = max([sent["job"]["logprob_max"], *(way["logprob_max"] for way in _ways(sent))])
    yield Claim(FIGURES, row, f"{_short(most, 0)} at most")
    publish, amid = sent["publish"], sent["swap"]["killed_amid_a_pass"]
    yield Claim(FIGURES, "A server killed amid a pass", f"{amid['seconds']:z.1f} s")
    for label, name, digits in (
        ("A publish of 445 MiB", "seconds", 1),
        ("Main memory", "learner_extra_mib", 0),
    ):
        ways = [publish[way][name] for way in ("broadcast", "folder")]
        unit = "s" if name == "seconds" else "MiB"
        parts = [
            f"{way['median']:z.{digits}f} {unit} ({way['least']:z.{digits}f} to {way['most']:z.{digits}f})"
            for way in ways
        ]
        yield Claim(FIGURES, label, f"median {'; '.join(parts)}")
    soak = data("soak")
    counts = soak["counts"]
    words = f"{counts['clients_killed']} clients and {counts['app_killed']} task apps killed"
    yield Claim(FIGURES, "**Ten minutes of load with kills**", words)


def _ways(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [found["swap"][way] for way in ("wait", "keep")]


def _requests(found: Mapping[str, Any]) -> int:
    return sum(way["requests"] for way in _ways(found))


def truth_claims() -> Iterator[Claim]:
    """The row of docs/figures.md about the measurement's own noise."""
    row = "**The truth of stored decisions**"

    def of(setting: str, figure: str) -> list[float]:
        return [seed["noise"][figure] for seed in data("truth")[setting]["seeds"].values()]

    def pairs(setting: str) -> int:
        """That bring the standard error to 0.3 of the spread: it falls with their root."""
        return math.ceil(16 * (statistics.median(of(setting, "ratio")) / 0.3) ** 2)

    def played(setting: str) -> str:
        noise = (seed["noise"] for seed in data("truth")[setting]["seeds"].values())
        return spread([item["played"] / item["decisions"] for item in noise], 0)

    for setting, words in (
        ("crafter", "five seeds: {} of the spread"), ("one_action", "With one action a decision {}"),
        ("sokoban", "Sokoban: {}"), ("rooms", "A corridor with a key: {}"), ("whole", "three seeds: {}"),
    ):  # fmt: skip
        yield Claim(FIGURES, row, words.format(spread(of(setting, "ratio"))))
    yield Claim(FIGURES, row, f"about {pairs('crafter')} pairs")
    yield Claim(FIGURES, row, f"with about {pairs('one_action')}.")
    yield Claim(FIGURES, row, f"{played('crafter')} and {played('one_action')} decisions")
    yield Claim(FIGURES, row, f"{played('whole')} decisions for each")


def shared_prefix_claims() -> Iterator[Claim]:
    """Shared beginnings that an update computes once."""
    row, cases = "**Shared beginnings computed once**", data("shared_prefix")["cases"]
    times = {}
    for name, case in cases.items():
        least = {side: min(case[f"{side}_s"]) for side in ("plain", "shared", "trl") if case[f"{side}_s"]}
        times[name] = f"x{least['plain'] / least['shared']:.2f}"
        yield Claim(FIGURES, row, times[name])
        if "trl" in least:
            yield Claim(FIGURES, row, f"x{least['trl'] / least['shared']:.1f}")
    gradients = [case["gradient"] for case in cases.values()]
    yield Claim(FIGURES, row, f"{min(gradients):.1e} to {max(gradients):.1e}")
    yield Claim(README, "an update on Crafter's full text", times["full text, tiny-0.8m"])


def claims() -> list[Claim]:
    """All of them."""
    parts = (
        shared_prefix_claims, demo_claims, reward_mode_claims, credit_claims, study_claims, captured_claims,
        cost_claims, gpu_claims, agreement_claims, gpu_curve_claims, coverage_claims, fault_claims,
        rank_claims, server_claims, truth_claims,
    )  # fmt: skip
    return [claim for part in parts for claim in part()]
