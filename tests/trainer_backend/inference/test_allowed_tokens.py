"""A model that may sample only some tokens: engine, learner and a saved folder have one distribution."""

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.trajectory import Sampling
from tests.conftest import tiny_job
from tests.trainer_backend.inference.conftest import ACTIONS
from tests.trainer_backend.inference.naive import assert_equal_to_naive, staggered
from tests.trainer_backend.learner.hand_made import SIZE, segment
from trainer_backend import learner_parts
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.sharding import gathered_copy
from trainer_backend.models import build_preset, load_model_folder, save_model_folder
from trainer_backend.models.allowed_tokens import allow_only

PROMPT = [5, 6, 7]


@pytest.fixture
def allowed(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return [tokenizer.encode(f" {name}")[0] for name in ACTIONS]


@pytest.fixture
def restricted(tokenizer: PreTrainedTokenizerFast, allowed: list[int]) -> PreTrainedModel:
    made = build_preset("tiny-0.3m", tokenizer, seed=1)
    allow_only(made, allowed)
    return made


async def test_the_engine_samples_the_allowed_tokens_by_a_softmax_over_them_alone(
    start_engine, model, restricted, allowed
):
    kinds = ({}, {"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 5})
    requests = [(PROMPT, Sampling(max_tokens=4, seed=seed, **kinds[seed % 4])) for seed in range(12)]
    results = await staggered(start_engine(restricted, max_model_len=256), requests)
    assert_equal_to_naive(restricted, requests, results)
    assert {token for result in results for token in result.token_ids} <= set(allowed)
    logits_V = model(torch.tensor([PROMPT])).logits[0, -1].detach()
    logprobs = dict(zip(allowed, logits_V[allowed].log_softmax(0).tolist(), strict=True))
    plain = results[0]
    assert plain.logprobs[0] == pytest.approx(logprobs[plain.token_ids[0]], abs=1e-5)


def test_the_learner_scores_a_token_by_a_softmax_over_the_allowed_ones_and_trains_no_other(
    tokenizer: PreTrainedTokenizerFast, restricted: PreTrainedModel, allowed: list[int]
):
    learner = LocalLearner(learner_parts.learner_config(tiny_job()), restricted, tokenizer)
    (found,) = learner.scorer.score([segment("r", PROMPT, allowed[:2], [0.0, 0.0])], SIZE)
    plain = build_preset("tiny-0.3m", tokenizer, seed=1)
    logits_LV = plain(torch.tensor([[*PROMPT, allowed[0]]])).logits[0, len(PROMPT) - 1 :]
    expected_LA = logits_LV[:, allowed].log_softmax(-1).tolist()
    assert found == pytest.approx([expected_LA[0][0], expected_LA[1][1]], abs=1e-5)
    assert "lm_head.bias" not in dict(restricted.named_parameters())


def test_a_saved_folder_and_the_copy_of_a_sharded_model_keep_the_restriction(tokenizer, restricted, tmp_path):
    save_model_folder(tmp_path, restricted, tokenizer)
    loaded, _ = load_model_folder(tmp_path)
    ids = torch.tensor([PROMPT])
    for copied in (loaded, gathered_copy(restricted)):
        assert torch.equal(copied(ids).logits, restricted(ids).logits)
