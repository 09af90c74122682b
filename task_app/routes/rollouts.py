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
    """Queue rollouts; posting a rollout again with the same id and the same content changes nothing."""
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
    """Return the rollouts of a run that have ended since the reply that contained `cursor`.

    If there are none, wait up to `wait_s` seconds until a rollout ends.
    """
    services = get_services(request)
    if wait_s > services.settings.max_wait_s:
        raise InvalidRequest(
            f"wait_s is {wait_s:g}; at most {services.settings.max_wait_s:g}", where="wait_s"
        )
    return Response(await services.runner.poll(run_id, cursor, wait_s), media_type=JSON)


@router.post("/ack")
async def ack_rollouts(request: Request, body: RolloutAck) -> RolloutAcked:
    """Delete ended rollouts whose results the caller has stored."""
    return get_services(request).runner.results.ack(body)


@router.get("/{rollout_id:path}", response_model=Rollout)
async def show_rollout(request: Request, rollout_id: str) -> Response:
    """Return the state of a rollout and, if it has finished, its trajectory."""
    return Response(get_services(request).runner.state(rollout_id), media_type=JSON)


@router.delete("/{rollout_id:path}", response_model=Rollout)
async def cancel_rollout(request: Request, rollout_id: str) -> Response:
    """Cancel a rollout that has not ended, and return its state; a repeated request changes nothing."""
    return Response(await get_services(request).runner.cancel(rollout_id), media_type=JSON)


runs_router = Router(prefix="/run", tags=["rollouts"])


class RunAbort(ForeignBody):
    run_id: Id = Field(description="known or not; a run may be aborted before it starts")


class RolloutCounts(Reply):
    """How many rollouts of a run have not ended, and how many have ended with each status."""

    unfinished: int
    finished: int
    failed: int
    cancelled: int


Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class RunReply(Reply):
    """A run and the counts of its rollouts. Times are UTC; null stands for an event that has not happened."""

    run_id: str
    status: RunState
    started_at: Time | None
    finished_at: Time | None
    aborted_at: Time | None
    rollouts: RolloutCounts


class RunAbortReply(RunReply):
    """The run after an abort; `stopped` is the number of rollouts that the abort ended."""

    ok: bool
    stopped: int


@runs_router.post("/abort", response_model=RunAbortReply)
async def abort_run(request: Request, body: RunAbort) -> dict[str, Any]:
    """End the unfinished rollouts of a run, and refuse to start further rollouts under its id.

    Rollouts that have ended keep their results. A repeated request changes nothing.
    """
    run, stopped = await get_services(request).runner.abort(body.run_id)
    return {"ok": True, "run_id": body.run_id, "stopped": stopped, **run.to_json()}


@runs_router.get("/status/{run_id:path}", response_model=RunReply)
async def show_run(request: Request, run_id: str = Path(min_length=1, max_length=200)) -> dict[str, Any]:
    """Return the counts of a run's rollouts, and the run's state: running, completed, failed or aborted.

    A run has failed if all its rollouts have ended, at least one of them failed, and none finished.
    """
    return {"run_id": run_id, **get_services(request).runner.runs.get(run_id).to_json()}
