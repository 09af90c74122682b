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

from bench.kit import ROOT, spread

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


def figures(texts: Mapping[str, str]) -> Iterator[Claim]:
    """The claims of docs/figures.md: the text by words of its row."""
    return (Claim(FIGURES, row, text) for row, text in texts.items())


@cache
def data(name: str) -> Any:
    """A file of bench/results, by its name without .json."""
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def columns(values: Sequence[float], digits: int = 2) -> str:
    """Figure and spread as two cells: median | least to greatest."""
    return spread(values, digits).replace(" (", " | ").removesuffix(")")


def mean_columns(values: Sequence[float]) -> str:
    """Figure and spread as two cells: mean | least to greatest |."""
    return f"{statistics.fmean(values):.2f} | {_range(values, 2)} |"


def change_columns(before: Sequence[float], after: Sequence[float], digits: int = 2) -> str:
    """Figures and spreads before and after as two cells: medians | least to greatest of each."""
    return changed(columns(before, digits), columns(after, digits))


def changed(before: str, after: str) -> str:
    """The cells of two rows as one row: each cell before → after."""
    cells = zip(before.split(" | "), after.split(" | "), strict=True)
    return " | ".join(" → ".join(pair) for pair in cells)


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


def differences(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value - other for value, other in zip(values, others, strict=True)]


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
        return differences(self.after(arm), self.before(arm))

    def gain_apart(self, arm: str, other: str) -> list[float]:
        """Differences of two arms' gains, seed by seed."""
        return differences(self.gain(arm), self.gain(other))

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
    apart = interval_columns(arms.minus("decision_stepwise", "off"))
    yield Claim(README, "gain from rewards for decisions", apart)
    yield from figures(
        {
            "**Rewards for decisions**": columns(arms.gain("decision_stepwise")),
            "**Outcome alone**": columns(arms.gain("off")),
            "Rewards for decisions less outcome alone": apart,
        }
    )


def demo_claims() -> Iterator[Claim]:
    arms = Arms("demo", "unique_achievements")
    gain = arms.gain("demo")
    yield Claim(README, "`make demo`: gain in unique achievements", columns(gain))
    yield from figures(
        {
            "**Gain by RL** in unique achievements, mean": f"| {mean_columns(gain)}",
            "the same gain, median over the seeds": columns(gain),
            "Unique achievements before →": change_columns(arms.before("demo"), arms.after("demo")),
        }
    )
    by_world = (run["last_minus_first"] for run in arms.runs["demo"].values())
    least = min(by_world, key=lambda one: one["mean"])
    words = f"gain by world of a seed is {least['mean']:+.2f} ({least['low']:.2f} to {least['high']:.2f})"
    yield Claim(STUDIES, "", words)


def credit_claims() -> Iterator[Claim]:
    arms = Arms("credit", "unique_achievements")
    for arm in arms.runs:
        more = "| |" if arm == "grpo" else interval_columns(arms.minus(arm, "grpo"))
        steps = statistics.fmean(arms.training(arm, "steps"))
        text = f"| {columns(arms.gain(arm))} | {more} {steps:.1f} |"
        yield Claim(FIGURES, f"| credit by `{arm}` ", text)
    decisions = [statistics.fmean(arms.training(arm, "decisions")) for arm in arms.runs]
    least, most = (f"{value:,.0f}" for value in (min(decisions), max(decisions)))
    start = statistics.median(arms.before("grpo"))
    words = f"played {least} to {most} decisions an iteration, from {start:z.2f} unique"
    yield Claim(FIGURES, "", words)


def statelm_claims() -> Iterator[Claim]:
    arms = Arms("statelm", "outcome_reward")
    before, after = arms.before("editing"), arms.after("editing")
    medians = " → ".join(f"{statistics.median(values):z.2f}" for values in (before, after))
    text = f"| {medians} | after: {min(after):z.2f} to {max(after):z.2f} |"
    yield Claim(README, "documents that do not fit the window", text)
    words = f"from {spread(before)} to {spread(after)}. Without deletion, it falls from"
    without = f"{spread(arms.before('no_editing'))} to {spread(arms.after('no_editing'))}"
    yield Claim(DOCUMENTS, "", f"{words} {without}")
    yield from figures(
        {
            "**Documents larger than the window**": change_columns(before, after),
            "gain with deletion less gain": interval_columns(arms.gain_apart("editing", "no_editing")),
        }
    )


