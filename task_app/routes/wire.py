"""Replies with observations and outcomes of decisions, and base classes of request bodies.

Routes declare the models of their replies for /openapi.json, but return a Response, which FastAPI does not
validate: validation would take longer than a step. Tests compare real replies with /openapi.json.
"""

import json
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError, PydanticSerializationError, to_json
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Receive

from service_kit import gate
from service_kit.problems import problem_responses
from shared_schemas.base import OpenBody, Reply
from shared_schemas.rewards import StepRewardKeys
from shared_schemas.trajectory import RewardPart, StepMetadata
from task_app.episode.actions import requests_from_wire
from task_app.episode.decisions import NO_METADATA, achievements_added, achievements_status
from task_app.errors import InvalidRequest
from task_app.protocols import DecisionOutcome, Observation, ToolRequest
from task_app.sessions.sessions import EnvironmentSession
from task_app.sessions.switches import KEY

Result = TypeVar("Result")

# Statuses of the errors with which a route may answer.
ERRORS = (401, 404, 408, 409, 413, 422, 424, 428, 429, 500, 502, 503, 504, 507)
# Each operation's id is the name of its route, because generated clients name their functions by this id.
Router = partial(
    APIRouter, responses=problem_responses(ERRORS), generate_unique_id_function=attrgetter("name")
)


class ReplyJSON(JSONResponse):
    """A JSON response; lone surrogates in a plug-in's text are replaced, and NaN raises ValueError."""

    def render(self, content: Any) -> bytes:
        return reply_body(content)


def reply_body(content: Any) -> bytes:
    """Return the JSON bytes of a `ReplyJSON`. Raises ValueError for NaN or infinity."""
    # pydantic needs a quarter of json.dumps's time, but it writes NaN unchanged and fails on a lone
    # surrogate. In both cases json.dumps is called, which refuses NaN; encode() then replaces the surrogate.
    with suppress(PydanticSerializationError):
        body = to_json(content, inf_nan_mode="constants")
        if b"NaN" not in body and b"Infinity" not in body:
            return body
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


async def while_connected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result | None:
    """Return the result of `work`. If the client disconnects first, cancel the work and return None."""
    try:
        return await gate.while_connected(work, receive)
    except ClientDisconnect:
        return None


class Ok(Reply):
    """The reply of a request that was carried out and returns no data."""

    ok: bool


OK = Ok(ok=True)


class ObservationReply(Reply):
    """An observation, with the fields that all environments have in common (DESIGN.md 4.2)."""

    text: str
    data: dict[str, Any] = Field(description="the environment's own")
    achievements_status: dict[str, bool]
    achievements_counts: dict[str, int]
    reward_last_step: float


def observation_json(observation: Observation) -> dict[str, Any]:
    """Return the JSON of an `ObservationReply`."""
    counts = dict(observation.achievements_counts)
    return {
        "text": observation.text,
        "data": dict(observation.data),
        "achievements_status": achievements_status(counts),
        "achievements_counts": counts,
        "reward_last_step": observation.reward_last_step,
    }


def read_calls(calls: Sequence[Mapping[str, Any]], *, at_most: int, where: str) -> tuple[ToolRequest, ...]:
    """Parse the tool calls of a decision.

    Raises:
        InvalidRequest: there are too many calls, or a call contains no tool name.
    """
    if len(calls) > at_most:
        raise InvalidRequest(f"{len(calls)} tool calls in one decision; at most {at_most}", where=where)
    try:
        return requests_from_wire(calls)
    except ValueError as exc:
        raise InvalidRequest(str(exc), where=where) from exc


class StepReplyInfo(Reply):
    """Facts about a decision; no reward is computed from them."""

    turn: int
    achievements_added: tuple[str, ...]
    invalid_reason: str | None
    executed_actions: tuple[str, ...]
    tool_result: str


class EnvStepReply(Reply):
    """The observation after a decision, and its rewards; `reward` is the sum of `env_rewards`."""

    observation: ObservationReply
    reward: float
    done: bool
    terminated: bool
    truncated: bool
    env_rewards: tuple[float, ...] = Field(description="[S] reward of each env step")
    reward_parts: tuple[RewardPart, ...]
    step_idx: int = Field(description="env steps of the episode so far")
    info: StepReplyInfo
    metadata: StepMetadata


