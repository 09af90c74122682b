"""This year's families by the learner: each segment scored and trained as if it were computed alone."""

import os

import pytest
import torch

from tests.tiny_families import EACH_KIND, KEYS, VOCABULARY, tiny_model
from tests.trainer_backend.segment_columns import segment_of
from trainer_backend.core.collate import cut_packed, pack_segments
from trainer_backend.core.segments import Segment
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.learner.device import Placement
from trainer_backend.learner.learner import scorer_of
from trainer_backend.learner.scoring import Scorer
from trainer_backend.learner.stepping import checkpoint_layers, stepping
from trainer_backend.learner.support import refuse_unsupported

CPU = Placement(torch.device("cpu"))
FAMILIES = tuple(KEYS) if os.environ.get("TURNWISE_TEST_FAMILIES") else EACH_KIND
LENGTHS = (23, 70, 12, 3, 19, 9, 21, 5)


def segments() -> list[Segment]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for k, length in enumerate(LENGTHS):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        decision = [-1 if i == 0 or i % 4 == 1 else i // 4 for i in range(length)]
        temperature = (0.5, 1.0, 1.5)[k % 3]
        made.append(segment_of(f"r-{k}", ids, decision, (-1.0,) * length, temperature=temperature))
    return made


def learners(family: str) -> Scorer:
    model = tiny_model(family)
    return scorer_of(model, CPU, why_apart=refuse_unsupported(model, longest=128))


def alone(model, part: Segment) -> torch.Tensor:
    """[N] by the model's own forward pass of one segment, with full logits."""
    ids_L = torch.from_numpy(part.token_ids.astype("int64"))
    logits_LV = model(input_ids=ids_L[None], use_cache=False).logits[0]
    logp_LV = (logits_LV[:-1] / float(part.temperatures[0])).log_softmax(-1)
    at = torch.tensor(part.sampled_positions)
    return logp_LV[at - 1, ids_L[at]]


def gradient(model, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    weights = list(model.parameters())
    return torch.cat([torch.zeros_like(w).flatten() if w.grad is None else w.grad.flatten() for w in weights])


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradient_are_those_of_each_segment_alone(family: str):
    scorer, parts = learners(family), segments()
    found = scorer.score(parts, LoopKeys(row_tokens=80, micro_batch_tokens=160))
    model = tiny_model(family)
    expected = [alone(model, part) for part in parts]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), theirs.detach(), rtol=0, atol=1e-4)
    one_by_one = gradient(model, sum(row.sum() for row in expected))
    pieces = list(cut_packed(pack_segments(parts, row_tokens=80), 2))
    together = gradient(scorer.model, sum(scorer.logprobs(piece).sum() for piece in pieces))
    assert float((together - one_by_one).norm() / one_by_one.norm()) <= 1e-5
    checkpoint_layers(scorer.model)
    with stepping(scorer.model):
        again = gradient(scorer.model, sum(scorer.logprobs(piece).sum() for piece in pieces))
    torch.testing.assert_close(again, together, rtol=1e-4, atol=1e-6 * float(together.abs().max()))