def dialogue_claims() -> Iterator[Claim]:
    arms = Arms("dialogue", "outcome_reward")
    yield Claim(FIGURES, "**Short sums in dialogue**", columns(arms.gain("turn_scores")))
    for arm, name in (("outcome", "grpo"), ("outcome_stepwise", "stepwise")):
        row = f"dialogue: gain from scores of answers less gain from the outcome alone with `{name}`"
        yield Claim(FIGURES, row, interval_columns(arms.gain_apart("turn_scores", arm)))


def mixture_claims() -> Iterator[Claim]:
    mixture = Arms("mixture", "unique_achievements")
    good, bad = mixture.minus("good", "alone"), mixture.minus("bad", "alone")
    yield from figures(
        {
            "**A mixture**": columns(mixture.after("alone")),
            "with a clone of the teacher": interval_columns(good),
            "with a policy of random weights": interval_columns(bad),
        }
    )
    for arm, row in {
        "alone": "| alone |", "good": "| with the teacher's clone |", "bad": "| with random weights |",
    }.items():  # fmt: skip
        medians = [statistics.median(mixture.at(arm, index).values()) for index in range(5)]
        ends = ", ".join(f"{value:.2f}" for value in mixture.after(arm))
        yield Claim(MIXTURE, row, " | ".join([*(f"{value:.2f}" for value in medians), ends]))
    words = f"{spread(good).removesuffix(')')}; 95 % interval of the mean"
    yield Claim(MIXTURE, "", f"{words} {interval_text(good).partition(',')[0]})")
    yield Claim(MIXTURE, "", f"{spread(bad)} ahead at the end")


def ahead_claims() -> Iterator[Claim]:
    ahead = Arms("ahead", "unique_achievements")
    yield Claim(FIGURES, "**One iteration ahead**", interval_columns(ahead.minus("processes", "turns")))
    pairs = zip(ahead.iteration_s("processes"), ahead.iteration_s("turns"), strict=True)
    ratios = columns([mine / other for mine, other in pairs])
    yield Claim(FIGURES, "**Short games in processes**", f"x{ratios}")


def captured_claims() -> Iterator[Claim]:
    agents = {item["agent"]: item for item in data("captured_agents")}
    one = agents["smolagents"]
    most = max(item["logprob_difference"] for item in agents.values())
    yield from figures(
        {
            "score of smolagents": f"| {one['score_before']:z.2f} → {one['score_after']:z.2f} |",
            "captured agents: largest difference": f"| {_short(most)} |",
        }
    )


def _short(value: float, digits: int = 1) -> str:
    """2.5e-5 for 2.5e-05."""
    return re.sub(r"e([+-])0", r"e\1", f"{value:.{digits}e}")


def cost_claims() -> Iterator[Claim]:
    """Tokens of an iteration, and idle sessions."""
    kinds, idle = data("segment_cost")["a token"], data("idle_sessions")
    most, tenth = kinds["nearly all sampled"], kinds["a tenth sampled"]
    yield from figures(
        {
            "if nearly all tokens are sampled": f"| {most['held']:.0f} bytes |",
            "the same if a tenth of the tokens": f"| {tenth['held']:.0f} bytes |",
            "the same if tokens are stored in tuples": f"| {most['plain held']:.0f} bytes |",
            "**1,000 idle Crafter sessions**": f"| {idle['kb_per_session']:.0f} kB |",
            "1,000 idle sessions, 99th": f"| {idle['load']['p99_ms']:z.1f} ms |",
        }
    )


def cells(card: str, kind: str, shape: str, **has: Any) -> list[Mapping[str, Any]]:
    """Figures of a GPU of this kind, in the order in which they were written."""
    (run,) = (run for run in data("gpu")["runs"] if card in run["machine"]["device"])
    wanted = {"kind": kind, "shape": shape, **has}
    found = [item for item in run["figures"] if wanted.items() <= item.items()]
    if not found:
        raise SystemExit(f"gpu.json: no {kind} of {shape} with {has} on an {card}")
    return found


def on_both(kind: str, shape: str, figure: str, form: str, **has: Any) -> str:
    """The cells of the H100 and of the H200, by a format whose shares are percentages."""
    values = [cells(card, kind, shape, **has)[0][figure] for card in ("H100", "H200")]
    if form.endswith("e"):
        return f"| {' | '.join(map(_short, values))} |"
    return f"| {' | '.join(format(value, form).replace('%', ' %') for value in values)} |"


