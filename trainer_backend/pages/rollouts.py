"""The list of a run's rollouts, filtered and sorted by its address."""

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from fastapi import Request
from starlette.responses import HTMLResponse, Response

from trainer_backend.collect.losses import FAILED
from trainer_backend.pages.address import read_filter, read_order, write_query
from trainer_backend.pages.figures import spaced
from trainer_backend.pages.page import dashboard_of, page, page_router
from trainer_backend.pages.run import run_frame
from trainer_backend.pages.run_view import MOST_LOSSES, list_losses
from trainer_backend.store import reads, reads_rollouts
from trainer_backend.store.database import Store
from trainer_backend.store.reads_rollouts import RolloutFilter, RolloutSort

router = page_router()

_SORTS = get_args(RolloutSort)
_PAGE = 50


@router.get("/runs/{job_id}/rollouts", response_class=HTMLResponse)
def rollouts(request: Request, job_id: str) -> Response:
    """Show the list of rollouts, as the address filters and sorts it."""
    values = list_rollouts(dashboard_of(request).store, job_id, request.query_params)
    return page("rollouts", **values, **run_frame(request, job_id, "rollouts"))


def list_rollouts(store: Store, job_id: str, params: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of the rollouts that an address asks for, and the addresses that change its order."""
    where, (sort, down) = read_filter(RolloutFilter, params), read_order(params, _SORTS, "newest")
    cursor = params.get("cursor") or None
    rows = reads_rollouts.rollouts(
        store, job_id, where, sort=cast(RolloutSort, sort), descending=down, cursor=cursor, limit=_PAGE
    )
    here = f"/runs/{job_id}/rollouts?"
    order = f"by {spaced(sort)}, {'highest' if down else 'lowest'} first"
    if (sort, down) == ("newest", True):
        order = "newest first"
    total = reads_rollouts.count_rollouts(store, job_id, where)
    return {
        "rows": rows.items,
        "caption": f"{len(rows.items)} of {total:,} rollouts, {order}",
        "facets": reads_rollouts.facets(store, job_id),
        "chosen": where, "filtered": where != RolloutFilter(), "sort": sort, "down": down,
        # A click on the present column reverses the order.
        "sorted_by": {
            key: here + write_query(where, sort=key, down=int(not (key == sort and down))) for key in _SORTS
        },
        "later": here + write_query(where, sort=sort, down=int(down), cursor=rows.cursor)
        if rows.cursor
        else "",
        "first": here + write_query(where, sort=sort, down=int(down)),
        "paged": cursor is not None,
        "losses": _read_losses(store, job_id) if where.lost else (),
    }  # fmt: skip


def _read_losses(store: Store, job_id: str) -> Sequence[tuple[str, str, str]]:
    """Return the newest stages that lost rollouts, with how many and why."""
    lines = reads.lines_above_zero(store, job_id, FAILED, limit=MOST_LOSSES)
    return list_losses([{**line.row, "kind": line.kind, "iteration": line.iteration} for line in lines])
