"""The panels of a run's page, each of which is a chart: their order, sections and titles.

The declarations of the metrics (`core/metric.py`) say which lines a panel has. A page shows the panels for
which a run has metrics. `make_other_panels` generates a panel for each metric that no panel contains.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import get_args

from trainer_backend.core.metric import Line, Metric, Panel, Section
from trainer_backend.metrics import DECLARED
from trainer_backend.run.timeline import PREFIX

_UNIQUE_TITLE = "Unique achievements an episode"

# The panels in the order of a page. A metric's declaration names its panel, or defines a panel for itself.
_TABLE: tuple[Panel, ...] = (
    Panel("outcome", "Outcome", "Outcome an episode",
          "Means of training and of held-out episodes. Bands: 95 %, over groups and episodes.", wide=True),
    Panel("unique", "Outcome", _UNIQUE_TITLE,
          "Means of training and of held-out episodes. Band: 95 %, over episodes.", wide=True),
    Panel("score", "Outcome", "Crafter score and progress",
          "In percent: geometric mean of the success rates, and their mean. Bands: 95 %, over episodes."),
    Panel("answers", "Outcome", "Score of an answer", "Mean over the answers that an interaction scored."),
    Panel("reward", "Rewards and credit", "Reward an episode", "Sum of r_t, mean over the batch's episodes."),
    Panel("reward_sum", "Rewards and credit", "Sum of r_t", "Of all decisions of the batch."),
    Panel("event_reward", "Rewards and credit", "Decisions with event reward",
          "Share of decisions that unlocked something; share of episodes with any reward.", form="percent"),
    Panel("achieved", "Rewards and credit", "Achievement deltas",
          "Sums over the batch: first unlocks, and counters that rose."),
    Panel("anchors", "Rewards and credit", "Anchor groups",
          "States that several decisions met, of estimators that compare states."),
    Panel("forks", "Rewards and credit", "Trained forks",
          "Share of the trained decisions that come after forks.", form="percent"),
    Panel("length", "Episodes", "Length of an episode", "Means of the batch."),
    Panel("endings", "Episodes", "How episodes ended", "Share of each stop reason.", form="percent",
          stacked=True),
    Panel("invalid", "Episodes", "Refused decisions",
          "Share of decisions whose call could not be carried out.", form="percent"),
    Panel("context", "Episodes", "Context of an episode", "Means of an episode."),
    Panel("peak", "Episodes", "Longest context", "Tokens of an episode's longest prompt and answer, mean."),
    Panel("loss", "Losses and policy", "Loss", "Mean over the iteration's steps."),
    Panel("entropy", "Losses and policy", "Entropy", "Of the policy, nats a token."),
    Panel("kl", "Losses and policy", "KL",
          "How far the updates moved the policy, and how far it is from others; nats a token."),
    Panel("ratio", "Losses and policy", "Probability ratio",
          "Of new to proximal policy, over the sampled tokens."),
    Panel("clip", "Losses and policy", "Tokens held by the clip",
          "Share of tokens whose ratio was held at a bound.", form="percent"),
    Panel("critic", "Losses and policy", "Critic",
          "Share of the spread of returns that V foretold; means of V and of returns."),
    Panel("gradient", "Losses and policy", "Gradient norm", "Mean norm before clipping."),
    Panel("rate", "Losses and policy", "Learning rate", "Of the iteration's last step."),
    Panel("decision_kl", "Losses and policy", "KL of an iteration",
          "How far its steps moved the policy, nats a decision that is not certain (desired_kl)."),
    Panel("staleness", "Losses and policy", "Staleness",
          "Versions that the samplers lay behind the policy that learns from them."),
    Panel("mismatch", "Losses and policy", "Sampler against learner",
          "Log-probs of the same tokens under the same weights, nats."),
    Panel("mix", "Mixture", "Policies that played", "Finished rollouts of each policy.", stacked=True),
    Panel("starts", "Mixture", "Starts at snapshots",
          "Share of the games that began at one, and of these the share that gained something.",
          form="percent"),
    Panel("starts_pool", "Mixture", "Snapshots to start at",
          "How many are kept, by the number of achievements before them.", stacked=True),
    Panel("alpha", "Mixture", "Share of the actor",
          "P(actor) of the schedule, and the share that was planned.", form="percent"),
    Panel("by_policy", "Mixture", "Outcome by policy", "Mean of an episode of each."),
    Panel("ess", "Mixture", "Effective samples",
          "Of each policy's truncated weights, as a share of its samples.", form="percent"),
    Panel("counted", "Mixture", "How much they counted",
          "A fixed policy's samples, as a share of as many of the actor's.", form="percent"),
    Panel("time", "Speed", "Time of an iteration", "Seconds of each stage.", form="seconds", stacked=True),
    Panel("waits", "Speed", "Who waited", "Seconds in which only one of the two worked.", form="seconds"),
    Panel("speed", "Speed", "Decisions a second", "While collecting, and over the whole iteration."),
    Panel("failures", "System", "Failed rollouts",
          "By cause, those that were planned again too; and those that were lost for good, by stage."),
    Panel("apps", "System", "Seconds a decision", "Of each task app, with its model calls; mean.",
          form="seconds"),
    Panel("engine", "System", "Requests at once", "That the sampler worked on, mean over its steps."),
    Panel("experts", "System", "Load of the experts",
          "Busiest expert over an even load, and experts without tokens; means over the layers."),
)  # fmt: skip


def fill(table: Iterable[Panel], metrics: Sequence[Metric]) -> tuple[Panel, ...]:
    """Return the panels that `table` or a metric defines, sorted by section, with the lines of `metrics`.

    In a panel, the lines of iterations come first. Lines of the same kind keep the order of `metrics`.
    """
    own = dict.fromkeys(metric.panel for metric in metrics if isinstance(metric.panel, Panel))
    panels = sorted((*table, *own), key=lambda panel: get_args(Section).index(panel.section))
    lines: dict[str, list[Line]] = {panel.key: [] for panel in panels}
    for metric in metrics:
        key = metric.panel.key if isinstance(metric.panel, Panel) else metric.panel
        if key and key not in lines:
            raise ValueError(f"{metric.name}: panel {key!r} is not one of {', '.join(lines)}")
        if key:
            lines[key] += metric.lines()
    for several in lines.values():
        several.sort(key=lambda line: line.kind != "iteration")
    return tuple(replace(panel, lines=tuple(lines[panel.key])) for panel in panels)


PANELS = fill(_TABLE, DECLARED)


def restrict(panels: Iterable[Panel], metrics: Iterable[tuple[str, str]]) -> list[Panel]:
    """Drop lines whose metric a run lacks, and empty panels. `metrics` are the run's (kind, metric) pairs."""
    pairs = sorted(set(metrics))
    lines = [tuple(line for part in panel.lines for line in _lines(part, pairs)) for panel in panels]
    return [replace(panel, lines=own) for panel, own in zip(panels, lines, strict=True) if own]


def merge_outcome(panels: Iterable[Panel], outcome: str) -> list[Panel]:
    """Drop the panel "unique" if it shows the outcome, because the panel "outcome" shows the same.

    The panel "outcome" then gets the title of the dropped panel.
    """
    if outcome != "unique achievements":
        return list(panels)
    return [
        replace(panel, title=_UNIQUE_TITLE) if panel.key == "outcome" else panel
        for panel in panels
        if panel.key != "unique"
    ]


def make_other_panels(metrics: Iterable[tuple[str, str]]) -> list[Panel]:
    """Make a panel for every iteration metric that no panel in `PANELS` shows, except for times of day."""
    pairs = sorted(set(metrics))
    drawn = {name for panel in restrict(PANELS, pairs) for line in panel.lines for name in line.metrics}
    names = [
        name
        for kind, name in pairs
        if kind == "iteration" and name not in drawn and not name.startswith(PREFIX)
    ]
    return [Panel(f"rest:{name}", "", name, "", (Line(name, name.rpartition("/")[2]),)) for name in names]


def split_by_line(panels: Iterable[Panel]) -> list[Panel]:
    """Return a panel for every line of the panels, because a chart of several runs compares one metric."""
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
