"""A tiny learner and episodes of one decision, for the tests of the learner."""

from collections.abc import Sequence

import torch

from tests.conftest import tiny_job
from trainer_backend import learner_parts
from trainer_backend.core.segments import Segment
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.models import build_preset, train_tokenizer
from trainer_backend.parts import CreditedEpisode

SIZE = LoopKeys(row_tokens=64, micro_batch_tokens=1024)


def tiny_tokenizer():
    return train_tokenizer(["tree L2 U1 water wood3 stone coal"] * 20, 300, whole_words=["noop", "do"])


def make_learner(tokenizer, **overrides) -> LocalLearner:
    """One that takes log-probs which nobody sampled with."""
    torch.set_num_threads(1)
    overrides = {"training__mismatch_limit": 1e9, **overrides}
    return LocalLearner(
        learner_parts.learner_config(tiny_job(**overrides)),
        build_preset("tiny-0.3m", tokenizer, seed=3),
        tokenizer,
    )


def segment(
    name: str, prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float], t: int = 0
) -> Segment:
    context = len(prompt)
    ids = [*prompt, *answer]
    return Segment.of(name, ids, logprobs, [(context, len(ids), t, 0, 1.0)])


def make_episodes(learner: LocalLearner, advantages: Sequence[float]) -> list[CreditedEpisode]:
    """Single-decision episodes whose log-probs are the learner's own, as if it had sampled them."""
    drafts = [segment(f"r{i}", [5, 6, 7 + i], [20 + i, 30 + i], [0.0, 0.0]) for i in range(len(advantages))]
    own = learner.scorer.score(drafts, SIZE)
    segments = [
        segment(item.rollout_id, item.token_ids[:3].tolist(), item.token_ids[3:].tolist(), values)
        for item, values in zip(drafts, own, strict=True)
    ]
    return [
        CreditedEpisode(item.rollout_id, [item], [advantage])
        for item, advantage in zip(segments, advantages, strict=True)
    ]


def gradient(model, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return get_gradients(model)


def get_gradients(model) -> torch.Tensor:
    weights = model.parameters()
    return torch.cat([torch.zeros(w.numel()) if w.grad is None else w.grad.flatten() for w in weights])
