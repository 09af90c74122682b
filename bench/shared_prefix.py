"""CPU time of an update: with shared prefixes computed once, without, and by `trl`'s GRPOTrainer.

    python -m bench.shared_prefix [--rounds 5] [--only "full text" --only "short games" …] [--out FILE]

    full text    64 decisions of Crafter's full text (configs/crafter_cpu.toml with that text); also with a
                 model of 12M parameters
    dialogues    invented: 8 questions of 200 tokens, each with 8 siblings whose answers have 150 tokens
    short games  an iteration of configs/crafter_cpu.toml, in the job's steps of 256 decisions
    crafter      1,024 random prompts and answers as long as in short games, in four steps, against trl

All sides use float32, one thread, and the same tokens and optimizer steps. They take turns; the ratio
compares the least CPU times. With and without sharing, log-probs and the gradient of a weighted sum of them
must agree. If trl and datasets are installed (pip install trl datasets), `trl` takes part in `full text` and
`crafter`, with its fastest micro-batch size of 2 to 256. The exit code is 1 if a ratio is below its limit,
or the two ways differ by more than 1e-5 (log-probs, nats) or 1e-6 (gradient, relative to its norm).
"""

import importlib.util
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench import kit, trl_peer
from bench.played_iteration import played
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
# Largest differences of the two ways: of log-probs in nats, of gradients relative to the norm.
LOGPROBS, GRADIENT = 1e-5, 1e-6


@dataclass(frozen=True, slots=True)
class Case:
    """An update to be timed.

    shape: of the model.
    limit: smallest allowed ratio of the CPU time of `against` ("plain" or "trl") to that with sharing.
    step: decisions of an optimizer step.
    micro: samples in a micro-batch of trl; 0 leaves trl out.
    """

    name: str
    segments: list[Segment]
    shape: str
    limit: float
    against: str = "plain"
    step: int = 10**6
    row_tokens: int | None = None
    micro: int = 0

    @property
    def steps(self) -> int:
        return ceil(len(self.segments) / self.step)


@dataclass(frozen=True, slots=True)
class Compared:
    """An update without sharing, compared with the same update with sharing.

    distinct: number of tokens, divided by the number of tokens of one row that all segments share.
    computed: number of tokens computed without sharing, divided by that with sharing.
    plain_s, shared_s, trl_s: CPU seconds of the update in each round; trl_s is empty without trl.
    logprobs, gradient: the largest differences of the two ways.
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

    def ratio(self, against: str) -> float | None:
        """Return the least CPU time of `against`, divided by the least with sharing; None if unmeasured."""
        seconds: list[float] = getattr(self, f"{against}_s")
        return min(seconds) / min(self.shared_s) if seconds else None


def dialogues() -> list[Segment]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for question in range(8):
        prompt, *answers = (
            torch.randint(10, 200, (count,), generator=generator).tolist() for count in (200, *[150] * 8)
        )
        found += [_segment(f"d{question}-{n}", prompt, answer) for n, answer in enumerate(answers)]
    return found


def random_samples() -> list[Segment]:
    draw = random.Random(0)

    def ids(least: int, most: int) -> list[int]:
        return [draw.randrange(10, 500) for _ in range(draw.randint(least, most))]

    return [_segment(f"r{number}", ids(35, 60), ids(4, 8)) for number in range(1024)]


def _segment(name: str, prompt: list[int], answer: list[int]) -> Segment:
    ids = [*prompt, *answer]
    return Segment.of(name, ids, [-1.0] * len(answer), [(len(prompt), len(ids), 0, 0, 1.0)])


def played_segments(settings: Sequence[str]) -> list[Segment]:
    found = played(settings)
    episodes = job_parts.credit(found.job).credit(found.rollouts, found.measured).episodes
    parts = ((f"{n}-{i}", part) for n, e in enumerate(episodes) for i, part in enumerate(e.segments))
    return [replace(part, rollout_id=name) for name, part in parts]


def make_learner(model: PreTrainedModel, case: Case, *, share: bool) -> LocalLearner:
    rows = {} if case.row_tokens is None else {"row_tokens": case.row_tokens}
    tables = {
        "model": {"preset": "tiny-0.8m", "device": "cpu"},
        "inference": {"max_model_len": max(256, *map(len, case.segments))},
        "training": {
            "update_passes": 1, "batch_decisions": case.step, "threads": 1, "entropy_coef": 0.0,
            "learning_rate": 1e-9, "mismatch_limit": 1e9, "share_prefixes": share, **rows,
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
    """Measure a case; trl's trainer writes to `folder`, and None leaves trl out."""
    segments = case.segments
    vocabulary = 1 + max(int(segment.token_ids.max()) for segment in segments)
    plain, shared = (
        make_learner(model_of(case.shape, vocabulary), case, share=share) for share in (False, True)
    )
    sides = {"plain": _updates(plain, case), "shared": _updates(shared, case)}
    if folder is not None:
        sides["trl"] = _updates_by_trl(model_of(case.shape, vocabulary), case, folder)
    found = kit.in_turns({name: partial(next, side) for name, side in sides.items()}, rounds)
    tokens, logprobs, gradient = zip(*(_looked_at(side, segments) for side in (plain, shared)), strict=True)
    total = sum(map(len, segments))
    return Compared(
        segments=len(segments),
        tokens=total,
        distinct=total / Tries.of(segments, SHARE_FROM).distinct,
        computed=tokens[0] / tokens[1],
        plain_s=found["plain"],
        shared_s=found["shared"],
        trl_s=found.get("trl", []),
        logprobs=float((logprobs[0] - logprobs[1]).abs().max()),
        gradient=float((gradient[0] - gradient[1]).norm() / gradient[0].norm()),
    )