def step_json(session: EnvironmentSession, before: Observation, outcome: DecisionOutcome) -> dict[str, Any]:
    """Return the JSON of an `EnvStepReply` for the session's last decision.

    `before` is the observation before the decision.
    """
    after, metadata = outcome.observation, session.metadata
    return {
        "observation": observation_json(after),
        "reward": float(sum(outcome.env_rewards)),
        "done": outcome.terminated or outcome.truncated,
        "terminated": outcome.terminated,
        "truncated": outcome.truncated,
        "env_rewards": list(outcome.env_rewards),
        "reward_parts": [],
        "step_idx": session.step_idx,
        "info": {
            "turn": session.turn,
            "achievements_added": achievements_added(before.achievements_counts, after.achievements_counts),
            "invalid_reason": outcome.invalid_reason,
            "executed_actions": list(outcome.executed_actions),
            "tool_result": outcome.result,
        },
        "metadata": {} if metadata is NO_METADATA else metadata.model_dump(mode="json", exclude_none=True),
    }


MISSPELT = "misspelt_key"
# Least similarity of difflib at which an unknown key counts as misspelt. Keys of other task apps must stay
# below it: `run_id` is allowed, although it resembles our `rl_run_id`.
_CUTOFF = 0.85
_LONGEST = 40
# Limited, because each unknown key is compared with all known keys.
MOST_UNKNOWN = 100

LONGEST_ID = 200

# Names of the reward switches; at the top level of a body, a switch would have no effect.
SWITCHES = frozenset({KEY, *StepRewardKeys.model_fields})

EnvId = Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]


class ForeignBody(OpenBody):
    """Base class of bodies that other projects define too: unknown keys are kept, misspelt keys are refused.

    If misspellings were allowed, `{"sed": 7}` would start an episode with seed 0.
    """

    @model_validator(mode="before")
    @classmethod
    def _refuse_misspellings(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        unknown = body.keys() - cls.model_fields.keys()
        if len(unknown) > MOST_UNKNOWN:
            raise PydanticCustomError(
                "too_many_keys",
                "{found} unknown keys; at most {most} are read over",
                {"found": len(unknown), "most": MOST_UNKNOWN},
            )
        for name in unknown:
            if len(name) > _LONGEST:
                continue
            close = get_close_matches(name, cls.model_fields, n=1, cutoff=_CUTOFF)
            if close:
                raise PydanticCustomError(
                    MISSPELT,
                    "unknown key '{name}'. Did you mean '{meant}'?",
                    {"name": name, "meant": close[0]},
                )
        return body


# For a body that may be absent. If its type were `Model | None`, generated clients would send invalid JSON.
NULL_IS_EMPTY = BeforeValidator(lambda body: {} if body is None else body)


class CreateBody(ForeignBody):
    """Base class of bodies that create an environment or a policy.

    The switches of decision rewards may be in `config`, `training` or `rollout`.
    """

    config: dict[str, Any] = Field(default_factory=dict, description="may hold step_rewards")
    training: StepRewardKeys | None = Field(
        default=None, description="the same switches, under their names in a job's [training]"
    )
    rollout: Any = Field(default=None, description="a table that may hold them under these names too")

    @model_validator(mode="before")
    @classmethod
    def _refuse_misplaced_switches(cls, body: Any) -> Any:
        for name in sorted(SWITCHES & body.keys()) if isinstance(body, dict) else ():
            home = "config" if name == KEY else "training"
            raise PydanticCustomError(
                MISSPELT, "'{name}' has no effect here; it stands in '{home}'", {"name": name, "home": home}
            )
        return body


class LegacyObservation(ObservationReply):
    """An observation for older clients: `inventory` and `player_position` repeat values from `data`."""

    inventory: Any = None
    player_position: Any = None


def legacy_observation(observation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of a `LegacyObservation`."""
    data = observation["data"]
    values = {"inventory": data.get("inventory"), "player_position": data.get("position")}
    return {**observation, **{name: value for name, value in values.items() if value is not None}}
