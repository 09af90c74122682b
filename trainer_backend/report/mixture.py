"""What a report tells of a mixture: who sampled, what that was worth, and how much of it counted."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from trainer_backend.core.mixture_history import COUNTED, OUTCOME, mean_over, metric_of, past_of
from trainer_backend.core.policies import ACTOR
from trainer_backend.evaluation.outcome import outcome_name
from trainer_backend.jobfile.mixture_table import RolloutOnlyTable
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.report.charts import Picture, Theme, from_zero, picture, plain, whole_numbers
from trainer_backend.report.story import Row, Story

Line = tuple[str, str]
_SHARE = "rollout/policy_choice"
_LINES = ("-", "--", "-.", ":")


def mixture_settings(job: JobConfig) -> list[Line]:
    """Who may sample, and by which schedule; nothing of a job without fixed policies."""
    schedule = job.rollout_allocation_schedule
    if schedule is None:
        return []
    keys = schedule.model_dump(mode="json", exclude_none=True, exclude_defaults=True, exclude={"type"})
    told = ", ".join(f"{name} = {value}" for name, value in keys.items() if value != [])
    return [
        *((f"fixed policy {table.name!r}", _described(table)) for table in job.fixed_policies),
        ("rollout_allocation_schedule", f"{schedule.type}{': ' if told else ''}{told}"),
    ]


def mixture_lines(story: Story) -> list[Line]:
    """What each policy played, over the whole run, and how much of a fixed one's samples counted."""
    rows = [row for row in story.iterations if _SHARE in row]
    return [
        (f"training episodes by {policy!r}", _played(rows, policy, outcome_name(story.told)))
        for policy in (_policies(story.job) if rows else ())
    ]


def policies_chart(story: Story) -> Picture | None:
    """Outcome by policy, who sampled, and how much its samples counted, over iterations."""
    rows = [row for row in story.iterations if _SHARE in row]
    if not rows:
        return None
    policies = _policies(story.job)
    measured = f"{outcome_name(story.told)} an episode"

    def draw(figure: Figure, theme: Theme) -> None:
        outcomes, shares = figure.subplots(2, 1, sharex=True)
        for index, policy in enumerate(policies):
            colour, line = theme.series[index % len(theme.series)], _LINES[index % len(_LINES)]
            look = {"color": colour, "linestyle": line}
            outcomes.plot(*_points(rows, metric_of(policy, OUTCOME)), marker=".", label=plain(policy), **look)
            if policy != ACTOR:
                counted = _points(rows, metric_of(policy, COUNTED))
                shares.plot(*counted, marker=".", label=plain(f"{policy}: how much it counted"), **look)
        shares.plot(*_points(rows, _SHARE), color=theme.ink, linewidth=1.0, label="rollouts by the actor")
        outcomes.set_title(plain(measured))
        from_zero(outcomes)
        outcomes.legend(loc="best")
        shares.set_ylim(-0.03, 1.08)
        shares.yaxis.set_major_formatter(PercentFormatter(1.0))
        shares.set_xlabel("iteration")
        shares.xaxis.set_major_locator(whole_numbers())
        shares.legend(loc="best")

    told = "; ".join(f"{policy}: {_played(rows, policy, outcome_name(story.told))}" for policy in policies)
    return picture("policies", f"Line charts of {measured} by policy. {told}.", draw, height_in=4.6)


def _policies(job: JobConfig) -> list[str]:
    return [ACTOR, *(table.name for table in job.fixed_policies)]


def _points(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    found = [(row["iteration"], row[name]) for row in rows if name in row]
    return [at for at, _ in found], [value for _, value in found]


def _played(rows: Sequence[Row], policy: str, outcome: str) -> str:
    """Over these iterations, an episode counting once."""
    past = past_of(rows, [policy])
    mean = mean_over(past, [policy], of=OUTCOME)
    if mean is None:
        return "none"
    told = f"{sum(item.episodes.get(policy, 0.0) for item in past):.0f}, {mean:.2f} {outcome} on average"
    counted = mean_over(past, [policy], of=COUNTED)
    if policy == ACTOR or counted is None:
        return told
    return f"{told}; they counted as {counted:.1%} of that many of the actor's"


def _described(table: RolloutOnlyTable) -> str:
    """Where it comes from, and what [rollout_only] says of it beside its defaults."""
    source = {"name", "model_path", "inference_url", "model", "api_key_env"}
    keys = table.model_dump(mode="json", exclude_none=True, exclude=source)
    own = {key: value for key, value in keys.items() if value != RolloutOnlyTable.model_fields[key].default}
    shown = {"objective": table.objective, **own}
    return f"{table.source}; " + ", ".join(f"{key} = {value}" for key, value in shown.items())
