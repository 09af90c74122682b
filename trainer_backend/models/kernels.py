"""Triton kernels for the operations between a decoder's matrix products, and for log-probs of logits.

Engine and learner use the same kernels on CUDA, so that both round at the same points of the computation
(`models.precision`). Each kernel replaces several torch operators, which would each read and write the hidden
states again.

    rms_norm         h' = h + a            n = h' / sqrt(mean(h'^2) + eps) * weight       rows [T, W]
    rotary           optional norm of each head, and rotation of its halves by position   heads [T, S, D]
    swiglu           silu(gate) * up                                                      rows [T, M]
    token_logprobs   log softmax(z / temperature)[target], and the entropy                rows [N, V]

Import this module only if `triton` is installed. The tensors of a call are on one device, and their last axis
has stride 1. `by_x` is the gradient of the loss with respect to x.
Sources: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467; Su et al.,
RoFormer, arXiv:2104.09864, eq. 34, with pairs as in GPT-NeoX; Milakov and Gimelshein, Online normalizer
calculation for softmax, arXiv:1805.02867.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code=misc

import torch
import triton
import triton.language as tl
from torch import Tensor

# Heads, gate values and logits that one Triton program handles at a time.
_HEADS, _GATE, _LOGITS = 8, 1024, 4096
# Number of programs that each sum a weight's gradient over a share of the tokens; their sums are then added.
# A large GPU runs several of these programs on each multiprocessor.
_PROGRAMS = 512


@triton.jit
def _norm(
    states_ptr, added_ptr, weight_ptr, sum_ptr, out_ptr, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * WIDTH
    d = tl.arange(0, BLOCK)
    mask = d < WIDTH
    x = tl.load(states_ptr + place + d, mask=mask, other=0.0)
    if ADDS:
        x += tl.load(added_ptr + place + d, mask=mask, other=0.0).to(tl.float32)
        tl.store(sum_ptr + place + d, x, mask=mask)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0)
    tl.store(out_ptr + place + d, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_back(
    sum_ptr, weight_ptr, by_out_ptr, by_sum_ptr, by_states_ptr, by_added_ptr, by_weight_ptr, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr, ADDS: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < WIDTH
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0)
    by_weight = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        place = row * WIDTH + d
        x = tl.load(sum_ptr + place, mask=mask, other=0.0)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        x *= inverse
        g = tl.load(by_out_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if WEIGHS:
            by_weight += g * x
        g *= weight
        g = (g - x * (tl.sum(g * x, 0) / WIDTH)) * inverse
        if SUMS:
            g += tl.load(by_sum_ptr + place, mask=mask, other=0.0)
        tl.store(by_states_ptr + place, g, mask=mask)
        if ADDS:
            tl.store(by_added_ptr + place, g.to(by_added_ptr.dtype.element_ty), mask=mask)
    if WEIGHS:
        tl.store(by_weight_ptr + program * WIDTH + d, by_weight, mask=mask)


@triton.jit
def _halves(HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Return a program's heads, offsets in half a head and their mask, offsets in a token and their mask."""
    h = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, HALF)
    in_half = d < DIM // 2
    return h, d, in_half, h[:, None] * DIM + d[None, :], (h < HEADS)[:, None] & in_half[None, :]


@triton.jit
def _inverse(first, second, DIM: tl.constexpr, eps):
    """Compute 1 / RMS of each head, given the head's two halves."""
    return tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]


