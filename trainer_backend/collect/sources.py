"""Chooses a world or a row of a data set for each group, and a policy for each rollout. Pure functions."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from pydantic import JsonValue, SecretStr

from shared_schemas.rollouts import InteractionSpec, RolloutRequest, Start
from shared_schemas.trajectory import Sampling
from trainer_backend.core.allocation import ByReward, DrawnSchedule, Selection, Weighted
from trainer_backend.core.mixture_history import Past, read_past
from trainer_backend.core.policies import ACTOR, parse_policy
from trainer_backend.core.seeds import (
    HELD_OUT_FROM,
    cycled_worlds,
    derived_seed,
    evaluation_worlds,
    other_worlds,
    training_world,
)
from trainer_backend.data.dataset import DataSet
from trainer_backend.data.rows import Row
from trainer_backend.data.truths import refuse_unmatchable
from trainer_backend.errors import DataError
from trainer_backend.job.mixture_table import AllocationTable, RolloutOnlyTable
from trainer_backend.job.rollout_table import DataTable, MultiTurnTable
from trainer_backend.job.schema import EvaluationTable
from trainer_backend.plugins import allocation
from trainer_backend.rundir.spool import plan_id


@dataclass(frozen=True, slots=True)
class Origin:
    """What all siblings of a group have in common: the world, the row of the data set, and the start."""

    seed: int
    """Seed of the environment's world."""
    row_id: str | None = None
    """Id of the row in the data set; None: the job has no data set."""
    env_config: Mapping[str, Any] = field(default_factory=dict)
    """Config of the environment that comes from the row; overrides `rollout.env_config`."""
    ground_truth: JsonValue = None
    interaction: InteractionSpec | None = None
    """The simulated user of a conversation."""
    start: Start | None = None
    """The snapshot from which the siblings start; None: they start at the beginning of a world."""
    decisions_done: int = 0
    """Number of decisions before the snapshot; the siblings' limit of decisions is lower by this number."""
    invalid: int = 0
    """Number of invalid decisions before the snapshot."""


@dataclass(frozen=True, slots=True)
class Worlds:
    """Chooses world seeds as origins of groups, for jobs without a data set.

    Training uses `rollout.seeds` in shuffled epochs or, if there are none, a new seed for every group. The
    methods of this class and of `Rows` are pure functions of the job and the arguments.
    """

    job_seed: int
    seeds: tuple[int, ...]
    held_out: EvaluationTable

    def training(self, purpose: str, numbers: range, iteration: int) -> list[Origin]:
        """Return the origins for training.

        Args:
            purpose: the stage. Each stage has its own endless sequence of origins.
            numbers: indices in the sequence, from 0.
            iteration: the iteration that plays these origins.
        """
        if self.seeds:
            return [Origin(seed) for seed in cycled_worlds(self.job_seed, purpose, self.seeds, numbers)]
        world = partial(training_world, self.job_seed, purpose, iteration, held_out=self._held_out())
        return [Origin(world(group)) for group in range(len(numbers))]

    def refill(self, stage: str, iteration: int, *, played: Sequence[Origin], numbers: range) -> list[Origin]:
        """Return further origins for an iteration. Origins in `played` are repeated only after all others."""
        if not self.seeds:
            return self.training(stage, numbers, iteration)
        played_ids = {origin.seed for origin in played}
        others = other_worlds(self.job_seed, self.seeds, iteration=iteration, played=played_ids)
        return [Origin(others[number % len(others)]) for number in numbers]

    def evaluation(self, most: int | None = None) -> list[Origin]:
        """Return the first `most` held-out origins; by default they are the same for every job."""
        return [Origin(seed) for seed in self._held_out()[:most]]

    def of_group(self, group_id: str, seed: int) -> Origin:
        return Origin(seed)

    def largest(self) -> Origin:
        return self.evaluation(most=1)[0]  # all have the same size

    def _held_out(self) -> Sequence[int]:
        return evaluation_worlds(self.held_out.instances, self.held_out.seeds)


