"""--state-dir at the start: the sessions and answers of the process before, as far as anybody was told.

A file that cannot be read is named in the log and left where it is; all others come back.
"""

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import EnvSpec
from task_app.actions import json_object
from task_app.errors import JournalDamaged, TaskAppError
from task_app.guards.idempotency import Answers, Claim
from task_app.guards.once import lost_answer
from task_app.guards.threads import Threads
from task_app.journal.files import SUFFIX, read_records
from task_app.journal.keeping import StateDir
from task_app.journal.sessions import EnvironmentJournal, PolicyJournal, seen
from task_app.plugins import PolicyContext
from task_app.protocols import ToolRequest
from task_app.sessions import EnvironmentSession, PolicySession
from task_app.snapshots.sessions import environment_session, open_environment, open_policy, policy_session

# An Idempotency-Key, and the digest of its request.
Due = tuple[str, str]

log = structlog.get_logger("task_app")


@dataclass(slots=True)
class Found:
    """What a state folder holds, by id; `owing`: answers that are yet to be written, and told of in files."""

    environments: dict[str, EnvironmentSession] = field(default_factory=dict)
    policies: dict[str, PolicySession] = field(default_factory=dict)
    owing: list[Claim] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class File:
    """The file of one session; `records` is without its head, and without what it was told."""

    path: Path
    head: dict[str, Any]
    records: list[dict[str, Any]]
    told: set[Due]

    def trailing(self, answers: Answers) -> int:
        """How many of the last records can be undone: those whose requests were never answered."""
        count = 0
        for record in reversed(self.records):
            if "claim" not in record or self.is_answered(_due(record["claim"]), answers):
                break
            count += 1
        return count

    def stays(self, answers: Answers) -> list[dict[str, Any]]:
        return self.records[: len(self.records) - self.trailing(answers)]

    def is_answered(self, due: Due, answers: Answers) -> bool:
        claim = answers.get(due[0])
        return due in self.told or (claim is not None and claim.due == due)


async def recover(
    state: StateDir, answers: Answers, threads: Threads, make_context: Callable[[], PolicyContext]
) -> Found:
    """Read every session back. `answers` holds those of the process before; what was done but is not among
    them is undone, or answered as lost."""
    for aside in state.folder.glob("*.tmp"):
        aside.unlink()
    policies, environments = _read(state, "policy"), _read(state, "env")
    _answer_lost([*policies, *environments], answers)
    found = Found()
    for file in policies:
        with _refusing(file.path):
            if records := _undone(file, state, answers):
                owing = _owing(file, records, answers, found)
                found.policies[file.path.stem] = _policy(file, records, owing, state, make_context())
    for file in environments:
        with _refusing(file.path):
            if records := _undone(file, state, answers):
                owing = _owing(file, records, answers, found)
                session = await _environment(file, records, owing, state, found, threads)
                found.environments[file.path.stem] = session
    return found


def _read(state: StateDir, kind: str) -> list[File]:
    files = []
    for path in sorted(state.folder.glob(f"{kind}_*{SUFFIX}")):
        with _refusing(path):
            head, *records = read_records(path, kind=kind)
            told = {_due(record["claim"]) for record in records if record["op"] == "told"}
            done = [record for record in records if record["op"] != "told"]
            files.append(File(path, head, done, told))
    return files


def _answer_lost(files: Sequence[File], answers: Answers) -> None:
    """What a request did is undone everywhere or nowhere: if some of it has to stay, its answer is lost."""
    lost = lost_answer("the task app was killed before it answered")
    found = True
    while found:
        found = False
        for file in files:
            for due in _dues(file.stays(answers)):
                if not file.is_answered(due, answers):
                    # It keeps what came before it from being undone: look at all of them again.
                    found = True
                    answers.restore(*due, lost)


def _undone(file: File, state: StateDir, answers: Answers) -> list[dict[str, Any]]:
    """The records that stay, also on disk; the retries of the others will do them again."""
    records = file.stays(answers)
    undone = len(file.records) - len(records)
    if not undone:
        return records
    log.info("journal_undone", file=file.path.name, records=undone, reason="never answered")
    if records:
        # What was told stays: it outlives the answers.
        told = [{"op": "told", "claim": due} for due in sorted(file.told)]
        state.file(file.path.stem).replace([file.head, *records, *told])
    else:
        file.path.unlink()
    return records


