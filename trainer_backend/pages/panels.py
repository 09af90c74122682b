"""The charts of a run in order: their metrics, sections and titles.

A `*` in the name of a metric matches any text, such as every stop reason. A run shows the panels for which it
has metrics, and a generated panel for each metric in no panel (`make_other_panels`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from trainer_backend.run.timeline import PREFIX

Kind = Literal["iteration", "evaluation", "teacher", "prompts"]
Form = Literal["number", "percent", "seconds"]
Section = Literal[
    "Outcome", "Rewards and credit", "Episodes", "Losses and policy", "Mixture", "Speed", "System", ""
]


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of a panel. Metrics of the same name with `_low` and `_high` are its band."""

    metric: str  # may contain a `*`
    label: str = ""
    """The name in the legend; absent: the text that the `*` matches."""
    kind: Kind = "iteration"
    band: tuple[str, str] | None = None
    """Metrics of the bounds, if they have other names."""
    needs: str | None = None
    """A metric of an iteration; runs without it do not show this line."""

    @property
    def bounds(self) -> tuple[str, str]:
        return self.band or (f"{self.metric}_low", f"{self.metric}_high")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of the line and of its band."""
        return (self.metric, *self.bounds)


@dataclass(frozen=True)
class Panel:
    """A chart; all fields except `lines` are also keys of the chart (series.make_chart)."""

    key: str  # in addresses
    section: Section
    title: str
    note: str  # a sentence with the unit
    lines: tuple[Line, ...]
    form: Form = "number"
    stacked: bool = False  # its lines are parts of a whole
    wide: bool = False
    unit: str = "iteration"  # of the horizontal axis
    scatter: bool = False  # points without a line between them


_ACHIEVEMENTS = "episode/unique_achievements"  # only of an environment with achievements
_UNIQUE_TITLE = "Unique achievements an episode"

PANELS: tuple[Panel, ...] = (
    Panel("outcome", "Outcome", "Outcome an episode",
          "Means of training and of held-out episodes. Bands: 95 %, over groups and episodes.",
          (Line("episode/outcome_reward", "training"), Line("eval/outcome_reward", "held-out", "evaluation")),
          wide=True),
    Panel("unique", "Outcome", _UNIQUE_TITLE,
          "Means of training and of held-out episodes. Band: 95 %, over episodes.",
          (Line(_ACHIEVEMENTS, "training"), Line("eval/unique_achievements", "held-out", "evaluation")),
          wide=True),
    Panel("score", "Outcome", "Crafter score and progress",
          "In percent: geometric mean of the success rates, and their mean. Bands: 95 %, over episodes.",
          (Line("eval/crafter_score", "score", "evaluation"),
          Line("eval/progress", "progress", "evaluation"))),
    Panel("answers", "Outcome", "Score of an answer", "Mean over the answers that an interaction scored.",
          (Line("interaction/score", "training"), Line("interaction/score", "held-out", "evaluation"))),
    Panel("reward", "Rewards and credit", "Reward an episode", "Sum of r_t, mean over the batch's episodes.",
          (Line("reward/mean", "reward"), Line("reward/kl", "paid for KL"))),
    Panel("reward_sum", "Rewards and credit", "Sum of r_t", "Of all decisions of the batch.",
          (Line("reward/sum", "sum of r_t"),)),
    Panel("event_reward", "Rewards and credit", "Decisions with event reward",
          "Share of decisions that unlocked something; share of episodes with any reward.",
          (Line("decision/nonzero_frac", "decisions", needs=_ACHIEVEMENTS),
          Line("reward/nonzero_episode_frac", "episodes")), form="percent"),
    Panel("achieved", "Rewards and credit", "Achievement deltas",
          "Sums over the batch: first unlocks, and counters that rose.",
          (Line("decision/unique_sum", "unique", needs=_ACHIEVEMENTS),
          Line("decision/ach_sum", "all", needs=_ACHIEVEMENTS))),
    Panel("anchors", "Rewards and credit", "Anchor groups",
          "States that several decisions met, of estimators that compare states.",
          (Line("anchors/mean_size", "mean size"), Line("anchors/singleton_frac", "share alone"))),
    Panel("forks", "Rewards and credit", "Trained forks",
          "Share of the trained decisions that come after forks.",
          (Line("forks/share", "after forks"),), form="percent"),
    Panel("fork_gain", "Rewards and credit", "Gain of forks",
          "Mean return of continuations less that of their parents from there on.",
          (Line("forks/gain", "gain"),)),
    Panel("length", "Episodes", "Length of an episode", "Means of the batch.",
          (Line("episode/decisions", "decisions"), Line("episode/env_steps", "env steps"))),
    Panel("endings", "Episodes", "How episodes ended", "Share of each stop reason.", (Line("stop/*"),),
          form="percent", stacked=True),
    Panel("invalid", "Episodes", "Refused decisions",
          "Share of decisions whose call could not be carried out.",
          (Line("episode/invalid_frac", "training"), Line("eval/invalid_frac", "held-out", "evaluation")),
          form="percent"),
    Panel("context", "Episodes", "Context of an episode", "Means of an episode.",
          (Line("statelm/deletes", "messages deleted"), Line("statelm/segments", "segments"))),
    Panel("peak", "Episodes", "Longest context", "Tokens of an episode's longest prompt and answer, mean.",
          (Line("statelm/peak_context", "training"), Line("statelm/peak_context", "held-out", "evaluation"))),
    Panel("loss", "Losses and policy", "Loss", "Mean over the iteration's steps.",
          (Line("loss/policy", "policy"), Line("value/loss", "value"))),
    Panel("entropy", "Losses and policy", "Entropy", "Of the policy, nats a token.",
          (Line("loss/entropy", "entropy"),)),
    Panel("kl", "Losses and policy", "KL",
          "How far the updates moved the policy, and how far it is from others; nats a token.",
          (Line("loss/approx_kl", "of an update"), Line("loss/kl_to_proximal", "to the proximal policy"),
          Line("loss/kl", "in the loss"), Line("kl/reference", "to the reference"))),
    Panel("ratio", "Losses and policy", "Probability ratio",
          "Of new to proximal policy, over the sampled tokens.",
          (Line("loss/ratio_mean", "mean", band=("loss/ratio_min", "loss/ratio_max")),)),
    Panel("clip", "Losses and policy", "Tokens held by the clip",
          "Share of tokens whose ratio was held at a bound.", (Line("loss/clip_low_share", "lower"),
          Line("loss/clip_high_share", "upper")), form="percent"),
    Panel("critic", "Losses and policy", "Critic",
          "Share of the spread of returns that V foretold; means of V and of returns.",
          (Line("value/explained_variance", "explained"), Line("value/mean", "mean V"),
          Line("value/return_mean", "mean return"))),
    Panel("gradient", "Losses and policy", "Gradient norm", "Mean norm before clipping.",
          (Line("optim/grad_norm", "norm"),)),
    Panel("rate", "Losses and policy", "Learning rate", "Of the iteration's last step.",
          (Line("optim/lr", "rate"),)),
    Panel("decision_kl", "Losses and policy", "KL of an iteration",
          "How far its steps moved the policy, nats a decision that is not certain (desired_kl).",
          (Line("kl/decision", "moved"),)),
    Panel("staleness", "Losses and policy", "Staleness",
          "Versions that the samplers lay behind the policy that learns from them.",
          (Line("policy/staleness_max", "largest"), Line("policy/staleness_mean", "mean"))),
    Panel("mismatch", "Losses and policy", "Sampler against learner",
          "Log-probs of the same tokens under the same weights, nats.",
          (Line("mismatch/logprob_max", "largest"), Line("mismatch/logprob_mean", "mean"))),
    Panel("mix", "Mixture", "Policies that played", "Finished rollouts of each policy.",
          (Line("mixture/*/episodes"),), stacked=True),
    Panel("starts", "Mixture", "Starts at snapshots",
          "Share of the games that began at one, and of these the share that gained something.",
          (Line("starts/share", "share"), Line("starts/gain", "gained")), form="percent"),
    Panel("starts_pool", "Mixture", "Snapshots to start at",
          "How many are kept, by what was achieved before them.", (Line("starts/*/kept"),), stacked=True),
    Panel("alpha", "Mixture", "Share of the actor",
          "P(actor) of the schedule, and the share that was planned.", (Line("mixture/alpha", "schedule"),
          Line("rollout/policy_choice", "planned")), form="percent"),
    Panel("by_policy", "Mixture", "Outcome by policy", "Mean of an episode of each.",
          (Line("mixture/*/outcome_reward"),)),
    Panel("ess", "Mixture", "Effective samples",
          "Of each policy's truncated weights, as a share of its samples.", (Line("mixture/*/ess"),),
          form="percent"),
    Panel("counted", "Mixture", "How much they counted",
          "A fixed policy's samples, as a share of as many of the actor's.",
          (Line("mixture/*/counted_share"),), form="percent"),
    Panel("weights", "Mixture", "Weights held at the cap", "Share of each policy's importance weights.",
          (Line("mixture/*/truncated_share"),), form="percent"),
    Panel("time", "Speed", "Time of an iteration", "Seconds of each stage.",
          (Line("time/collect_s", "collect"), Line("time/update_s", "update"),
          Line("time/credit_s", "credit, store"), Line("time/publish_s", "publish")), form="seconds",
          stacked=True),
    Panel("waits", "Speed", "Who waited", "Seconds in which only one of the two worked.",
          (Line("time/wait_collect_s", "the learner"), Line("time/wait_learner_s", "the collectors")),
          form="seconds"),
    Panel("speed", "Speed", "Decisions a second", "While collecting, and over the whole iteration.",
          (Line("perf/collect_decisions_per_s", "collecting"), Line("perf/decisions_per_s", "all in all"))),
    Panel("failures", "System", "Failed rollouts",
          "By cause, those that were planned again too; and those that were lost for good, by stage.",
          (Line("rollout/failure/*"), Line("rollout/failed", "lost for good"),
          Line("branch/failed", "branches, lost"), Line("rollout/failed", "held-out, lost", "evaluation"),
          Line("rollout/failed", "warm-up, lost", "teacher"),
          Line("rollout/failed", "prompts, lost", "prompts"))),
    Panel("apps", "System", "Seconds a decision", "Of each task app, with its model calls; mean.",
          (Line("app/seconds_per_decision/*"),), form="seconds"),
    Panel("engine", "System", "Requests at once", "That the sampler worked on, mean over its steps.",
          (Line("inference/mean_running", "running"),)),
    Panel("experts", "System", "Load of the experts",
          "Busiest expert over an even load, and experts without tokens; means over the layers.",
          (Line("moe/load_max", "busiest"), Line("moe/idle_experts", "idle"))),
    Panel("ranks", "System", "Ranks of the learner",
          "Most tokens of a rank over the mean; the others wait for it.",
          (Line("learner/tokens_imbalance", "most over mean"),)),
)  # fmt: skip


def restrict(panels: Iterable[Panel], metrics: Iterable[tuple[str, str]]) -> list[Panel]:
    """Keep the panels and lines for which a run has metrics, given as (kind, metric) pairs."""
    pairs = sorted(set(metrics))
    lines = [tuple(line for part in panel.lines for line in _lines(part, pairs)) for panel in panels]
    return [replace(panel, lines=own) for panel, own in zip(panels, lines, strict=True) if own]


def merge_outcome(panels: Iterable[Panel], outcome: str) -> list[Panel]:
    """Drop the panel of unique achievements if these are the `outcome`, which has a panel."""
    if outcome != "unique achievements":
        return list(panels)
    return [
        replace(panel, title=_UNIQUE_TITLE) if panel.key == "outcome" else panel
        for panel in panels
        if panel.key != "unique"
    ]


def make_other_panels(metrics: Iterable[tuple[str, str]]) -> list[Panel]:
    """Make a panel for every metric of an iteration in no panel of `PANELS`, except times of day."""
    pairs = sorted(set(metrics))
    drawn = {name for panel in restrict(PANELS, pairs) for line in panel.lines for name in line.metrics}
    names = [
        name
        for kind, name in pairs
        if kind == "iteration" and name not in drawn and not name.startswith(PREFIX)
    ]
    return [Panel(f"rest:{name}", "", name, "", (Line(name, name.rpartition("/")[2]),)) for name in names]


def split_by_line(panels: Iterable[Panel]) -> list[Panel]:
    """Make a panel for every line, since a chart of several runs compares one metric."""
    return [
        Panel(
            panel.key if len(panel.lines) == 1 else f"{panel.key}:{number}",
            panel.section,
            panel.title if len(panel.lines) == 1 else f"{panel.title}: {line.label}",
            panel.note, (line,), panel.form,
        )
        for panel in panels
        for number, line in enumerate(panel.lines)
    ]  # fmt: skip


def _lines(line: Line, pairs: list[tuple[str, str]]) -> Iterator[Line]:
    begin, star, end = line.metric.partition("*")
    if line.needs is not None and ("iteration", line.needs) not in pairs:
        return
    if not star:
        if (line.kind, line.metric) in pairs:
            yield line
        return
    for kind, name in pairs:
        between = name.removeprefix(begin).removesuffix(end)
        if kind == line.kind and between and name == f"{begin}{between}{end}":
            yield Line(name, line.label or between.replace("_", " "), line.kind)