def _updates(learner: LocalLearner, case: Case) -> Iterator[float]:
    """Yield the CPU seconds of one update after the other."""
    episodes = [
        CreditedEpisode(part.rollout_id, [part], [1.0] * (1 + int(part.spans["decision"].max())))
        for part in case.segments
    ]
    for iteration in range(1, 1000):
        begin = time.process_time()
        metrics = learner.update(episodes, iteration=iteration)
        yield time.process_time() - begin
        assert not case.micro or metrics["optim/steps"] == case.steps, "as many steps on all sides"


def _updates_by_trl(model: PreTrainedModel, case: Case, folder: str) -> Iterator[float]:
    """Yield the CPU seconds of trl's updates; its samples are a prompt and an answer each."""
    samples = []
    for part in case.segments:
        ids, start = part.token_ids.tolist(), int(part.spans["start"][0])
        samples.append(trl_peer.Sample(ids[:start], ids[start:]))
    tokenizer = train_tokenizer(["wood stone tree"], 512)
    return trl_peer.updates(model, tokenizer, samples, micro=case.micro, steps=case.steps, folder=folder)


def _looked_at(learner: LocalLearner, segments: list[Segment]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the number of computed tokens, all log-probs, and the gradient of their weighted sum."""
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


def full_text() -> list[Case]:
    segments = played_segments(FULL_TEXT)[:64]
    return [Case("full text", segments, shape, 3.0, micro=16) for shape in ("tiny-0.8m", "12m")]


CASES: dict[str, Callable[[], list[Case]]] = {
    "full text": full_text,
    "dialogues": lambda: [Case("dialogues", dialogues(), "tiny-0.8m", 1.5)],
    "short games": lambda: [Case("short games", played_segments(()), "tiny-0.8m", 1.0, step=256)],
    "crafter": lambda: [
        Case("crafter", random_samples(), "tiny-0.3m", 1.5, "trl", step=256, row_tokens=192, micro=256)
    ],
}


def report(case: Case, found: Compared) -> int:
    """Print what was found; return the exit code."""
    ratios = [f"{side} x{ratio:.2f}" for side in ("plain", "trl") if (ratio := found.ratio(side))]
    print(
        f"{case.name}, {case.shape}: {found.segments} segments, {found.tokens} tokens, distinct "
        f"x{found.distinct:.2f}, computed x{found.computed:.2f}, log-probs {found.logprobs:.1e}, gradient "
        f"{found.gradient:.1e}; CPU time against shared: {', '.join(ratios)}"
    )
    is_equal = found.logprobs <= LOGPROBS and found.gradient <= GRADIENT
    ratio = found.ratio(case.against)
    if ratio is None:
        return kit.report(f"  {case.against} is not measured; both ways equal", is_equal)
    return kit.report(f"  {case.against} at least x{case.limit:g}", is_equal and ratio >= case.limit)


def main() -> int:
    options = kit.options(
        __doc__, ("--rounds", 5), ("--out", "", "file for the results"),
        ("--only", [], f"one of {', '.join(CASES)}; may be repeated"),
    )  # fmt: skip
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    has_trl = importlib.util.find_spec("trl") is not None
    results: dict[str, dict[str, Any]] = {"plain": {}, "trl": {}}
    code = 0
    for case in (case for name in options.only or CASES for case in CASES[name]()):
        with tempfile.TemporaryDirectory() as folder:
            peer = folder if has_trl and case.micro else None
            found = compared(case, options.rounds, peer)
        code |= report(case, found)
        name = f"{case.name}, {case.shape}"
        results[case.against][name] = asdict(found) | {"cpu": found.ratio("plain")}
    if options.out:
        machine = kit.describe_machine(load=os.getloadavg()[0])
        cases_of = {"cases": results["plain"], "trl": results["trl"]}
        kit.write_results(Path(options.out), {"bench": "shared_prefix", "machine": machine, **cases_of})
    return code


if __name__ == "__main__":
    sys.exit(main())
