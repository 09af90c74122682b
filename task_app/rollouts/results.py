"""Stores the state of rollouts, and their results until they are acknowledged; no I/O except log lines.

A result is stored as the bytes of JSON that are sent to the client.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import structlog

from shared_schemas.plain_text import encodable
from shared_schemas.rollouts import (
    EnvSpec,
    Rollout,
    RolloutAck,
    RolloutAcked,
    RolloutBatch,
    RolloutFailure,
    RolloutRequest,
    RolloutStatus,
)
from shared_schemas.trajectory import Trajectory
from task_app.errors import (
    CapacityReached,
    Conflict,
    ContextLengthExceeded,
    CursorExpired,
    EpisodeFailed,
    TaskAppError,
    UnknownId,
)
from task_app.held import Held
from task_app.settings import Settings

log = structlog.get_logger("task_app")

END_STATES: frozenset[RolloutStatus] = frozenset({"finished", "failed", "cancelled"})
# Fields that a request, its record and its result have in common.
_NAMES = ("rollout_id", "run_id", "iteration", "group_id", "sibling", "attempt")


class Fingerprint(NamedTuple):
    """The digest of a request, and the size of the request in bytes of JSON."""

    digest: bytes
    size: int


@dataclass(slots=True, eq=False)
class Record:
    """The state of one rollout, its result, and parts of its request; the inference key is not stored.

    `seed` is None for an episode that starts at a snapshot. `reason` is the stop reason or failure code.
    """

    rollout_id: str
    run_id: str
    iteration: int
    group_id: str
    sibling: int
    attempt: int
    fingerprint: Fingerprint
    env: EnvSpec
    seed: int | None
    reward_function: str | None = None
    status: RolloutStatus = "queued"
    sequence: int = 0
    end_s: float = 0.0
    result_json: bytes = b""
    reason: str = ""
    decisions: int = 0
    env_steps: int = 0

    @property
    def has_ended(self) -> bool:
        return self.status in END_STATES


def cut_page(records: Iterable[Record], *, at_most: int, at_most_bytes: int) -> list[Record]:
    """Return the first records within both bounds, but at least one, so that a large result is sent too."""
    page: list[Record] = []
    size = 0
    for record in islice(records, at_most):
        size += len(record.result_json)
        if page and size > at_most_bytes:
            break
        page.append(record)
    return page


class Results:
    """Stores the records of this instance by id, and records with a result also by run and sequence number.

    The bytes of all stored requests and results are counted in `held`. A request counts because its record
    keeps the environment's config, which may contain a whole document.
    """

    def __init__(self, instance_id: str, held: Held) -> None:
        self.instance_id = instance_id
        self._held = held
        self._records: dict[str, Record] = {}
        self._results: dict[str, dict[int, Record]] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._records)

    def find(self, rollout_id: str) -> Record | None:
        return self._records.get(rollout_id)

    def get(self, rollout_id: str) -> Record:
        record = self._records.get(rollout_id)
        if record is None:
            hint = "it was never accepted here, was acknowledged, or expired"
            raise UnknownId("rollout", rollout_id, where="rollout_id", hint=hint)
        return record

    def since(self, run_id: str, sequence: int) -> Iterator[Record]:
        """Return the ended rollouts of a run with a larger sequence number, oldest first."""
        return (record for number, record in self._results.get(run_id, {}).items() if number > sequence)

    def add(self, request: RolloutRequest, fingerprint: Fingerprint) -> Record:
        record = Record(
            fingerprint=fingerprint,
            env=request.env,
            seed=request.start.seed,
            reward_function=request.reward_function,
            **{name: getattr(request, name) for name in _NAMES},
        )
        self._records[record.rollout_id] = record
        self._held.total += fingerprint.size
        return record

    def state(self, record: Record) -> bytes:
        """Return a `Rollout` as JSON, with its result if it has ended."""
        return record.result_json or self.json(record, record.status)

    def json(
        self,
        record: Record,
        status: RolloutStatus,
        *,
        trajectory: Trajectory | None = None,
        failure: RolloutFailure | None = None,
    ) -> bytes:
        """Return a `Rollout` of this status as JSON; a failure's code is stored as the record's reason."""
        if failure is not None:
            record.reason = failure.code
        names = {name: getattr(record, name) for name in _NAMES}
        rollout = Rollout(
            **names, instance_id=self.instance_id, status=status, trajectory=trajectory, failure=failure
        )
        return rollout.model_dump_json().encode()

    def finished_json(self, record: Record, trajectory: Trajectory) -> bytes:
        record.reason = trajectory.stop_reason.value
        record.decisions, record.env_steps = len(trajectory.steps), trajectory.env_steps
        log.info(
            "rollout_finished", stop_reason=record.reason, decisions=record.decisions,
            outcome=trajectory.outcome_reward,
        )  # fmt: skip
        return self.json(record, "finished", trajectory=trajectory)

    def failure_json(self, record: Record, exc: TaskAppError) -> bytes:
        decisions_done = exc.decisions_done if isinstance(exc, EpisodeFailed) else 0
        failure = build_failure(exc, decisions_done=decisions_done)
        if isinstance(exc, ContextLengthExceeded):
            failure = failure.model_copy(update={"detail": _explain_long_prompt(record, failure.detail)})
        log.warning("rollout_failed", code=exc.code, detail=failure.detail, decisions=decisions_done)
        return self.json(record, "failed", failure=failure)

    def end(self, record: Record, status: RolloutStatus, result_json: bytes, *, now_s: float) -> None:
        """Store the result of an ended rollout under the next sequence number."""
        self._sequence += 1
        record.status, record.result_json = status, result_json
        record.sequence, record.end_s = self._sequence, now_s
        self._held.total += len(result_json)
        self._results.setdefault(record.run_id, {})[record.sequence] = record

    def forget(self, record: Record) -> None:
        assert record.has_ended, "only an ended rollout can be forgotten"
        del self._records[record.rollout_id]
        self._held.total -= record.fingerprint.size + len(record.result_json)
        results = self._results[record.run_id]
        del results[record.sequence]
        if not results:
            del self._results[record.run_id]

    def ack(self, ack: RolloutAck) -> RolloutAcked:
        """Forget the acknowledged rollouts of the run that have ended; report all other ids as unknown."""
        acknowledged, unknown = [], []
        for rollout_id in dict.fromkeys(ack.rollout_ids):
            record = self.find(rollout_id)
            if record is not None and record.has_ended and record.run_id == ack.run_id:
                self.forget(record)
                acknowledged.append(rollout_id)
            else:
                unknown.append(rollout_id)
        return RolloutAcked(acked=tuple(acknowledged), unknown=tuple(unknown))

    def check_room(self, new: int, settings: Settings) -> None:
        """Raise CapacityReached if `new` further rollouts are too many, or the limit of bytes is reached."""
        free = settings.max_rollouts_held - len(self)
        if new > free:
            raise CapacityReached(
                f"{new} new rollouts, but only {max(0, free)} more can be held, of max_rollouts_held = "
                f"{settings.max_rollouts_held}",
                hint="acknowledge rollouts that have ended (POST /rollouts/ack)",
            )
        self._held.check_room()

    def expire(self, *, before_s: float) -> int:
        """Forget results from before `before_s` that were never acknowledged; return their number."""
        old = [record for record in self._records.values() if record.has_ended and record.end_s < before_s]
        for record in old:
            self.forget(record)
        return len(old)

    def cursor(self, sequence: int) -> str:
        return f"{self.instance_id}.{sequence}"

    def read_cursor(self, cursor: str | None) -> int:
        """Return a cursor's sequence number (0 for None); raise CursorExpired if another process made it."""
        if not cursor:
            return 0
        instance_id, _, number = cursor.rpartition(".")
        if instance_id != self.instance_id or not (number.isascii() and number.isdigit()):
            raise CursorExpired(
                "the cursor is not of this instance of the task app; its unacknowledged rollouts are lost",
                where="cursor",
                hint="poll without a cursor, and ask again for the rollouts that are missing",
            )
        return int(number[:18])


