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
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    RwkvConfig,
    SiglipVisionConfig,
)

from tests.conftest import tiny_job
from tests.model_folders import FAMILIES, SIZE
from tests.trainer_backend.learner.hand_made import segment
from trainer_backend import learner_parts
from trainer_backend.errors import ModelFolderError
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.shapes import model_shape
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.models.kinds import refuse_rotations_by_length

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
    with pytest.raises(ModelFolderError, match=r"sliding_attention of 64 tokens"):
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


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}


@pytest.mark.parametrize(
    ("rotation", "limit"),
    [
        ({**LONGROPE, "original_max_position_embeddings": 128}, 128),
        ({**DYNAMIC, "original_max_position_embeddings": 128}, 128),
        ({**DYNAMIC, "original_max_position_embeddings": 4096}, 1024),
        ({"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}, 1024),
    ],
    ids=["longrope", "dynamic", "dynamic beyond its positions", "one of two kinds"],
)
def test_positions_that_depend_on_the_length_of_a_neighbour_are_refused(rotation, limit: int):
    config = LlamaConfig(vocab_size=50, **SIZE)
    config.rope_parameters = rotation
    refuse_rotations_by_length(config, longest=limit)
    with pytest.raises(
        ModelFolderError, match=rf"more than {limit} tokens.*max_model_len to {limit} or less"
    ):
        refuse_rotations_by_length(config, longest=limit + 1)


def test_texts_that_a_row_does_not_keep_apart_are_found_without_a_name():
    model = llama()
    forward = model.model.forward
    model.model.forward = lambda *args, **told: forward(
        *args, **{**told, "position_ids": None, "attention_mask": None}
    )
    refuse_unsupported(llama(), longest=64)
    with pytest.raises(ModelFolderError, match="two texts in one row change each other's logits"):
        refuse_unsupported(model, longest=64)


def test_attention_that_torch_does_not_compute_is_refused():
    config = GptOssConfig(vocab_size=50, num_local_experts=2, num_experts_per_tok=1, **SIZE)
    with pytest.raises(ModelFolderError, match="GptOssForCausalLM has attention of its own"):
        refuse_unsupported(GptOssForCausalLM(config), longest=64)


def test_of_a_model_for_pictures_too_the_part_about_texts_is_looked_at():
    text = Gemma3TextConfig(vocab_size=50, sliding_window=64, **SIZE)
    eyes = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config = Gemma3Config(text_config=text, vision_config=eyes, mm_tokens_per_image=4)
    assert model_shape(config, None).width == SIZE["hidden_size"]
    with torch.device("meta"):
        model = Gemma3ForConditionalGeneration(config)
    with pytest.raises(ModelFolderError, match="sliding_attention of 64 tokens"):
        refuse_unsupported(model, longest=65)


@pytest.mark.parametrize("config", [MambaConfig(), RwkvConfig()], ids=lambda config: config.model_type)
def test_models_without_attention_are_told_as_such(config):
    with pytest.raises(
        ModelFolderError, match=rf"'{config.model_type}' is no decoder of layers with attention"
    ):
        model_shape(config, None)


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_the_learner_scores_a_family_as_the_model_itself_does(family: str, model_folders: Mapping[str, Path]):
    job = tiny_job(model__preset=None, model__path=str(model_folders[family]))
    learner = LocalLearner.fresh(learner_parts.learner_config(job), [])
    answers = [[7, 8, 9], [300, 2], [11, 12, 13, 14]]
    segments = [segment(f"r{i}", [5, 6 + i], answer, [0.0] * len(answer)) for i, answer in enumerate(answers)]
    packed_together = learner.scorer.score(segments, LoopKeys(row_tokens=64, micro_batch_tokens=1024))
    for item, scored in zip(segments, packed_together, strict=True):
        with torch.no_grad():
            logits_LV = learner.model(torch.tensor([item.token_ids.tolist()])).logits[0]
        alone = (
            logits_LV[1:-1]
            .log_softmax(-1)
            .gather(1, torch.tensor(item.token_ids[2:].tolist())[:, None])[:, 0]
        )
        torch.testing.assert_close(torch.tensor(scored), alone, atol=1e-5, rtol=0)