@dataclass(frozen=True, slots=True)
class Rows:
    """Chooses rows of the data set in [data] as origins of groups.

    Every row is played once before any row is repeated; each such epoch is shuffled, unless `data.shuffle` is
    false. The order depends only on the job's seed, the stage and the row ids, so a resumed run needs no
    stored position.
    """

    job_seed: int
    table: DataTable
    data: DataSet

    def training(self, purpose: str, numbers: range, iteration: int) -> list[Origin]:
        rows = self.data.training
        if not self.table.shuffle:
            return [self.origin(rows[number % len(rows)]) for number in numbers]
        ids = [row.id for row in rows]
        ids_in_order = cycled_worlds(self.job_seed, purpose, ids, numbers)
        return [self.origin(self.data.by_id[row_id]) for row_id in ids_in_order]

    def refill(self, stage: str, iteration: int, *, played: Sequence[Origin], numbers: range) -> list[Origin]:
        ids = [row.id for row in self.data.training]
        played_ids = {origin.row_id for origin in played if origin.row_id is not None}
        others = other_worlds(self.job_seed, ids, iteration=iteration, played=played_ids)
        return [self.origin(self.data.by_id[others[number % len(others)]]) for number in numbers]

    def evaluation(self, most: int | None = None) -> list[Origin]:
        return [self.origin(row) for row in self.data.evaluation[:most]]

    def of_group(self, group_id: str, seed: int) -> Origin:
        row_id = read_row_id(group_id)
        assert row_id is not None, "the groups of a job with [data] are named with their rows"
        if row_id not in self.data.by_id:
            raise DataError(
                f"has no training row {row_id!r} any more, from which stored rollouts began",
                where=str(self.table.path),
                hint="Restore it to play on from them.",
            )
        return self.origin(self.data.by_id[row_id])

    def largest(self) -> Origin:
        """Return the origin of the training or held-out row that needs the most bytes in a request."""
        return max(map(self.origin, (*self.data.training, *self.data.evaluation)), key=count_bytes)

    def interactions(self) -> frozenset[str | None]:
        """Return the names of the interactions that rows use.

        None is in the result if a row has an interaction without a name; the task app then chooses it.
        """
        origins = map(self.origin, (*self.data.training, *self.data.evaluation))
        return frozenset(item.interaction.name for item in origins if item.interaction is not None)

    def refuse_unmatchable(self, names: Collection[str | None]) -> None:
        """Raise DataError if an answer cannot equal the ground truth of a row.

        Args:
            names: the interactions whose ground truth must be a number; None stands for one without a name.
        """
        refuse_unmatchable(self.table, (*self.data.training, *self.data.evaluation), names)

    def origin(self, row: Row) -> Origin:
        return make_origin(row, interaction=self.table.interaction)


Source = Worlds | Rows


def make_origin(row: Row, *, interaction: str | None = None) -> Origin:
    """Return the origin of a group that plays a row; `interaction` is the default if the row names none."""
    return Origin(
        seed=derived_seed("row", row.id, below=HELD_OUT_FROM),
        row_id=row.id,
        env_config=_env_config(row),
        ground_truth=row.ground_truth,
        interaction=_interaction(row, interaction),
    )


def count_bytes(origin: Origin) -> int:
    """Return how many bytes the content of a row takes in a request, as ASCII JSON."""
    kwargs = {} if origin.interaction is None else origin.interaction.kwargs
    return len(json.dumps([origin.env_config, origin.ground_truth, kwargs]))


def _env_config(row: Row) -> dict[str, Any]:
    """Return the environment's config that contains the row's content.

    The config is for `dialogue`, or for an environment that reads documents if the row has a document.
    """
    if row.document is None:
        prompt = row.prompt if isinstance(row.prompt, str) else [dict(message) for message in row.prompt]
        return {"prompt": prompt}
    return {"document_content": row.document, "question": row.question, "ground_truth": row.ground_truth}


def _interaction(row: Row, default: str | None) -> InteractionSpec | None:
    own = row.interaction
    if own is not None:
        return own if own.name or default is None else InteractionSpec(name=default, kwargs=own.kwargs)
    if default is None:
        return None
    kwargs = {"query": row.question, "ground_truth": row.ground_truth}
    return InteractionSpec(name=default, kwargs=kwargs)


def group_name(stage: str, iteration: int, group: int, origin: Origin) -> str:
    """Return the id of a group, such as `train/3/0`, or `train/3/0/3f9c...` if the group has a row."""
    row = "" if origin.row_id is None else f"/{origin.row_id}"
    return f"{stage}/{iteration}/{group}{row}"


