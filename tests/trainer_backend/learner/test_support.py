"""What of a model the learner would leave out, or could not hold: refused, and by name where it has one."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tests.conftest import tiny_job
from tests.model_folders import FAMILIES, SIZE
from tests.trainer_backend.learner.hand_made import segment
from trainer_backend.errors import ModelFolderError
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.support import refuse_unsupported

torch.set_num_threads(1)


def llama(**changes: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **SIZE, **changes)).eval()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (CohereForCausalLM(CohereConfig(vocab_size=50, logit_scale=0.5, **SIZE)), "sets logit_scale"),
        (GraniteForCausalLM(GraniteConfig(vocab_size=50, logits_scaling=4.0, **SIZE)), "sets logits_scaling"),
        (
            Gemma2ForCausalLM(Gemma2Config(vocab_size=50, final_logit_softcapping=None, **SIZE)),
            "sets attn_logit_softcapping",
        ),
    ],
    ids=["cohere", "granite", "gemma2"],
)
def test_a_scale_or_cap_of_the_config_is_named(model, says: str):
    with pytest.raises(ModelFolderError, match=says):
        refuse_unsupported(model, longest=64)


def test_a_head_with_a_bias_is_refused():
    model = llama()
    model.lm_head = torch.nn.Linear(32, 50, bias=True)
    with pytest.raises(ModelFolderError, match="lm_head has a bias"):
        refuse_unsupported(model, longest=64)


def test_what_no_name_foresees_is_measured():
    model = llama()
    refuse_unsupported(model, longest=64)
    model.lm_head.register_forward_hook(lambda module, given, logits: 1.5 * logits)
    with pytest.raises(ModelFolderError, match=r"its logits lie up to .* from lm_head"):
        refuse_unsupported(model, longest=64)


def test_a_window_is_none_for_sequences_that_it_holds_whole():
    model = MistralForCausalLM(MistralConfig(vocab_size=50, sliding_window=64, **SIZE)).eval()
    refuse_unsupported(model, longest=64)
    with pytest.raises(ModelFolderError, match=r"sliding_attention of 64 tokens.*\(65\)"):
        refuse_unsupported(model, longest=65)


def test_a_job_may_not_sample_more_tokens_than_the_model_has_positions():
    refuse_unsupported(llama(), longest=1024)
    with pytest.raises(ModelFolderError, match=r"made for 1024 positions.*max_model_len to 1024 or less"):
        refuse_unsupported(llama(), longest=1025)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    stretched = llama(rope_parameters=yarn)
    refuse_unsupported(stretched, longest=4096)
    with pytest.raises(ModelFolderError, match="made for 4096 positions"):
        refuse_unsupported(stretched, longest=4097)


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_the_learner_scores_a_family_as_the_model_itself_does(family: str, model_folders: Mapping[str, Path]):
    job = tiny_job(model__preset=None, model__path=str(model_folders[family]))
    learner = LocalLearner.fresh(job, [])
    answers = [[7, 8, 9], [300, 2], [11, 12, 13, 14]]
    segments = [segment(f"r{i}", [5, 6 + i], answer, [0.0] * len(answer)) for i, answer in enumerate(answers)]
    packed_together = learner.scorer.score(segments, row_tokens=64, micro_batch_tokens=1024)
    for item, scored in zip(segments, packed_together, strict=True):
        with torch.no_grad():
            logits_LV = learner.model(torch.tensor([item.token_ids])).logits[0]
        alone = logits_LV[1:-1].log_softmax(-1).gather(1, torch.tensor(item.token_ids[2:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scored), alone, atol=1e-5, rtol=0)
