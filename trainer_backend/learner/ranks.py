"""The ranks of a learner: processes under torchrun that work in lockstep, each with a share of the model.

Every rank has all segments and takes the same branches, but computes only its share of the micro-batches.
Gradients are summed over the ranks, not averaged, because token weights sum to 1 over a whole step. If one
rank finds an error (a loss that is not finite, a file that cannot be written), it tells the others before it
raises. All ranks then raise; otherwise the others would wait forever in their next collective.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import version as installed
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from service_kit.boundary import describe_error
from service_kit.release import version
from service_kit.rpc import ErrorBody
from trainer_backend.errors import JobError, LearnerFailed, TrainerError
from trainer_backend.job.tables import RANKS_JOIN_S, LearnerTable

# Time limit, in seconds, while the ranks of a node load a model one after the other.
_LOAD_S = 3600.0
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Communication between this process and the other ranks of its learner, `count` in all."""

    index: int = 0
    """Index of this rank, from 0."""
    count: int = 1
    control: dist.ProcessGroup | None = None
    """gloo process group for Python objects and CPU tensors; None for a single rank."""
    timeout_s: float = RANKS_JOIN_S
    """Time limit of a collective, in seconds."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def are_several(self) -> bool:
        return self.count > 1

    def rows_of_a_piece(self, rows: int, most: int) -> int:
        """Return the rows per micro-batch: at most `most`, and few enough that each rank can get one."""
        return max(1, min(most, -(-rows // self.count)))

    def own_pieces(self, pieces: Sequence[Item]) -> Iterator[tuple[Item, bool]]:
        """Yield this rank's micro-batches, each with a bool: whether its results count.

        Every rank gets equally many, because each forward pass gathers weights from all ranks. A rank that
        has no micro-batch left in the last round repeats another rank's, and must ignore the results.
        """
        for first in range(0, len(pieces), self.count):
            number = first + self.index
            yield pieces[min(number, len(pieces) - 1)], number < len(pieces)

    def sums_by_rank(self, sizes: Sequence[int]) -> list[int]:
        """Return for each rank the total size of its micro-batches, given the sizes of all micro-batches."""
        return [sum(sizes[index :: self.count]) for index in range(self.count)]

    def in_order(self, own: Sequence[Item]) -> list[Item]:
        """Gather on every rank the results for all micro-batches, in order; `own` are this rank's results."""
        if not self.are_several:
            return list(own)
        found = self.of_every_rank(list(own))
        return [row[turn] for turn in range(len(found[0])) for row in found if turn < len(row)]

    def of_every_rank(self, own: Item) -> list[Item]:
        """Gather the value `own` from every rank; return the values by rank index."""
        if not self.are_several:
            return [own]
        every: list[Item] = [own] * self.count
        dist.all_gather_object(every, own, group=self.control)
        return every

    def sums(self, *numbers: float) -> tuple[float, ...]:
        """Sum numbers over all ranks, in float64."""
        if not self.are_several:
            return numbers
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums, group=self.control)
        return tuple(sums.tolist())

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all ranks, in place."""
        if self.are_several:
            for tensor in tensors:
                dist.all_reduce(tensor, group=None if tensor.is_cuda else self.control)

    @torch.no_grad()
    def sum_gradients(self, weights: Sequence[Tensor]) -> None:
        """Sum the gradients of unsharded weights over all ranks; FSDP has summed those of sharded weights.

        If a rank's micro-batches did not use a weight, its gradient is None there and counts as 0.
        """
        if not self.are_several:
            return
        whole = [weight for weight in weights if weight.requires_grad and not isinstance(weight, DTensor)]
        found = self.sums(*(float(weight.grad is not None) for weight in whole)) if whole else ()
        reached = [weight for weight, count in zip(whole, found, strict=True) if count]
        for weight in reached:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        self.sum_([weight.grad for weight in reached if weight.grad is not None])

    def patient(self, timeout_s: float) -> "Ranks":
        """Set the time limit of all collectives, in seconds; return a `Ranks` with this limit."""
        if self.are_several:
            for group in (None, self.control):
                distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
        return replace(self, timeout_s=timeout_s)

    def together(self, work: Callable[[], Result]) -> Result:
        """Call `work` on every rank. If some ranks fail, all ranks raise the error of the first of them."""
        if not self.are_several:
            return work()
        result: Result | None = None
        own: TrainerError | None = None
        try:
            result = work()
        except TrainerError as error:
            own = error
        except Exception as error:
            own = LearnerFailed(f"rank {self.index}: {describe_error(error)}")
            own.__cause__ = error
        bodies = self.of_every_rank(None if own is None else ErrorBody.of(own))
        failed = next((index for index, body in enumerate(bodies) if body is not None), None)
        if failed is None:
            return cast(Result, result)
        if own is not None and failed == self.index:
            raise own
        body = bodies[failed]
        assert body is not None
        raise body.error(TrainerError, LearnerFailed)

    def in_turns(self, work: Callable[[], Result]) -> Result:
        """Call `work`, which needs much main memory, on one rank of each node at a time.

        `work` must not communicate with other ranks, because these are waiting for it to end.
        """
        if not self.are_several:
            return work()
        local, turns = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        self.patient(_LOAD_S)
        results: list[Result] = []
        try:
            for turn in range(max(self.of_every_rank(turns))):
                self.together(lambda: results.append(work()) if turn == local else None)  # noqa: B023
        finally:
            self.patient(self.timeout_s)
        return results[0]

    def first_alone(self, work: Callable[[], object]) -> None:
        """Call `work` on the first rank only; the others wait. If it fails, all ranks raise its error."""
        self.together(work if self.is_first else lambda: None)


ALONE = Ranks()


def join_ranks() -> Ranks:
    """Connect this process to the other ranks that torchrun started; return its `Ranks`.

    Raises LearnerFailed if the ranks do not connect, or if they have different package versions.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    limit = timedelta(seconds=RANKS_JOIN_S)
    backend = "cpu:gloo"
    if torch.cuda.is_available():
        local, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local < devices:  # otherwise `refuse_other_count` refuses the job
            torch.cuda.set_device(local)
            backend += ",cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=limit)
        control = dist.new_group(backend="gloo", timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise LearnerFailed(
            f"the {os.environ['WORLD_SIZE']} ranks of the learner did not connect: {error}",
            hint="Is torchrun's --master-addr and --master-port reachable from every node?",
        ) from error
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), control)
    _refuse_other_versions(ranks)
    return ranks


def _refuse_other_versions(ranks: Ranks) -> None:
    own = {"turnwise": version()} | {name: installed(name) for name in ("torch", "transformers")}
    for index, other in enumerate(ranks.of_every_rank(own)):
        if other != own:
            name = next(name for name in own if other[name] != own[name])
            raise LearnerFailed(
                f"rank {index} has {name} {other[name]}, and rank {ranks.index} has {own[name]}",
                hint="All ranks compute the same update: install the same versions on every node.",
            )


def refuse_other_count(ranks: Ranks, table: LearnerTable, device: torch.device) -> None:
    """Raise JobError if the job sets another number of ranks, or if this node has more ranks than GPUs."""
    if ranks.count != table.ranks:
        raise JobError(
            f"the learner has {ranks.count} ranks, but the job has {table.ranks}",
            where="learner.nnodes, learner.nproc_per_node",
            hint="Start torchrun with matching --nnodes and --nproc-per-node, or change the job.",
        )
    local, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks.are_several and device.type == "cuda" and local > devices:
        raise JobError(
            f"{local} ranks on a node with {devices} GPUs; each needs one of its own",
            where="learner.nproc_per_node",
        )
