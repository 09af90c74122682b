"""Attention over one row of prefix trees (tries). It is computed in parts, so that shared keys are read once.

A tree is cut into *runs*, which are its stretches without a branch. A token attends to its own run up to
itself, and to every run between its own run and the root. In depth-first order, all tokens below a run follow
the run without a gap, so each part of the attention multiplies two slices of the row:

    own      queries and keys of the same run, causal; runs of similar length are batched
    shared   queries of all tokens below a run, with the keys of that run

`models.part_attention` combines the parts into the attention of the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_backend.learner.by_length import MOST_QUERIES, group_alike
from trainer_backend.models import part_attention
from trainer_backend.models.part_attention import attended, folded, heads_first, join, unfolded, widened


class Shared(NamedTuple):
    """A run: tokens `start` to `end`. The tokens `end` to `until` are below it. Ends are exclusive."""

    start: int
    end: int
    until: int


@dataclass(frozen=True, slots=True)
class Runs:
    starts_R: NDArray[np.int64]
    """The index of the first token of each run, followed by the number of tokens."""
    shared: Sequence[Shared]
    """The runs that have tokens below them, in the order of the row."""

    @classmethod
    def of(cls, position_L: NDArray[np.int64]) -> Runs:
        """Find the runs of a row without padding, whose trees are in depth-first order.

        `position_L` contains each token's position, which is its depth in its tree.
        """
        length = len(position_L)
        begins = np.flatnonzero(np.diff(position_L, prepend=-2) != 1).tolist()
        path: list[tuple[int, int]] = []  # stretches on the current path: index, position of the first token
        cuts = set(begins)
        for begin in begins:
            depth = int(position_L[begin])
            while path and path[-1][1] >= depth:
                path.pop()
            if path:  # the run ends after the parent token
                place, position = path[-1]
                cuts.add(place + depth - position)
            path.append((begin, depth))
        starts = [*sorted(cuts), length]
        shared: list[Shared] = []
        open_: list[tuple[int, int]] = []  # runs on the current path: start and end
        for begin, end in zip(starts, [*starts[1:], length], strict=True):
            depth = int(position_L[begin]) if begin < length else 0
            while open_ and int(position_L[open_[-1][0]]) >= depth:
                first, last = open_.pop()
                if begin > last:
                    shared.append(Shared(first, last, begin))
            open_.append((begin, end))
        return cls(np.array(starts), sorted(shared))


@dataclass(frozen=True, slots=True)
class _Places:
    """Maps the tokens of a row to a padded batch of G runs of similar length, with P cells for each run."""

    token_GP: Tensor
    """int64, index of the token in each cell. A cell of padding has the index of the run's last token."""
    real_N: Tensor
    """int64, indices of the N cells of the flattened batch that are not padding."""
    real_token_N: Tensor
    """int64, indices of the tokens in these N cells."""

    @classmethod
    def of(cls, first_G: Tensor, end_G: Tensor) -> _Places:
        wanted_GP = first_G[:, None] + torch.arange(int((end_G - first_G).max()))
        token_GP = torch.minimum(wanted_GP, end_G[:, None] - 1)
        real_N = (wanted_GP < end_G[:, None]).flatten().nonzero()[:, 0]
        return cls(token_GP, real_N, token_GP.flatten()[real_N])

    def spread(self, tokens: Tensor, times: int = 1) -> Tensor:
        """Copy tokens [L, H, D] to the cells [G, H * times, P, D]; each head is repeated `times` times."""
        side = tokens.index_select(0, self.token_GP.flatten()).view(*self.token_GP.shape, *tokens.shape[1:])
        side = side.transpose(1, 2)
        return side.repeat_interleave(times, dim=1) if times > 1 else side.contiguous()

    def spread_once(self, tokens: Tensor) -> Tensor:
        """Copy tokens to cells like `spread`, but fill the padding with 0."""
        side = tokens.new_zeros((self.token_GP.numel(), *tokens.shape[1:]))
        side.index_copy_(0, self.real_N, tokens.index_select(0, self.real_token_N))
        return side.view(*self.token_GP.shape, *tokens.shape[1:]).transpose(1, 2).contiguous()

    def gather(self, side: Tensor, tokens: Tensor) -> None:
        """Copy all cells of `side` [G, H, P, D] except padding to their tokens in `tokens` [L, H, D]."""
        flat = side.transpose(1, 2).flatten(0, 1).index_select(0, self.real_N)
        tokens.index_copy_(0, self.real_token_N, flat)


