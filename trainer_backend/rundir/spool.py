"""The spool: finished rollouts of a stage on disk, before the task app forgets them.

    rollouts/iteration_n.spool.jsonl     a header, then a rollout a line

After a kill, the next start reuses those whose requests it sends again to the same weights; the header
identifies both. Failed rollouts are not in the spool; they are requested again.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared_schemas.rollouts import Rollout, RolloutRequest
from shared_schemas.trajectory import PolicyLogprobs
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.files import (
    append_line,
    append_text,
    each_line,
    read_lines,
    read_texts,
    replace_lines,
    replace_text,
    write_errors,
)

SPOOL_ENDING = ".spool.jsonl"


class Spool:
    """The finished rollouts of one stage. Create it with `Spool.open`."""

    def __init__(self, path: Path, header: Mapping[str, Any], rollouts: Mapping[str, Rollout]) -> None:
        self.path, self._header, self._rollouts = path, header, rollouts
        self._is_there = bool(rollouts)
        self._held: list[Rollout] | None = None

    @classmethod
    def open(
        cls, path: Path, requests: Sequence[RolloutRequest], *,
        versions: range, gateway_urls: Sequence[str], tell: Callable[[str], None],
    ) -> "Spool":  # fmt: skip
        """Open the spool of a stage, with the rollouts that an earlier start of the same stage left.

        Args:
            path: `RunDirectory.spool_file` of the stage.
            requests: the stage's first requests, which identify it.
            versions: those that may have sampled its tokens; the last one samples now.
            gateway_urls: addresses of the gateways, which differ in every start.
            tell: receives a sentence about rollouts of an earlier start; unusable ones are set aside.
        """
        header = {"requests": request_digests(requests, gateway_urls), "policy_version": versions[-1]}
        rows = read_lines(path)
        if rows and rows[0].get("policy_version") in versions:
            earlier = {**header, "policy_version": rows[0]["policy_version"]}
            rollouts = _answers_in(path, rows[0].get("requests") or {}, earlier, tell)
            if rollouts is not None:
                if rollouts:
                    tell(f"{len(rollouts)} rollouts of {path.name} were collected before, and are used")
                return cls(path, earlier, {plan_id(rollout.rollout_id): rollout for rollout in rollouts})
        if len(rows) > 1:
            set_aside(path, tell, why="for another plan, or of other weights")
        return cls(path, header, {})

    def rollouts_for(self, requests: Iterable[RolloutRequest]) -> dict[str, Rollout]:
        """Return rollouts of an earlier start by the id of the request that each answers, under its new ids.

        The task app has logged them under the ids of that start, which differ only in the run's id.
        """
        pairs = ((request, self._rollouts.get(plan_id(request.rollout_id))) for request in requests)
        return {request.rollout_id: _with_ids_of(old, request) for request, old in pairs if old is not None}

    def keep(self, rollout: Rollout) -> None:
        """Append a finished rollout. It survives a kill; after a power cut it may be requested again."""
        if self._held is not None:
            self._held.append(rollout)
        else:
            self._append(rollout)

    def _append(self, rollout: Rollout) -> None:
        if not self._is_there:
            replace_lines(self.path, [self._header], durable=False)
            self._is_there = True
        append_text(self.path, _line_of(rollout), durable=False)

    def hold(self) -> None:
        """Keep what comes in memory: of weights that no checkpoint holds yet it is of no use on disk."""
        self._held = []

    def release(self) -> None:
        """Write what was held, and from now on each rollout at once.

        Raises:
            RunNotWritten: what is not written is still held.
        """
        while self._held:
            self._append(self._held[0])
            del self._held[0]
        self._held = None

    def reject(self, rollouts: Sequence[Rollout]) -> None:
        """Take rollouts out, so that the next start asks for them again; see `append_rejected`."""
        plans = {plan_id(rollout.rollout_id) for rollout in rollouts}
        self._rollouts = {name: one for name, one in self._rollouts.items() if name not in plans}
        if self._held is not None:
            self._held = [one for one in self._held if plan_id(one.rollout_id) not in plans]
        if self._is_there:
            rest = [one for one in _rollouts_in(self.path) if plan_id(one.rollout_id) not in plans]
            replace_text(self.path, _text_of(self._header, rest), durable=True)

    def remove(self) -> None:
        """Delete the spool, once no later start needs its rollouts."""
        with write_errors(self.path):
            self.path.unlink(missing_ok=True)


def append_rejected(path: Path, rollout: Rollout, why: str) -> None:
    """Keep a rollout that cannot be learned from, with the reason, for a person alone."""
    # Pydantic writes null for the NaN that may be the reason, and json would refuse it.
    append_text(path, f'{{"why": {json.dumps(why)}, "rollout": {_line_of(rollout)}}}', durable=True)


def request_digests(requests: Iterable[RolloutRequest], gateway_urls: Sequence[str]) -> dict[str, str]:
    """Return digests by plan id, equal for equal requests, whatever the start and the gateways. Pure."""
    digests = {}
    for request in requests:
        text = json.dumps(_comparable(request, gateway_urls), sort_keys=True)
        digests[plan_id(request.rollout_id)] = blake2b(text.encode(), digest_size=16).hexdigest()
    return digests


def tidy_spools(
    folder: Path,
    iteration: int,
    tell: Callable[[str], None],
    *,
    max_staleness: int = 0,
    policy_version: int | None = None,
) -> None:
    """Remove spools that cannot be used when a run continues from the end of an iteration.

    Only that iteration's evaluation and the next iteration match the weights of the checkpoint, and with
    `max_staleness` so many iterations beyond it, as far as their tokens are not of later weights.

    Args:
        folder: rollouts/ of the run.
        iteration: -1: the run begins anew.
        policy_version: of the checkpoint; None: no token can be of a later one.
    """
    for path in sorted(folder.glob(f"*_*{SPOOL_ENDING}")):
        stage, _, digits = path.name.removesuffix(SPOOL_ENDING).rpartition("_")
        number = int(digits) if digits.isdecimal() else -1
        first = {"iteration": iteration + 1, "evaluation": iteration}.get(stage)
        if first is None:
            continue
        last = first + (max_staleness if stage == "iteration" else 0)
        if first <= number <= last and iteration >= 0:
            if policy_version is not None:
                _drop_later_versions(path, policy_version, tell)
            continue
        if number > last or iteration < 0:
            set_aside(path, tell, why="of weights that no checkpoint holds")
        else:  # its Parquet file exists, and the process was killed before it deleted the spool
            with write_errors(path):
                path.unlink()


def set_aside(path: Path, tell: Callable[[str], None], *, why: str) -> None:
    """Rename a spool that cannot be used."""
    count, aside = max(len(read_texts(path)) - 1, 0), _name_aside(path)
    with write_errors(path):
        path.rename(aside)
    tell(_left(count, path, aside, why))


def _name_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(path.name.replace(SPOOL_ENDING, f".unused-{number}.jsonl"))).exists():
        number += 1
    return aside


def _left(count: int, path: Path, aside: Path, why: str) -> str:
    return f"{count} rollouts of {path.name} were collected {why}; they are left in {aside.name}, unused"


def _keep_part(
    path: Path,
    header: Mapping[str, Any],
    usable: Sequence[Rollout],
    rest: Sequence[Rollout],
    tell: Callable[[str], None],
    *,
    why: str,
) -> None:
    """Leave the usable rollouts in a spool, under this header, and set the rest aside."""
    if rest:  # first: a kill must lose none
        aside = _name_aside(path)
        replace_text(aside, _text_of(read_lines(path)[0], rest), durable=False)
        tell(_left(len(rest), path, aside, why))
    replace_text(path, _text_of(header, usable), durable=False)


def _answers_in(
    path: Path, earlier: Mapping[str, str], header: Mapping[str, Any], tell: Callable[[str], None]
) -> list[Rollout] | None:
    """The rollouts of a spool that answer requests of the header; others are set aside. None: none does.

    Requests that come later in a stage follow from its first ones: where these are the same, so are those.

    Args:
        earlier: digests of the first requests that the spool was begun for.
    """
    requests, rollouts = header["requests"], _rollouts_in(path)
    if earlier == requests:
        return rollouts
    same = {name for name, digest in earlier.items() if requests.get(name) == digest}
    usable = [rollout for rollout in rollouts if plan_id(rollout.rollout_id) in same]
    if not usable:
        return None
    rest = [rollout for rollout in rollouts if plan_id(rollout.rollout_id) not in same]
    _keep_part(path, header, usable, rest, tell, why="for another plan")
    return usable


def _comparable(request: RolloutRequest, gateway_urls: Sequence[str]) -> dict[str, Any]:
    """Return a request without the parts that differ in every start."""
    wire = request.model_dump(mode="json", exclude={"run_id": True, "policy": {"inference_key"}})
    wire["rollout_id"] = plan_id(request.rollout_id)
    config = wire["policy"]["config"]
    wire["policy"]["config"] = {
        key: value for key, value in config.items() if not (key == "inference_url" and value in gateway_urls)
    }
    return wire


def _with_ids_of(rollout: Rollout, request: RolloutRequest) -> Rollout:
    """Return the rollout under the ids of this request, so that sorting by ids is as in an unbroken run."""
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
    """Leave out of a spool what later versions sampled: other weights will get the numbers of those."""
    rollouts = _rollouts_in(path)
    usable = [rollout for rollout in rollouts if _newest_version(rollout) <= newest]
    rest = [rollout for rollout in rollouts if _newest_version(rollout) > newest]
    if rest:
        why = "by weights that no checkpoint holds"
        _keep_part(path, read_lines(path)[0], usable, rest, tell, why=why)


def _text_of(header: Mapping[str, Any], rollouts: Iterable[Rollout]) -> str:
    return "".join(f"{line}\n" for line in (json.dumps(header), *map(_line_of, rollouts)))


def _line_of(rollout: Rollout) -> str:
    return rollout.model_dump_json(exclude_unset=True)


def _newest_version(rollout: Rollout) -> int:
    """The newest policy version that sampled one of its tokens; 0 where none is known."""
    steps = () if rollout.trajectory is None else rollout.trajectory.steps
    calls = [step.policy_logprobs for step in steps if isinstance(step.policy_logprobs, PolicyLogprobs)]
    return max((version for call in calls for _, version in call.versions), default=0)


def _rollouts_in(path: Path) -> list[Rollout]:
    """Read the rollouts after the header. An unreadable line is skipped; its rollout is requested again."""
    rollouts = []
    for line in read_texts(path)[1:]:
        try:
            rollouts.append(Rollout.model_validate_json(line))
        except ValidationError:
            continue
    return rollouts


# ledger.jsonl lists the rollouts that each finished update learned from; no rollout occurs twice.

LEDGER_FILE = "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The rollouts that one iteration's update learned from; none if every group was flat.

    Attributes:
        policy_version: the version after the update.
        rollout_ids: the episodes in the update: without omitted flat groups, and without branches, which only
            measure.
    """

    iteration: int
    policy_version: int
    rollout_ids: tuple[str, ...]


