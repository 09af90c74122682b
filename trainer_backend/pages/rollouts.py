"""The list of a run's rollouts, filtered and sorted by its address."""

from typing import Any, cast, get_args

from fastapi import Request
from starlette.datastructures import QueryParams
from starlette.responses import HTMLResponse, Response

from trainer_backend.collect.losses import FAILED
from trainer_backend.pages.address import describe_order, link_list, read_filter, read_order
from trainer_backend.pages.page import dashboard_of, list_page, page_router, takes_part
from trainer_backend.pages.run import run_frame
from trainer_backend.pages.run_data import MOST_LOSSES
from trainer_backend.pages.run_view import list_losses
from trainer_backend.store import reads, reads_rollouts
from trainer_backend.store.database import Store
from trainer_backend.store.reads_rollouts import RolloutFilter, RolloutSort

router = page_router()

_SORTS = get_args(RolloutSort)
_PAGE = 50


@router.get("/runs/{job_id}/rollouts", response_class=HTMLResponse)
def rollouts(request: Request, job_id: str) -> Response:
    """Show the list of rollouts, as the address filters and sorts it."""
    store = dashboard_of(request).store
    values = list_rollouts(store, job_id, request.query_params)
    # A list that is filtered or followed needs no values to filter by.
    facets = None if takes_part(request) else reads_rollouts.facets(store, job_id)
    return list_page("rollouts", facets=facets, **values, **run_frame(request, job_id, "rollouts"))


def list_rollouts(store: Store, job_id: str, params: QueryParams) -> dict[str, Any]:
    """Return a page of the rollouts that an address asks for; of lost ones also why each stage lost some."""
    where, (sort, down) = read_filter(RolloutFilter, params), read_order(params, _SORTS, "newest")
    rows = reads_rollouts.rollouts(
        store, job_id, where, sort=cast(RolloutSort, sort), descending=down,
        cursor=params.get("cursor") or None, limit=_PAGE,
    )  # fmt: skip
    total, whole = reads_rollouts.count_rollouts(store, job_id, where)
    counted = f"{total:,}" if whole else f"more than {total:,}"
    links = link_list(
        f"/runs/{job_id}/rollouts", params, sort=sort, down=down, sorts=_SORTS, cursor=rows.cursor
    )
    lossy = reads.lines_above_zero(store, job_id, FAILED, limit=MOST_LOSSES) if where.lost else ()
    return {
        "rows": rows.items,
        "caption": f"{len(rows.items)} of {counted} rollouts, {describe_order(sort, down, 'newest')}",
        "chosen": where, "filtered": where != RolloutFilter(), "sorts": _SORTS,
        "losses": list_losses([line.whole for line in lossy]),
        **links,
    }  # fmt: skip
