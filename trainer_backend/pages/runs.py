"""The pages of several runs: the list of runs, and a table of the numbers of chosen runs."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast, get_args

from fastapi import Query, Request
from starlette.datastructures import QueryParams
from starlette.responses import HTMLResponse, RedirectResponse, Response

from trainer_backend.collect.losses import sum_losses
from trainer_backend.pages.address import change_query, describe_order, link_list, read_order
from trainer_backend.pages.facts import differing_keys, name_folder, time_taken
from trainer_backend.pages.figures import clip, number
from trainer_backend.pages.page import (
    BadAddress,
    frame,
    get_dashboard,
    list_page,
    page,
    page_router,
    takes_part,
)
from trainer_backend.pages.run import MOST_RUNS, name_runs
from trainer_backend.pages.run_view import show_bounds
from trainer_backend.pages.series import draw_spark
from trainer_backend.run.timeline import PREFIX
from trainer_backend.store import jobs, reads
from trainer_backend.store.database import Store, UnknownJob
from trainer_backend.store.metrics import list_numbers
from trainer_backend.store.reads import RunFilter, RunSort
from trainer_backend.store.rows import ACTIVE, ENDED, Job, JobState, parse_tables, read_iterations

router = page_router()

_SORTS = get_args(RunSort)
_GROUPS: dict[str, frozenset[JobState]] = {"active": ACTIVE | {"queued", "paused"}, "ended": ENDED}
_TEXT = 400  # the most characters of a job's detail; the run's own page shows all of them
_MOST_CHOSEN = 30
_KINDS = {"evaluation": "The last evaluation", "iteration": "The last iteration"}

Chosen = Query(default=[])


@router.get("/", response_class=HTMLResponse)
def runs(request: Request) -> Response:
    """Show the list of runs, filtered and sorted as the query string requests."""
    dashboard = get_dashboard(request)
    values = list_runs(dashboard.store, request.query_params)
    facets = None if takes_part(request) else count_values(dashboard.store, values["where"])
    return list_page("runs", now=dashboard.clock(), facets=facets, **values, **frame(request, "runs"))


def list_runs(store: Store, params: QueryParams) -> dict[str, Any]:
    """Return template values for the part of the list of runs that a query string selects.

    The values include the runs that the user has ticked; the query string also contains their ids.
    """
    where, (sort, down) = _read_filter(params), read_order(params, _SORTS, "created")
    rows = reads.runs(
        store, where, sort=cast(RunSort, sort), descending=down, cursor=params.get("cursor") or None
    )
    chosen = []
    for job_id in _limit(params.getlist("run")):
        with suppress(UnknownJob):  # the run was deleted after the user had ticked it
            chosen.append(jobs.get(store, job_id))
    ids, shown = [job.id for job in chosen], {job.id for job in rows.items}
    return {
        "lines": [_describe(job) for job in rows.items],
        "where": where, "group": params.get("state", "").strip(),
        "filtered": where != RunFilter(), "sorts": _SORTS,
        "caption": describe_order(sort, down, "created"),
        "chosen": [{"id": job.id, "name": job.name, "shown": job.id in shown} for job in chosen],
        "query": _query(ids), "can_overlay": len(ids) <= MOST_RUNS,
        "unchosen": f"/?{change_query(params, run=None)}",
        **link_list("/", params, sort=sort, down=down, sorts=_SORTS, cursor=rows.cursor),
    }  # fmt: skip


def count_values(store: Store, where: RunFilter) -> dict[str, Any]:
    """Return the values by which the list can be filtered, and the number of runs with each value.

    Tags are grouped by their keys. The tag keys of the filter `where` are included even if no run has them.
    """
    facets = reads.run_facets(store)
    tags: dict[str, dict[str, int]] = {key: {} for key in where.tags}
    for tag, count in facets["tags"].items():
        tags.setdefault(tag.partition("=")[0], {})[tag] = count
    return facets | {"tags": dict(sorted(tags.items()))}


def _read_filter(params: QueryParams) -> RunFilter:
    texts = {name: params.get(name, "").strip() for name in ("text", "state", "environment", "model")}
    state, known = texts["state"], (*_GROUPS, *get_args(JobState))
    if state and state not in known:
        raise BadAddress(f"state is {state[:40]!r}; known: {', '.join(known)}")
    tags = [tag for tag in params.getlist("tag") if tag.strip()]
    if wrong := next((tag for tag in tags if "=" not in tag), None):
        raise BadAddress(f"tag is {wrong[:40]!r}; it must be key=value")
    return RunFilter(
        text=texts["text"],
        states=_GROUPS.get(state, frozenset({cast(JobState, state)} if state else ())),
        environment=texts["environment"] or None,
        model=texts["model"] or None,
        tags={key: value for key, _, value in (tag.partition("=") for tag in tags)},
    )


def _limit(job_ids: Sequence[str]) -> list[str]:
    if len(ids := list(dict.fromkeys(job_ids))) > _MOST_CHOSEN:
        raise BadAddress(f"{len(ids)} runs are chosen; at most {_MOST_CHOSEN} stand side by side")
    return ids


def _query(job_ids: Sequence[str]) -> str:
    return "&".join(f"run={job_id}" for job_id in job_ids)


def _describe(job: Job) -> dict[str, Any]:
    """Return the template values for a run's line in the list."""
    # `numbers` is empty until the store has first read the run's files.
    held_out, losses = job.numbers.get("evaluated", {}), sum_losses(job.numbers.get("sums", {}))
    _, outcomes = job.numbers.get("spark") or ((), ())
    return {
        "id": job.id, "name": job.name, "state": job.state, "live": job.state in ACTIVE,
        "where": f"{name_folder(job)}{'' if job.origin == 'api' else ' · turnwise train'}",
        "tags": [f"{name}={value}" for name, value in job.tags.items()],
        "environment": job.environment, "model": job.model,
        "advantage": str(parse_tables(job.config).get("algorithm", {}).get("advantage", "")),
        "detail": clip(job.detail or "", _TEXT),
        "done": job.iteration, "total": read_iterations(job.config) or 0,
        "outcome": number(job.outcome),
        "spark": draw_spark(outcomes, "training outcome"),
        "held_out": number(job.evaluation), "bounds": show_bounds(held_out),
        "started": job.started, "took": time_taken(job), "finished": job.finished,
        "lost": losses.count if losses.lost else "",
    }  # fmt: skip


