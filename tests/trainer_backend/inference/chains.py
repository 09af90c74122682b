"""Models whose greedy answer is known beforehand."""

from itertools import pairwise

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from trainer_backend.models import build_preset


def chain_model(tokenizer: PreTrainedTokenizerFast, *texts: str) -> PreTrainedModel:
    """A preset whose likeliest next token is always the next one of these texts, end to end.

    No token may come twice but the last, which goes on to nothing in particular.
    """
    chain = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    assert len(set(chain[:-1])) == len(chain) - 1, "a table of transitions has one for each token"
    model = build_preset("tiny-0.3m", tokenizer, seed=1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # With silent layers the logits are embedding of the last token x head: a table of transitions.
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        model.model.embed_tokens.weight.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(0))
        for token, after in pairwise(chain):
            model.lm_head.weight[after] = model.model.embed_tokens.weight[token]
    return model
