"""Builds a causal language model from its config. Of a vision-language model, only the text part is built."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast


def text_config(folder: Path) -> Any:
    """Read the config of the model in a folder. Of a vision-language model, return the text part's config."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    if text is not config:
        # A vision-language model reads this key from its own config; some text configs lack it.
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    return text


def causal_class(config: Any) -> type[PreTrainedModel]:
    kind = type(config)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return _with_head(MODEL_MAPPING[kind])
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    own: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return own


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    decoder = model.get_decoder()  # type: ignore[no-untyped-call]
    # Llama 4 returns itself as its decoder.
    layers: nn.ModuleList = (model.model if decoder is model else decoder).layers
    return layers


def empty_model(config: Any) -> PreTrainedModel:
    """Build the causal language model of a config on the meta device, so that weights occupy no memory."""
    with torch.device("meta"):
        model: PreTrainedModel = causal_class(config)._from_config(config)  # type: ignore[no-untyped-call]
    return model


@cache
def _with_head(decoder: Any) -> type[PreTrainedModel]:
    """Return a causal language model class for a decoder class for which `transformers` has none.

    `decoder` is the text decoder of a vision-language model. The returned class applies a linear head to the
    decoder's hidden states, as the vision-language model does if its input is only text.
    """
    base: Any = decoder.__mro__[1]

    class TextForCausalLM(base, GenerationMixin):  # type: ignore[misc]
        config_class = decoder.config_class
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  # the library's

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = decoder(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: Any = None, **inputs: Any) -> CausalLMOutputWithPast:
            outputs = self.model(input_ids=input_ids, **inputs)
            logits_BLV = self.lm_head(outputs.last_hidden_state)
            return CausalLMOutputWithPast(logits=logits_BLV, past_key_values=outputs.past_key_values)  # type: ignore[call-arg]

    TextForCausalLM.__name__ = decoder.__name__.removesuffix("Model") + "ForCausalLM"
    return TextForCausalLM
