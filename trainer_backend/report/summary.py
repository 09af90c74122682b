"""The report's tables: what was run, its figures with intervals, evaluations, failures."""

from collections.abc import Sequence

from trainer_backend.core.seeds import evaluation_worlds
from trainer_backend.core.statistics import Interval
from trainer_backend.report.learning_charts import evaluation_interval, spaced
from trainer_backend.report.stored_episodes import last_minus_first
from trainer_backend.report.story import Row, Story
from trainer_backend.report.training_charts import stage_totals

Line = tuple[str, str]


def job_lines(story: Story) -> list[Line]:
    """Switches and seeds."""
    job, table = story.job, story.job.training
    worlds = evaluation_worlds(job.evaluation.instances, job.evaluation.seeds)
    return [
        ("run", story.run_id),
        ("model", job.model.source),
        ("environment", f"{job.rollout.env_name} {job.rollout.env_config or ''}".strip()),
        ("advantage", f"{job.algorithm.advantage}, gamma {job.algorithm.gamma:g}"),
        ("loss", job.algorithm.loss),
        ("step_rewards_enabled", str(table.step_rewards_enabled).lower()),
        ("step_rewards_mode", table.step_rewards_mode),
        ("event_rewards_kind", table.event_rewards_kind),
        ("step_rewards_beta", f"{table.step_rewards_beta:g} (horizon {table.step_rewards_horizon})"),
        ("step_rewards_indicator_lambda", f"{table.step_rewards_indicator_lambda:g}"),
        ("episodes", f"{job.rollout.episodes_per_batch} an iteration, groups of {table.group_size}"),
        ("decisions", f"at most {job.rollout.max_turns} an episode"),
        ("job seed", str(job.job.seed)),
        (
            "held-out worlds",
            f"{len(worlds)}, seeds {min(worlds)} to {max(worlds)}, "
            f"temperature {job.evaluation_temperature:g}",
        ),
    ]


def figure_lines(story: Story) -> list[Line]:
    """The figures that a reader looks for first, each with what it was measured on."""
    lines = [("iterations", f"{len(story.iterations)} of {story.job.training.iterations} finished")]
    lines += _held_out(story)
    lines += _training(story.iterations)
    if story.teacher is not None:
        found = evaluation_interval(story.teacher)
        policy = story.job.warmup.policy_name if story.job.warmup else "a teacher"
        told = f"{_told(found)} unique achievements, {found.count} episodes"
        lines.append((f"imitated in the warm-up: {policy}", told))
    seconds = sum(value for _, value in stage_totals(story))
    if seconds:
        lines.append(("time, all stages", f"{_minutes(seconds)} (without start-up and saving)"))
    return lines


def evaluation_rows(story: Story) -> list[Sequence[str]]:
    """A row an evaluation: iteration, unique achievements, Crafter score, decisions, invalid, worlds."""
    best = story.best_evaluation
    return [
        (
            f"{row['iteration']}{' (best)' if row is best else ''}",
            _told(evaluation_interval(row)),
            _number(row.get("eval/crafter_score"), "{:.1f} %"),
            _number(row.get("eval/decisions"), "{:.1f}"),
            _number(row.get("eval/invalid_frac"), "{:.1%}"),
            str(row["eval/episodes"]),
        )
        for row in story.evaluations
    ]


def failure_lines(story: Story) -> list[Line]:
    """Failures of the infrastructure by cause, and how the episodes of the last iteration ended."""
    lines = [(f"failed: {code}", str(count)) for code, count in sorted(story.failures.items())]
    lost = int(story.total("rollout/failed"))
    lines.append(("rollouts lost for good", f"{lost} of {lost + int(story.total('rollout/finished'))}"))
    for row in story.iterations[-1:]:
        ended = sorted((name, share) for name, share in row.items() if name.startswith("stop/"))
        lines += [
            (f"ended by {spaced(name.removeprefix('stop/'))}", f"{share:.1%} of iteration {row['iteration']}")
            for name, share in ended
        ]
    return lines


def _held_out(story: Story) -> list[Line]:
    lines = [
        (
            f"held-out worlds after iteration {row['iteration']} ({words})",
            f"{_told(evaluation_interval(row))} unique achievements",
        )
        for words, row in story.landmarks
    ]
    found = last_minus_first(story)
    if found is not None:
        told = f"{_told(found, sign='+')}, {found.count} worlds"
        lines.append(("last minus first, world by world", told))
    return lines


def _training(rows: Sequence[Row]) -> list[Line]:
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    batches = sum(row.get("decision/batch_nonzero", 0.0) for row in rows) / len(rows)
    unique, rewarded = "episode/unique_achievements", "decision/nonzero_frac"
    return [
        ("training episodes, first and last iteration", f"{first[unique]:.2f}, {last[unique]:.2f} unique"),
        ("decisions that unlocked something", f"{first[rewarded]:.1%}, {last[rewarded]:.1%}"),
        ("reward an episode", f"{first['reward/mean']:.2f}, {last['reward/mean']:.2f}"),
        ("iterations with any event reward", f"{batches:.0%}"),
    ]


def _told(found: Interval, sign: str = "") -> str:
    if found.low is None or found.high is None:
        return f"{found.mean:{sign}.2f}"
    return f"{found.mean:{sign}.2f} (95 %: {found.low:{sign}.2f} to {found.high:{sign}.2f})"


def _number(value: float | None, form: str) -> str:
    return "not known" if value is None else form.format(value)


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
