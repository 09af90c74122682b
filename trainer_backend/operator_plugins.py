"""Loads the operator's plug-ins of the trainer from the files of `job.trainer_plugins` and from packages.

A plug-in is a function or class that is decorated with `@estimator`, `@loss`, `@aggregation` or `@schedule`.
The plug-in files are executed by `check`, by a run and its learner, by `recredit` and by `truth`. Commands
that only read a run (`report`, `compare`, `eval`, `serve`, the dashboard) do not execute them. A package
lists its plug-ins as entry points. docs/plugins.md has examples.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from inspect import isabstract, isclass, iscoroutinefunction
from itertools import zip_longest
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from service_kit.boundary import Boundary, describe_line
from service_kit.errors import SettingsError
from service_kit.plugin_file import load_module, package_plugs
from shared_schemas.base import did_you_mean
from trainer_backend.core.advantages.episodes import (
    Advantages,
    EpisodeRewards,
    Estimator,
    EstimatorKeys,
    EstimatorPlug,
)
from trainer_backend.core.aggregation import (
    Aggregation,
    AggregationPlug,
    ConstantKeys,
    WeighedOver,
    refuse_none,
    without_keys,
)
from trainer_backend.core.allocation import AllocationPlug, RolloutAllocationSchedule
from trainer_backend.core.critic import ByToken, ValueLevel
from trainer_backend.core.keys import Table
from trainer_backend.core.losses import LossPlug, PolicyLoss
from trainer_backend.core.segments import Segment
from trainer_backend.errors import AdvantageError, JobError, NonFiniteLoss, place
from trainer_backend.plugins import BUILT_IN, OPEN_BOARDS, OperatorPlug

KEY = "job.trainer_plugins"
_SCHEDULES = "rollout_allocation_schedule.type"
# Group of entry points -> key of its registry in `plugins.OPEN_BOARDS`, and the decorator of its members.
_GROUPS = {
    "turnwise.estimators": ("algorithm.advantage", "@estimator(NAME)"),
    "turnwise.losses": ("algorithm.loss", "@loss(NAME)"),
    "turnwise.aggregations": ("training.aggregation", "@aggregation(NAME)"),
    "turnwise.schedules": (_SCHEDULES, "@schedule(NAME)"),
}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,59}")
_MARK = "turnwise_plug"
# The allowed error in the sum of an aggregation's weights, which may be float32.
_SUM_ERROR = 1e-5
Rows = Sequence[Sequence[float]]
Schedule = TypeVar("Schedule", bound=type[RolloutAllocationSchedule])


@dataclass(frozen=True, slots=True)
class _Plug:
    """What a decorator stores on a function or class: a registry (`board`), and the entry to add to it."""

    board: str
    name: str
    plug: OperatorPlug
    home: str = ""
    """The file or package that contains the decorated object, for errors."""


def estimator(
    name: str, *, keys: type[EstimatorKeys] = EstimatorKeys, **facts: Any
) -> Callable[[Callable[[Sequence[EpisodeRewards], Any], Advantages | Rows]], Any]:
    """Register the decorated function as an estimator, which jobs select by `algorithm.advantage = NAME`.

    The function receives all episodes of a batch, and an instance of `keys`. For each episode, in the given
    order, it returns the [T] advantages in reward units. Alternatively, it returns `Advantages`, which may
    also contain intermediate values and counts.

    Args:
        keys: class of the job keys that the function reads. A key that `[algorithm]` defines is read from
            `[algorithm]`; any other key is read from `[algorithm.NAME]`.
        facts: further fields of `EstimatorPlug`, such as needs_values = "decision".

    Raises:
        SettingsError: `facts` has an unknown name or an invalid value.
    """
    _refuse_no_keys(name, keys, EstimatorKeys)
    known = {item.name for item in fields(EstimatorPlug)} - {"compute"}
    for key in facts:
        if key not in known:
            raise SettingsError(f"{name!r} names {key!r} of EstimatorPlug{did_you_mean(key, known)}")
    _refuse_values(name, facts.get("values", {}))
    levels, level = get_args(ValueLevel), facts.get("needs_values")
    if level is not None and level not in levels:
        raise SettingsError(f"{name!r} has needs_values = {level!r}{did_you_mean(str(level), levels)}")
    for key in facts.keys() & {item.name for item in fields(EstimatorPlug) if isinstance(item.default, bool)}:
        if not isinstance(facts[key], bool):
            raise SettingsError(f"{name!r} has {key} = {facts[key]!r}; write True or False")

    def mark(compute: Callable[[Sequence[EpisodeRewards], Any], Advantages | Rows]) -> Any:
        _refuse_async(name, compute)
        plug = EstimatorPlug(_with_checks(name, compute), keys, **facts)
        setattr(compute, _MARK, _Plug("algorithm.advantage", name, plug))
        return compute

    return mark


def loss(
    name: str, *, keys: type[Table] = Table, values: Mapping[str, float | bool | str] | None = None
) -> Callable[[PolicyLoss], PolicyLoss]:
    """Register the decorated function as a loss, which jobs select by `algorithm.loss = NAME`.

    The function has the arguments and the result of `clipped_policy_loss`.

    Args:
        keys: class of the job keys that the function reads. A key that `[training]` defines is read from
            `[training]`; any other key is read from `[training.NAME]`. A loss without keys counts as a loss
            that does not keep probability ratios near 1.
        values: defaults of job keys, by dotted key. Values that the job sets take precedence.

    Raises:
        SettingsError: a key in `values` belongs to neither `algorithm.` nor `training.`.
    """
    _refuse_no_keys(name, keys, Table)
    _refuse_values(name, values or {})

    def mark(compute: PolicyLoss) -> PolicyLoss:
        _refuse_async(name, compute)
        plug = LossPlug(_scalar(name, compute), keys, dict(values or {}))
        setattr(compute, _MARK, _Plug("algorithm.loss", name, plug))
        return compute

    return mark


def aggregation(
    name: str, *, over: WeighedOver = "step", keys: type[Table] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as an aggregation, which jobs select by `training.aggregation = NAME`.

    The function has the arguments and the result of `token_mean`.

    Args:
        keys: class of the job keys that the function reads; it receives an instance as its second argument. A
            key that `[training]` defines is read from `[training]`; any other key from `[training.NAME]`.
            None: the function receives only the segments.
        over: the segments that the function receives, and the sum of the weights that it returns. "step":
            the segments of an optimizer step; sum 1. "iteration": all segments of an iteration; sum 1.
            "plan": the segments of an optimizer step; any sum, because the trainer divides the weights by the
            number of planned tokens.

    Raises:
        SettingsError: `over` has another value.
    """
    if over not in get_args(WeighedOver):
        raise SettingsError(f"{name!r} has over = {over!r}{did_you_mean(str(over), get_args(WeighedOver))}")

    kind = keys or (ConstantKeys if over == "plan" else Table)
    _refuse_no_keys(name, kind, Table)

    def mark(compute: Callable[..., Any]) -> Callable[..., Any]:
        _refuse_async(name, compute)
        weights = without_keys(compute) if keys is None else compute
        plug = AggregationPlug(_with_weights_checked(name, compute, weights, over), over, kind)
        setattr(compute, _MARK, _Plug("training.aggregation", name, plug))
        return compute

    return mark