def gpu_claims() -> Iterator[Claim]:
    """Decode, prefill, update, and how exact they are."""
    wide = {"rows": 64, "context": 1024}
    exact, low = ({"precision": f"torch.{name}"} for name in ("float32", "bfloat16"))
    (lora,), (large, *_) = cells("H200", "lora", "4b"), cells("H200", "update", "4b")
    needs = sum(lora["needs"].values()) - lora["needs"].get("checkpoint", 0)
    (iteration,) = (item["row"] for item in cells("H100", "iteration", "0.6b"))
    seconds = ", ".join(f"{iteration[f'time/{part}_s']:z.1f}" for part in ("collect", "update"))
    texts = {
        "**Decode, 4B shape**": on_both("decode", "4b", "share_of_limit", "z.1%", **wide),
        "decode, 4B shape, 64 rows of 1k tokens: tok": on_both(
            "decode", "4b", "tokens_per_s", ",.0f", **wide
        ),
        "**Decode, 0.6B shape**": on_both("decode", "0.6b", "share_of_limit", "z.1%", rows=16, context=1024),
        "**Prefill, 4B shape**": on_both("prefill", "4b", "mfu", ".0%", **wide),
        "**Update of the 4B shape**": f"| not measured | {100 * large['mfu']:z.1f} % |",
        "**Update of the 0.6B shape**": on_both("update", "0.6b", "mfu", "z.1%"),
        "earner against engine in float32, 0.6B shape": on_both("agreement", "0.6b", "most", "e", **exact),
        "earner against engine in float32, 4B shape": on_both("agreement", "4b", "most", "e", **exact),
        "earner against engine in bfloat16, 4B shape": on_both("agreement", "4b", "rms", "e", **low),
        "**LoRA of rank 32**": f"| {needs / 2**30:.0f} GiB |",
        "**One iteration of `crafter_online`**": f"| {seconds} |",
    }
    rows = {"packed": "**Log-probs by kernels**", "masked": "log-probs by torch's operators under a mask"}
    for side, row in rows.items():
        texts[row] = on_both("attention", "0.6b", side, "e", what="log-probs")
    yield from figures(texts)


def gpu_curve_claims() -> Iterator[Claim]:
    """Whole games by 26M parameters."""
    curve, rows = data("gpu_curve"), data("gpu_curve")["training"]
    first, last = curve["evaluations"][0], curve["evaluations"][-1]
    moved = curve["gains_world_by_world"][str(last["iteration"])]
    low, high = f"{moved['low']:z.2f}", f"{moved['high']:+z.2f}"
    yield Claim(STUDIES, "", f"{moved['mean']:+z.2f} ({low} to {high})")
    for item in (first, last, data("gpu_curve_h200")["evaluations"][0]):
        words = _unique(item).replace(" (", " unique (")
        yield Claim(STUDIES, "", f"{words} and score {item['crafter_score']:z.1f}")
    text = changed(*(_unique(item).replace(" (", " | ").removesuffix(")") for item in (first, last)))
    yield Claim(FIGURES, "by 26M parameters: unique achievements after", f"| {text} |")
    row = "**RL's part of whole games by 26M parameters**"
    yield Claim(FIGURES, row, f"{sum(row['optim/steps'] for row in rows):.0f} steps in 20 iterations")
    yield Claim(FIGURES, row, f"| {moved['mean']:+z.2f} | {low} to {high} |")
    decisions = statistics.fmean(item["decision/count"] for item in rows)
    uncertain = 1 - statistics.fmean(item["optim/certain_frac"] for item in rows)
    words = f"{round(decisions * uncertain, -3):,.0f} of {round(decisions, -3):,.0f} decisions"
    yield Claim(FIGURES, "", f"uncertain at some {words} ({100 * uncertain:.0f} % of the tokens)")


def _unique(item: Mapping[str, float]) -> str:
    name = "unique_achievements"
    return f"{item[name]:z.2f} ({item[f'{name}_low']:z.2f} to {item[f'{name}_high']:z.2f})"


