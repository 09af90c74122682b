"""Our decoder computes what `transformers` computes, with the same weights in the same memory."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from itertools import chain, product

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainer_backend.inference.cache import SlotCache
from trainer_backend.inference.decoder import Decoder, fused, unsupported_because
from trainer_backend.inference.row_attention import RowAttentions, cut_spans
from trainer_backend.inference.runner import DecoderRunner, TransformersRunner, choose_runner
from trainer_backend.inference.weights import ServedWeights
from trainer_backend.job.training_table import LoraTable
from trainer_backend.learner.adapter import Adapter
from trainer_backend.learner.loading import hold_in
from trainer_backend.models.cpu_kernels import CpuKernels, cpu_kernels

SIZE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 256, "initializer_range": 0.1,
}  # fmt: skip
# So wide that a CPU's kernel multiplies few tokens; outputs of the head are no whole columns of it.
WIDE = {**SIZE, "hidden_size": 320, "intermediate_size": 336, "initializer_range": 0.04}
LONG = {"factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {**LONG, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def adapted(model: PreTrainedModel, *targets: str) -> PreTrainedModel:
    """With adapters that were trained, where B is not 0."""
    table = LoraTable(rank=3, alpha=5, target_modules=targets or ("all-linear",))
    Adapter.fresh(model, table, seed=0, base=None)
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            weight.data.normal_(std=0.2)
    return model


MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=24, tie_word_embeddings=True)),
    "qwen3, biases": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=40, attention_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZE | {"num_key_value_heads": 4})),
    "llama, biases": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZE | {"num_key_value_heads": 1}, attention_bias=True, mlp_bias=True)
    ),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=True)),
    "llama, wide and tied": lambda: LlamaForCausalLM(LlamaConfig(**WIDE, tie_word_embeddings=True)),
    "qwen2, wide": lambda: Qwen2ForCausalLM(Qwen2Config(**WIDE)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SIZE, rope_parameters=LLAMA3)),
    "yarn": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZE, rope_parameters={**LONG, "rope_type": "yarn"})),
    "linear": lambda: LlamaForCausalLM(LlamaConfig(**SIZE, rope_parameters={**LONG, "rope_type": "linear"})),
    "qwen3, adapters": lambda: adapted(Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=24))),
    "llama, biases and adapters of some layers": lambda: adapted(
        LlamaForCausalLM(LlamaConfig(**SIZE, attention_bias=True)), "q_proj", "v_proj", "o_proj"
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZE, sliding_window=None, head_dim=20)),
    "mistral, wide window": lambda: MistralForCausalLM(MistralConfig(**SIZE, sliding_window=256)),
}


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    """As trained: no norm is 1, no bias is 0."""
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data.add_(0.1 * torch.randn_like(weight))
    return model


def built_kernels() -> CpuKernels:
    kernels = cpu_kernels()
    if kernels is None:
        pytest.skip("there is no C compiler to build the kernels of a CPU with")
    return kernels


def draw_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Rows:
    """Sequences in the rows of a cache, fed by hand."""

    def __init__(
        self, model: PreTrainedModel, *, most_waste: int | None = 10**9, by_kernel: bool = False
    ) -> None:
        cpu = built_kernels() if most_waste is None else None
        self.decoder = Decoder(model, max_len=256, by_kernel=by_kernel, cpu=cpu)
        self.cache = SlotCache(slots=8, max_len=256)
        self.attentions = RowAttentions(
            self.cache,
            kv_heads=self.decoder.heads.keys,
            device=torch.device("cpu"),
            most_waste=most_waste or 10**9,
            cpu=cpu,
        )

    @torch.inference_mode()
    def prefill(self, first_row: int, starts: list[int], ids: list[list[int]], *, logits: bool) -> Tensor:
        """Feed each row some ids, which begin at its start; return [T, V] logits, or none."""
        counts_B = np.array([len(row) for row in ids])
        attention = self.attentions.prefill(first_row=first_row, starts_B=np.array(starts), counts_B=counts_B)
        tokens = torch.tensor(list(chain.from_iterable(ids))), attention.positions_T, attention
        if logits:
            return self.decoder.logits(*tokens)
        self.decoder.prefill(*tokens)
        return torch.empty(0)

    @torch.inference_mode()
    def copy(self, source: int, target: int, length: int) -> None:
        self.cache.move_row(source, target, length)

    @torch.inference_mode()
    def decode(self, ids: list[int], cached: list[int]) -> Tensor:
        """Feed a token to each of the first rows; return [B, V] logits."""
        attention = self.attentions.decode(np.array(cached))
        return self.decoder.logits(torch.tensor(ids), attention.positions_T, attention)


@torch.inference_mode()
def by_transformers(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """[length, V] logits of one sequence, alone, without a cache."""
    logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# Rows attend all together, or cut where a few columns would be padded, or (None) by the kernels of a CPU.
WAYS = pytest.mark.parametrize(
    ("name", "most_waste"),
    [*product(MODELS, [10**9, None]), ("qwen3", 30), ("llama, biases", 30)],
)


@WAYS
def test_a_prefill_a_shared_prefix_a_move_and_decoding_equal_transformers_in_rows_of_mixed_lengths(
    name: str, most_waste: int | None
):
    model = make_model(name)
    rows = Rows(model, most_waste=most_waste)
    sequences = [draw_ids(length, length) for length in (204, 5, 34)]
    # A row goes on from a copy of the first; the rest of its prompt is computed beside that of another.
    sequences += [[*sequences[0][:50], *draw_ids(30, 5)], [*sequences[2][:20], *draw_ids(9, 6)]]
    expected = [by_transformers(model, ids) for ids in sequences]
    prompts = [ids[:-4] for ids in sequences]
    found = rows.prefill(0, [0] * 3, prompts[:3], logits=True).split(list(map(len, prompts[:3])))
    for logits, whole in zip(found, expected, strict=False):
        assert_near(logits, whole[:-4])
    rows.copy(0, 3, 50)
    rows.copy(2, 4, 20)
    rows.prefill(3, [50, 20], [prompts[3][50:], prompts[4][20:]], logits=False)
    for step in range(4, 0, -1):
        if step == 2:  # the second row ends, and the last one moves into its place
            rows.copy(4, 1, len(sequences[4]) - step)
            sequences[1], expected[1] = sequences.pop(), expected.pop()
        starts = [len(ids) - step for ids in sequences]
        found = rows.decode([ids[at] for ids, at in zip(sequences, starts, strict=True)], starts)
        for logits, whole, start in zip(found, expected, starts, strict=True):
            assert_near(logits, whole[start])


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: make test-kernel")
@pytest.mark.parametrize("name", MODELS)
def test_what_the_kernels_compute_between_the_products_equals_transformers(name: str):
    model = make_model(name)
    rows, prompts = Rows(model, by_kernel=True), [draw_ids(length, length) for length in (9, 2)]
    found = rows.prefill(0, [0] * 2, [ids[:-1] for ids in prompts], logits=True)
    last = rows.decode([ids[-1] for ids in prompts], [len(ids) - 1 for ids in prompts])
    whole = torch.cat([found[:8], last[:1], found[8:], last[1:]]).split([9, 2])
    for logits, prompt in zip(whole, prompts, strict=True):
        assert_near(logits, by_transformers(model, prompt))


@pytest.mark.parametrize("most_waste", [10**9, None])
@pytest.mark.parametrize("name", ["qwen3", "llama, biases", "qwen3, adapters", "llama, wide and tied"])
def test_new_weights_are_seen_by_the_decoder_and_by_transformers_alike(name: str, most_waste: int | None):
    model, other = make_model(name), make_model(name, seed=1)
    rows, prompt = Rows(model, most_waste=most_waste), draw_ids(20)
    ServedWeights(model).replace(other.state_dict())
    expected = by_transformers(other, prompt)
    assert_near(rows.prefill(0, [0], [prompt], logits=True), expected)
    assert_near(by_transformers(model, prompt), expected)


def test_there_is_one_copy_of_the_weights_and_tied_ones_stay_tied():
    model = make_model("qwen3")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    decoder = Decoder(model, max_len=8)
    layer, attention = decoder.layers[0], model.model.layers[0].self_attn
    assert layer.query_key_value.weight.data_ptr() == attention.q_proj.weight.data_ptr()
    memory = {weight.untyped_storage().data_ptr(): weight.untyped_storage() for weight in model.parameters()}
    assert sum(storage.nbytes() for storage in memory.values()) == 4 * model.num_parameters()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_weights_that_were_moved_away_from_the_decoder_are_told_at_a_swap():
    model = make_model("qwen3")
    decoder = Decoder(model, max_len=8)
    decoder.assert_in_place()
    model.to(torch.float64)
    with pytest.raises(AssertionError, match="weights were moved"):
        decoder.assert_in_place()


def test_a_product_with_adapters_is_rounded_once_as_the_layers_are():
    model = adapted(make_model("llama"))
    hold_in(model, torch.bfloat16)
    attention, given_TI = model.model.layers[0].self_attn, torch.randn(40, 64)
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.cat([layer(given_TI) for layer in layers], dim=-1)
    found = fused(layers)(given_TI)
    assert found.dtype == expected.dtype == torch.bfloat16
    # Both may sum in another order, and so round a few numbers to the neighbour.
    assert (found != expected).float().mean() < 0.02
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)


def wrapped(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj = nn.Sequential(attention.k_proj)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda model: model.model.layers[1].mlp.register_forward_hook(print),
            "model.layers.1.mlp has hooks",
        ),
        (wrapped, "model.layers.0.self_attn.k_proj is a Sequential and not a plain Linear"),
        (lambda model: model.to(torch.bfloat16), "q_proj.bias is torch.bfloat16"),
        (lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"), "rope_type is 'dynamic'"),
        (lambda model: setattr(model.config, "hidden_act", "gelu"), "hidden_act is 'gelu'"),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_not_taken(change, reason):
    model = make_model("qwen3, biases")
    assert unsupported_because(model) is None
    change(model)
    found = unsupported_because(model)
    assert found is not None and reason in found


def test_another_architecture_is_run_by_transformers_and_the_log_says_why_once():
    gemma = GemmaForCausalLM(GemmaConfig(**SIZE, head_dim=16)).eval()
    with capture_logs() as lines:
        runner = choose_runner(gemma, slots=1, max_len=8)
    assert isinstance(runner, TransformersRunner)
    (line,) = lines
    assert (
        line["event"] == "engine_decodes_by_transformers" and "GemmaForCausalLM is none of" in line["reason"]
    )
    with capture_logs() as lines:
        assert isinstance(choose_runner(make_model("llama"), slots=1, max_len=8), DecoderRunner)
    assert lines == []


def test_rows_of_like_lengths_attend_in_one_call_and_others_in_calls_of_their_own():
    def spans(starts: list[int], counts: list[int]) -> list[tuple[int, int]]:
        return cut_spans(np.array(starts), np.array(counts), most_waste=100)

    # decoding, each row sees its cached tokens and its own: 20 and 10 columns of padding
    assert spans([40, 60, 50], [1, 1, 1]) == [(0, 3)]
    assert spans([499, 99, 99], [1, 1, 1]) == [(0, 1), (1, 3)]
    assert spans([99, 99, 499], [1, 1, 1]) == [(0, 2), (2, 3)]
    # a prefill's tokens each see a whole row: 3 x 20 x 20 pairs where 400 + 324 + 256 are needed, then 220
    assert spans([0, 0, 0], [20, 18, 16]) == [(0, 2), (2, 3)]
    # whole prompts need no mask, rests of prompts do
    assert spans([0, 0, 96, 96], [20, 20, 5, 5]) == [(0, 2), (2, 4)]