@dataclass(frozen=True, slots=True)
class _Side:
    """Queries and keys of a padded batch of runs of similar length."""

    queries: _Places
    keys: _Places
    hidden_GQK: Tensor | None
    """True where a query must not attend to a key. If None, queries and keys are the same tokens, and
    attention is causal."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Lists the parts of the attention of a row. The queries may be those of all tokens or of some tokens."""

    own: Sequence[_Side]
    """Attention of queries within their own runs, in padded batches."""
    shared: Sequence[tuple[slice, slice]]
    """For each run with queries below it: the slice of the run's keys, and the slice of those queries."""

    @classmethod
    def of_all(cls, runs: Runs) -> Plan:
        own = []
        for first_G, end_G in group_alike(runs.starts_R.tolist()):
            places = _Places.of(first_G, end_G)
            own.append(_Side(places, places, None))
        return cls(own, [(slice(run.start, run.end), slice(run.end, run.until)) for run in runs.shared])

    @classmethod
    def of_some(cls, runs: Runs, position_N: Tensor) -> Plan | None:
        """Plan attention for the queries of the tokens `position_N` only: [N] int64, ascending.

        Returns None if the attention of all tokens costs no more.
        """
        own, scores, of_all = [], 0, 0
        for first_G, end_G in group_alike(runs.starts_R.tolist()):
            reads_2G = torch.searchsorted(position_N, torch.stack((first_G, end_G)))
            is_read_G = reads_2G[0] < reads_2G[1]
            of_all += len(first_G) * int((end_G - first_G).max()) ** 2
            if not is_read_G.any():
                continue
            first_G, end_G, reads_2G = first_G[is_read_G], end_G[is_read_G], reads_2G[:, is_read_G]
            keys, queries = _Places.of(first_G, end_G), _Places.of(*reads_2G)
            # Keys in padding get indices beyond the run's end, so they are hidden from every query of it.
            key_GK = first_G[:, None] + torch.arange(keys.token_GP.shape[1])
            hidden_GQK = key_GK[:, None] > position_N[queries.token_GP][:, :, None]
            scores += hidden_GQK.numel()
            own.append(_Side(queries, keys, hidden_GQK))
        if scores > MOST_QUERIES * of_all:
            return None
        shared = []
        for run in runs.shared:
            begin, end = torch.searchsorted(position_N, torch.tensor([run.end, run.until])).tolist()
            if begin < end:
                shared.append((slice(run.start, run.end), slice(begin, end)))
        return cls(own, shared)


