"""Compute the forward pass of Qwen3, Qwen2, Llama and Mistral models over a flat list of tokens.

    h += O(attention(rope(norm(Q(n(h)))), rope(norm(K(n(h)))), V(n(h))))        in each layer
    h += Down(silu(Gate(n(h))) * Up(n(h)))                                      in each layer
    logits = Head(n(h))

Here h is the residual stream, n is an RMSNorm, and `norm` is an RMSNorm of each head, which only Qwen3
has. O, Q, K, V, Down, Gate, Up and Head are linear layers.

The pass has no batch dimension and no padding. Prefill and decode differ only in the keys that a token
attends to, and the cache's `TokenAttention` determines these keys. The pass never reads a number back from
the device.

Weight matrices that multiply the same input are joined into one matrix: Q, K and V; gate and up. The weights
of the model's own modules become views of the joined matrix. So the weights exist only once, `transformers`
can still use them, and the decoder uses new weights as soon as they are written to the modules.

The pass rounds as `models.precision` specifies. In float32, logits differ from those of `transformers` only
by the order of summation. If Triton's kernels are selected, they compute everything between the matrix
products. With torch's operators, a decode step on a GPU spent a third of its time on launching kernels.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from trainer_backend.models.cpu_kernels import CpuKernels

ARCHITECTURES = (Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM, MistralForCausalLM)
# The kinds of rotary embeddings whose angles depend only on the position, not on the length of the sequence.
ROTATIONS = ("default", "linear", "llama3", "yarn")


class TokenAttention(Protocol):
    """Computes the attention of the tokens of one pass. It is the interface between the decoder and a cache.

    Each of the T tokens of a pass belongs to a row of the cache and has a position in that row.
    Implementations receive rows and positions in their constructor.
    """

    def write(self, layer: int, keys_TKD: Tensor, values_TKD: Tensor) -> None:
        """Store the rotated keys and the values of the tokens in a layer, [T, key-value heads, head_dim]."""

    def attend(self, layer: int, queries_THD: Tensor) -> Tensor:
        """Return the attention outputs of rotated queries, [T, heads, head_dim].

        Each token attends to the tokens of its row up to and including itself. Call `write` for the layer
        first.
        """


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank adapters of joined linear layers, which add scale * x A' B' to the layers' outputs.

    `down` (A) stacks the down-projections of the layers. `up` (B) contains their up-projections as diagonal
    blocks.
    """

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    scale: float


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer, or several joined ones: y = x W' + b, plus the adapters' output.

    W' is the transpose of `weight`. The input x is rounded to the dtype of W. If `cpu` kernels are given,
    they compute products in float32 where they are faster than torch.
    """

    weight: Tensor  # [out, in]
    bias: Tensor | None
    adapters: LowRank | None = None
    cpu: CpuKernels | None = None

    def __call__(self, input_TI: Tensor) -> Tensor:
        if self.adapters is not None:
            return self._adapted(self.adapters, input_TI)
        if self.cpu is not None and self.cpu.multiplies(len(input_TI), self.weight):
            product_TO = self.cpu.product(input_TI, self.weight)
            return product_TO if self.bias is None else product_TO.add_(self.bias)
        dtype = self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input_TI.to(dtype), self.weight, bias)

    def add_to(self, residual_TW: Tensor, input_TI: Tensor) -> None:
        """Add the product to the residual stream, in place."""
        if self.bias is not None or self.adapters is not None or self.weight.dtype != residual_TW.dtype:
            residual_TW.add_(self(input_TI))
        elif self.cpu is not None and self.cpu.multiplies(len(input_TI), self.weight):
            self.cpu.add_product(input_TI, self.weight, to_TO=residual_TW)
        else:
            residual_TW.addmm_(input_TI, self.weight.t())

    def outputs(self, first: int) -> "Product":
        """Return a product with only the outputs from index `first` on; it shares the weights' memory."""
        low = self.adapters
        return Product(
            self.weight[first:],
            None if self.bias is None else self.bias[first:],
            None if low is None else LowRank(low.down, low.up[first:], low.scale),
            self.cpu,
        )

    def _adapted(self, low: LowRank, input_TI: Tensor) -> Tensor:
        """Return the output with adapters. The sum is rounded once, as in `learner.adapter.AdaptedLinear`."""
        given_TI = input_TI.to(self.weight.dtype)
        added_TO = F.linear(F.linear(given_TI, low.down), low.up)
        summed_TO = torch.addmm(added_TO, given_TI, self.weight.t(), beta=low.scale)
        return summed_TO if self.bias is None else summed_TO + self.bias.to(summed_TO.dtype)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm over the last dimension, in float32."""

    weight: Tensor
    eps: float

    def __call__(self, input_TW: Tensor) -> Tensor:
        return F.rms_norm(input_TW, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Heads:
    """The numbers of query heads and key heads in a layer, and the size of a head."""

    queries: int
    keys: int
    size: int

    def of(self, flat_TI: Tensor) -> Tensor:
        """Return a product's output as S heads, [T, S, size]."""
        return flat_TI.view(len(flat_TI), -1, self.size)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms that Qwen3 applies to each query head and to each key head."""

    queries: Norm
    keys: Norm

    def __call__(self, heads_THD: Tensor, keys: int) -> Tensor:
        """Return normed heads in float32. The last `keys` heads are key heads, the others query heads."""
        size = self.queries.weight.shape
        normed_THD = F.rms_norm(heads_THD.float(), size, None, self.queries.eps)
        if heads_THD.dtype != torch.float32:  # round here, as `transformers` does
            normed_THD = normed_THD.to(heads_THD.dtype).float()
        normed_THD[:, :-keys].mul_(self.queries.weight)
        normed_THD[:, -keys:].mul_(self.keys.weight)
        return normed_THD


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of rotary angles, [T, 1, head_dim]. The first half of each sine vector is negated."""

    cos_T1D: Tensor
    sin_T1D: Tensor

    def at(self, positions_T: Tensor) -> "Rotation":
        """Return the rotation for some positions. Entry i of this object must belong to position i."""
        return Rotation(self.cos_T1D.index_select(0, positions_T), self.sin_T1D.index_select(0, positions_T))

    def __call__(self, heads_THD: Tensor) -> Tensor:
        """Rotate each pair (i, i + head_dim / 2) of each head (Su et al., arXiv:2104.09864, eq. 34)."""
        swapped_THD = heads_THD.roll(heads_THD.shape[-1] // 2, dims=-1)
        return (heads_THD * self.cos_T1D).addcmul_(swapped_THD, self.sin_T1D)


class Stream:
    """The residual stream of one pass, and the operations between matrix products, with torch's operators.

    `residual_TW` is float32 and is changed in place. `turns` contains the rotations of all positions.
    """

    def __init__(self, residual_TW: Tensor, turns: Rotation, positions_T: Tensor) -> None:
        self._residual_TW, self._rotation = residual_TW, turns.at(positions_T)

    def norm(self, norm: Norm) -> Tensor:
        """Return the normalised stream, [T, width]."""
        return norm(self._residual_TW)

    def add(self, product: Product, input_TI: Tensor) -> None:
        product.add_to(self._residual_TW, input_TI)

    def rotary(self, heads_TSD: Tensor, norms: HeadNorms | None, keys: int) -> Tensor:
        """Return the heads after rotation. If `norms` is given, the heads are normed first.

        The last `keys` heads are key heads, the others query heads.
        """
        return self._rotation(heads_TSD.float() if norms is None else norms(heads_TSD, keys))

    def swiglu(self, gate_up_TM: Tensor) -> Tensor:
        """Return silu(gate) * up, [T, M]. Each row of the input, [T, 2 M], contains gate, then up.

        The input may be overwritten.
        """
        gate_TM, up_TM = gate_up_TM.chunk(2, dim=-1)
        return F.silu(gate_TM, inplace=True).mul_(up_TM)


class KernelStream(Stream):
    """A stream whose operations are computed by kernels such as Triton's.

    `add` only computes a product. The next call of `norm` adds the product to the residual stream.
    """

    def __init__(
        self, residual_TW: Tensor, turns: Rotation, positions_T: Tensor, *, kernels: Any, dtype: torch.dtype
    ) -> None:
        self._residual_TW, self._turns, self._positions_T = residual_TW, turns, positions_T
        self._kernels, self._dtype = kernels, dtype
        self._added_TW: Tensor | None = None

    def norm(self, norm: Norm) -> Tensor:
        (stream_TW, added_TW), self._added_TW = (self._residual_TW, self._added_TW), None
        normed_TW: Tensor = self._kernels.rms_norm(
            stream_TW, added_TW, norm.weight, norm.eps, sums_TW=stream_TW, out=self._dtype
        )
        return normed_TW

    def add(self, product: Product, input_TI: Tensor) -> None:
        assert self._added_TW is None, "a norm lies between any two products that are added"
        self._added_TW = product(input_TI)

    def rotary(self, heads_TSD: Tensor, norms: HeadNorms | None, keys: int) -> Tensor:
        rotated_TSD: Tensor = self._kernels.rotary(
            heads_TSD,
            None if norms is None else (norms.queries.weight, norms.keys.weight),
            self._turns.cos_T1D,
            self._turns.sin_T1D,
            self._positions_T,
            queries=heads_TSD.shape[1] - keys,
            eps=0.0 if norms is None else norms.queries.eps,
            out=self._dtype,
        )
        return rotated_TSD

    def swiglu(self, gate_up_TM: Tensor) -> Tensor:
        opened_TM: Tensor = self._kernels.swiglu(*gate_up_TM.chunk(2, dim=-1))
        return opened_TM


class CpuStream(KernelStream):
    """A stream whose operations are computed by CPU kernels in float32.

    The kernels add a product to the residual stream while they compute it.
    """

    def add(self, product: Product, input_TI: Tensor) -> None:
        product.add_to(self._residual_TW, input_TI)


@dataclass(frozen=True, slots=True)
class Layer:
    heads: Heads
    attention_norm: Norm
    query_key_value: Product
    head_norms: HeadNorms | None
    out: Product
    mlp_norm: Norm
    gate_up: Product
    down: Product

    def run(self, number: int, stream: Stream, attention: TokenAttention) -> None:
        heads = self.heads
        all_TSD = heads.of(self.query_key_value(stream.norm(self.attention_norm)))
        rotated_TSD = stream.rotary(all_TSD[:, : -heads.keys], self.head_norms, heads.keys)
        attention.write(number, rotated_TSD[:, heads.queries :], all_TSD[:, -heads.keys :])
        stream.add(self.out, attention.attend(number, rotated_TSD[:, : heads.queries]).flatten(1))
        stream.add(self.down, stream.swiglu(self.gate_up(stream.norm(self.mlp_norm))))

    def write_only(self, number: int, stream: Stream, attention: TokenAttention) -> None:
        """Store the keys and values without the output. A prefill needs only this from the last layer."""
        heads = self.heads
        key_value = self.query_key_value.outputs(heads.queries * heads.size)
        all_TSD = heads.of(key_value(stream.norm(self.attention_norm)))
        rotated_TKD = stream.rotary(all_TSD[:, : heads.keys], self.head_norms, heads.keys)
        attention.write(number, rotated_TKD, all_TSD[:, heads.keys :])


class Decoder:
    """Computes the forward pass of a model with the model's own weights.

    `unsupported_because` says which models are supported. The decoder moves the weights into joined matrices,
    so only one decoder may use a model.

    Args:
        max_len: the number of positions; the last position is max_len - 1.
        by_kernel: compute with Triton's kernels (see `kernels_are_here`).
        cpu: compute with these CPU kernels (see `kernels_for`). Without kernels, torch's operators compute.
    """

    def __init__(
        self, model: PreTrainedModel, *, max_len: int, by_kernel: bool = False, cpu: CpuKernels | None = None
    ) -> None:
        assert unsupported_because(model) is None, "the decoder does not support the model"
        base: Any = model.model
        self.embedding: Tensor = base.embed_tokens.weight
        self.head: Callable[[Tensor], Tensor] = model.lm_head
        self._low = None if self.embedding.dtype == torch.float32 else self.embedding.dtype
        if self._low is None and type(model.lm_head) is nn.Linear:
            self.head = fused([model.lm_head], cpu)
        self.turns = Rotation(*rotation_tables(base.rotary_emb, max_len, self.embedding.device))
        self._stream: Callable[[Tensor, Rotation, Tensor], Stream] = Stream
        if by_kernel:
            from trainer_backend.models import kernels

            self._stream = partial(KernelStream, kernels=kernels, dtype=self.embedding.dtype)
        elif cpu is not None:
            self._stream = partial(CpuStream, kernels=cpu, dtype=torch.float32)
        self.norm = _norm(base.norm)
        self.layers = [_layer(layer, cpu) for layer in base.layers]
        self.heads = self.layers[0].heads
        self._places = {weight: weight.data_ptr() for weight in model.parameters()}

    def assert_in_place(self) -> None:
        """Assert that the weights were not moved in memory: otherwise the decoder computes with old ones."""
        moved = any(weight.data_ptr() != place for weight, place in self._places.items())
        assert not moved, "the model's weights were moved, and the decoder computes with the old ones"

    def prefill(self, ids_T: Tensor, positions_T: Tensor, attention: TokenAttention) -> None:
        """Store the keys and values of T tokens without computing logits. Ids and positions are int64 [T]."""
        stream = self._new_stream(ids_T, positions_T)
        last = len(self.layers) - 1
        for number in range(last):
            self.layers[number].run(number, stream, attention)
        self.layers[last].write_only(last, stream, attention)

    def logits(self, ids_T: Tensor, positions_T: Tensor, attention: TokenAttention) -> Tensor:
        """Store the keys and values of T tokens. Return the next-token logits at each of them, [T, V].

        Ids and positions are int64 [T].
        """
        stream = self._new_stream(ids_T, positions_T)
        for number, layer in enumerate(self.layers):
            layer.run(number, stream, attention)
        low, normed_TW = self._low, stream.norm(self.norm)
        with nullcontext() if low is None else torch.autocast(normed_TW.device.type, dtype=low):
            return self.head(normed_TW)

    def _new_stream(self, ids_T: Tensor, positions_T: Tensor) -> Stream:
        """Return a residual stream that begins with the tokens' embeddings, in newly allocated memory."""
        return self._stream(F.embedding(ids_T, self.embedding).float(), self.turns, positions_T)


def unsupported_because(model: PreTrainedModel) -> str | None:
    """Return why the decoder does not support a model, or None if the decoder supports it.

    For a supported model, the decoder computes the same as `transformers`.
    """
    if type(model) not in ARCHITECTURES:
        names = ", ".join(kind.__name__ for kind in ARCHITECTURES)
        return f"{type(model).__name__} is none of {names}"
    base: Any = model.model
    rotation = base.rotary_emb.rope_type
    if rotation not in ROTATIONS:
        return f"rope_type is {rotation!r}, not one of {', '.join(ROTATIONS)}"
    if model.config.hidden_act != "silu":
        return f"hidden_act is {model.config.hidden_act!r}, not 'silu'"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has hooks, which it would not call"
        if name.endswith("_proj") and type(module) is not nn.Linear and not hasattr(module, "parts"):
            return f"{name} is a {type(module).__name__} and not a plain Linear"
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and weight.dtype != torch.float32:
            return f"{name} is {weight.dtype}, and norms and biases are computed in float32"
    return None


def rotation_tables(rotary: nn.Module, longest: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines for the positions below `longest` with the model's module `rotary`.

    Both are [longest, 1, head_dim]. The first half of each sine vector is negated, as in `Rotation`.
    """
    positions_1L = torch.arange(longest, device=device)[None]
    cos_1LD, sin_1LD = rotary(torch.zeros(1, device=device), positions_1L)
    sin_1LD[..., : sin_1LD.shape[-1] // 2].neg_()
    return cos_1LD[0][:, None], sin_1LD[0][:, None]


def _layer(module: Any, cpu: CpuKernels | None) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    size: int = attention.head_dim
    has_norms = hasattr(attention, "q_norm")
    return Layer(
        Heads(attention.q_proj.out_features // size, attention.k_proj.out_features // size, size),
        _norm(module.input_layernorm),
        fused([attention.q_proj, attention.k_proj, attention.v_proj], cpu),
        HeadNorms(_norm(attention.q_norm), _norm(attention.k_norm)) if has_norms else None,
        fused([attention.o_proj], cpu),
        _norm(module.post_attention_layernorm),
        fused([mlp.gate_proj, mlp.up_proj], cpu),
        fused([mlp.down_proj], cpu),
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), module.variance_epsilon)


def fused(linears: Sequence[Any], cpu: CpuKernels | None = None) -> Product:
    """Join linear layers with the same input. Their weights and biases become views of joined tensors."""
    plain = [linear.parts()[0] if hasattr(linear, "parts") else linear for linear in linears]
    weights = [linear.weight for linear in plain]
    biases = [linear.bias for linear in plain if linear.bias is not None]
    return Product(_joined(weights), _joined(biases) if biases else None, _adapters(linears), cpu)


def _adapters(linears: Sequence[Any]) -> LowRank | None:
    """Return the joined adapters of linear layers that have the same input, or None if no layer has adapters.

    The layers' own adapter matrices become views of the joined ones.
    """
    parts = [linear.parts()[1:] if hasattr(linear, "parts") else None for linear in linears]
    found = [part for part in parts if part is not None]
    if not found:
        return None
    scales = {scale for _, _, scale in found}
    assert len(scales) == 1, "one table gives the rank and the scale of all adapters"
    down = _joined([down for down, _, _ in found])
    up = down.new_zeros((sum(linear.out_features for linear in linears), len(down)))
    row = column = 0
    for linear, part in zip(linears, parts, strict=True):
        if part is not None:
            block = up[row : row + linear.out_features, column : column + len(part[0])]
            block.copy_(part[1].detach())
            part[1].data = block
            column += len(part[0])
        row += linear.out_features
    return LowRank(down, up, scales.pop())


def _joined(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0].detach()
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = view
    return whole