def coverage_claims() -> Iterator[Claim]:
    """How often intervals contain the Crafter score, and how wide they are."""
    cells, evaluations = data("score_coverage")["coverage"], data("score_coverage")["evaluations"]
    scripts = ("from scratch", "demo", "strong")
    rows: dict[str, tuple[tuple[str, ...], int]] = {
        "scripts from scratch,": (scripts[:1], 100), "scripts as short games,": (scripts[1:2], 100),
        "strong scripts,": (scripts[2:], 100),
        "| all these scripts | 32 |": (scripts, 32),
        **{f"| drawn rates | {games} |": (("drawn",), games) for games in (100, 32)},
        **{f"| beyond the limits | {games} |": (("beyond",), games) for games in (100, 32, 256)},
    }  # fmt: skip
    for row, (kinds, games) in rows.items():
        of_row = [
            cell
            for cell in cells
            if cell["population"].startswith(kinds) and (cell["worlds"], cell["plays"]) == (games, 1)
        ]
        both = (_range([cell[method]["coverage"] for cell in of_row], 2) for method in ("interval", "delta"))
        yield Claim(FIGURES, row, f"| {' | '.join(both)} |")
    for name, row in (
        ("random play, 400 held-out worlds", "**Score of random play**"),
        ("the teacher, 800 worlds of crafter_gpu", "**Score of the teacher**"),
    ):
        one = evaluations[name]
        yield Claim(FIGURES, row, f"| {one['mean']:.1f} % | 95 % {one['low']:.1f} to {one['high']:.1f} |")
    widths = [
        cell["interval"]["relative_width"]
        for cell in cells
        if (cell["worlds"], cell["plays"]) == (100, 1) and not cell["population"].startswith("beyond")
    ]
    narrow, wide = [w for w in widths if w < 1.8], [w for w in widths if w >= 1.8]
    yield Claim(FIGURES, "**Width** of the interval", f"| {_range(narrow, 1, 'x')} |")
    yield Claim(FIGURES, "the same width if six or more", f"| {_range(wide, 1, 'x')} |")


def _range(values: Sequence[float], digits: int, sign: str = "") -> str:
    return f"{sign}{min(values):.{digits}f} to {sign}{max(values):.{digits}f}"


def fault_claims() -> Iterator[Claim]:
    """Kills of jobs in one process, and in several."""
    kills = _kills("faults", ("service", "job", "task_app", "database"))
    wrong = "some" if any(job["wrong"] for job in data("faults")["jobs"].values()) else "none"
    for text in (f"{kills} random kills", wrong):
        yield Claim(README, "random kills of service, job, task app", text)
    for text in (f"killed {kills} times", f"| {wrong} |"):
        yield Claim(FIGURES, "**Kills**: 20 short jobs", text)
    kills = _kills("faults_processes", ("service", "job", "task_app", "database", "learner", "gateway"))
    kept = data("faults_processes")["counts"]["kept"]
    yield Claim(FIGURES, "**Kills of a job in processes**", f"killed {kills} times")
    yield Claim(FIGURES, "in these jobs: rollouts in flight at a kill", f"| {kept} |")
    for study, kind, row, digits in (
        ("faults", "service", "seconds from a kill of the service to the first", 1),
        ("faults", "job", "| the same after a kill of the job", 1),
        ("faults", "task_app", "the same after a kill of the task app", 1),
        ("faults_processes", "gateway", "seconds from a kill of one of two gateways", 1),
        ("faults_processes", "learner", "in these jobs, after a kill of the learner", 0),
        ("faults_processes", "service", "in these jobs, after a kill of the service", 0),
        ("faults_processes", "job", "in these jobs, after a kill of the job", 0),
    ):
        jobs = data(study)["jobs"].values()
        seconds = [value for job in jobs for value in job["recovery_s"].get(kind, ())]
        longest = f"{max(seconds):z.1f}" if study == "faults" else f"{max(seconds):.0f}"
        yield Claim(FIGURES, row, f"| {statistics.median(seconds):z.{digits}f} | longest {longest} |")


def _kills(study: str, kinds: Sequence[str]) -> int:
    return sum(data(study)["counts"][f"{kind}_killed"] for kind in kinds)


def rank_claims() -> Iterator[Claim]:
    """Several ranks, two Ray nodes."""
    ranks, faults, ray = data("ranks")["ranks"].values(), data("ranks")["faults"], data("ray")
    gradient = max(part["gradient"] for found in ranks for part in found.values() if "gradient" in part)
    update, resumed = (
        max(found[case][figure] for found in ranks)
        for case, figure in (("update", "update"), ("resume", "weights"))
    )
    still, seconds = [item["others_s"] for item in faults["stands still"]], ray["goes_on_s"]
    assert max(still) < 10, "the limit of the row"
    yield from figures(
        {
            "**A learner of 2 and of 3 ranks**": f"| {_short(gradient)} |",
            "ranks' weights after three passes": f"| {_short(update)} |",
            "ranks' weights when resumed": f"| {_short(resumed)} |",
            "a rank is killed: seconds": f"| {columns([item['others_s'] for item in faults['killed']])} |",
            "a rank hangs": f"| {statistics.median(still):z.1f} |",
            "Ray: seconds from the kill": f"| {statistics.median(seconds):.0f} | {_range(seconds, 1)} |",
            "Ray: a learner on two nodes": f"| {_short(ray['first_update_on_two_nodes'])} |",
            "**Two Ray nodes, one killed**": f"| {ray['rollouts_lost']} |",
        }
    )