def schedule(name: str) -> Callable[[Schedule], Schedule]:
    """Register the decorated class as a schedule, which decides when a fixed policy samples.

    Jobs select it by `rollout_allocation_schedule.type = NAME`. The class has one of two forms:

    - It has the method `get_policy_choice(step)`, which returns "actor" or "fixed".
    - It derives from `DrawnSchedule`, and `alpha_at(step)` returns the probability that the actor samples.

    The arguments of the class are job keys. A key that [rollout_allocation_schedule] defines is read from
    this table; any other key from [rollout_allocation_schedule.NAME].

    Raises:
        SettingsError: the decorated object is not a class of either form.
    """

    def mark(kind: Schedule) -> Schedule:
        choose = getattr(kind, "get_policy_choice", None)
        if not isclass(kind) or not callable(choose) or isabstract(kind):
            missing = sorted(getattr(kind, "__abstractmethods__", ())) or ["get_policy_choice"]
            raise SettingsError(
                f"{name!r} marks no class with the method {missing[0]}(step); a subclass of "
                "RolloutAllocationSchedule has get_policy_choice, and one of DrawnSchedule alpha_at"
            )
        for method in (choose, getattr(kind, "alpha_at", None)):
            _refuse_async(name, method)
        setattr(kind, _MARK, _Plug(_SCHEDULES, name, AllocationPlug(kind)))
        return kind

    return mark


