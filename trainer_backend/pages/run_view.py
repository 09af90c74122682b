"""Pure: makes the contents of a run's pages: state, progress, key figures, losses and evaluations."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import fmean
from typing import Any, get_args

from trainer_backend.collect.losses import NAMES_BEFORE_RL, losses_in, sum_losses
from trainer_backend.collect.metrics import count_worlds, outcome_interval, outcome_name
from trainer_backend.core.intervals import wilson_interval
from trainer_backend.core.metric import Form
from trainer_backend.pages.facts import time_taken
from trainer_backend.pages.figures import NONE, ago, interval, number, roughly, spaced
from trainer_backend.pages.series import draw_spark
from trainer_backend.rundir.state import ProcessRole, RunState
from trainer_backend.store.rows import ACTIVE, Curve, Job, parse_tables, read_iterations

Row = Mapping[str, Any]
Figure = tuple[str, str, str]

_ACTIONS = {
    **dict.fromkeys(("queued", "running"), ("pause", "cancel")),
    **dict.fromkeys(("failed", "cancelled"), ("resume",)),
    "paused": ("resume", "cancel"),
    "pausing": ("cancel",),
}


def make_head(
    job: Job, state: RunState | None, *, rate_s: float | None, place: str, now: datetime, can_control: bool
) -> dict[str, Any]:
    """Return the template values for the head of a job's pages.

    `job` is the job's row in the store, and `state` the state in its run directory, if there is one. `rate_s`
    is the mean seconds of a recent iteration, and `place` the id of the last event that the page includes.

    In the result, `live` is true if the job is queued or active, and `progress` is a text.
    `actions` contains the verbs that the job's state allows, `processes` the processes of an active run
    sorted by role, and `notes` sentences about avoidable slowness.
    """
    total, live = read_iterations(job.config) or 0, job.state in ACTIVE or job.state == "queued"
    done = max(job.iteration, state.iteration if state is not None and live else 0)
    return {
        "id": job.id, "name": job.name, "state": job.state, "live": live, "place": place, "done": done,
        "total": total, "progress": _progress(job, state, done, total, rate_s),
        "actions": _ACTIONS.get(job.state, ()) if can_control and job.origin != "cli" else (),
        "facts": _facts(job, state, now), "code": job.code or "", "detail": job.detail or "",
        "processes": sorted(state.processes, key=lambda one: get_args(ProcessRole).index(one.role))
        if state is not None and job.state in ACTIVE
        else [],
        "notes": () if state is None else state.notes,
    }  # fmt: skip


def seconds_an_iteration(times: Mapping[str, Curve]) -> float | None:
    """Return the mean seconds that a recent iteration takes, all stages together; None without iterations."""
    return sum(fmean(curve.values[-5:]) for curve in times.values()) if times else None


def _progress(job: Job, state: RunState | None, done: int, total: int, rate_s: float | None) -> str:
    parts = [f"{done} of {total} iterations" if total else f"{done} iterations"]
    if job.state not in ACTIVE:
        return parts[0]
    if state is not None and (stage := state.stage or {"starting": "starting"}.get(state.state, "")):
        parts.append(stage + (f", {state.done} of {state.total}" if state.stage and state.total > 1 else ""))
    if rate_s and total > done:
        parts.append(f"about {roughly((total - done) * rate_s)} left")
    return " · ".join(parts)


def _facts(job: Job, state: RunState | None, now: datetime) -> list[tuple[str, str]]:
    losses = sum_losses(job.numbers.get("sums", {}))
    tables = parse_tables(job.config)
    model, rollout = tables.get("model", {}), tables.get("rollout", {})
    path = str(model.get("path") or model.get("preset") or model.get("name") or "")
    parts = path.split("/")
    facts = [
        ("environment", rollout.get("env_name", "")),
        # Keep the end of a path, since the beginnings of paths rarely differ.
        ("model", path if len(parts) <= 4 else "…/" + "/".join(parts[-3:])),
        ("advantage", tables.get("algorithm", {}).get("advantage", "")),
        ("begun", ago(job.started, now) if job.started else ""),
        ("took", time_taken(job)),
        ("starts", str(state.starts) if state is not None and state.starts > 1 else ""),
        ("lost rollouts", f"{losses.count} ({losses.share:.1%})" if losses.lost else ""),
        ("directory", job.run_dir or ""),
    ]
    return [(name, str(value)) for name, value in facts if value]


_OUTCOME, _EVENT = "eval/outcome_reward", "decision/nonzero_frac"
# Name, metric, form, unit and meaning of a run's key figures; figures of evaluations come first.
FIGURES: tuple[tuple[str, str, Form, str, str], ...] = (
    ("held-out {outcome}", _OUTCOME, "number", "", ""),
    ("Crafter score", "eval/crafter_score", "number", " %", "geometric mean of success rates"),
    ("progress", "eval/progress", "number", " %", "mean share of the achievements"),
    ("environment's reward", "eval/env_reward", "number", "", "summed over an episode"),
    ("training {outcome}", "episode/outcome_reward", "number", "", ""),
    ("reward an episode", "reward/mean", "number", "", ""),
    ("decisions with event reward", _EVENT, "percent", "", ""),
    ("entropy", "loss/entropy", "number", "", ""),
    ("decisions a second", "perf/decisions_per_s", "number", "", ""),
)


def key_figures(iterations: Sequence[Row], evaluations: Sequence[Row], outcome: str) -> list[Figure]:
    """Return (name, value, note) of each key figure as texts. Both lists of rows start with the oldest row.

    A note has the 95 % interval, the losses, and the figure's meaning or, if it has none, its first value.
    """
    figures = []
    for name, metric, form, unit, note in FIGURES:
        held_out = metric.startswith("eval/")
        rows = evaluations if held_out else iterations
        last = rows[-1] if rows else {}
        if last.get(metric) is None and not (rows and metric == _OUTCOME):
            continue  # an evaluation that lost all episodes is still shown
        if metric == _EVENT and "episode/unique_achievements" not in last:
            continue
        bounds = show_bounds(last, metric) if held_out else ""
        faulty = losses_in(last).lost or "eval/cut_short" in last
        lost = count_worlds(last) if metric == _OUTCOME and faulty else ""
        texts = (f"95 % {bounds}" if bounds else "", lost, note or _before(rows, metric, form))
        value = f"{number(last.get(metric), form)}{unit}"
        figures.append((name.format(outcome=outcome), value, ", ".join(filter(None, texts))))
    return figures


def _before(rows: Sequence[Row], metric: str, form: Form) -> str:
    """Return a metric's value in the first row, as text. It is empty if the first row is also the last."""
    first = rows[0]
    if first["iteration"] == rows[-1]["iteration"] or first.get(metric) is None:
        return ""
    return f"{number(first[metric], form)} at iteration {first['iteration']}"