def append_to_ledger(folder: Path, entry: LedgerEntry) -> None:
    """Append and flush an entry; refuse a rollout that occurs twice, as it would be learned from twice.

    Every line is checked: 3 ms per hundred lines of 64 rollouts each.
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
    """Return a rollout's id without start and attempt: `run.1/train/3/0/1:1` is train/3/0/1. Pure."""
    start, slash, path = rollout_id.partition("/")
    return (path if slash else start).partition(":")[0]


def duplicate_error(plan: str, first: int, second: int) -> RunDirectoryError:
    """Return the error for a rollout in two entries, which neither trainer nor store accepts."""
    return RunDirectoryError(
        f"{LEDGER_FILE}: rollout {plan} was learned from in iterations {first} and {second}"
    )


def read_ledger(folder: Path) -> list[LedgerEntry]:
    """Read all entries, oldest first; a run of an earlier version has none."""
    return list(_lines(folder / LEDGER_FILE))


def cut_ledger(folder: Path, iteration: int) -> None:
    """Drop the entries of iterations that a resumed run repeats, since their weights are gone."""
    lines = read_ledger(folder)
    if any(line.iteration > iteration for line in lines):
        replace_lines(
            folder / LEDGER_FILE,
            [asdict(line) for line in lines if line.iteration <= iteration],
            durable=True,
        )


def _lines(path: Path) -> Iterator[LedgerEntry]:
    for row in each_line(path):
        if row.keys() >= {"iteration", "policy_version", "rollout_ids"}:
            yield LedgerEntry(row["iteration"], row["policy_version"], tuple(row["rollout_ids"]))