def _owing(file: File, records: Sequence[dict[str, Any]], answers: Answers, found: Found) -> list[Claim]:
    """The claims that the file is yet to be told of: they have answers by now."""
    claims = [answers.get(due[0]) for due in _dues(records) if due not in file.told]
    owing = [claim for claim in claims if claim is not None]
    found.owing += owing
    return owing


def _dues(records: Sequence[dict[str, Any]]) -> list[Due]:
    """The claims that records name, each once."""
    named = (claim for record in records for claim in (*_claim_of(record), *record.get("open", ())))
    return list(dict.fromkeys(map(_due, named)))


def _claim_of(record: dict[str, Any]) -> tuple[Any, ...]:
    return (record["claim"],) if "claim" in record else ()


def _due(claim: Any) -> Due:
    key, digest = claim
    return key, digest


def _policy(
    file: File, records: Sequence[dict[str, Any]], owing: list[Claim], state: StateDir, context: PolicyContext
) -> PolicySession:
    last, name = records[-1], file.path.stem
    facts = open_policy(base64.b64decode(last["snapshot"]), at_most_bytes=state.max_snapshot_bytes)
    session = policy_session(facts, state.boards, context)
    session.bound_env_id, session.switches = facts.bound_env_id, facts.step_rewards
    # The key is gone with the process that knew it.
    session.key_lost = last["had_key"]
    session.journal = PolicyJournal(state, name, since=len(records), owing=owing)
    return session


async def _environment(
    file: File,
    records: Sequence[dict[str, Any]],
    owing: list[Claim],
    state: StateDir,
    found: Found,
    threads: Threads,
) -> EnvironmentSession:
    head, name = file.head, file.path.stem
    session = _start_of(head, records[0], state)
    session.threads = threads
    session.rl_run_id = head["rl_run_id"]
    session.switches = {who: StepRewards.model_validate(value) for who, value in head["switches"].items()}
    for policy_id, policy in found.policies.items():
        if policy.bound_env_id == name and policy.switches is not None:
            session.switches[policy_id] = policy.switches
    await _played(session, records)
    session.journal = EnvironmentJournal(state, name, since=len(records), owing=owing)
    return session


def _start_of(head: dict[str, Any], record: dict[str, Any], state: StateDir) -> EnvironmentSession:
    """The session as its first record says it; one without a snapshot is yet to be reset."""
    if record["op"] == "state":
        data = base64.b64decode(record["snapshot"])
        snapshot = open_environment(data, at_most_bytes=state.max_snapshot_bytes)
        return environment_session(snapshot, state.boards)
    spec = EnvSpec.model_validate(head["env"])
    return EnvironmentSession(environment=state.boards.environment(spec.env_name, spec.config), spec=spec)


async def _played(session: EnvironmentSession, records: Sequence[dict[str, Any]]) -> None:
    """Do again what the records say."""
    for record in records:
        if record["op"] == "reset":
            await session.reset(record["seed"])
        elif record["op"] == "step":
            requests = tuple(ToolRequest(name, json_object(raw), raw) for name, raw in record["calls"])
            _, outcome = await session.step(requests)
            if seen(outcome) != record["seen"]:
                raise JournalDamaged(
                    f"decision {session.turn} played again shows something else: environment "
                    f"{session.environment.name!r} is not reproducible, or not the same code any more"
                )


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """One file that cannot be read costs one session."""
    try:
        yield
    except (TaskAppError, OSError) as exc:
        _refused(path, exc)
    except (KeyError, TypeError, ValueError) as exc:
        # Every line is as it was written, but by other code of the same format.
        _refused(path, JournalDamaged(f"it does not say what it should: {type(exc).__name__}: {exc}"[:300]))


def _refused(path: Path, exc: TaskAppError | OSError) -> None:
    reason = exc.detail if isinstance(exc, TaskAppError) else str(exc)
    log.error("journal_refused", file=path.name, reason=reason)
