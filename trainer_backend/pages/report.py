"""The report of a run: one HTML file of charts, figures and a filmstrip, made only from the run's files."""

import base64
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from shared_schemas.rollouts import Rollout
from trainer_backend.collect.losses import sum_losses
from trainer_backend.collect.metrics import count_worlds, outcome_interval, outcome_meaning, outcome_name
from trainer_backend.collect.sources import read_row_id
from trainer_backend.core.metric import Panel
from trainer_backend.core.mixture_history import COUNTED, OUTCOME, mean_over, read_past
from trainer_backend.core.policies import ACTOR, policy_in
from trainer_backend.core.seeds import evaluation_worlds
from trainer_backend.core.statistics import Interval
from trainer_backend.errors import TrainerError
from trainer_backend.evaluation.best import describe_others, find_comparable, paired_difference
from trainer_backend.pages.episode_view import decision_lines, last_message, new_messages
from trainer_backend.pages.facts import chosen_keys
from trainer_backend.pages.figures import clip, duration, interval, name_iterations, number, spaced
from trainer_backend.pages.page import saved_page
from trainer_backend.pages.run import View
from trainer_backend.pages.run_data import chart_data, group_by_section, panels_for, points_for, run_data
from trainer_backend.pages.run_view import make_head
from trainer_backend.pages.series import Chart, add_up_axes, make_chart, make_curve
from trainer_backend.pages.stored import FrameSource, played_frames, why_undrawn
from trainer_backend.pages.story import EVALUATE_S, Row, Story, read_story
from trainer_backend.rundir.files import replacement, write_errors
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import finished_rows, read_rollout
from trainer_backend.rundir.state import read_state
from trainer_backend.store.metrics import MetricsFile, thin_together

_CLIP = 700


def filmstrip(story: Story, frames: FrameSource) -> dict[str, Any] | None:
    """Return template values that show the best episode of the best evaluation.

    Return None if no evaluation has stored an episode yet. `headline` contains the world, the outcome and the
    stop reason, `lines` each decision with the new text of its prompt, and `shots` the pictures. If there are
    no pictures, `missing` contains the reason.
    """
    best = story.best_evaluation
    path = story.rollouts_file(f"evaluation_{best['iteration']}") if best else None
    rollout = best_episode(path) if path else None
    episode = rollout.trajectory if rollout else None
    if best is None or rollout is None or episode is None or not episode.steps:
        return None
    # The new part of a prompt: new messages in a conversation, otherwise the last message.
    talks = bool(episode.full_history)
    texts = ["\n".join(new_messages(step)) if talks else last_message(step) for step in episode.steps]
    lines = list(zip(decision_lines(episode, []), (clip(text, _CLIP) for text in texts), strict=True))
    row_id, count = read_row_id(rollout.group_id), len(lines)
    headline = (
        f"{f'Row {row_id}' if row_id else f'World {episode.seed}'}, evaluation after iteration "
        f"{best['iteration']}: {episode.outcome_reward:g} {outcome_name(best)} in {count} "
        f"decision{'s' * (count > 1)} ({episode.env_steps} env steps); ended by "
        f"{spaced(episode.stop_reason)}."
    )
    film = {"headline": headline, "lines": lines, "shots": [], "missing": ""}
    if reason := why_undrawn(rollout):
        return film | {"missing": f"No pictures: {reason}"}
    unlocks = {line["turn"]: ", ".join(line["unlocked"]) for line, _ in lines if line["unlocked"]}
    job = story.job
    try:
        pictures = frames(job.services, job.rollout.env_config, episode, {0, count, *unlocks})
    except TrainerError as error:
        return film | {"missing": f"No pictures: {error}"}
    shots = []
    for turn, png in pictures.items():
        event = unlocks.get(turn, "the end" if turn == count else "the start")
        uri = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
        alt = f"The game after decision {turn}: {event}."
        shots.append({"caption": f"{turn}: {event}", "alt": alt, "uri": uri})
    return film | {"shots": shots}


_WINDOW = 3  # iterations averaged at each end of the run: one iteration is too noisy to compare

Lines = Sequence[tuple[str, Sequence[float]]]  # of a chart: (name in the legend, values by turn)
Line = tuple[str, str]


def write_report(directory: RunDirectory, *, frames: FrameSource = played_frames) -> Path:
    """Write the report of a run, which may still be training, to report/report.html, and return the path.

    Call it on a thread without an event loop, because it blocks. `frames` draws the pictures.

    Raises:
        JobError: job.toml of the run cannot be read.
        RunDirectoryError: a file of the run cannot be read, or the report cannot be written.
    """
    story = read_story(directory)
    job = story.job_row()
    leaks = "" if story.data is None else story.data.describe_leaks()
    drawn, data = saved_data([story], turn_charts(story))
    html = saved_page(
        "run",
        drawn,
        **data,
        lines=(),
        head=make_head(
            job, read_state(directory.path), rate_s=None, place="", now=job.created, can_control=False
        ),
        figures=[*figure_lines(story), *([("not held out", leaks)] if leaks else [])],
        film=filmstrip(story, frames),
        differs=chosen_keys(job),
        toml=job.config,
        saved_at=job.created,
    )
    return save(directory.report / "report.html", html)


