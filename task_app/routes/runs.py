"""/run: abort a run, and see what became of it; for POST /rollouts and POST /rollout alike."""

from typing import Any

from fastapi import APIRouter, Path, Request
from pydantic import Field

from shared_schemas.rollouts import Id
from task_app.routes.bodies import ForeignBody
from task_app.services import services_of

router = APIRouter(prefix="/run", tags=["rollouts"])


class RunAbort(ForeignBody):
    run_id: Id = Field(description="known or not: an abort before the start is kept")


@router.post("/abort")
async def abort(request: Request, body: RunAbort) -> dict[str, Any]:
    """End what the run has unfinished, and start nothing more under its id. Repeating it changes nothing;
    what had finished stays finished."""
    run, stopped = await services_of(request).runner.abort(body.run_id)
    return {"ok": True, "run_id": body.run_id, "stopped": stopped, **run.to_json()}


@router.get("/status/{run_id:path}")
async def status(request: Request, run_id: str = Path(min_length=1, max_length=200)) -> dict[str, Any]:
    """`running`, `completed`, `failed` (nothing finished) or `aborted`, and the counts behind it."""
    return {"run_id": run_id, **services_of(request).runner.runs.get(run_id).to_json()}
