import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_backend.core.logprobs import BYTES_PER_LOGIT, LogitMap, chunk_within, chunked_logprobs


def plain(hidden, head, targets, temperatures):
    logp = (hidden @ head.T / temperatures[:, None]).log_softmax(-1)
    return logp[torch.arange(len(targets)), targets], torch.distributions.Categorical(logits=logp).entropy()


def inputs(count=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, 6, generator=generator, dtype=dtype).requires_grad_()
    head = torch.randn(9, 6, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(9, (count,), generator=generator)
    temperatures = torch.rand(count, generator=generator, dtype=dtype) + 0.5
    return hidden, head, targets, temperatures


def gradients(function, *, of, frozen=(), **options):
    hidden, head, targets, temperatures = inputs()
    for k in frozen:
        (hidden, head)[k].requires_grad_(False)
    outputs = function(hidden, head, targets, temperatures, **options)
    scale = torch.linspace(-1, 1, len(targets), dtype=torch.float64)
    sum((outputs[k] * scale).sum() for k in of).backward()
    return hidden.grad, head.grad


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_chunks_give_the_plain_log_probs_and_entropies(chunk):
    torch.testing.assert_close(chunked_logprobs(*inputs(), chunk=chunk), plain(*inputs()))


@pytest.mark.parametrize("chunk", [1, 100])
def test_a_scale_a_cap_and_a_bias_stand_before_the_temperature(chunk):
    # Products 0 and 2, with the bias 1 and 2, by a scale of 1/2: 1/2 and 2; the cap 4 makes 4 tanh(1/8) and
    # 4 tanh(1/2); a temperature of 2 halves them.
    hidden, head, bias = torch.ones(3, 1), torch.tensor([[0.0], [2.0]]), torch.tensor([1.0, 2.0])
    told = {"chunk": chunk, "bias_V": bias, "logits": LogitMap(scale=0.5, cap=4.0)}
    logprobs, _ = chunked_logprobs(hidden, head, torch.tensor([0, 1, 1]), torch.full((3,), 2.0), **told)
    low, high = 2 * math.tanh(1 / 8), 2 * math.tanh(1 / 2)
    total = math.log(math.exp(low) + math.exp(high))
    assert logprobs.tolist() == pytest.approx([low - total, high - total, high - total], abs=1e-6)


@pytest.mark.parametrize("logits", [LogitMap(0.5), LogitMap(cap=2.0), LogitMap(0.5, 2.0)], ids=str)
def test_gradients_by_chunks_are_the_plain_ones_of_scales_caps_and_biases(logits):
    def by(chunk):
        hidden, head, targets, temperatures = inputs()
        bias = torch.linspace(-1, 1, 9, dtype=torch.float64).requires_grad_()
        found = chunked_logprobs(hidden, head, targets, temperatures, chunk=chunk, bias_V=bias, logits=logits)
        sum(part.square().sum() for part in found).backward()
        return hidden.grad, head.grad, bias.grad

    torch.testing.assert_close(by(4), by(100))  # the second is autograd's


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)], ids=["logprobs", "entropies", "both"])
@pytest.mark.parametrize("frozen", [(), (0,), (1,)], ids=["both", "head", "hidden"])
def test_chunks_give_the_plain_gradients(chunk, of, frozen):
    found = gradients(chunked_logprobs, of=of, frozen=frozen, chunk=chunk)
    torch.testing.assert_close(found, gradients(plain, of=of, frozen=frozen))


def find_memory(tensor):
    return tensor.untyped_storage().data_ptr()


class Alive(TorchDispatchMode):
    """Counts the rows of tensors that are alive among those that `counts` is true of; `most` is the peak."""

    def __init__(self, counts):
        super().__init__()
        self._counts = counts
        self.rows = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = [argument for argument in args if isinstance(argument, torch.Tensor)]
        # a view of an argument is not counted
        made = isinstance(out, torch.Tensor) and find_memory(out) not in map(find_memory, given)
        if made and self._counts(out):
            self._add(len(out))
            weakref.finalize(out, self._add, -len(out))
        return out

    def _add(self, rows):
        self.rows += rows
        self.most = max(self.most, self.rows)