def _refuse_no_keys(name: str, keys: object, base: type[Table]) -> None:
    if not (isclass(keys) and issubclass(keys, base)):
        raise SettingsError(f"{name!r} has keys = {keys!r}; write a class that derives from {base.__name__}")


def _refuse_values(name: str, values: Mapping[str, Any]) -> None:
    for key in values:
        if key.partition(".")[0] not in ("algorithm", "training"):
            raise SettingsError(f"{name!r} has values of {key!r}; they are keys of algorithm. and training.")


def _refuse_async(name: str, compute: object) -> None:
    if iscoroutinefunction(compute):
        raise SettingsError(f"{name!r} is an async function; write def without async")


def _with_checks(
    name: str, compute: Callable[[Sequence[EpisodeRewards], Any], Advantages | Rows]
) -> Estimator[Any]:
    """Return the estimator `compute` with a check of the shape and the finiteness of its result."""

    def estimate_checked(episodes: Sequence[EpisodeRewards], keys: Any) -> Advantages:
        with Boundary(f"the estimator {name!r}", AdvantageError, compute):
            result = _as_advantages(compute(episodes, keys))
        _refuse_rows(name, "", episodes, result.per_episode)
        for part, rows in result.parts.items():
            _refuse_rows(name, f" as its part {part!r}", episodes, rows)
        if result.per_token is not None:
            firsts = [[row[0] if row else math.nan for row in one.rows_T] for one in result.per_token]
            _refuse_rows(name, " by token", episodes, firsts)
            for episode, one in zip(episodes, result.per_token, strict=True):
                _refuse_numbers(name, " by token", episode, one.rows_T)
        return result

    return estimate_checked


def _as_advantages(found: Advantages | Rows) -> Advantages:
    """Convert an estimator's result to lists of floats, which can be stored as JSON and Parquet."""
    if not isinstance(found, Advantages):
        return Advantages(_floats(found))
    parts = {
        part: [[None if value is None else float(value) for value in row] for row in rows]
        for part, rows in found.parts.items()
    }
    tokens = found.per_token
    return replace(
        found,
        per_episode=_floats(found.per_episode),
        parts=parts,
        per_token=None if tokens is None else [ByToken(_floats(one.rows_T)) for one in tokens],
    )


def _floats(rows: Rows) -> list[list[float]]:
    return [[*map(float, row)] for row in rows]


def _refuse_rows(
    name: str, what: str, episodes: Sequence[EpisodeRewards], rows: Sequence[Sequence[float | None]]
) -> None:
    # `what` names `rows` in errors. It begins with a space, or is empty if `rows` are the advantages.
    if len(rows) != len(episodes):
        raise AdvantageError(
            f"the estimator {name!r} returned {len(rows)} rows{what} for {len(episodes)} episodes"
        )
    for episode, row_T in zip(episodes, rows, strict=True):
        if len(row_T) != len(episode.rewards_T):
            raise AdvantageError(
                f"it returned {len(row_T)} advantages{what} for {len(episode.rewards_T)} decisions",
                where=_place(name, episode),
            )
        _refuse_numbers(name, what, episode, [[value] for value in row_T])


def _refuse_numbers(
    name: str, what: str, episode: EpisodeRewards, rows_T: Sequence[Sequence[float | None]]
) -> None:
    for t, row in enumerate(rows_T):
        for value in row:
            if value is not None and not math.isfinite(value):
                raise AdvantageError(f"it returned {value}{what}", where=_place(name, episode, t + 1))


def _place(name: str, episode: EpisodeRewards, turn: int | None = None) -> str:
    """Return an error's place. It does not begin with the rollout, so that the rollout is not rejected."""
    return f"the estimator {name!r}, {place(episode.rollout_id, turn)}"