def attend(plan: Plan, q_NHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float) -> Tensor:
    """Compute the attention [N, H, D] of the plan's queries to the keys and values of all L tokens.

    Keys and values may have fewer heads than queries (grouped-query attention).
    """
    size = v_LHD.shape[-1]
    wide = widened(v_LHD, q_NHD.shape[-1])
    out: Tensor = _Joined.apply(plan, q_NHD, k_LHD, wide, scale)  # type: ignore[no-untyped-call]
    return out[..., :size]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, lse, heads = torch.empty_like(q), q.new_empty((*q.shape[:2], 1)), q.shape[1] // k.shape[1]
        for side in plan.own:
            part, part_lse = attended(
                side.queries.spread(q), side.keys.spread(k, heads), side.keys.spread(v, heads),
                side.hidden_GQK, True, scale,
            )  # fmt: skip
            side.queries.gather(part, out)
            side.queries.gather(part_lse[..., None], lse)
        lse = lse[..., 0]
        for keys, queries in plan.shared:
            part, part_lse = attended(
                folded(q[queries], k.shape[1]), heads_first(k[keys]), heads_first(v[keys]),
                None, False, scale,
            )  # fmt: skip
            join(
                out[queries],
                lse[queries],
                unfolded(part, q.shape[1]),
                unfolded(part_lse[..., None], q.shape[1])[..., 0],
            )
        ctx.plan, ctx.scale = plan, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale, grad = ctx.plan, ctx.scale, gradients[0].contiguous()
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        heads = q.shape[1] // k.shape[1]
        for side in plan.own:
            parts = part_attention.gradients(
                side.queries.spread_once(grad),  # no gradient from padding
                side.queries.spread(q), side.keys.spread(k, heads), side.keys.spread(v, heads),
                side.queries.spread(out), side.queries.spread(lse[..., None])[..., 0],
                side.hidden_GQK, True, scale,
            )  # fmt: skip
            side.queries.gather(parts[0], dq)
            for whole, part in zip((dk, dv), parts[1:], strict=True):
                side.keys.gather(_sum_heads(part, heads), whole)
        for keys, queries in plan.shared:
            kept = (grad, q, out, lse[..., None])
            grad_part, q_part, out_part, lse_part = (folded(part[queries], k.shape[1]) for part in kept)
            parts = part_attention.gradients(
                grad_part, q_part, heads_first(k[keys]), heads_first(v[keys]), out_part, lse_part[..., 0],
                None, False, scale,
            )  # fmt: skip
            dq[queries] += unfolded(parts[0], q.shape[1])
            dk[keys] += parts[1][0].transpose(0, 1)
            dv[keys] += parts[2][0].transpose(0, 1)
        return None, dq, dk, dv, None


@dataclass(frozen=True, slots=True)
class Level:
    """Inputs of one call of a variable-length attention kernel, which computes a part for each of S runs."""

    query_N: Tensor
    """int64, indices of the tokens whose queries are used, run after run."""
    key_N: Tensor
    """int64, indices of the tokens whose keys and values are used, run after run."""
    queries_S: Tensor
    """int32, [S + 1]: index in `query_N` of the first query of each run, followed by their total number."""
    keys_S: Tensor
    """int32, [S + 1]: the same for `key_N`."""
    longest: tuple[int, int]
    """The largest number of queries, and of keys, of any run."""
    causal: bool
    """Whether a query attends only to the keys up to its own token."""

    @classmethod
    def of(
        cls, queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], *, causal: bool
    ) -> Level:
        """Build a level on the CPU from the ranges of query tokens and of key tokens of each run."""
        counts = [[end - begin for begin, end in ranges] for ranges in (queries, keys)]
        tokens = [torch.cat([torch.arange(*bounds) for bounds in ranges]) for ranges in (queries, keys)]
        starts = [torch.tensor([0, *accumulate(count)], dtype=torch.int32) for count in counts]
        longest = max(counts[0]), max(counts[1])
        return cls(tokens[0], tokens[1], starts[0], starts[1], longest, causal)


def list_levels(runs: Runs) -> list[Level]:
    """Divide the attention of a row into levels.

    The first level is the causal attention within each run. Each further level contains the runs of one depth
    of the trees, with the queries of all tokens below these runs. Within a level, each token occurs at most
    once as a query and at most once as a key.
    """
    own = list(pairwise(runs.starts_R.tolist()))
    depths: list[list[Shared]] = []
    path: list[Shared] = []
    for run in runs.shared:
        while path and path[-1].until <= run.start:
            path.pop()
        if len(path) == len(depths):
            depths.append([])
        depths[len(path)].append(run)
        path.append(run)
    return [
        Level.of(own, own, causal=True),
        *(
            Level.of(
                [(run.end, run.until) for run in level], [(run.start, run.end) for run in level], causal=False
            )
            for level in depths
        ),
    ]


