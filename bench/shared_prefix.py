"""An update with shared prefixes computed once, compared with one without: CPU time, log-probs, gradient.

    python -m bench.shared_prefix [--quick] [--rounds 5] [--full-text 3] [--dialogues 1.5] [--demo 1]
                                  [--out FILE]

    full text    64 decisions of Crafter's full text, played by the demo's job with that text
    dialogues    8 questions of 200 tokens, 8 siblings each with answers of 150, hand-made
    demo         an iteration of the demo's job, in its steps of 256 decisions

by `tiny-0.8m`, and the full text by a shape of 12M parameters too; float32, one thread. Timed is an update
(AdamW in one step, but for the demo), sides in turn; the ratio is of the least CPU times. With `trl` in this
interpreter its GRPOTrainer makes the same step of the full text, a side more. The gradient is that of
a weighted sum of log-probs. Exit code 1 where a ratio is below its limit or the two ways differ by more than
1e-5 (log-probs, nats) or 1e-6 (gradient, of its norm). --quick: the full text by tiny-0.8m, without trl.
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench import kit, learner_speed
from bench.demo_iteration import played
from trainer_backend import job_parts, learner_parts
from trainer_backend.core.segments import Segment
from trainer_backend.core.tries import Tries
from trainer_backend.job.load import parse_job
from trainer_backend.learner.attention import SHARE_FROM
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
class Case:
    """Segments, the model that updates on them, decisions of a step, and the least ratio of CPU times."""

    name: str
    segments: list[Segment]
    shape: str
    limit: float
    step: int = 10**6


@dataclass(frozen=True, slots=True)
class Compared:
    """The way without sharing compared with the one with it.

    distinct: all tokens of the segments over those that one row of all would hold; computed: over those of an
        update.
    plain_s, shared_s, trl_s: CPU seconds of each round's update; the last are empty without trl.
    logprobs, gradient: differences.
    """

    segments: int
    tokens: int
    distinct: float
    computed: float
    plain_s: list[float]
    shared_s: list[float]
    trl_s: list[float]
    logprobs: float
    gradient: float

    @property
    def cpu(self) -> float:
        return min(self.plain_s) / min(self.shared_s)


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


def learner_of(model: PreTrainedModel, longest: int, step: int, *, share: bool) -> LocalLearner:
    tables = {
        "model": {"preset": "tiny-0.8m", "device": "cpu"},
        "inference": {"max_model_len": max(256, longest)},
        "training": {
            "update_passes": 1, "batch_decisions": step, "threads": 1, "entropy_coef": 0.0,
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


def compared(case: Case, rounds: int, folder: str | None) -> Compared:
    """`folder`: where trl's trainer writes; None: it is left out."""
    segments = case.segments
    vocabulary = 1 + max(int(segment.token_ids.max()) for segment in segments)
    longest = max(map(len, segments))
    models = [model_of(case.shape, vocabulary) for _ in range(2)]
    plain, shared = (
        learner_of(model, longest, case.step, share=share)
        for model, share in zip(models, (False, True), strict=True)
    )
    sides = [_updates(plain, segments), _updates(shared, segments)]
    if folder is not None:
        sides.append(_updates_of_trl(model_of(case.shape, vocabulary), segments, folder))
    # What a side does for the first time is not timed.
    found = [[next(side) for side in sides] for _ in range(rounds + 1)][1:]
    plain_s, shared_s, *trl_s = map(list, zip(*found, strict=True))
    tokens, logprobs, gradient = zip(*(_looked_at(side, segments) for side in (plain, shared)), strict=True)
    distinct = Tries.of(segments, SHARE_FROM).distinct
    return Compared(
        segments=len(segments),
        tokens=sum(map(len, segments)),
        distinct=sum(map(len, segments)) / distinct,
        computed=tokens[0] / tokens[1],
        plain_s=plain_s,
        shared_s=shared_s,
        trl_s=trl_s[0] if trl_s else [],
        logprobs=float((logprobs[0] - logprobs[1]).abs().max()),
        gradient=float((gradient[0] - gradient[1]).norm() / gradient[0].norm()),
    )


def _updates(learner: LocalLearner, segments: Sequence[Segment]) -> Iterator[float]:
    """CPU seconds of each update, without end."""
    episodes = [CreditedEpisode(part.rollout_id, [part], _advantages(part)) for part in segments]
    for iteration in range(1, 1000):
        begin = time.process_time()
        learner.update(episodes, iteration=iteration)
        yield time.process_time() - begin


def _updates_of_trl(model: PreTrainedModel, segments: Sequence[Segment], folder: str) -> Iterator[float]:
    """The same by trl, whose samples are a prompt and an answer, in micro-batches of 16."""
    samples = []
    for part in segments:
        ids, start = part.token_ids.tolist(), int(part.spans["start"][0])
        samples.append(learner_speed.Sample(tuple(ids[:start]), tuple(ids[start:]), 1.0))
    answer = max(len(sample.answer) for sample in samples)
    shape = learner_speed.Shape(len(samples), (0, 0), (1, answer), micro=16, rows=0, steps=1)
    tokenizer = train_tokenizer(["wood stone tree"], 512)
    for cpu_s, _ in learner_speed.theirs(model, tokenizer, samples, shape, folder):
        yield cpu_s


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


def cases(options: argparse.Namespace) -> Iterator[Case]:
    full = played_segments(FULL_TEXT)[:64]
    yield Case("full text", full, "tiny-0.8m", options.full_text)
    if not options.quick:
        yield Case("full text", full, "12m", options.full_text)
        yield Case("dialogues", dialogues(), "tiny-0.8m", options.dialogues)
        yield Case("demo", played_segments(()), "tiny-0.8m", options.demo, step=256)


def main() -> int:
    options = kit.options(
        __doc__, ("--quick", False), ("--rounds", 5), ("--full-text", 3.0, "least ratio"),
        ("--dialogues", 1.5, "least ratio"), ("--demo", 1.0, "least ratio"),
        ("--out", "", "file for the results"),
    )  # fmt: skip
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    has_trl = not options.quick and importlib.util.find_spec("trl") is not None
    results, met = {}, True
    for case in cases(options):
        with tempfile.TemporaryDirectory() as folder:
            peer = folder if has_trl and case.name == "full text" else None
            found = compared(case, 2 if options.quick else options.rounds, peer)
        is_met = found.cpu >= case.limit and found.logprobs <= LOGPROBS and found.gradient <= GRADIENT
        met &= is_met
        results[f"{case.name}, {case.shape}"] = asdict(found) | {"cpu": found.cpu}
        trl = f", trl x{min(found.trl_s) / min(found.shared_s):.2f}" if found.trl_s else ""
        print(
            f"{case.name}, {case.shape}, {found.segments} segments, {found.tokens} tokens, computed "
            f"x{found.computed:.2f}, log-probs {found.logprobs:.1e}{trl}, at least x{case.limit:g} wanted "
            f"{kit.verdict(is_met)}\n"
            f"distinct x{found.distinct:.2f} cpu x{found.cpu:.2f} gradient {found.gradient:.1e}",
            flush=True,
        )
    if options.out:
        machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "load": os.getloadavg()[0]}
        text = {"bench": "shared_prefix", "machine": machine, "cases": results}
        Path(options.out).write_text(json.dumps(text, indent=1) + "\n")
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
