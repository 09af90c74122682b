"""Pure: which requests of a batch are new, and which were accepted before: the same id, the same rollout."""

import hashlib
from collections.abc import Callable

from shared_schemas.rollouts import RolloutBatch, RolloutRequest
from task_app.errors import Conflict
from task_app.results import Fingerprint, Record

New = tuple[int, RolloutRequest, Fingerprint]


def new_and_known(batch: RolloutBatch, find: Callable[[str], Record | None]) -> tuple[list[New], list[str]]:
    """New requests with their place in the batch and their fingerprint, and the ids of those seen before.

    Args:
        batch: as it came.
        find: the record of a rollout that is held.

    Raises:
        Conflict: an id is taken by another body.
    """
    new: dict[str, New] = {}
    known: list[str] = []
    for index, request in enumerate(batch.rollouts):
        fingerprint, rollout_id = fingerprint_of(request), request.rollout_id
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


def fingerprint_of(request: RolloutRequest) -> Fingerprint:
    """Of the whole request but the key, which pydantic masks: a retry may carry a fresh one."""
    text = request.model_dump_json().encode()
    return Fingerprint(hashlib.blake2b(text, digest_size=16).digest(), len(text))
