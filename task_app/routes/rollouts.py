"""Routes that accept, list, acknowledge and cancel rollouts (/rollouts), and abort whole runs (/run)."""

from typing import Annotated, Any

from fastapi import Path, Query, Request
from pydantic import Field
from starlette.responses import Response

from shared_schemas.base import Reply
from shared_schemas.rollouts import (
    Id,
    Rollout,
    RolloutAck,
    RolloutAcked,
    RolloutBatch,
    RolloutPage,
    RolloutsAccepted,
)
from task_app.errors import InvalidRequest
from task_app.rollouts.runs import RunState
from task_app.routes.wire import ForeignBody, Router
from task_app.services import get_services

router = Router(prefix="/rollouts", tags=["rollouts"])

JSON = "application/json"


@router.post("", status_code=202)
async def accept_rollouts(request: Request, batch: RolloutBatch) -> RolloutsAccepted:
    """Queue rollouts; posting the same id with the same body again changes nothing."""
    services = get_services(request)
    services.captures.address = request.scope.get("server")
    return services.runner.accept(batch)


@router.get("", response_model=RolloutPage)
async def poll_rollouts(
    request: Request,
    run_id: Annotated[Id, Query()],
    cursor: Annotated[str | None, Query(max_length=200)] = None,
    wait_s: Annotated[float, Query(ge=0.0, allow_inf_nan=False)] = 0.0,
) -> Response:
    """Return a run's rollouts that ended after the cursor; wait up to `wait_s` seconds for the first one."""
    services = get_services(request)
    if wait_s > services.settings.max_wait_s:
        raise InvalidRequest(
            f"wait_s is {wait_s:g}; at most {services.settings.max_wait_s:g}", where="wait_s"
        )
    return Response(await services.runner.poll(run_id, cursor, wait_s), media_type=JSON)


@router.post("/ack")
async def ack_rollouts(request: Request, body: RolloutAck) -> RolloutAcked:
    """Forget rollouts that the caller has stored."""
    return get_services(request).runner.results.ack(body)


@router.get("/{rollout_id:path}", response_model=Rollout)
async def show_rollout(request: Request, rollout_id: str) -> Response:
    """Return a rollout; if it has finished, with its trajectory."""
    return Response(get_services(request).runner.state(rollout_id), media_type=JSON)


@router.delete("/{rollout_id:path}", response_model=Rollout)
async def cancel_rollout(request: Request, rollout_id: str) -> Response:
    """End an unfinished rollout and return its state; repeating this changes nothing."""
    return Response(await get_services(request).runner.cancel(rollout_id), media_type=JSON)


runs_router = Router(prefix="/run", tags=["rollouts"])


class RunAbort(ForeignBody):
    run_id: Id = Field(description="known or not; a run may be aborted before it starts")


class RolloutCounts(Reply):
    """Numbers of a run's rollouts: unfinished, and ended by their status."""

    unfinished: int
    finished: int
    failed: int
    cancelled: int


Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class RunReply(Reply):
    """A run with its counts; times are UTC, or null for an event that has not happened."""

    run_id: str
    status: RunState
    started_at: Time | None
    finished_at: Time | None
    aborted_at: Time | None
    rollouts: RolloutCounts


class RunAbortReply(RunReply):
    """The run after the abort, and the number of rollouts that it ended."""

    ok: bool
    stopped: int


@runs_router.post("/abort", response_model=RunAbortReply)
async def abort_run(request: Request, body: RunAbort) -> dict[str, Any]:
    """End the unfinished rollouts of a run, and start nothing more under its id.

    Repeating this changes nothing, and finished rollouts stay finished.
    """
    run, stopped = await get_services(request).runner.abort(body.run_id)
    return {"ok": True, "run_id": body.run_id, "stopped": stopped, **run.to_json()}


@runs_router.get("/status/{run_id:path}", response_model=RunReply)
async def show_run(request: Request, run_id: str = Path(min_length=1, max_length=200)) -> dict[str, Any]:
    """Return the state and the counts of a run: running, completed, failed (none finished), or aborted."""
    return {"run_id": run_id, **get_services(request).runner.runs.get(run_id).to_json()}
