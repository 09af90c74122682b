"""An update with shared prefixes computed once, beside the same without: CPU time, log-probs, gradient.

    python -m bench.shared_prefix [--quick] [--rounds 5] [--full-text 3] [--dialogues 1.5] [--demo 1]

    full text    64 decisions of Crafter's full text, played by the demo's job with that text
    dialogues    8 questions of 200 tokens, 8 siblings each with answers of 150, hand-made
    demo         an iteration of the demo's job

by `tiny-0.8m`, and the full text by a shape of 12M parameters too; float32, one thread. Timed is an update
(one step of AdamW), sides in turn; the ratio is of the least CPU times. The gradient is that of
a weighted sum of log-probs. Exit code 1 where a ratio is below its limit or the two ways differ by more than
1e-5 (log-probs, nats) or 1e-6 (gradient, of its norm). --quick: the full text by tiny-0.8m alone.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench import kit
from bench.demo_iteration import played
from trainer_backend import job_parts, learner_parts
from trainer_backend.core.segments import Segment
from trainer_backend.job.load import parse_job
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.scoring import cut_pieces
from trainer_backend.models import build_preset, train_tokenizer
from trainer_backend.parts import CreditedEpisode

FULL_TEXT = (
    'rollout.env_config={text="full",max_actions=8}', "inference.max_model_len=2048", "warmup.episodes=8",
    "rollout.max_turns=8", "rollout.episodes_per_batch=16", "evaluation.instances=1",
)  # fmt: skip
# The most by which the two ways may differ: nats, and of the gradient's norm.
LOGPROBS, GRADIENT = 1e-5, 1e-6


@dataclass(frozen=True, slots=True)
class Compared:
    """The way without sharing beside the one with it.

    tokens, cpu: those of the first over those of the second, of an update; logprobs, gradient: differences.
    """

    tokens: float
    cpu: float
    logprobs: float
    gradient: float


def dialogues() -> list[Segment]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for question in range(8):
        prompt, *answers = (
            torch.randint(10, 200, (count,), generator=generator).tolist() for count in (200, *[150] * 8)
        )
        found += [
            Segment.of(f"d{question}-{n}", [*prompt, *answer], [-1.0] * 150, [(200, 350, 0, 0, 1.0)])
            for n, answer in enumerate(answers)
        ]
    return found


def played_segments(settings: Sequence[str]) -> list[Segment]:
    found = played(settings)
    episodes = job_parts.credit(found.job).credit(found.rollouts, found.measured).episodes
    return [
        replace(part, rollout_id=f"{n}-{i}")
        for n, e in enumerate(episodes)
        for i, part in enumerate(e.segments)
    ]


def learner_of(model: PreTrainedModel, longest: int, *, share: bool) -> LocalLearner:
    tables = {
        "model": {"preset": "tiny-0.8m", "device": "cpu"},
        "inference": {"max_model_len": max(256, longest)},
        "training": {
            "update_passes": 1, "batch_decisions": 10**6, "threads": 1, "entropy_coef": 0.0,
            "learning_rate": 1e-9, "mismatch_limit": 1e9, "share_prefixes": share,
        },
    }  # fmt: skip
    tokenizer = train_tokenizer(["wood stone tree"], 512)
    config = parse_job(tables, where="bench").config
    return LocalLearner(learner_parts.learner_config(config), model, tokenizer)


def model_of(shape: str, vocabulary: int) -> PreTrainedModel:
    torch.manual_seed(0)
    if shape == "12m":
        config = Qwen3Config(
            vocab_size=vocabulary, hidden_size=320, intermediate_size=960, num_hidden_layers=8, head_dim=64,
            num_attention_heads=5, num_key_value_heads=5, max_position_embeddings=4096,
            tie_word_embeddings=True,
        )  # fmt: skip
        return Qwen3ForCausalLM(config).eval()
    model = build_preset(shape, train_tokenizer(["wood stone tree"], 512))
    model.resize_token_embeddings(vocabulary, mean_resizing=False)
    return model


def compared(segments: list[Segment], shape: str, rounds: int) -> Compared:
    vocabulary = 1 + max(int(segment.token_ids.max()) for segment in segments)
    longest = max(map(len, segments))
    sides = [learner_of(model_of(shape, vocabulary), longest, share=share) for share in (False, True)]
    episodes = [CreditedEpisode(part.rollout_id, [part], _advantages(part)) for part in segments]
    least = [float("inf")] * 2
    for number in range(rounds):
        for side, learner in enumerate(sides):
            begin = time.process_time()
            learner.update(episodes, iteration=1 + number)
            least[side] = min(least[side], time.process_time() - begin)
    plain, shared = (_looked_at(learner, segments) for learner in sides)
    return Compared(
        tokens=plain[0] / shared[0],
        cpu=least[0] / least[1],
        logprobs=float((plain[1] - shared[1]).abs().max()),
        gradient=float((plain[2] - shared[2]).norm() / plain[2].norm()),
    )


def _advantages(part: Segment) -> list[float]:
    return [1.0] * (1 + int(part.spans["decision"].max()))


def _looked_at(learner: LocalLearner, segments: list[Segment]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Tokens that are computed; log-probs, a segment after the other; the gradient of their weighted sum."""
    model, keys = learner.model, learner.config.training
    model.zero_grad()
    tokens = 0
    for piece in cut_pieces(segments, keys, learner.scorer)[1]:
        tokens += int((piece.segment_ids_BL > 0).sum())
        weights_N = torch.linspace(-1, 1, len(segments))[piece.segment_N]
        (learner.scorer.logprobs(piece) * weights_N).sum().backward()
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
    logprobs = torch.cat([torch.from_numpy(row) for row in learner.scorer.score(segments, keys)])
    return tokens, logprobs, gradient


def main() -> int:
    options = kit.options(
        __doc__, ("--quick", False), ("--rounds", 5), ("--full-text", 3.0, "least ratio"),
        ("--dialogues", 1.5, "least ratio"), ("--demo", 1.0, "least ratio"),
    )  # fmt: skip
    torch.set_num_threads(1)
    full = played_segments(FULL_TEXT)[:64]
    cases = [("full text", full, "tiny-0.8m", options.full_text)]
    if not options.quick:
        cases += [
            ("full text", full, "12m", options.full_text),
            ("dialogues", dialogues(), "tiny-0.8m", options.dialogues),
            ("demo", played_segments(()), "tiny-0.8m", options.demo),
        ]
    met = True
    for name, segments, shape, limit in cases:
        found = compared(segments, shape, 2 if options.quick else options.rounds)
        met &= found.cpu >= limit and found.logprobs <= LOGPROBS and found.gradient <= GRADIENT
        print(
            f"{name}, {shape}, {len(segments)} segments, {sum(map(len, segments))} tokens, log-probs "
            f"{found.logprobs:.1e}, at least x{limit:g} wanted {kit.verdict(met)}\n"
            f"distinct x{found.tokens:.2f} cpu x{found.cpu:.2f} gradient {found.gradient:.1e}",
            flush=True,
        )
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
