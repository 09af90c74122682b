"""Two ranks of a model whose segments have rows of their own: as many passes each, and the same numbers."""

import os
from pathlib import Path

import pytest

from bench.study_ranks import Group
from tests.conftest import tiny_job
from tests.tiny_families import EACH_KIND, tiny_model
from tests.trainer_backend.learner.hand_made import segment, tiny_tokenizer
from trainer_backend import learner_parts
from trainer_backend.models.folder import save_model_folder
from trainer_backend.parts import CreditedEpisode, Learner

pytestmark = pytest.mark.skipif(
    not os.environ.get("TURNWISE_TEST_FAMILIES"), reason="`make test-families` has the minutes"
)


def episodes() -> list[CreditedEpisode]:
    made = [segment(f"r{k}", range(20, 23 + 7 * k), range(40, 45 + k), [-1.0] * (5 + k)) for k in range(7)]
    return [CreditedEpisode(part.rollout_id, [part], [(-1.0) ** k]) for k, part in enumerate(made)]


def numbers(learner: Learner) -> list[dict[str, float]]:
    return [learner.update(episodes(), iteration=number) for number in (1, 2)]


@pytest.mark.parametrize("family", EACH_KIND)
def test_two_ranks_train_a_family_as_one_process_does(family: str, tmp_path: Path):
    tokenizer = tiny_tokenizer()
    end = tokenizer.eos_token_id
    model = tiny_model(family, vocab_size=300, bos_token_id=None, eos_token_id=end, pad_token_id=end)
    save_model_folder(tmp_path / "model", model, tokenizer)
    tables = {
        "model__preset": None,
        "model__path": str(tmp_path / "model"),
        "training__mismatch_limit": 1e9,
        "training__row_tokens": 64,
        "training__micro_batch_tokens": 64,
        "training__kl_coef": 0.1,
        "cluster__launcher": "local",
    }
    alone = numbers(learner_parts.local_learners(tiny_job(**tables)).fresh([], None))
    # Layers that are computed again gather their weights again, and change no number.
    ranks = {"learner__nproc_per_node": 2, "training__gradient_checkpointing": 1}
    group = Group(tiny_job(**tables, **ranks), tmp_path)
    try:
        together = numbers(group.fresh([], None))
    finally:
        group.end()
    for one, two in zip(alone, together, strict=True):
        assert {"learner/ranks", "learner/tokens_imbalance"} == two.keys() - one.keys()
        assert {name: two[name] for name in one} == pytest.approx(one, rel=1e-3, abs=1e-4)