def save(path: Path, html: bytes) -> Path:
    """Write a page to `path` atomically, and return `path`. A missing folder is created."""
    with write_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacement(path, durable=False) as aside:
        aside.write_bytes(html)
    return path


def saved_data(
    stories: Sequence[Story], charts: Sequence[Chart] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `chart_data` and `run_data` of a saved page of these runs; `charts` are shown additionally."""
    points = points_for(len(stories))
    files = [MetricsFile(story.directory.metrics_file) for story in stories]
    for file in files:
        file.read()
    curves = [thin_together({key: file.points(*key) for key in file.curves}, points) for file in files]
    runs = [story.as_run(own) for story, own in zip(stories, curves, strict=True)]
    metrics = {key for own in curves for key in own}
    panels, rest = panels_for(runs, metrics)
    axes = [add_up_axes({row["iteration"]: row for row in story.iterations}) for story in stories]
    drawn = chart_data(runs, curves, axes, [*panels, *rest] if len(runs) == 1 else panels)
    drawn["charts"] += charts
    data = run_data(runs, metrics, pin=runs[0].name) | {"sections": group_by_section(drawn["charts"])}
    return drawn, data | {"view": View(pin=runs[0].name), "query": ""}


def turn_charts(story: Story) -> list[Chart]:
    """Return charts of rewards and, if the run has them, achievements or scores by decision turn.

    Each chart has a curve for the first iterations of the run, and a curve for the last ones.
    """
    rows = story.by_actor
    if not rows:
        return []
    size = min(_WINDOW, len(rows) // 2)  # the first and the last iterations never overlap
    parts = (rows[:size], rows[-size:]) if size else (rows,)
    windows = [(name_iterations(part), part) for part in parts]
    rewards = []
    for label, part in windows:
        files = [story.rollouts_file(f"iteration_{row['iteration']}") for row in part]
        paid_by_turn = reward_by_turn([file for file in files if file is not None], story.job.job.name)
        rewards.append((label, paid_by_turn))
    note = "r_t that training used, mean a decision; an episode that ended earlier counts 0."
    paid = _turn_chart("reward_by_turn", "Reward by decision turn", note, rewards)
    achieved = _achieved_by_turn(windows)
    return [_turn_chart("achieved_by_turn", *achieved), paid] if achieved else [paid]


def _turn_chart(key: str, title: str, note: str, lines: Lines) -> Chart:
    longest = max(len(values) for _, values in lines)
    curves = [
        make_curve(label, [*values, *[None] * (longest - len(values))], line=line)
        for line, (label, values) in enumerate(lines)
    ]
    panel = Panel(key, "Episodes", title, note, (), unit="decision turn")
    return make_chart(panel, range(1, longest + 1), curves)


def _achieved_by_turn(windows: Sequence[tuple[str, Sequence[Row]]]) -> tuple[str, str, Lines] | None:
    """Return the title, note and lines of a chart by turn: first unlocks, or else a dialogue's scores.

    Return None if the rows contain neither.
    """
    rows = [row for _, part in windows for row in part]
    if all("episode/unique_achievements" in row for row in rows):
        note = "Achievements unlocked for the first time, mean a decision."
        return "First unlocks by decision turn", note, _by_turn(windows, "decision/unique_by_turn")
    if all("interaction/score_by_turn" in row for row in rows):
        note = "Last score up to each turn, mean an episode."
        return "Score by decision turn", note, _by_turn(windows, "interaction/score_by_turn")
    return None


def _by_turn(windows: Sequence[tuple[str, Sequence[Row]]], name: str) -> Lines:
    lines = []
    for label, rows in windows:
        lists = [row[name] for row in rows]
        turns = range(max(map(len, lists)))
        lines.append((label, [sum(one[t] for one in lists if t < len(one)) / len(lists) for t in turns]))
    return lines


_STAGES = (
    ("time/collect_s", "RL: collect"),
    ("time/update_s", "RL: update"),
    ("time/credit_s", "RL: credit, store"),
    ("time/publish_s", "RL: publish"),
)
_SHARE, _ANY_REWARD = "rollout/policy_choice", "decision/batch_nonzero"
_FAILURE = "rollout/failure/"


def figure_lines(story: Story) -> list[Line]:
    """Return (name, value) of each key figure that the run has, as texts."""
    meaning = outcome_meaning(story.last_episodes)
    failures = Counter[str]()  # over all stages; retried rollouts count too
    for name, value in chain.from_iterable(row.items() for row in story.rows):
        if name.startswith(_FAILURE):
            failures[name.removeprefix(_FAILURE)] += int(value)
    return [
        *([(story.outcome, meaning)] if meaning else []),
        *_held_out(story),
        *_training(story),
        *_warmup(story),
        *_time(story),
        *((f"failed: {code}", str(count)) for code, count in sorted(failures.items())),
        ("rollouts lost for good", sum_losses(story.sums).count),
    ]


def stage_totals(story: Story) -> list[tuple[str, float]]:
    """Return (stage, seconds) over the whole run for each stage that took time."""
    warmups = [row for kind in ("teacher", "warmup") for row in story.select_rows(kind)[:1]]
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
            f"{interval(outcome_interval(row))} {outcome_name(row)}, {count_worlds(row)}",
        )
        for words, row in story.landmarks
    ]
    difference = last_minus_first(story)
    if difference is not None:
        value = f"{interval(difference, sign='+')}, {difference.count} {story.unit}s"
        lines.append((f"last minus first, {story.unit} by {story.unit}", value))
    if others := describe_others(story.evaluations):
        lines.append(("not comparable", others))
    job, temperature = story.job, story.job.evaluation.evaluation_temperature(story.job.rollout)
    if job.data is None:
        worlds = evaluation_worlds(job.evaluation.instances, job.evaluation.seeds)
        value = f"{len(worlds)}, seeds {min(worlds)} to {max(worlds)}"
    else:
        value = f"at most {job.evaluation.instances}: {job.data.held_out}"
    return [*lines, (f"held-out {story.unit}s", f"{value}, temperature {temperature:g}")]


def _training(story: Story) -> list[Line]:
    lines = []
    rewarded = [row[_ANY_REWARD] for row in story.by_actor if _ANY_REWARD in row]
    if rewarded:
        lines.append(("iterations with any event reward", f"{sum(rewarded) / len(rewarded):.0%}"))
    rows = [row for row in story.iterations if _SHARE in row]
    fixed = [table.name for table in story.job.fixed_policies] if rows else []
    return lines + [
        (f"training episodes by {policy!r}", _count_episodes(rows, policy, story.outcome))
        for policy in ([ACTOR, *fixed] if fixed else [])
    ]


def _count_episodes(rows: Sequence[Row], policy: str, outcome: str) -> str:
    """Describe a policy's episodes in these iterations by their number and mean outcome.

    For a fixed policy, add how much its episodes counted in the updates, relative to episodes of the actor.
    """
    past = read_past(rows, [policy])
    mean = mean_over(past, [policy], of=OUTCOME)
    if mean is None:
        return "none"
    value = f"{sum(item.episodes.get(policy, 0.0) for item in past):.0f}, {mean:.2f} {outcome} on average"
    weight = mean_over(past, [policy], of=COUNTED)
    if policy == ACTOR or weight is None:
        return value
    return f"{value}; they counted as {weight:.1%} of that many of the actor's"


def _warmup(story: Story) -> list[Line]:
    if not (rows := story.select_rows("teacher")):
        return []
    row = rows[0]
    outcome = outcome_interval(row)
    policy = story.job.warmup.policy_name if story.job.warmup else "a teacher"
    value = f"{interval(outcome)} {outcome_name(row)}, {outcome.count} episodes"
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


def reward_by_turn(paths: Sequence[Path], job_name: str) -> list[float]:
    """Return [T], the mean reward r_t at each turn over the actor's episodes.

    An episode that ended before a turn counts as a reward of 0 at that turn.
    """
    sums: defaultdict[int, float] = defaultdict(float)
    episodes = 0
    for path in paths:
        for row in finished_rows(path, ["decisions", "model"]):
            if policy_in(job_name, row["model"]) != ACTOR:
                continue
            episodes += 1
            for decision in row["decisions"]:
                sums[decision["turn"]] += decision["reward"] or 0.0
    return [sums[turn] / episodes for turn in range(1, max(sums, default=0) + 1)]


def last_minus_first(story: Story) -> Interval | None:
    """Return the mean gain in outcome from the first to the last evaluation that played the same tasks.

    Return None if there are no two such evaluations, or if their episodes are not stored.
    """
    same = find_comparable(story.evaluations)
    if len(same) < 2:
        return None
    first, last = (story.rollouts_file(f"evaluation_{row['iteration']}") for row in (same[0], same[-1]))
    return paired_difference(first, last) if first and last else None


def best_episode(path: Path) -> Rollout | None:
    """Return the finished episode with the highest outcome and, among equals, the fewest env steps."""
    rows = finished_rows(path, ["rollout_id", "outcome_reward", "env_steps"])
    if not rows:
        return None
    best = min(rows, key=lambda row: (-row["outcome_reward"], row["env_steps"], row["rollout_id"]))
    return read_rollout(path, best["rollout_id"])