def _scalar(name: str, compute: PolicyLoss) -> PolicyLoss:
    """Return a loss that masks padded tokens, calls `compute`, and checks the result."""

    # The types are torch.Tensor. They are not imported, because the orchestrator imports this file too.
    def compute_checked(logprobs: Any, proximal: Any, advantages: Any, weights: Any, keys: Any) -> Any:
        # Masked before the call, because a padded token's NaN times its weight 0 would still be NaN, in the
        # loss and in the gradient.
        own, before, credit = (row.masked_fill(weights == 0, 0.0) for row in (logprobs, proximal, advantages))
        with Boundary(f"the loss {name!r}", JobError):
            found = compute(own, before, credit, weights, keys)
        if not isinstance(found, type(own)):
            raise JobError(f"the loss {name!r} returned a {type(found).__name__}; return a tensor")
        if found.shape:
            raise JobError(
                f"the loss {name!r} returned {tuple(found.shape)}; a loss is one number: weigh the tokens "
                "and add them up"
            )
        if own.requires_grad and not found.requires_grad and bool((weights != 0).any()):
            raise JobError(f"the loss {name!r} has no gradient; it must depend on its log-probs, undetached")
        if bool(own.isfinite().all()) and not bool(found.isfinite()):
            raise NonFiniteLoss(
                f"the loss {name!r} returned {found.item()} for finite log-probs; the weights before this "
                "step are kept"
            )
        return found

    return compute_checked


def _with_weights_checked(
    name: str, compute: Callable[..., Any], weights: Aggregation, over: WeighedOver
) -> Aggregation:
    """Return an aggregation that calls `weights` and checks the result. Errors name the line of `compute`."""
    where = f"the aggregation {name!r} ({describe_line(compute)})"

    def weigh_checked(segments: Sequence[Segment], keys: Any) -> list[NDArray[Any]]:
        refuse_none(segments)
        with Boundary(f"the aggregation {name!r}", JobError, compute):
            rows = [np.asarray(row, np.float64) for row in weights(segments, keys)]
        if len(rows) != len(segments):
            raise JobError(f"{where} returned {len(rows)} rows for {len(segments)} segments")
        for segment, row_N in zip(segments, rows, strict=True):
            _refuse_weights(where, segment, row_N)
        total = math.fsum(float(row_N.sum()) for row_N in rows)
        if over != "plan" and abs(total - 1.0) > _SUM_ERROR:
            raise JobError(
                f"{where} returned weights that sum to {total:g}; with over = {over!r} they sum to 1. Did "
                "you mean over = 'plan', which divides them by the planned tokens?"
            )
        return rows

    return weigh_checked


def _refuse_weights(where: str, segment: Segment, row_N: NDArray[np.float64]) -> None:
    if row_N.shape != segment.logprobs.shape:
        raise JobError(
            f"{where} returned weights of shape {row_N.shape} for a segment of {len(segment.logprobs)} "
            f"sampled tokens, {place(segment.rollout_id)}"
        )
    wrong = row_N[~(np.isfinite(row_N) & (row_N >= 0.0))]
    if wrong.size:
        raise JobError(
            f"{where} returned the weight {wrong[0]:g}, {place(segment.rollout_id)}; weights are finite and "
            "not below 0"
        )


# Loaded file -> its digest, and the entries that it added to the registries.
_BY_FILE: dict[Path, tuple[str, Sequence[_Plug]]] = {}
_LOCK = RLock()  # a service reads jobs in threads


def digest_files(files: Sequence[Path], *, option: str = KEY) -> list[str]:
    """Return the SHA-256 of each file. Raises JobError if a file cannot be read."""
    return [_digest(file, option) for file in files]


def refuse_changed(files: Sequence[Path], known: Sequence[str], *, option: str, value: Any) -> None:
    """Raise JobError if one of the files has changed since the run began.

    Args:
        known: the digests of the files when the run began; empty: the run has not begun.
        option: the job key that names the files.
        value: the value of this key. The error suggests `--set KEY=VALUE`, which accepts the changed files.

    Raises:
        JobError: a file has changed, or cannot be read.
    """
    if not known or [*known] == (digests := digest_files(files, option=option)):
        return
    changed = (file for file, old, new in zip_longest(files, known, digests) if old != new)
    raise JobError(
        f"{next(changed) or option} has changed since the run began. Restore it, begin a new run (post the "
        f"job again), or give this command (turnwise train --resume RUN, truth RUN) --set '{option}="
        f"{json.dumps(value)}'"
    )


