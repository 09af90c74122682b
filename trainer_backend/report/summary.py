"""The report's tables: what was run, its figures with intervals, evaluations, failures."""

from collections.abc import Sequence

from trainer_backend.core.seeds import evaluation_worlds
from trainer_backend.core.statistics import Interval
from trainer_backend.evaluation.outcome import outcome_interval, outcome_meaning, outcome_name
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.report.learning_charts import spaced
from trainer_backend.report.mixture import mixture_lines, mixture_settings
from trainer_backend.report.stored_episodes import last_minus_first
from trainer_backend.report.story import Row, Story
from trainer_backend.report.training_charts import stage_totals

Line = tuple[str, str]

_DELETED = "messages deleted an episode"
# Of the first and the last iteration, where episodes are conversations.
_CONVERSATION = (
    ("score of an answer", "interaction/score"),
    ("answers an episode", "interaction/answers"),
    ("segments an episode", "statelm/segments"),
    (_DELETED, "statelm/deletes"),
    ("longest context of an episode, tokens", "statelm/peak_context"),
    ("share of episodes that ran over their context", "statelm/context_length_exceeded"),
)


def job_lines(story: Story) -> list[Line]:
    """Switches and seeds."""
    job, table = story.job, story.job.training
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
        ("decisions", f"at most {job.max_decisions} an episode"),
        ("job seed", str(job.job.seed)),
        *_conversation_settings(job),
        *mixture_settings(job),
        *_held_out_of(job),
    ]


def _conversation_settings(job: JobConfig) -> list[Line]:
    """Of a job with conversations: who answers, within which limits, and what may be edited."""
    table = job.multi_turn
    if not table.enable:
        return []
    who = job.data.interaction if job.data is not None else None
    file = f"of {table.interaction_config_path}" if table.interaction_config_path is not None else ""
    turns = (
        f"at most {table.max_user_turns} answers of the user; " if table.max_user_turns is not None else ""
    )
    told = f"{turns}{table.max_model_length} tokens, beyond them {table.context_length_penalty:g}"
    return [
        ("conversation", told),
        *([("interaction", f"{who or 'named by the rows'} {file}".strip())] if who or file else []),
        *([("context tools", ", ".join(table.context_tools))] if table.statelm_enabled else []),
    ]


def _held_out_of(job: JobConfig) -> list[Line]:
    told = f"temperature {job.evaluation_temperature:g}"
    if job.data is None:
        worlds = evaluation_worlds(job.evaluation.instances, job.evaluation.seeds)
        return [("held-out worlds", f"{len(worlds)}, seeds {min(worlds)} to {max(worlds)}, {told}")]
    return [
        ("data", f"{job.data.split} of {job.data.path}"),
        ("held-out rows", f"at most {job.evaluation.instances}: {job.data.held_out}, {told}"),
    ]


def figure_lines(story: Story) -> list[Line]:
    """The figures that a reader looks for first, each with what it was measured on."""
    lines = [("iterations", f"{len(story.iterations)} of {story.job.training.iterations} finished")]
    meaning = outcome_meaning(story.told)
    lines += [(outcome_name(story.told), meaning)] if meaning else []
    lines += _held_out(story)
    lines += _training(story.by_actor, edits=story.job.multi_turn.statelm_enabled)
    lines += mixture_lines(story)
    if story.teacher is not None:
        found = outcome_interval(story.teacher)
        policy = story.job.warmup.policy_name if story.job.warmup else "a teacher"
        told = f"{_told(found)} {outcome_name(story.teacher)}, {found.count} episodes"
        lines.append((f"imitated in the warm-up: {policy}", told))
    seconds = sum(value for _, value in stage_totals(story))
    if seconds:
        lines.append(("time, all stages", f"{_minutes(seconds)} (without start-up and saving)"))
    return lines


def evaluation_columns(story: Story) -> list[str]:
    """What stands in each cell of `evaluation_rows`."""
    score = ["Crafter score"] if _have_score(story) else []
    return ["iteration", outcome_name(story.told), *score, "decisions", "invalid", "episodes"]


def evaluation_rows(story: Story) -> list[Sequence[str]]:
    """A row an evaluation."""
    best, scored = story.best_evaluation, _have_score(story)
    return [
        (
            f"{row['iteration']}{' (best)' if row is best else ''}",
            _told(outcome_interval(row)),
            *([_number(row.get("eval/crafter_score"), "{:.1f} %")] if scored else []),
            _number(row.get("eval/decisions"), "{:.1f}"),
            _number(row.get("eval/invalid_frac"), "{:.1%}"),
            str(row["eval/episodes"]),
        )
        for row in story.evaluations
    ]


def _have_score(story: Story) -> bool:
    return any("eval/crafter_score" in row for row in story.evaluations)


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
            f"held-out {story.unit}s after iteration {row['iteration']} ({words})",
            f"{_told(outcome_interval(row))} {outcome_name(row)}",
        )
        for words, row in story.landmarks
    ]
    found = last_minus_first(story)
    if found is not None:
        told = f"{_told(found, sign='+')}, {found.count} {story.unit}s"
        lines.append((f"last minus first, {story.unit} by {story.unit}", told))
    return lines


def _training(rows: Sequence[Row], *, edits: bool) -> list[Line]:
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    outcome = "episode/outcome_reward"
    lines = [
        (
            "training episodes, first and last iteration",
            f"{first[outcome]:.2f}, {last[outcome]:.2f} {outcome_name(last)}",
        ),
        ("reward an episode", f"{first['reward/mean']:.2f}, {last['reward/mean']:.2f}"),
    ]
    if "episode/unique_achievements" in last:
        lines += _achieved(rows)
    return lines + [
        (title, f"{first[name]:.2f}, {last[name]:.2f}")
        for title, name in _CONVERSATION
        if name in first and name in last and (edits or title != _DELETED)
    ]


def _achieved(rows: Sequence[Row]) -> list[Line]:
    rewarded = "decision/nonzero_frac"
    batches = sum(row.get("decision/batch_nonzero", 0.0) for row in rows) / len(rows)
    return [
        ("decisions that unlocked something", f"{rows[0][rewarded]:.1%}, {rows[-1][rewarded]:.1%}"),
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