@triton.jit
def _rotary(
    heads_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, out_ptr, in_row, eps,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    NORMED: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h, d, in_half, places, mask = _halves(HEADS, DIM, HALF, ROWS)
    first = tl.load(heads_ptr + token * in_row + places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + token * in_row + places + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        inverse = _inverse(first, second, DIM, eps)
        first = (first * inverse).to(heads_ptr.dtype.element_ty).to(tl.float32)
        second = (second * inverse).to(heads_ptr.dtype.element_ty).to(tl.float32)
        is_query = (h < QUERIES)[:, None]
        q_first = tl.load(q_weight_ptr + d, mask=in_half, other=0.0)[None, :]
        q_second = tl.load(q_weight_ptr + d + DIM // 2, mask=in_half, other=0.0)[None, :]
        k_first = tl.load(k_weight_ptr + d, mask=in_half, other=0.0)[None, :]
        k_second = tl.load(k_weight_ptr + d + DIM // 2, mask=in_half, other=0.0)[None, :]
        first *= tl.where(is_query, q_first, k_first)
        second *= tl.where(is_query, q_second, k_second)
    position = token
    if PLACED:
        position = tl.load(positions_ptr + token)
    # Read the second half of the table's row: both halves have the same angles, but the first half's sine is
    # negated in some tables.
    turn = position * DIM + DIM // 2 + d
    cos = tl.load(cos_ptr + turn, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + turn, mask=in_half, other=0.0)[None, :]
    out = out_ptr + token * (HEADS * DIM) + places
    tl.store(out, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + DIM // 2, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotary_back(
    heads_ptr, weight_ptr, cos_ptr, sin_ptr, by_out_ptr, by_heads_ptr, by_weight_ptr, tokens, in_row, by_row,
    out_row, eps, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    NORMED: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    _h, d, in_half, places, mask = _halves(HEADS, DIM, HALF, ROWS)
    weight_first = tl.zeros([HALF], tl.float32)
    weight_second = tl.zeros([HALF], tl.float32)
    if NORMED:
        weight_first = tl.load(weight_ptr + d, mask=in_half, other=0.0)
        weight_second = tl.load(weight_ptr + d + DIM // 2, mask=in_half, other=0.0)
    by_first = tl.zeros([HALF], tl.float32)
    by_second = tl.zeros([HALF], tl.float32)
    for token in range(program, tokens, tl.num_programs(0)):
        turn = token * DIM + DIM // 2 + d
        cos = tl.load(cos_ptr + turn, mask=in_half, other=0.0)[None, :]
        sin = tl.load(sin_ptr + turn, mask=in_half, other=0.0)[None, :]
        by = by_out_ptr + token * by_row + places
        g_first = tl.load(by, mask=mask, other=0.0).to(tl.float32)
        g_second = tl.load(by + DIM // 2, mask=mask, other=0.0).to(tl.float32)
        back_first = g_first * cos + g_second * sin
        back_second = g_second * cos - g_first * sin
        if NORMED:
            at = heads_ptr + token * in_row + places
            first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(at + DIM // 2, mask=mask, other=0.0).to(tl.float32)
            inverse = _inverse(first, second, DIM, eps)
            first *= inverse
            second *= inverse
            if WEIGHS:
                by_first += tl.sum(back_first * first, 0)
                by_second += tl.sum(back_second * second, 0)
            back_first *= weight_first[None, :]
            back_second *= weight_second[None, :]
            mean = ((tl.sum(back_first * first, 1) + tl.sum(back_second * second, 1)) / DIM)[:, None]
            back_first = (back_first - first * mean) * inverse
            back_second = (back_second - second * mean) * inverse
        out = by_heads_ptr + token * out_row + places
        tl.store(out, back_first.to(by_heads_ptr.dtype.element_ty), mask=mask)
        tl.store(out + DIM // 2, back_second.to(by_heads_ptr.dtype.element_ty), mask=mask)
    if WEIGHS:
        part = (tl.program_id(1) * tl.num_programs(0) + program) * DIM
        tl.store(by_weight_ptr + part + d, by_first, mask=in_half)
        tl.store(by_weight_ptr + part + DIM // 2 + d, by_second, mask=in_half)


@triton.jit
def _swiglu(gate_ptr, up_ptr, out_ptr, gate_row, up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < WIDTH
    gate = tl.load(gate_ptr + row * gate_row + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + d, mask=mask, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(gate_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + d, (opened * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_back(
    gate_ptr, up_ptr, by_out_ptr, by_gate_ptr, by_up_ptr, gate_row, up_row, out_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < WIDTH
    gate = tl.load(gate_ptr + row * gate_row + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + d, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(by_out_ptr + row * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    by_gate = g * up * share * (1.0 + gate * (1.0 - share))
    tl.store(by_gate_ptr + row * out_row + d, by_gate.to(by_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(by_up_ptr + row * out_row + d, (g * gate * share).to(by_up_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _logprob(
    logits_ptr, targets_ptr, temperatures_ptr, logprobs_ptr, entropies_ptr, totals_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    d = tl.arange(0, BLOCK)
    # Start below any logit, but with a finite value, because (-inf) - (-inf) is NaN.
    best = tl.full([BLOCK], -1e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        mask = start + d < WIDTH
        z = tl.load(logits_ptr + row * WIDTH + start + d, mask=mask, other=-1e38) / temperature
        z = tl.maximum(z, -1e38, propagate_nan=tl.PropagateNan.ALL)
        higher = tl.maximum(best, z, propagate_nan=tl.PropagateNan.ALL)
        shrink = tl.exp(best - higher)
        p = tl.where(mask, tl.exp(z - higher), 0.0)
        total = total * shrink + p
        weighted = weighted * shrink + p * z
        best = higher
    highest = tl.max(best, 0)
    shrink = tl.exp(best - highest)
    whole = tl.sum(total * shrink, 0)
    log_total = highest + tl.log(whole)
    z = tl.load(logits_ptr + row * WIDTH + tl.load(targets_ptr + row)) / temperature
    tl.store(logprobs_ptr + row, z - highest - tl.log(whole))
    tl.store(entropies_ptr + row, log_total - tl.sum(weighted * shrink, 0) / whole)
    tl.store(totals_ptr + row, log_total)


@triton.jit
def _logprob_back(
    logits_ptr, targets_ptr, temperatures_ptr, entropies_ptr, totals_ptr, by_logprobs_ptr, by_entropies_ptr,
    out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < WIDTH
    temperature = tl.load(temperatures_ptr + row)
    by_logprob, by_entropy = tl.load(by_logprobs_ptr + row), tl.load(by_entropies_ptr + row)
    z = tl.load(logits_ptr + row * WIDTH + d, mask=mask, other=0.0) / temperature
    logp = z - tl.load(totals_ptr + row)
    by = -tl.exp(logp) * (by_logprob + (logp + tl.load(entropies_ptr + row)) * by_entropy)
    by += tl.where(d == tl.load(targets_ptr + row), by_logprob, 0.0)
    tl.store(out_ptr + row * WIDTH + d, (by / temperature).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    states_TW: Tensor,
    added_TW: Tensor | None,
    weight_W: Tensor,
    eps: float,
    *,
    sums_TW: Tensor,
    out: torch.dtype,
) -> Tensor:
    """Return the RMS norm of `states_TW` (float32) plus `added_TW`, rounded once, to dtype `out`.

    If `added_TW` is given, the sum is written to `sums_TW` (float32), which may be `states_TW` itself.
    """
    rows, width = states_TW.shape
    out_TW = torch.empty((rows, width), dtype=out, device=states_TW.device)
    block = triton.next_power_of_2(width)
    if rows:
        _norm[(rows,)](
            states_TW, states_TW if added_TW is None else added_TW, weight_W, sums_TW, out_TW, eps,
            WIDTH=width, BLOCK=block, ADDS=added_TW is not None, num_warps=_warps(block),
        )  # fmt: skip
    return out_TW


def rms_norm_backward(
    sums_TW: Tensor,
    weight_W: Tensor,
    by_out_TW: Tensor,
    by_sums_TW: Tensor | None,
    eps: float,
    *,
    added: torch.dtype | None,
    weighs: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of `rms_norm` with respect to states, `added_TW` (in dtype `added`) and weight.

    `by_sums_TW` is the gradient that reaches the sums from their other uses, or None if there are none. The
    gradient of `added_TW` is None if `added` is None, and the weight's gradient is None if `weighs` is false.
    """
    rows, width = sums_TW.shape
    by_states_TW = torch.empty_like(sums_TW)
    by_added_TW = None if added is None else torch.empty_like(sums_TW, dtype=added)
    programs, block = min(rows, _PROGRAMS), triton.next_power_of_2(width)
    parts_PW = sums_TW.new_empty((programs, width)) if weighs else None
    if rows:
        _norm_back[(programs,)](
            sums_TW, weight_W, by_out_TW, by_sums_TW, by_states_TW, by_added_TW, parts_PW, rows, eps,
            WIDTH=width, BLOCK=block, SUMS=by_sums_TW is not None, ADDS=added is not None, WEIGHS=weighs,
            num_warps=_warps(block),
        )  # fmt: skip
    return by_states_TW, by_added_TW, None if parts_PW is None else parts_PW.sum(0)


def rotary(
    heads_TSD: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    cos_LD: Tensor,
    sin_LD: Tensor,
    positions_T: Tensor | None,
    *,
    queries: int,
    eps: float,
    out: torch.dtype,
) -> Tensor:
    """Return query and key heads [T, S, D], normed if `weights` are given, then rotated by token position.

    Args:
        heads_TSD: the heads of a token are contiguous; tokens may have any stride.
        weights: the norm weights, float32 [D], of the first `queries` heads and of the other heads (keys).
        cos_LD: float32 table with a row for each position; both halves of a row have the same angles.
        sin_LD: the same for the sine. Only a row's second half is read, so the first half may be negated.
        positions_T: token t uses row `positions_T[t]` of the tables, or row t if None.
    """
    tokens, heads, dim = heads_TSD.shape
    out_TSD = torch.empty((tokens, heads, dim), dtype=out, device=heads_TSD.device)
    q_weight, k_weight = weights or (cos_LD, cos_LD)
    if tokens:
        _rotary[(tokens, triton.cdiv(heads, _HEADS))](
            heads_TSD, q_weight, k_weight, cos_LD, sin_LD, positions_T, out_TSD, heads_TSD.stride(0), eps,
            QUERIES=queries, HEADS=heads, DIM=dim, HALF=triton.next_power_of_2(dim // 2), ROWS=_HEADS,
            NORMED=weights is not None, PLACED=positions_T is not None, num_warps=4,
        )  # fmt: skip
    return out_TSD


def rotary_backward(
    heads_TSD: Tensor,
    weight_D: Tensor | None,
    cos_TD: Tensor,
    sin_TD: Tensor,
    by_out_TSD: Tensor,
    *,
    by_heads_TSD: Tensor,
    eps: float,
    weighs: bool,
) -> Tensor | None:
    """Write the gradient of `rotary` with respect to the heads to `by_heads_TSD`.

    Return the gradient of the norm's weight, or None if there is no weight or `weighs` is false. All heads
    share the weight, and token t uses row t of the tables. The heads of a token are contiguous in
    `by_heads_TSD` and `heads_TSD`. If there is no weight, `heads_TSD` is not read.
    """
    tokens, heads, dim = heads_TSD.shape
    groups = triton.cdiv(heads, _HEADS)
    programs = min(tokens, max(1, 4 * _PROGRAMS // groups))
    parts_PD = cos_TD.new_empty((groups * programs, dim)) if weighs and weight_D is not None else None
    if tokens:
        _rotary_back[(programs, groups)](
            heads_TSD, weight_D, cos_TD, sin_TD, by_out_TSD, by_heads_TSD, parts_PD, tokens,
            heads_TSD.stride(0), by_out_TSD.stride(0), by_heads_TSD.stride(0), eps,
            HEADS=heads, DIM=dim, HALF=triton.next_power_of_2(dim // 2), ROWS=_HEADS,
            NORMED=weight_D is not None, WEIGHS=parts_PD is not None, num_warps=4,
        )  # fmt: skip
    return None if parts_PD is None else parts_PD.sum(0)


def swiglu(gate_TM: Tensor, up_TM: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, M], in the dtype of gate and up; rows of both may have any stride."""
    rows, width = gate_TM.shape
    out_TM = torch.empty((rows, width), dtype=gate_TM.dtype, device=gate_TM.device)
    if rows:
        _swiglu[(rows, triton.cdiv(width, _GATE))](
            gate_TM, up_TM, out_TM, gate_TM.stride(0), up_TM.stride(0), WIDTH=width, BLOCK=_GATE, num_warps=4
        )
    return out_TM


def swiglu_backward(gate_TM: Tensor, up_TM: Tensor, by_out_TM: Tensor) -> Tensor:
    """Return the gradients of `swiglu` with respect to gate and up, concatenated to [T, 2 M]."""
    rows, width = gate_TM.shape
    by_both_TM = by_out_TM.new_empty((rows, 2 * width))
    by_gate_TM, by_up_TM = by_both_TM.chunk(2, dim=1)
    if rows:
        _swiglu_back[(rows, triton.cdiv(width, _GATE))](
            gate_TM, up_TM, by_out_TM, by_gate_TM, by_up_TM, gate_TM.stride(0), up_TM.stride(0), 2 * width,
            WIDTH=width, BLOCK=_GATE, num_warps=4,
        )  # fmt: skip
    return by_both_TM


def token_logprobs(
    logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return target log-prob, entropy and log-sum-exp, [N] each, of float32 logits / temperature."""
    rows, width = logits_NV.shape
    logprobs_N, entropies_N, totals_N = (logits_NV.new_empty(rows) for _ in range(3))
    if rows:
        _logprob[(rows,)](
            logits_NV, targets_N, temperatures_N, logprobs_N, entropies_N, totals_N,
            WIDTH=width, BLOCK=min(_LOGITS, triton.next_power_of_2(width)), num_warps=8,
        )  # fmt: skip
    return logprobs_N, entropies_N, totals_N


def token_logprobs_backward(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    entropies_N: Tensor,
    totals_N: Tensor,
    by_logprobs_N: Tensor,
    by_entropies_N: Tensor,
    *,
    out: torch.dtype,
) -> Tensor:
    """Return the gradient of `token_logprobs` with respect to the logits, [N, V], in dtype `out`.

    `totals_N` are the log-sum-exps that `token_logprobs` returned.
    """
    rows, width = logits_NV.shape
    out_NV = torch.empty((rows, width), dtype=out, device=logits_NV.device)
    block = min(_LOGITS, triton.next_power_of_2(width))
    if rows:
        _logprob_back[(rows, triton.cdiv(width, block))](
            logits_NV, targets_N, temperatures_N, entropies_N, totals_N, by_logprobs_N, by_entropies_N,
            out_NV, WIDTH=width, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out_NV


def _warps(block: int) -> int:
    """Return the number of warps of a program, so that its block fits in registers."""
    return max(1, min(16, block // 256))
