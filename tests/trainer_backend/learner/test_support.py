"""Which models get a row for each segment, and which are refused, by name where the reason has one."""

import pytest
import torch
from transformers import MambaConfig, PreTrainedModel, RwkvConfig

from tests.tiny_families import VOCABULARY, tiny_model, tiny_wrapper
from trainer_backend.errors import ModelFolderError
from trainer_backend.learner.shapes import model_shape
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.models.kinds import refuse_rotations_by_length, why_not_by_position

torch.set_num_threads(1)


def llama(**changes: object) -> PreTrainedModel:
    return tiny_model("llama", max_position_embeddings=1024, **changes)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("cohere", {}), ("granite", {}), ("gemma2", {"final_logit_softcapping": 0.5, "sliding_window": 64})],
)
def test_scales_caps_and_a_bias_of_the_head_are_computed(family, changes):
    model = tiny_model(family, **changes)
    model.lm_head = torch.nn.Linear(32, VOCABULARY, bias=True)
    refuse_unsupported(model, longest=64)


def test_what_no_name_foresees_is_measured():
    model = llama()
    refuse_unsupported(model, longest=64)
    model.lm_head.register_forward_hook(lambda module, given, logits: 1.5 * logits)
    with pytest.raises(ModelFolderError, match=r"its logits differ by up to .* from lm_head"):
        refuse_unsupported(model, longest=64)


def test_a_window_is_none_for_sequences_that_it_holds_whole():
    model = tiny_model("mistral", sliding_window=64)
    assert refuse_unsupported(model, longest=64) is None
    assert "sliding_attention of 64 tokens" in refuse_unsupported(model, longest=65)


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
    config = llama().config
    config.rope_parameters = rotation
    refuse_rotations_by_length(config, longest=limit)
    with pytest.raises(ModelFolderError, match=f"max_model_len to {limit} or less"):
        refuse_rotations_by_length(config, longest=limit + 1)


def with_forward(change) -> PreTrainedModel:
    model = llama()
    forward = model.model.forward
    model.model.forward = lambda *args, **told: change(forward(*args, **told), told)
    return model


def test_texts_that_a_row_does_not_keep_apart_get_rows_of_their_own():
    def mean_before(out, told):  # a state that no mask resets
        out.last_hidden_state = out.last_hidden_state.cumsum(dim=1)
        return out

    assert refuse_unsupported(llama(), longest=64) is None
    assert "with another text in the row" in refuse_unsupported(with_forward(mean_before), longest=64)


def test_layers_that_read_the_padding_behind_a_text_are_refused():
    def mean_of_all(out, told):
        out.last_hidden_state = out.last_hidden_state.mean(dim=1, keepdim=True).expand_as(
            out.last_hidden_state
        )
        return out

    with pytest.raises(ModelFolderError, match="padding after a text changes the text's logits"):
        refuse_unsupported(with_forward(mean_of_all), longest=64)


def test_attention_that_torch_does_not_compute_is_the_models_own():
    why = refuse_unsupported(tiny_model("gpt_oss", sliding_window=64), longest=64)
    assert "GptOssForCausalLM does not use scaled_dot_product_attention" in why


def test_of_a_model_for_pictures_too_the_part_about_texts_is_looked_at():
    model = tiny_wrapper("gemma3", sliding_window=64)
    assert model_shape(model.config, None).width == 32
    assert "sliding_attention of 64 tokens" in why_not_by_position(model, longest=65)


@pytest.mark.parametrize("config", [MambaConfig(), RwkvConfig()], ids=lambda config: config.model_type)
def test_models_without_attention_are_told_as_such(config):
    with pytest.raises(ModelFolderError, match=f"'{config.model_type}' is not a decoder"):
        model_shape(config, None)