def test_in_forward_and_backward_only_one_chunk_of_logits_is_alive_at_a_time():
    def peak(chunk):
        with Alive(lambda made: made.dim() == 2 and made.shape[1] == 9 and len(made) != 6) as logits:
            logprobs, entropies = chunked_logprobs(*inputs(count=64), chunk=chunk)
            (logprobs + entropies).sum().backward()
        return logits.most

    assert peak(chunk=4) * 8 <= peak(chunk=64)
    assert peak(chunk=4) <= 4 * BYTES_PER_LOGIT / 4  # what chunk_within counts with, in rows of float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_add_to_one_gradient_of_a_large_head(dtype):
    hidden = torch.randn(12, 4, dtype=dtype).requires_grad_()
    head = torch.randn(50_000, 4, dtype=dtype).requires_grad_()
    outputs, _ = chunked_logprobs(hidden, head, torch.arange(12), torch.ones(12), chunk=3)
    with Alive(lambda made: made.shape == (50_000, 4) and made.dtype == torch.float32) as wide:
        outputs.sum().backward()
    # Of bfloat16 this CPU makes a float32 copy of the head for its products, one chunk after the other.
    assert wide.most == (1 if dtype == torch.float32 else 2) * 50_000


def test_the_chunk_is_what_its_budget_holds():
    # 12 bytes a logit: a vocabulary of 1000 takes 12 kB a token
    assert chunk_within(120_000, 1000) == 10
    assert chunk_within(1, 152_000) == 1
    assert chunk_within(2**40, 300) == 1024


@pytest.mark.parametrize("chunk", [4, 100])
def test_rounded_factors_have_float32_sums(chunk):
    hidden, head, targets, temperatures = inputs(dtype=torch.float32)
    factors = {"factors": torch.bfloat16, "chunk": chunk}
    found, _ = chunked_logprobs(hidden, head, targets, temperatures, **factors)
    rounded = [tensor.detach().bfloat16().float() for tensor in (hidden, head)]
    expected, _ = plain(*rounded, targets, temperatures)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    # The same product with its sums rounded, as autocast has it, is off by a hundred times that.
    in_bfloat16 = (hidden.bfloat16() @ head.bfloat16().T).float() / temperatures[:, None]
    sums_rounded = in_bfloat16.log_softmax(-1)[torch.arange(11), targets]
    assert (sums_rounded - expected).abs().max() > 1e-4


def test_rounded_factors_have_gradients_of_the_width_that_was_given():
    hidden, head, targets, temperatures = inputs(dtype=torch.float32)
    chunked_logprobs(hidden, head, targets, temperatures, chunk=4, factors=torch.bfloat16)[0].sum().backward()
    found = hidden.grad, head.grad
    hidden.grad = head.grad = None
    plain(hidden, head, targets, temperatures)[0].sum().backward()
    for rounded, exact in zip(found, (hidden.grad, head.grad), strict=True):
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded, exact, rtol=2**-6, atol=0.02)


def test_the_entropy_of_certainty_is_0_and_of_ignorance_log_v():
    head = torch.eye(3)
    hidden = torch.tensor([[1e4, 0.0, 0.0], [0.0, 0.0, 0.0]])
    _, entropies = chunked_logprobs(hidden, head, torch.tensor([0, 0]), torch.ones(2))
    assert entropies.tolist() == pytest.approx([0.0, math.log(3)])


def test_no_tokens_give_no_log_probs():
    logprobs, entropies = chunked_logprobs(*inputs(count=0))
    assert len(logprobs) == len(entropies) == 0


def test_a_chunk_of_nothing_is_refused():
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        chunked_logprobs(*inputs(), chunk=0)