NewRequest = tuple[int, RolloutRequest, Fingerprint]


def split_batch(
    batch: RolloutBatch, find: Callable[[str], Record | None]
) -> tuple[list[NewRequest], list[str]]:
    """Return the new requests, with index in the batch and fingerprint, and the ids of known requests.

    Raises:
        Conflict: a known id comes with a different request.
    """
    new: dict[str, NewRequest] = {}
    known: list[str] = []
    for index, request in enumerate(batch.rollouts):
        fingerprint, rollout_id = take_fingerprint(request), request.rollout_id
        record = find(rollout_id)
        earlier = record.fingerprint if record else new[rollout_id][2] if rollout_id in new else None
        if earlier is None:
            new[rollout_id] = (index, request, fingerprint)
        elif earlier == fingerprint:
            known.append(rollout_id)
        else:
            raise Conflict(
                f"rollout {rollout_id!r} was accepted with another body",
                where=f"rollouts.{index}.rollout_id",
                hint="a new rollout needs a new id",
            )
    return list(new.values()), known


def take_fingerprint(request: RolloutRequest) -> Fingerprint:
    """Return the fingerprint of a request without its inference key, since a retry may send a new key."""
    text = request.model_dump_json().encode()
    return Fingerprint(hashlib.blake2b(text, digest_size=16).digest(), len(text))


def _explain_long_prompt(record: Record, sentence: str) -> str:
    """Return the failure's `detail` for a first prompt that is too long; it quotes the server's `sentence`.

    It also names the group, because in a job the group's id ends with the row of the data set.
    """
    start = "a snapshot" if record.seed is None else f"seed {record.seed}"
    group = f" in group {record.group_id!r}" if record.group_id else ""
    return (
        f"the first prompt does not fit the model, so there is no decision to learn from "
        f"({record.env.env_name!r}, {start}{group}): {sentence}. In a job, max_model_length is "
        "multi_turn.max_model_length, the model's own limit inference.max_model_len, and max_tokens "
        "rollout.max_tokens"
    )


def build_failure(exc: TaskAppError, *, decisions_done: int) -> RolloutFailure:
    """Return the failure to record for an episode that ended with the error `exc`."""
    return RolloutFailure(
        code=exc.code,
        detail=encodable(exc.detail),
        decisions_done=decisions_done,
        recurs=isinstance(exc, EpisodeFailed) and exc.recurs,
    )
