"""A tiny learner and episodes of one decision, for the tests of the learner."""

import asyncio
from collections.abc import Mapping, Sequence

import torch

from shared_schemas.trajectory import Sampling
from tests.conftest import tiny_job
from tests.tiny_families import VOCABULARY
from tests.trainer_backend.segment_columns import make_segment
from trainer_backend import learner_parts
from trainer_backend.core.columns import Row
from trainer_backend.core.segments import Segment
from trainer_backend.inference.actor import Generation
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.update import LogprobCache
from trainer_backend.models import build_preset, train_tokenizer
from trainer_backend.parts import CreditedEpisode

SIZE = LoopKeys(row_tokens=64, micro_batch_tokens=1024)


def tiny_tokenizer():
    return train_tokenizer(["tree L2 U1 water wood3 stone coal"] * 20, 300, whole_words=["noop", "do"])


def make_config(**tables) -> LearnerConfig:
    return learner_parts.learner_config(tiny_job(**tables))


def make_learner(tokenizer, **overrides) -> LocalLearner:
    """One that takes log-probs which nobody sampled with."""
    torch.set_num_threads(1)
    overrides = {"training__mismatch_limit": 1e9, **overrides}
    return LocalLearner(
        make_config(**overrides),
        build_preset("tiny-0.3m", tokenizer, seed=3),
        tokenizer,
    )


def segment(
    name: str, prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float], t: int = 0
) -> Segment:
    context = len(prompt)
    ids = [*prompt, *answer]
    return Segment.of(name, ids, logprobs, [(context, len(ids), t, 0, 1.0)])


def make_segments(lengths: Sequence[int]) -> list[Segment]:
    """Segments of several decisions each, at three temperatures, for `tests.tiny_families`."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for k, length in enumerate(lengths):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        decision = [-1 if i == 0 or i % 4 == 1 else i // 4 for i in range(length)]
        temperature = (0.5, 1.0, 1.5)[k % 3]
        made.append(make_segment(f"r-{k}", ids, decision, temperature=temperature))
    return made


def alone(model, part: Segment) -> torch.Tensor:
    """[N] by the model's own forward pass of one segment, with full logits."""
    ids_L = torch.from_numpy(part.token_ids.astype("int64"))
    logits_LV = model(input_ids=ids_L[None], use_cache=False).logits[0]
    logp_LV = (logits_LV[:-1] / float(part.temperatures[0])).log_softmax(-1)
    at = torch.tensor(part.sampled_positions)
    return logp_LV[at - 1, ids_L[at]]


def sampled(
    model, *batches: Sequence[Sequence[int]], tokens: int = 10, keys: EngineKeys | None = None
) -> list[Generation]:
    """Answers of an engine, which is asked all prompts of a batch at the same time."""
    torch.set_num_threads(1)
    engine = LocalEngine(model, stop_ids=(), keys=keys)
    engine.start()

    async def all_of_them() -> list[Generation]:
        found: list[Generation] = []
        for prompts in batches:
            calls = [
                engine.generate(ids, Sampling(seed=seed, max_tokens=tokens), request_id=str(seed))
                for seed, ids in enumerate(prompts, len(found))
            ]
            found += await asyncio.gather(*calls)
        return found

    try:
        return asyncio.run(all_of_them())
    finally:
        engine.stop()


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


def find_gradient(
    learner: LocalLearner,
    episodes: Sequence[CreditedEpisode],
    known: dict[str, Sequence[Row]] | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient and metrics of one step over all episodes; `known` are their proximal log-probs."""
    update = learner.policy_update()
    scored = update.weighed(episodes, LogprobCache(known or {})).scored
    metrics = update.gradient(scored, {item.rollout_id: item for item in episodes})
    return get_gradients(learner.model), metrics


def change(learner: LocalLearner) -> None:
    """Move all weights, as an update would, the same way each time."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in learner.model.parameters():
            weight += 0.02 * torch.randn_like(weight)


def copy_tensors(learner: LocalLearner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}


def are_equal(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    assert own.keys() == other.keys()
    return all(torch.equal(tensor, other[name]) for name, tensor in own.items())


def gradient(model, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return get_gradients(model)


def get_gradients(model) -> torch.Tensor:
    weights = model.parameters()
    return torch.cat([torch.zeros(w.numel()) if w.grad is None else w.grad.flatten() for w in weights])
