"""Parses pages of rollout results, and checks each rollout against its request.

A rollout must belong to its request and contain only finite numbers. All functions are pure.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json, to_json

from service_kit.replies import ReplyInvalid, read_reply, show_found
from shared_schemas.plain_text import encodable
from shared_schemas.rollouts import Rollout, RolloutFailure, RolloutPage, RolloutRequest
from shared_schemas.trajectory import StepData, Trajectory

# The failure code of a rollout that does not answer its request.
WRONG_ROLLOUT = "wrong_rollout"
# Squares and sums of larger numbers leave the range of float32, in which the loss is computed.
_LARGEST = 1e15
# Fields that together identify a planned rollout within all runs; retries differ in `attempt`.
PLACE = ("run_id", "iteration", "group_id", "sibling", "attempt")
_NO_JSON = object()
# An error message names the path to an invalid field: at most this many names of this many characters each.
_MOST_NAMES, _LONGEST_NAME = 20, 80
_CLOSED_BY = {b"{": b"}", b"[": b"]"}
# Matches a string, a list without strings or nested values (most of a page consists of such lists), or a
# separator. If a quote matches alone, its string has no end.
_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"|\[[^"\[\]{}]*+\]|["\[\]{},]', re.DOTALL)
_MEMBER = re.compile(rb'\s*("(?:[^"\\]++|\\.)*+")\s*:(.*)', re.DOTALL)


def checked(request: RolloutRequest, rollout: Rollout) -> Rollout:
    """Return the rollout unchanged if it answers the request, and otherwise a failed copy of it.

    The failed copy has no trajectory; its failure has the code WRONG_ROLLOUT and names the fault.
    """
    fault = _find_fault(request, rollout)
    if fault is None:
        return rollout
    detail = f"the task app sent another episode than was asked for, or a broken one: {fault}"
    failure = RolloutFailure(code=WRONG_ROLLOUT, detail=detail)
    return rollout.model_copy(update={"status": "failed", "trajectory": None, "failure": failure})


def read_page(content: bytes, part: str) -> RolloutPage:
    """Parse a page of results, the body of a reply from GET /rollouts.

    A rollout that cannot be parsed is returned as a failed rollout, whose failure names the invalid field and
    its value. If its id cannot be parsed either, its `rollout_id` is "". The fields of PLACE, which give its
    place in the run, are copied only if all of them can be parsed.

    Args:
        part: name of the reply in error messages.

    Raises:
        ReplyInvalid: a field outside the rollouts is invalid, or it is unclear where each rollout ends.
    """
    try:
        page = read_reply(RolloutPage, content, part)
    except ReplyInvalid as error:
        return _read_each(content, part, error)
    if all(one.rollout_id for one in page.rollouts):
        return page
    return _read_each(content, part, _no_id(part))


def _read_each(content: bytes, part: str, fault: ReplyInvalid) -> RolloutPage:
    members = _parts(content) or []
    lists = [text for name, text in members if name == "rollouts" and text.lstrip().startswith(b"[")]
    each = _split(lists[0]) if len(lists) == 1 else None
    if each is None:
        inseparable = "" if fault.field else "; its rollouts cannot be told apart"
        raise ReplyInvalid(part, fault.field, fault.found, fault.allowed + inseparable) from fault
    others = [to_json(name) + b":" + text for name, text in members if name != "rollouts"]
    empty = read_reply(RolloutPage, b"{" + b",".join([*others, b'"rollouts":[]']) + b"}", part)
    read = (_read_one(text, f"{part}: rollouts.{place}", empty) for place, text in enumerate(each))
    return empty.model_copy(update={"rollouts": tuple(read)})


def _read_one(text: bytes, part: str, page: RolloutPage) -> Rollout:
    try:
        rollout = read_reply(Rollout, text, part)
        if not rollout.rollout_id:
            raise _no_id(part)
    except ReplyInvalid as error:
        fault = error if error.field else _locate(text, error)
        return Rollout(
            **_read_place(text), instance_id=page.instance_id, status="failed",
            failure=RolloutFailure(code=WRONG_ROLLOUT, detail=str(fault)),
        )  # fmt: skip
    return rollout


def _no_id(part: str) -> ReplyInvalid:
    return ReplyInvalid(part, "rollout_id", show_found(""), "it should be the id of the request")


def _read_place(text: bytes) -> dict[str, Any]:
    """Return the fields that identify the request, from the JSON text of an invalid rollout.

    They are `rollout_id` and the fields of PLACE. An id that cannot be parsed is returned as "". If one
    field of PLACE cannot be parsed, all fields of PLACE get defaults.
    """
    place: dict[str, Any] = {"rollout_id": "", **dict.fromkeys(PLACE, 0), "run_id": "", "group_id": ""}
    members, found = _parts(text) or [], {}
    for name, default in place.items():
        values = [_read_json(value) for key, value in members if key == name]
        # A key that occurs several times is accepted if all its values are equal.
        if values and type(values[0]) is type(default) and values.count(values[0]) == len(values):
            found[name] = values[0]
    is_whole = found.keys() >= {*PLACE}
    return place | (found if is_whole else {"rollout_id": found.get("rollout_id", "")})


def _locate(text: bytes, fault: ReplyInvalid) -> ReplyInvalid:
    """Return a copy of the fault, with the path to the innermost field that is not valid JSON."""
    names: list[str] = []
    while len(names) < _MOST_NAMES:
        members = _parts(text) or ()
        inner = next(((name, one) for name, one in members if _read_json(one) is _NO_JSON), None)
        if inner is None:
            break
        names.append(inner[0][:_LONGEST_NAME])
        text = inner[1]
    found = show_found(text) if names else fault.found
    return ReplyInvalid(fault.part, ".".join(names), found, fault.allowed)


def _read_json(text: bytes) -> Any:
    try:
        from_json(text)
        return json.loads(text)  # unlike from_json, it refuses integers with too many digits
    except ValueError:
        return _NO_JSON


def _parts(text: bytes) -> list[tuple[str, bytes]] | None:
    """Split the text of a JSON object or list into its values, each as a pair (key or index, text).

    Return None for any other text.
    """
    texts = _split(text)
    if texts is None or text.lstrip().startswith(b"["):
        return None if texts is None else [(str(place), one) for place, one in enumerate(texts)]
    members = [_MEMBER.fullmatch(one) for one in texts]
    return [(_name(one[1]), one[2]) for one in members if one] if all(members) else None


def _name(text: bytes) -> str:
    name = _read_json(text)
    return text.decode(errors="replace") if name is _NO_JSON else encodable(name)


def _split(text: bytes) -> list[bytes] | None:
    """Split the text of a JSON object or list at its top-level commas; the parts need not be valid JSON.

    Return None if the text is neither an object nor a list, or if its brackets or quotes do not match.
    """
    text, parts, first = text.strip(), [], 1
    if text[:1] not in _CLOSED_BY:
        return None
    closing = [_CLOSED_BY[text[:1]]]
    for mark in _MARK.finditer(text, 1):
        sign = mark[0]
        if sign in _CLOSED_BY:
            closing.append(_CLOSED_BY[sign])
        elif sign in b"]}":
            if closing.pop() != sign:
                return None
            if not closing:
                parts.append(text[first : mark.start()])
                is_whole = mark.end() == len(text) and (all(map(bytes.strip, parts)) or len(parts) == 1)
                return [one for one in parts if one.strip()] if is_whole else None
        elif sign == b"," and len(closing) == 1:
            parts.append(text[first : mark.start()])
            first = mark.end()
        elif sign == b'"':
            return None
    return None


def _find_fault(request: RolloutRequest, rollout: Rollout) -> str | None:
    for name in PLACE:
        found, asked = getattr(rollout, name), getattr(request, name)
        if found != asked:
            return f"its {name} is {found!r:.80}, and {asked!r} was asked for"
    episode, start = rollout.trajectory, request.start
    if episode is None:
        return "it has no trajectory"
    if start.seed is not None and episode.seed != start.seed:
        return f"it was played in the world of seed {episode.seed}; seed {start.seed} was asked for"
    if (episode.parent_rollout_id, episode.parent_turn) != (start.parent_rollout_id, start.parent_turn):
        return f"it continues {episode.parent_rollout_id!r:.80}; {start.parent_rollout_id!r} was asked for"
    turns = [step.turn for step in episode.steps]
    if turns != list(range(1, len(turns) + 1)):
        return f"the turns of its steps are {turns!r:.80}; they count from 1"
    # `not <=` instead of `>`, because every comparison with NaN is false.
    found = next((item for item in _numbers(episode) if not abs(item[1]) <= _LARGEST), None)
    return None if found is None else f"its {found[0]} is {found[1]}, beyond +-{_LARGEST:g}"


def _numbers(episode: Trajectory) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of every number from which rewards, metrics or losses are computed."""
    yield "outcome_reward", episode.outcome_reward
    yield "wall_s", episode.wall_s
    if episode.user_reward is not None:
        yield "environment_outcome_reward", episode.user_reward.environment_outcome_reward
        yield "score of the reward function", episode.user_reward.result.score
    for step in episode.steps:
        for name, value in _numbers_of_step(step):
            yield f"{name} at turn {step.turn}", value


def _numbers_of_step(step: StepData) -> Iterator[tuple[str, float]]:
    yield from (("env_reward", value) for value in step.env_rewards or ())
    yield from (("reward part", part.value) for part in step.reward_parts)
    for name in ("policy_value_estimate", "base_reward", "advantage", "return_to_go"):
        if (value := getattr(step, name)) is not None:
            yield name, value
    yield "reward_last_step", step.observation_data.reward_last_step
    if step.next_observation is not None:
        yield "reward_last_step", step.next_observation.reward_last_step
    info = step.step_info
    yield from (("time", value) for value in (info.policy_s, info.environment_s, info.interaction_s))