@router.get("/compare")
def compare(run: list[str] = Chosen) -> Response:
    """Redirect to the overlaid charts of the runs that the user has ticked in the list."""
    if not run:
        raise BadAddress("no run is chosen; tick two or more in the list")
    first, *others = run
    return RedirectResponse(
        f"/runs/{first}?" + "&".join(f"with={other}" for other in others), status_code=303
    )


@router.get("/compare/numbers", response_class=HTMLResponse)
def numbers(request: Request, run: list[str] = Chosen) -> Response:
    """Show the metrics of the chosen runs side by side."""
    dashboard = get_dashboard(request)
    values = compare_numbers(dashboard.store, run)
    return page("numbers", now=dashboard.clock(), **values, **frame(request, "runs"))


def compare_numbers(store: Store, job_ids: Sequence[str]) -> dict[str, Any]:
    """Return the template values for a table with a column per run.

    They contain a description of each run, the job keys that differ, and the numbers of each run's last
    evaluation and last iteration.
    """
    ids = _limit(job_ids)
    if not ids:
        raise BadAddress("no run is chosen; tick two or more in the list")
    rows = [jobs.get(store, job_id) for job_id in ids]
    lines = reads.last_lines(store, ids, tuple(_KINDS))
    tables = []
    for kind, title in _KINDS.items():
        last = [lines[job_id].get(kind) for job_id in ids]
        found = [dict(list_numbers(line.row)) if line is not None else {} for line in last]
        # Times of day cannot be compared.
        names = sorted({name for row in found for name in row if not name.startswith(PREFIX)})
        places = ["" if line is None else f"iteration {line.iteration}" for line in last]
        if names:
            tables.append({
                "title": title, "places": places,
                "rows": [(name, [number(row.get(name)) for row in found]) for name in names],
            })  # fmt: skip
    columns = zip(name_runs(rows), map(_describe, reads.refresh(store, rows)), strict=True)
    return {
        "runs": [
            one | {"name": name, "without": _query([other for other in ids if other != one["id"]])}
            for name, one in columns
        ],
        "differs": differing_keys([job.config for job in rows]),
        "tables": tables, "query": _query(ids), "can_overlay": len(ids) <= MOST_RUNS,
    }  # fmt: skip