def read_row_id(group_id: str) -> str | None:
    """Return the row's id that a group's id contains, or None if it contains none."""
    parts = group_id.split("/", 3)
    return parts[3] if len(parts) == 4 else None


@dataclass(frozen=True, slots=True)
class Inference:
    """A model server: its URL, the name of the model there, and the API key if the server needs one."""

    url: str
    model: str
    key: SecretStr | None
    max_model_len: int | None = None
    """Maximum number of tokens of a prompt and its response together; None: unknown."""
    asks: Mapping[str, Any] = field(default_factory=dict)
    """Config for policies that call this server, e.g. `processed_logprobs`; `policy_config` overrides it."""
    other_urls: tuple[str, ...] = ()
    """URLs of further servers that are equal to the one at `url`. Each rollout uses one of the servers."""

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url, *self.other_urls)

    def for_rollout(self, rollout_id: str) -> Self:
        """Choose the server for a rollout. A resumed run and every retry choose the same server again."""
        if not self.other_urls:
            return self
        return replace(
            self, url=self.urls[derived_seed("gateway", plan_id(rollout_id), below=len(self.urls))]
        )


def model_config(table: MultiTurnTable, inference: Inference, sampling: Sampling) -> dict[str, Any]:
    """Return the config of a policy that calls a model at a model server."""
    # Both keys limit prompt and response together, so the lower limit applies.
    lengths = filter(None, (table.max_model_length, inference.max_model_len))
    return {
        "inference_url": inference.url,
        "model": inference.model,
        **sampling.model_dump(exclude={"seed"}),
        **({"max_model_length": min(lengths)} if table.enable else {}),
        **inference.asks,
    }


def name_sampler(request: RolloutRequest) -> str:
    """Return the name of the policy that samples the rollout of a request: the actor or a fixed policy."""
    return parse_policy(request.policy.config.get("model"))


@dataclass(frozen=True, slots=True)
class Allocation:
    """Chooses the policy that samples each rollout of an iteration: the actor or a fixed policy."""

    table: AllocationTable | None
    """The job's settings for the choice; None: the actor samples all rollouts."""
    fixed: Sequence[RolloutOnlyTable]
    seed: int
    history: Sequence[Past] = ()
    """Metrics of finished iterations. Schedules for which `looks_back` is true read them."""

    @property
    def looks_back(self) -> bool:
        """Whether the choices depend on the metrics of earlier iterations."""
        table = self.table
        return table is not None and (allocation(table.type).looks_back or table.selection == "reward")

    def after(self, rows: Sequence[Mapping[str, Any]]) -> Self:
        """Return a copy whose `history` is read from these rows of metrics."""
        return replace(self, history=read_past(rows, [table.name for table in self.fixed]))

    @property
    def schedule(self) -> DrawnSchedule | None:
        """The schedule that draws the choices; None: the job has no fixed policies."""
        table = self.table
        if table is None or not self.fixed:
            return None
        plug = allocation(table.type)
        keys = table.values(plug.needs | plug.takes)
        selection: Selection = Weighted({fixed.name: fixed.weight for fixed in self.fixed})
        if table.selection == "reward":
            selection = ByReward([fixed.name for fixed in self.fixed], self.history)
        return plug.schedule(keys, seed=self.seed, selection=selection, history=self.history)

    def samplers(self, stage: str, iteration: int, *, groups: int, siblings: int) -> list[list[str]]:
        """Choose the policy of each rollout of a stage.

        The job's key `unit` says whether a policy is drawn per iteration, per group or per rollout. If it is
        drawn per iteration, refills of the iteration are sampled by the same policy.

        Returns:
            The names of the policies, indexed by group and sibling: [groups][siblings].
        """
        schedule = self.schedule
        if schedule is None or self.table is None:
            return [[ACTOR] * siblings for _ in range(groups)]
        if self.table.unit == "iteration":
            return [[schedule.get_policy_choice(iteration)] * siblings] * groups
        if self.table.unit == "group":
            policies = schedule.choices(iteration, [(stage, group) for group in range(groups)])
            return [[policy] * siblings for policy in policies]
        policies = schedule.choices(
            iteration, [(stage, group, sibling) for group in range(groups) for sibling in range(siblings)]
        )
        return [policies[group * siblings : (group + 1) * siblings] for group in range(groups)]
