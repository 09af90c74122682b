"""/interaction: simulated users from the operator's file, for callers that run their own episode loop."""

from dataclasses import asdict
from typing import Any

from fastapi import Request
from pydantic import Field, field_validator
from starlette.responses import Response

from shared_schemas.base import Reply
from shared_schemas.messages import Message, refuse_unanswerable
from shared_schemas.rollouts import GroundTruth, InteractionKwargs, InteractionName
from task_app.errors import EpisodeOver
from task_app.interactions.service import InteractionSession
from task_app.routes.wire import LONGEST_ID, OK, ForeignBody, Ok, ReplyJSON, Router
from task_app.services import get_services

router = Router(prefix="/interaction", tags=["interaction"])


class InteractionStart(ForeignBody):
    name: InteractionName | None = Field(
        default=None, description="may be absent where there is one interaction alone"
    )
    kwargs: InteractionKwargs = Field(
        default_factory=dict, repr=False, description="interaction_kwargs of the data row, without the name"
    )
    ground_truth: GroundTruth = Field(default=None, repr=False, description="used if kwargs hold none")


class InteractionRequest(ForeignBody):
    interaction_id: str = Field(min_length=1, max_length=LONGEST_ID)


class InteractionRespond(InteractionRequest):
    messages: tuple[Message, ...] = Field(min_length=1, max_length=100_000, description="all so far")

    @field_validator("messages", mode="before")
    @classmethod
    def _end_with_an_answer(cls, messages: Any) -> Any:
        refuse_unanswerable(messages, "messages")
        return messages


class InteractionStartReply(Reply):
    """The id of a new interaction, and its name in the operator's file."""

    interaction_id: str
    name: str


class InteractionRespondReply(Reply):
    """The user's answer to the last assistant message, and the score of that message."""

    should_terminate: bool
    response: str
    score: float | None
    metadata: dict[str, Any]
    turn: int


class InteractionScoreReply(Reply):
    score: float


@router.post("/start")
async def start_interaction(request: Request, body: InteractionStart) -> InteractionStartReply:
    """Start an interaction for one episode; it is finalised if it stays unused for too long."""
    services = get_services(request)
    sessions = services.interaction_sessions
    sessions.check_capacity()
    live = services.interactions.live(
        body.name, body.kwargs, rollout_id=services.instance_id, ground_truth=body.ground_truth
    )
    try:
        await live.start()
        interaction_id = sessions.add(InteractionSession(live))
        return InteractionStartReply(interaction_id=interaction_id, name=live.name)
    except BaseException:
        await live.close()
        raise


@router.post("/respond", response_model=InteractionRespondReply)
async def respond_interaction(request: Request, body: InteractionRespond) -> Response:
    """Return the user's answer to the last assistant message, and the score of that message."""
    session = get_services(request).interaction_sessions.get(body.interaction_id, where="interaction_id")
    async with session.lock:
        if session.live.terminated:
            raise EpisodeOver(
                "the interaction has ended the episode; it gives no more answers",
                where="interaction_id",
                hint="finalize it, and start another one",
            )
        reply = await session.live.respond(body.messages)
        session.turn += 1
        return ReplyJSON({**asdict(reply), "turn": session.turn})


@router.post("/score")
async def score_interaction(request: Request, body: InteractionRequest) -> InteractionScoreReply:
    """Return the current result of the interaction's `calculate_score`.

    The score of a single answer is in the reply of /interaction/respond.
    """
    session = get_services(request).interaction_sessions.get(body.interaction_id, where="interaction_id")
    async with session.lock:
        return InteractionScoreReply(score=await session.live.score())


@router.post("/finalize")
async def finalize_interaction(request: Request, body: InteractionRequest) -> Ok:
    """Finalise the interaction; if it is working on an answer, wait for that answer first."""
    session = get_services(request).interaction_sessions.remove(body.interaction_id, where="interaction_id")
    await session.live.close()
    return OK