def show_bounds(row: Row, metric: str = _OUTCOME) -> str:
    """Format the 95 % interval of a held-out figure; empty if the row has none."""
    low, high = row.get(f"{metric}_low"), row.get(f"{metric}_high")
    return "" if low is None or high is None else f"{number(low)} to {number(high)}"


_STAGES = NAMES_BEFORE_RL | {"evaluation": "evaluation after iteration {}", "iteration": "iteration {}"}


def list_losses(rows: Sequence[Row]) -> Sequence[tuple[str, str, str]]:
    """Return (stage, count, causes) for each stage that lost rollouts, with a count such as `180 of 200`."""
    lines = []
    for row in rows:
        stage = row.get("stage") or _STAGES.get(row["kind"], str(row["kind"])).format(row["iteration"])
        of_branches = losses_in(row, branches=True), f"branches of {stage}"
        for losses, name in ((losses_in(row), stage), of_branches):
            if losses.lost:
                why = losses.explain() if losses.causes else NONE
                lines.append((name, losses.count, why))
    return lines


RATES = "eval/success_rates/"


def evaluation_table(rows: Sequence[Row], best: int | None) -> Sequence[Sequence[str]]:
    """Return a table of the evaluations: a heading, and a line per evaluation with the oldest first.

    `best` is the iteration of the best evaluation. The table is empty if there are no evaluations.
    """
    if not rows:
        return []
    of_achievements = [figure for figure in FIGURES[1:] if figure[1].startswith("eval/")]
    figures = [figure for figure in of_achievements if any(figure[1] in row for row in rows)]
    names = [name for name, *_ in figures]
    head = ("iteration", outcome_name(rows[-1]), *names, "decisions", "invalid", "played")
    return [head] + [
        (
            f"{row['iteration']}{' (best)' if row['iteration'] == best else ''}",
            interval(outcome_interval(row)),
            *[f"{number(row[metric])}{unit}" if metric in row else NONE for _, metric, _, unit, _ in figures],
            number(row.get("eval/decisions")),
            number(row.get("eval/invalid_frac"), "percent"),
            count_worlds(row),
        )
        for row in rows
    ]


def success_rates(evaluations: Sequence[Row], curves: Mapping[str, Curve]) -> dict[str, Any]:
    """Return each achievement's success rate in the first and the last evaluation, the highest rate first.

    `before` and `after` name the two evaluations; `before` is empty if there is only one. Each row contains
    the rates of one achievement as texts and in percent, and a small curve drawn from `curves`. Return an
    empty dict if there are no rates.
    """
    if not evaluations or not evaluations[-1].get("eval/success_rates"):
        return {}
    first, last = evaluations[0], evaluations[-1]
    two = first["iteration"] != last["iteration"]
    old: Mapping[str, float] = first.get("eval/success_rates", {}) if two else {}
    rates: Mapping[str, float] = last["eval/success_rates"]
    names = sorted(rates, key=lambda name: (-rates[name], -old.get(name, 0.0), name))
    episodes = int(last["eval/episodes"])
    return {
        "before": f"iteration {first['iteration']}" if two else "",
        "after": f"iteration {last['iteration']}",
        "rows": [
            _rate(name, old.get(name) if two else None, rates[name], episodes, curves.get(RATES + name))
            for name in names
        ],
    }


def _rate(name: str, before: float | None, rate: float, episodes: int, curve: Curve | None) -> dict[str, Any]:
    bounds = wilson_interval(round(rate * episodes), episodes)
    low, high = (rate if bound is None else bound for bound in (bounds.low, bounds.high))
    return {
        "name": spaced(name),
        "before": NONE if before is None else f"{before:.0%}",
        "after": f"{rate:.0%}",
        "interval": f"{low:.0%} to {high:.0%}",
        "first": None if before is None else round(100 * before, 1),
        "last": round(100 * rate, 1),
        "low": round(100 * low, 1),
        "high": round(100 * high, 1),
        "spark": draw_spark(curve.values if curve else (), "success rate", "percent", between=(0.0, 1.0)),
    }
