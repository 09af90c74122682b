"""Leaving out what nobody reads changes no log-prob and no gradient."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.trainer_backend.learner.hand_made import segment
from trainer_backend.core.collate import pack_segments
from trainer_backend.learner.attention import BlockMask
from trainer_backend.learner.by_length import last_mlp_on
from trainer_backend.learner.device import Placement
from trainer_backend.learner.scoring import Scorer

PARTS = [segment("a", [5] * 7, [6, 7], [0.0, 0.0]), segment("b", [8] * 4, [9], [0.0])]


def scorer_of() -> Scorer:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**size, vocab_size=64, attn_implementation="sdpa")).eval()
    return Scorer(model.double(), Placement(torch.device("cpu")), BlockMask(), 16)


def found(scorer: Scorer) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradient of their sum."""
    logprobs_N, _ = scorer.logprobs(pack_segments(PARTS, row_tokens=14))
    logprobs_N.sum().backward()
    return logprobs_N.detach(), torch.cat([weight.grad.flatten() for weight in scorer.model.parameters()])


def test_the_last_mlp_sees_the_tokens_that_predict_a_sampled_one_and_no_others():
    scorer, seen = scorer_of(), []
    for layer in scorer.model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda _, given, __: seen.append(given[0].numel() // 48))
    found(scorer)
    assert seen == [14, 3]


def test_log_probs_and_gradients_are_those_of_the_whole():
    scorer, whole = scorer_of(), scorer_of()
    # a layer that is said to be computed again is left as it is
    whole.model.model.layers[-1].gradient_checkpointing = True
    whole.model.model.layers[-1]._gradient_checkpointing_func = lambda function, *given: function(*given)
    whole.model.model.layers[-1].training = True
    for mine, theirs in zip(found(scorer), found(whole), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_the_model_is_left_as_it_was_even_by_an_error():
    scorer = scorer_of()
    ids_BL, places = torch.tensor([[3, 4, 5]]), (torch.tensor([0]), torch.tensor([1]))
    before = scorer.model(ids_BL).logits
    try:
        with last_mlp_on(scorer.model, *places):
            raise KeyError
    except KeyError:
        assert torch.equal(scorer.model(ids_BL).logits, before)