def load_plugins(files: Sequence[Path], *, option: str = KEY) -> list[str]:
    """Add the plug-ins of `files` to the registries, and remove the plug-ins of all other files.

    A file is executed only if it has not been loaded yet, or has changed since it was loaded.

    Args:
        option: the job key that names the files, for errors.

    Returns:
        The SHA-256 of each file.

    Raises:
        JobError: a file is missing, raises an error, contains no plug-in, or uses a name that is taken.
    """
    paths = [file.resolve() for file in files]
    with _LOCK:
        for other in _BY_FILE.keys() - set(paths):
            _unload(other)
        return [_load(path, option) for path in paths]


def load_packages() -> None:
    """Add the plug-ins of installed packages to the registries. Further calls in a process do nothing.

    Raises:
        JobError: an entry point cannot be imported, is not decorated, or uses a name that is taken.
    """
    with _LOCK:
        _load_packages_once()


@cache
def _load_packages_once() -> Sequence[_Plug]:
    plugs: list[_Plug] = []
    for group, (board, mark) in _GROUPS.items():
        try:
            points = list(package_plugs(group))
        except SettingsError as error:
            raise JobError(str(error)) from error
        for point in points:
            own = list(_plugs_in({point.name: point.plug}, point.place))
            if not own:
                raise JobError(f"{point.place} is {type(point.plug).__name__}; decorate it with {mark}")
            if (own[0].name, own[0].board) != (point.name, board):
                raise JobError(
                    f"{point.place} is marked as {own[0].board} = {own[0].name!r}; name it equally"
                )
            _refuse_names(own, plugs, point.place)
            plugs += own
    _add(plugs)  # all or none, so that a second attempt raises the same error
    return plugs


def _load(file: Path, option: str) -> str:
    digest = _digest(file, option)
    if file in _BY_FILE and _BY_FILE[file][0] == digest:
        return digest
    _unload(file)
    try:
        plugs = list(_plugs_in(vars(load_module(file, option=option)), str(file)))
    except SettingsError as error:
        raise JobError(str(error)) from error
    if not plugs:
        marks = [mark for _, mark in _GROUPS.values()]
        raise JobError(
            f"{option} names {str(file)!r}, which marks nothing with {', '.join(marks[:-1])} or {marks[-1]}"
        )
    _refuse_names(plugs, _load_packages_once(), f"{option}, {file}")
    _add(plugs)
    _BY_FILE[file] = digest, plugs
    return digest


def _digest(file: Path, option: str) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise JobError(f"{option} names {str(file)!r}, which cannot be read: {error.strerror}") from error


def _add(plugs: Sequence[_Plug]) -> None:
    for item in plugs:
        OPEN_BOARDS[item.board][item.name] = item.plug


def _unload(file: Path) -> None:
    for item in _BY_FILE.pop(file, ("", ()))[1]:
        del OPEN_BOARDS[item.board][item.name]


def _plugs_in(names: Mapping[str, Any], home: str) -> Iterator[_Plug]:
    seen = set[int]()
    for value in names.values():
        # Read the mark from `vars`: `getattr` would also find that of a base class or of the object's class.
        mark = vars(value).get(_MARK) if hasattr(value, "__dict__") else None
        if isinstance(mark, _Plug) and id(mark) not in seen:  # not an alias
            seen.add(id(mark))
            yield replace(mark, home=home)


def _refuse_names(plugs: Sequence[_Plug], others: Sequence[_Plug], where: str) -> None:
    # `others` are plug-ins of packages, which may not be in the registries yet.
    homes = {(board, name): "built in" for board, names in BUILT_IN.items() for name in names}
    of_files = (item for _, known in _BY_FILE.values() for item in known)
    homes |= {(item.board, item.name): f"of {item.home}" for item in (*others, *of_files)}
    for item in plugs:
        if not isinstance(item.name, str) or not _NAME.fullmatch(item.name):
            raise JobError(f"{where}: {str(item.name)[:80]!r} is no name: a-z, 0-9 and _, at most 60")
        if home := homes.get((item.board, item.name)):
            raise JobError(
                f"{where}: {item.board} = {item.name!r} is there already ({home}); choose another name"
            )
        homes[item.board, item.name] = f"of {item.home}"
