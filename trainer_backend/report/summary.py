"""The figures of a run that no chart shows: differences, totals, what each policy played, failures."""

from collections.abc import Sequence

from trainer_backend.core.mixture_history import COUNTED, OUTCOME, mean_over, past_of
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.seeds import evaluation_worlds
from trainer_backend.dashboard.figures import duration, interval, number
from trainer_backend.evaluation.outcome import outcome_interval, outcome_meaning, outcome_name
from trainer_backend.report.stored_episodes import last_minus_first
from trainer_backend.report.story import EVALUATE_S, Row, Story

Line = tuple[str, str]
_STAGES = (
    ("time/collect_s", "RL: collect"),
    ("time/update_s", "RL: update"),
    ("time/credit_s", "RL: credit, store"),
    ("time/publish_s", "RL: publish"),
)
_SHARE, _ANY_REWARD = "rollout/policy_choice", "decision/batch_nonzero"


def figure_lines(story: Story) -> list[Line]:
    """Name and value of each figure; what a run has not is left out."""
    meaning = outcome_meaning(story.told)
    return [
        *([(story.outcome, meaning)] if meaning else []),
        *_held_out(story),
        *_training(story),
        *_warmup(story),
        *_time(story),
        *_failures(story),
    ]


def stage_totals(story: Story) -> list[tuple[str, float]]:
    """Seconds of each stage over the whole run; stages that took none are left out."""
    warmups = [row for row in (story.teacher, story.warmup) if row is not None]
    totals = [
        ("warm-up: collect", sum(row.get("time/collect_s", 0.0) for row in warmups)),
        ("warm-up: learn", sum(row.get("time/warmup_s", 0.0) for row in warmups)),
        *((label, sum(row.get(name, 0.0) for row in story.iterations)) for name, label in _STAGES),
        ("evaluate", story.total(EVALUATE_S)),
    ]
    return [(name, value) for name, value in totals if value > 0]


def _held_out(story: Story) -> list[Line]:
    lines = [
        (
            f"held-out {story.unit}s after iteration {row['iteration']} ({words})",
            f"{interval(outcome_interval(row))} {outcome_name(row)}",
        )
        for words, row in story.landmarks
    ]
    difference = last_minus_first(story)
    if difference is not None:
        value = f"{interval(difference, sign='+')}, {difference.count} {story.unit}s"
        lines.append((f"last minus first, {story.unit} by {story.unit}", value))
    job = story.job
    if job.data is None:
        worlds = evaluation_worlds(job.evaluation.instances, job.evaluation.seeds)
        value = f"{len(worlds)}, seeds {min(worlds)} to {max(worlds)}"
    else:
        value = f"at most {job.evaluation.instances}: {job.data.held_out}"
    return [*lines, (f"held-out {story.unit}s", f"{value}, temperature {job.evaluation_temperature:g}")]


def _training(story: Story) -> list[Line]:
    lines = []
    rewarded = [row[_ANY_REWARD] for row in story.by_actor if _ANY_REWARD in row]
    if rewarded:
        lines.append(("iterations with any event reward", f"{sum(rewarded) / len(rewarded):.0%}"))
    rows = [row for row in story.iterations if _SHARE in row]
    fixed = [table.name for table in story.job.fixed_policies] if rows else []
    return lines + [
        (f"training episodes by {policy!r}", _played(rows, policy, story.outcome))
        for policy in ([ACTOR, *fixed] if fixed else [])
    ]


def _played(rows: Sequence[Row], policy: str, outcome: str) -> str:
    """Over these iterations, an episode counting once."""
    past = past_of(rows, [policy])
    mean = mean_over(past, [policy], of=OUTCOME)
    if mean is None:
        return "none"
    value = f"{sum(item.episodes.get(policy, 0.0) for item in past):.0f}, {mean:.2f} {outcome} on average"
    counted = mean_over(past, [policy], of=COUNTED)
    if policy == ACTOR or counted is None:
        return value
    return f"{value}; they counted as {counted:.1%} of that many of the actor's"


def _warmup(story: Story) -> list[Line]:
    row = story.teacher
    if row is None:
        return []
    found = outcome_interval(row)
    policy = story.job.warmup.policy_name if story.job.warmup else "a teacher"
    value = f"{interval(found)} {outcome_name(row)}, {found.count} episodes"
    return [(f"imitated in the warm-up: {policy}", value)]


def _time(story: Story) -> list[Line]:
    totals = stage_totals(story)
    if not totals:
        return []
    whole = duration(sum(seconds for _, seconds in totals))
    return [
        ("time, all stages", f"{whole} (without start-up and saving)"),
        *((f"time, {name}", number(seconds, "seconds")) for name, seconds in totals),
    ]


def _failures(story: Story) -> list[Line]:
    """Failures of the infrastructure by cause; how episodes ended is a chart."""
    lines = [(f"failed: {code}", str(count)) for code, count in sorted(story.failures.items())]
    lost, finished = (int(story.total(f"rollout/{end}")) for end in ("failed", "finished"))
    return [*lines, ("rollouts lost for good", f"{lost} of {lost + finished}")]