def server_claims() -> Iterator[Claim]:
    """vLLM servers, weights sent to them, and the soak."""
    vllm, sent, counts = data("vllm"), data("broadcast"), data("soak")["counts"]
    row, job, adapters = "**vLLM servers of a run on a CPU**", vllm["job"], vllm["adapters"]
    yield Claim(FIGURES, row, f"of {job['decisions']} decisions")
    yield Claim(FIGURES, row, f"| {_short(job['logprob_max'], 0)} |")
    row = "vLLM: the same for"
    yield Claim(FIGURES, row, f"for {_requests(vllm)} requests")
    yield Claim(FIGURES, row, f"| {_short(max(way['logprob_max'] for way in _ways(vllm)), 0)} |")
    lost = sum(way["requests_lost"] for way in _ways(vllm))
    row = "vLLM: requests lost"
    yield Claim(FIGURES, row, f"| {lost}, {job['rollouts_lost']}, {job['decisions_of_old_weights']} |")
    row = "**Adapters merged by the server**"
    yield Claim(FIGURES, row, f"{adapters['decisions']} decisions")
    yield Claim(FIGURES, row, f"| {_short(adapters['logprob_max'], 0)} |")
    words = f"| {adapters['publish_bytes'] / 1e3:.0f} kB, {adapters['merged_bytes'] / 1e3:,.0f} kB |"
    yield Claim(FIGURES, "adapters, rank 2", words)
    row, job = "**Weights sent to vLLM servers by the learner**", sent["job"]
    yield Claim(FIGURES, row, f"{job['decisions']:,} decisions and of {_requests(sent)} requests")
    most = max([job["logprob_max"], *(way["logprob_max"] for way in _ways(sent))])
    yield Claim(FIGURES, row, f"| {_short(most, 0)} |")
    words = f"| {job['decisions_of_old_weights']}, {job['rollouts_lost']} |"
    yield Claim(FIGURES, "weights sent: decisions of old", words)
    amid = sent["swap"]["killed_amid_a_pass"]
    yield Claim(FIGURES, "a server killed during a transfer", f"| {amid['seconds']:z.1f} |")
    for row, way, name, digits in (
        ("a publish of 445 MiB", "broadcast", "seconds", 1),
        ("same publish by folder", "folder", "seconds", 1),
        ("memory that the learner needs", "broadcast", "learner_extra_mib", 0),
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
    """The measurement's own noise."""
    noise = {
        setting: [seed["noise"] for seed in data("truth")[setting]["seeds"].values()]
        for setting in ("crafter", "one_action", "sokoban", "rooms", "whole")
    }
    ratios = {setting: [one["ratio"] for one in seeds] for setting, seeds in noise.items()}
    # That bring the standard error to 0.3 of the spread: it falls with their root.
    pairs = math.ceil(16 * (statistics.median(ratios["crafter"]) / 0.3) ** 2)
    rows = (
        "**Noise of the truth**", "noise, short games with one", "noise, Sokoban", "noise, a corridor",
        "noise, whole games",
    )  # fmt: skip
    texts = {row: f"| {columns(values)} |" for row, values in zip(rows, ratios.values(), strict=True)}
    yield from figures(texts | {"pairs a decision that would bring": f"| {pairs} |"})


def shared_prefix_claims() -> Iterator[Claim]:
    """Shared beginnings that an update computes once."""
    cases, times = data("shared_prefix")["cases"], {}
    rows = (
        "**Shared beginnings of prompts computed once**", "shared beginnings, full text, a shape",
        "shared beginnings, dialogues", "shared beginnings, short games",
    )  # fmt: skip
    for (name, case), row in zip(cases.items(), rows, strict=True):
        times[name] = f"x{min(case['plain_s']) / min(case['shared_s']):.2f}"
        yield Claim(FIGURES, row, f"| {times[name]} |")
    first, gradients = cases["full text, tiny-0.8m"], [case["gradient"] for case in cases.values()]
    text = f"| x{min(first['trl_s']) / min(first['shared_s']):.1f} |"
    yield Claim(FIGURES, "the same update by `trl`'s GRPOTrainer", text)
    words = f"| {max(gradients):.1e} | {min(gradients):.1e} to {max(gradients):.1e} |"
    yield Claim(FIGURES, "shared beginnings: difference that sharing makes", words)
    yield Claim(README, "an update on Crafter's full text", times["full text, tiny-0.8m"])


def task_claims() -> Iterator[Claim]:
    """A corridor, BabyAI, Sokoban, Orders, FrozenLake, and scripted players of Crafter."""
    starts = Arms("starts", "unique_achievements")
    sokoban, orders, lake = (Arms(name, "outcome_reward") for name in ("sokoban", "orders", "frozen_lake"))
    scratch = "crafter_from_scratch"
    alone, scores = Arms(scratch, "unique_achievements"), Arms(scratch, "crafter_score").after(scratch)
    laptop = "crafter_laptop"
    taught, its_scores = Arms(laptop, "unique_achievements"), Arms(laptop, "crafter_score")
    for arm, row in (("frontier", "**`frontier` in a corridor"), ("plain", "the same corridor, all")):
        ends = starts.after(arm)  # by the most probable calls
        yield Claim(FIGURES, row, f"| {sum(end == 3 for end in ends)} of {len(ends)} |")
    runs = data("babyai")["unseen"]["by_seed"].values()  # of missions that no choice of a setting has seen
    least = min((run["gain"] for run in runs), key=lambda gain: (gain["mean"], gain["low"]))
    players, unique = data("player_limits")["players"], "unique_achievements"
    immortal, chosen = players["view, blows do not hurt"], data("best_of_n")["gain"]
    yield from figures(
        {
            "**BabyAI GoToLocal**": f"| +{_with_bounds(least, 'mean')} |",
            "BabyAI: success rate after imitation": change_columns(
                *([run[when]["mean"] for run in runs] for when in ("before", "after"))
            ),
            "**Sokoban**, 300 boards of 6 by 6": f"| +{columns(sokoban.gain('sokoban'))} |",
            "Sokoban: share of solved boards after imitation": change_columns(
                sokoban.before("sokoban"), sokoban.after("sokoban")
            ),
            "**Orders**, 300 databases": f"| +{columns(orders.gain('orders'))} |",
            "Orders: share of exact": change_columns(orders.before("orders"), orders.after("orders")),
            "**FrozenLake** by gymnasium": change_columns(
                lake.before("frozen_lake"), lake.after("frozen_lake")
            ),
            "**Without a teacher**": (
                f"| {statistics.median(scores):.1f} % | {min(scores):.1f} to {max(scores):.1f} |"
            ),
            "without a teacher: unique": change_columns(alone.before(scratch), alone.after(scratch)),
            "**Whole games: gain by RL**": f"| +{mean_columns(taught.gain(laptop))}",
            "whole games: unique achievements": change_columns(taught.before(laptop), taught.after(laptop)),
            "whole games: Crafter score": change_columns(
                its_scores.before(laptop), its_scores.after(laptop), digits=1
            ),
            "better choices at uncertain decisions": f"| +{_with_bounds(chosen, 'mean')} |",
            "**The scripted teacher": f"| {_with_bounds(players['view'], unique)} |",
            "the same teacher where blows": f"| {_with_bounds(immortal, unique)} |",
        }
    )


def _with_bounds(item: Mapping[str, Any], name: str) -> str:
    """A figure and its 95 % interval, in two cells."""
    return f"{item[name]:.2f} | 95 % {item['low']:.2f} to {item['high']:.2f}"


def mutant_claims() -> Iterator[Claim]:
    counted = [row for row in data("mutants")["rows"] if "equivalent" not in row]
    killed = sum(bool(row["killed_by"]) for row in counted) / len(counted)
    row = f"mutants that the tests of `core` and `credit` kill, of {len(counted)}"
    yield Claim(FIGURES, row, f"| {killed:.1%} |".replace("%", " %"))


def claims() -> list[Claim]:
    """All of them."""
    parts = (
        task_claims, shared_prefix_claims, demo_claims, reward_mode_claims, credit_claims, statelm_claims,
        dialogue_claims, mixture_claims, ahead_claims, captured_claims, cost_claims, gpu_claims,
        gpu_curve_claims, coverage_claims, fault_claims, rank_claims, server_claims, truth_claims,
        mutant_claims,
    )  # fmt: skip
    return [claim for part in parts for claim in part()]