class Flash:
    """Computes the attention of a level, and its gradients, by torch's FlashAttention on CUDA."""

    dtype: torch.dtype | None = torch.bfloat16
    """The dtype to which inputs are converted; None: they keep their dtype."""

    def forward(
        self, q_NHD: Tensor, k_MHD: Tensor, v_MHD: Tensor, level: Level, scale: float
    ) -> tuple[Tensor, Tensor, Any]:
        """Return the attention [N, H, D], the log-sum-exp [N, H], and what `backward` needs as `kept`."""
        out, lse_HN, *kept = torch.ops.aten._flash_attention_forward(
            q_NHD, k_MHD, v_MHD, level.queries_S, level.keys_S, *level.longest, 0.0, level.causal, False,
            scale=scale,
        )  # fmt: skip
        return out, lse_HN.T, kept[:2]

    def backward(
        self,
        grad_NHD: Tensor,
        tensors: tuple[Tensor, Tensor, Tensor],
        out_NHD: Tensor,
        lse_NH: Tensor,
        level: Level,
        scale: float,
        kept: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v from this level.

        `out_NHD` and `lse_NH` are the results of all levels joined, not of this level alone.
        """
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad_NHD, *tensors, out_NHD, lse_NH.T.contiguous(), level.queries_S, level.keys_S, *level.longest,
            0.0, level.causal, *kept, scale=scale,
        )  # fmt: skip
        return found


def flash_is_here() -> bool:
    """Return whether torch's private operators have the signatures that `Flash` expects."""
    names = {
        "_flash_attention_forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
        "return_debug_mask scale",
        "_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k "
        "dropout_p is_causal rng_state unused scale",
    }
    for name, wanted in names.items():
        operator = getattr(torch.ops.aten, name, None)
        known = [] if operator is None else [argument.name for argument in operator.default._schema.arguments]
        if known[: len(wanted.split())] != wanted.split():
            return False
    return True


def attend_levels(
    levels: Sequence[Level], kernel: Flash, q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float
) -> Tensor:
    """Compute the attention [L, H, D] of a row as the joined attention of its levels."""
    size = v_LHD.shape[-1]
    wide = widened(v_LHD, q_LHD.shape[-1])
    tensors = [tensor.to(kernel.dtype or tensor.dtype) for tensor in (q_LHD, k_LHD, wide)]
    out: Tensor = _Levels.apply(levels, kernel, *tensors, scale)  # type: ignore[no-untyped-call]
    return out[..., :size]


class _Levels(torch.autograd.Function):
    """Joins the attention of several levels. Outputs and gradients are summed in at least float32."""

    @staticmethod
    def forward(
        ctx: Any, levels: Sequence[Level], kernel: Flash, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        whole, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        kept = []
        for level in levels:
            part, part_lse, needed = kernel.forward(
                q[level.query_N], k[level.key_N], v[level.key_N], level, scale
            )
            own, own_lse = whole[level.query_N], lse[level.query_N]
            join(own, own_lse, part.to(wide), part_lse.to(wide))
            whole[level.query_N], lse[level.query_N] = own, own_lse
            kept.append(needed)
        out = whole.to(q.dtype)
        ctx.given = levels, kernel, scale, kept
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        levels, kernel, scale, kept = ctx.given
        sums = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (q, k, v)]
        for level, needed in zip(levels, kept, strict=True):
            parts = kernel.backward(
                gradients[0][level.query_N],
                (q[level.query_N], k[level.key_N], v[level.key_N]),
                out[level.query_N], lse[level.query_N], level, scale, needed,
            )  # fmt: skip
            for total, part, places in zip(
                sums, parts, (level.query_N, level.key_N, level.key_N), strict=True
            ):
                total.index_add_(0, places, part.to(total.dtype))
        dq, dk, dv = (total.to(q.dtype) for total in sums)
        return None, None, dq, dk, dv, None


def _sum_heads(part: Tensor, times: int) -> Tensor:
    """Sum [G, H, P, D] over groups of `times` adjacent heads, which share keys; return [G, H_kv, P, D]."""
    groups, heads, places, size = part.shape
    return part if times == 1 else part.reshape(groups, heads // times, times, places, size).sum(2)
