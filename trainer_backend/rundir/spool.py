"""The spool: a file to which a stage's finished rollouts are appended, so that they survive a kill.

    rollouts/iteration_n.spool.jsonl     one or more parts: a header, then one rollout per line

A header identifies the requests and the policy version. After a kill, the next start reuses the rollouts that
answer its requests and have a version that it may use. Other rollouts stay for a later start.
Failed rollouts are not stored, so they are requested again.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from shared_schemas.rollouts import Rollout, RolloutRequest
from shared_schemas.trajectory import PolicyLogprobs, Trajectory
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.files import (
    append_line,
    append_text,
    each_line,
    flush,
    parse_object,
    read_texts,
    replace_lines,
    replace_text,
    write_errors,
)

SPOOL_ENDING = ".spool.jsonl"


class Part(NamedTuple):
    """A header of a spool, and the rollouts below it."""

    header: Mapping[str, Any]
    """`requests` (digests of the stage's first requests by plan id) and `policy_version`. A spool of an
    earlier version of Turnwise has, instead of `requests`, `plan`: one digest of all these requests."""
    rollouts: list[Rollout]

    def answers(self, header: Mapping[str, Any]) -> list[Rollout]:
        """Return the rollouts of this part that answer the requests listed in another header.

        A header lists a stage's first requests, from which the later ones follow. So if all first requests
        are equal, all rollouts are returned.
        """
        mine, asked = self.header.get("requests"), header["requests"]
        if mine == asked:
            return self.rollouts
        same = {name for name, digest in (mine or {}).items() if asked.get(name) == digest}
        return [rollout for rollout in self.rollouts if plan_id(rollout.rollout_id) in same]


class Spool:
    """Stores the finished rollouts of one stage. Create it with `Spool.open`."""

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        rollouts: Mapping[str, Rollout],
        *,
        is_begun: bool = False,
    ) -> None:
        self.path, self._header, self._rollouts = path, header, rollouts
        self._is_begun = is_begun  # whether the file's last header is `header`
        self._held: list[Rollout] | None = None

    @classmethod
    def open(
        cls, path: Path, requests: Sequence[RolloutRequest], *,
        versions: range, gateway_urls: Sequence[str], tell: Callable[[str], None],
    ) -> "Spool":  # fmt: skip
        """Open the spool of a stage, with the rollouts that earlier starts of the same stage left.

        Args:
            requests: the stage's first requests, which identify the stage.
            versions: policy versions that may have sampled the stage's tokens; the last version samples now.
            gateway_urls: addresses of the gateways, which differ in every start.
            tell: receives a sentence about rollouts of earlier starts, and about a spool that is set aside.
        """
        header = {"requests": request_digests(requests, gateway_urls), "policy_version": versions[-1]}
        parts = name_requests(path, requests, gateway_urls)
        usable = [part for part in parts if part.header.get("policy_version") in versions]
        count = _count(parts)
        if count and not usable:
            set_aside(path, tell, why="by other weights, or their header is lost")
            return cls(path, header, {})
        rollouts = [rollout for part in usable for rollout in part.answers(header)]
        by_plan = {plan_id(rollout.rollout_id): rollout for rollout in rollouts}
        if by_plan:
            tell(f"{len(by_plan)} rollouts of {path.name} were collected before, and are used")
        if others := count - len(rollouts):
            tell(
                f"{others} rollouts of {path.name} answer no request of this job; they stay there until the "
                "stage has ended, in case a later start asks for them again"
            )
        last = parts[-1].header if parts else {}
        is_begun = last.get("requests") == header["requests"] and last["policy_version"] in versions
        return cls(path, last if is_begun else header, by_plan, is_begun=is_begun)

    def rollouts_for(self, requests: Iterable[RolloutRequest]) -> dict[str, Rollout]:
        """Return the rollouts of earlier starts that answer these requests, by request id.

        The rollouts get the ids of the requests. Logs of task apps show the earlier ids, which differ only in
        the run's id.
        """
        pairs = ((request, self._rollouts.get(plan_id(request.rollout_id))) for request in requests)
        return {request.rollout_id: _replace_ids(old, request) for request, old in pairs if old is not None}

    def keep(self, rollout: Rollout) -> None:
        """Append a finished rollout. It survives a kill; after a power cut it may be requested again."""
        (self._append if self._held is None else self._held.append)(rollout)

    def _append(self, rollout: Rollout) -> None:
        if not self._is_begun and self.path.exists():
            # Flushed: without this header, the next rollouts would belong to the header above.
            append_line(self.path, self._header, durable=True)
        elif not self._is_begun:
            replace_lines(self.path, [self._header], durable=False)
        self._is_begun = True
        append_text(self.path, _dump_rollout(rollout), durable=False)

    def hold(self) -> None:
        """Keep new rollouts in memory until `release` is called.

        On disk they would be useless until there is a checkpoint of the weights that sampled them.
        """
        self._held = []

    def release(self) -> None:
        """Write the rollouts kept in memory, and from now on write each new one at once.

        If a write fails, the rollouts that are not yet written stay in memory.
        """
        while self._held:
            self._append(self._held[0])
            del self._held[0]
        self._held = None

    def reject(self, rollouts: Sequence[Rollout]) -> None:
        """Remove rollouts, so that the next start requests them again; see `append_rejected`."""
        plans = {plan_id(rollout.rollout_id) for rollout in rollouts}
        self._rollouts = {name: one for name, one in self._rollouts.items() if name not in plans}
        if self._held is not None:
            self._held = [one for one in self._held if plan_id(one.rollout_id) not in plans]
        if parts := _read_parts(self.path):
            answers = [one for part in parts for one in part.answers(self._header)]
            ids = {id(one) for one in answers if plan_id(one.rollout_id) in plans}
            rest = _filter(parts, lambda one: id(one) not in ids)
            replace_text(self.path, _dump_parts(rest), durable=True)

    def flush(self) -> None:
        """Flush the spool to disk. Call it before writing a file that relies on it."""
        if self.path.exists():
            with write_errors(self.path):
                flush(self.path)
                flush(self.path.parent)

    def remove(self) -> None:
        """Delete the spool, once no later start needs its rollouts."""
        with write_errors(self.path):
            self.path.unlink(missing_ok=True)


def name_requests(path: Path, requests: Sequence[RolloutRequest], gateway_urls: Sequence[str]) -> list[Part]:
    """Read a spool. If an earlier version wrote it for these requests, first convert its header."""
    parts = _read_parts(path)
    before = parts[0].header if parts else {}  # an earlier version wrote one header, at the top
    if "plan" in before and before["plan"] == plan_digest(requests, gateway_urls):
        digests = request_digests(requests, gateway_urls)
        header = {"requests": digests, "policy_version": before["policy_version"]}
        parts[0] = parts[0]._replace(header=header)
        replace_text(path, _dump_parts(parts), durable=True)
    return parts


def find_missing(parts: Iterable[Part], rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Return those of the rollouts that have finished and are in no part of a spool."""
    held: dict[str, list[Trajectory | None]] = {}
    for part in parts:
        for one in part.rollouts:
            held.setdefault(plan_id(one.rollout_id), []).append(one.trajectory)
    finished = (one for one in rollouts if one.trajectory is not None)
    return [one for one in finished if one.trajectory not in held.get(plan_id(one.rollout_id), ())]


def add_stored(path: Path, requests: Sequence[RolloutRequest], rollouts: Iterable[Rollout]) -> None:
    """Append rollouts that answer `requests` to the spool of a stage before RL, and flush the spool."""
    spool = Spool(path, {"requests": request_digests(requests, ()), "policy_version": 0}, {})
    for rollout in rollouts:
        spool.keep(rollout)
    spool.flush()


def append_rejected(path: Path, rollout: Rollout, why: str) -> None:
    """Append a rollout that training cannot use, and the reason, to a file for users to read."""
    # A NaN may be the reason. Pydantic writes it as null; `append_line` would refuse it.
    append_text(path, f'{{"why": {json.dumps(why)}, "rollout": {_dump_rollout(rollout)}}}', durable=True)


def plan_digest(requests: Iterable[RolloutRequest], gateway_urls: Sequence[str]) -> str:
    """Return one digest of all requests, which is the same in every start and at any gateway. Pure."""
    digest = blake2b(digest_size=16)
    for request in requests:
        wire = request.model_dump(mode="json", exclude={"run_id": True, "policy": {"inference_key"}})
        wire["rollout_id"], config = plan_id(request.rollout_id), wire["policy"]["config"]
        if config.get("inference_url") in gateway_urls:
            del config["inference_url"]
        digest.update(json.dumps(wire, sort_keys=True).encode())
    return digest.hexdigest()


def request_digests(requests: Iterable[RolloutRequest], gateway_urls: Sequence[str]) -> dict[str, str]:
    """Return the digest of each request by plan id; see `plan_digest`."""
    return {plan_id(request.rollout_id): plan_digest([request], gateway_urls) for request in requests}


def tidy_spools(
    folder: Path, iteration: int, tell: Callable[[str], None], *, policy_version: int | None = None
) -> None:
    """Delete or rename spools that a run cannot use when it continues after `iteration`; -1: it starts over.

    The spools of this iteration's evaluation and of the next iteration stay, because their rollouts match the
    checkpoint's weights. Earlier spools are deleted, and later ones renamed.

    Args:
        policy_version: the version of the checkpoint's weights. If it is given, spools of all later training
            iterations stay too, but rollouts that newer versions sampled are moved out of the spools.
    """
    for path in sorted(folder.glob(f"*_*{SPOOL_ENDING}")):
        stage, number = read_stage(path)
        first = {"iteration": iteration + 1, "evaluation": iteration}.get(stage)
        if first is None:
            continue
        has_versions = stage == "iteration" and policy_version is not None
        if (number == first or (number > first and has_versions)) and iteration >= 0:
            if policy_version is not None:
                _drop_later_versions(path, policy_version, tell)
            continue
        if number > first or iteration < 0:
            set_aside(path, tell, why="of weights that no checkpoint holds")
        else:  # its Parquet file exists, and the process was killed before it deleted the spool
            with write_errors(path):
                path.unlink()


def read_stage(path: Path) -> tuple[str, int]:
    """Return stage and iteration from the name of a spool's file; `("", -1)` for a stage before RL."""
    stage, _, digits = path.name.removesuffix(SPOOL_ENDING).rpartition("_")
    return stage, int(digits) if digits.isdecimal() else -1


def set_aside(path: Path, tell: Callable[[str], None], *, why: str) -> None:
    """Rename a spool that cannot be used, and report it."""
    count = _count(_read_parts(path))
    tell(_left(count, path, rename_aside(path), why))


def rename_aside(path: Path) -> Path:
    """Rename a file that cannot be used, so that no start reads it, and return the new path."""
    aside = _name_aside(path)
    with write_errors(path):
        path.rename(aside)
    return aside


def copy_others_aside(path: Path, used: Sequence[Trajectory], tell: Callable[[str], None]) -> None:
    """Copy the spool's rollouts that are not in `used` to another file, before the spool is deleted."""
    parts = _read_parts(path)
    if _count(parts) <= len(used):
        return  # all of them are used
    # Compared as a set of texts, because comparing all pairs of thousands takes hours.
    texts = {trajectory.model_dump_json() for trajectory in used}
    rest = _filter(parts, lambda one: one.trajectory is None or one.trajectory.model_dump_json() not in texts)
    if _count(rest):
        _copy_aside(path, rest, tell, why="for another plan")


def _copy_aside(path: Path, parts: Sequence[Part], tell: Callable[[str], None], *, why: str) -> None:
    aside = _name_aside(path)
    replace_text(aside, _dump_parts(parts))
    tell(_left(_count(parts), path, aside, why))


def _name_aside(path: Path) -> Path:
    """Return an unused path for an unusable file, such as iteration_1.unused-1.jsonl."""
    stem, is_spool, _ = path.name.partition(SPOOL_ENDING)
    number, ending = 1, ".jsonl" if is_spool else ""
    while (aside := path.with_name(f"{stem}.unused-{number}{ending}")).exists():
        number += 1
    return aside


def _left(count: int, path: Path, aside: Path, why: str) -> str:
    return f"{count} rollouts of {path.name} were collected {why}; they are left in {aside.name}, unused"


def _replace_ids(rollout: Rollout, request: RolloutRequest) -> Rollout:
    """Return the rollout with the ids of this request, so that it sorts as in an uninterrupted run."""
    attempt = f":{rollout.attempt}" if rollout.attempt else ""
    parent, trajectory = request.start.parent_rollout_id, rollout.trajectory
    if parent is not None and trajectory is not None:
        trajectory = trajectory.model_copy(update={"parent_rollout_id": parent})
    return rollout.model_copy(
        update={
            "rollout_id": f"{request.rollout_id}{attempt}",
            "run_id": request.run_id,
            "group_id": request.group_id,
            "trajectory": trajectory,
        }
    )


def _drop_later_versions(path: Path, newest: int, tell: Callable[[str], None]) -> None:
    """Move rollouts of versions above `newest` to another file. New weights will get the same versions."""
    parts = _read_parts(path)
    rest = _filter(parts, lambda one: _newest_version(one) > newest)
    if _count(rest):
        # Copied before the removal, so that a kill loses no rollout.
        _copy_aside(path, rest, tell, why="by weights that no checkpoint holds")
        usable = _filter(parts, lambda one: _newest_version(one) <= newest)
        replace_text(path, _dump_parts(usable))


def _filter(parts: Iterable[Part], is_kept: Callable[[Rollout], bool]) -> list[Part]:
    return [part._replace(rollouts=[one for one in part.rollouts if is_kept(one)]) for part in parts]


def _count(parts: Iterable[Part]) -> int:
    return sum(len(part.rollouts) for part in parts)


def _dump_parts(parts: Iterable[Part]) -> str:
    lines = (line for part in parts for line in (json.dumps(part.header), *map(_dump_rollout, part.rollouts)))
    return "".join(f"{line}\n" for line in lines)


def _dump_rollout(rollout: Rollout) -> str:
    return rollout.model_dump_json(exclude_unset=True)


def _newest_version(rollout: Rollout) -> int:
    """Return the newest policy version that sampled a token of the rollout; 0 if unknown."""
    steps = () if rollout.trajectory is None else rollout.trajectory.steps
    calls = [step.policy_logprobs for step in steps if isinstance(step.policy_logprobs, PolicyLogprobs)]
    return max((version for call in calls for _, version in call.versions), default=0)


def _read_parts(path: Path) -> list[Part]:
    """Read a spool. Skip unreadable lines; their rollouts are requested again."""
    parts: list[Part] = []
    for line in read_texts(path):
        try:
            rollout = Rollout.model_validate_json(line)
        except ValidationError:
            header = parse_object(line)
            if header is not None and "policy_version" in header:
                parts.append(Part(header, []))
        else:
            if not parts:  # the header is lost
                parts.append(Part({}, []))
            parts[-1].rollouts.append(rollout)
    return parts


# ledger.jsonl lists the rollouts that each finished update learned from; no rollout occurs twice.

LEDGER_FILE = "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The rollouts that one iteration's update learned from; empty if every group was flat."""

    iteration: int
    policy_version: int
    """The version after the update."""
    rollout_ids: tuple[str, ...]
    """The episodes of the update, without flat groups and without branches that only measure."""


def append_to_ledger(folder: Path, entry: LedgerEntry) -> None:
    """Append an entry to the ledger and flush it. Raise RunDirectoryError if an id is there already.

    This reads every line: 3 ms per hundred lines of 64 rollouts each.
    """
    path, mine = folder / LEDGER_FILE, set[str]()
    for plan in map(plan_id, entry.rollout_ids):
        if plan in mine:
            raise duplicate_error(plan, entry.iteration, entry.iteration)
        mine.add(plan)
    for line in _lines(path):
        for plan in map(plan_id, line.rollout_ids):
            if plan in mine:
                raise duplicate_error(plan, line.iteration, entry.iteration)
    append_line(path, asdict(entry), durable=True)


def plan_id(rollout_id: str) -> str:
    """Return a rollout's id without run id and attempt: `run.1/train/3/0/1:1` gives `train/3/0/1`. Pure."""
    start, slash, path = rollout_id.partition("/")
    return (path if slash else start).partition(":")[0]


def duplicate_error(plan: str, first: int, second: int) -> RunDirectoryError:
    return RunDirectoryError(
        f"{LEDGER_FILE}: rollout {plan} was learned from in iterations {first} and {second}"
    )


def read_ledger(folder: Path) -> list[LedgerEntry]:
    """Read all entries of the ledger, oldest first; empty if an earlier version wrote the run."""
    return list(_lines(folder / LEDGER_FILE))


def find_in_ledger(folder: Path, rollout_id: str) -> int | None:
    """Return the iteration whose update learned from a rollout, or None."""
    try:
        with (folder / LEDGER_FILE).open("rb") as file:
            lines = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    # Only one line is parsed, because a ledger may list a hundred thousand ids.
    at = lines.find(json.dumps(rollout_id).encode())
    if at < 0:
        return None
    row = parse_object(lines[lines.rfind(b"\n", 0, at) + 1 : lines.find(b"\n", at)])
    return None if row is None else int(row.get("iteration", 0))


def cut_ledger(folder: Path, iteration: int) -> None:
    """Remove the entries of later iterations from the ledger, because a resumed run repeats them."""
    lines = read_ledger(folder)
    rest = [asdict(line) for line in lines if line.iteration <= iteration]
    if len(rest) < len(lines):
        replace_lines(folder / LEDGER_FILE, rest, durable=True)


def _lines(path: Path) -> Iterator[LedgerEntry]:
    for row in each_line(path):
        if row.keys() >= {"iteration", "policy_version", "rollout_ids"}:
            yield LedgerEntry(row["iteration"], row["policy_version"], tuple(row["rollout_ids"]))
