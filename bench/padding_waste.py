"""How much of what is trained is padding: Crafter's decisions, and dialogues of very mixed length.

    python -m bench.padding_waste [--limit 0.03]

Crafter: an iteration of configs/crafter_cpu.toml (a shorter warm-up, the same prompts and rollouts), in the
optimizer steps that its update makes. Dialogues: 512 of log-normal length, hand-made: median 600 tokens, 90 %
between 160 and 2240, at most 4096; 64 a step, rows of 4096 tokens.

    model        padding that the model's layers compute on this machine. Held to the limit.
    attention    places without a token where segments stand side by side (learner.by_length): attention alone
                 has them, and only where no kernel of variable length runs
    rows         padding of the packed rows, cut into micro-batches: what the model would compute under a mask
    left-padded  batches of the same samples in the same order, each sample a row, as GRPO trainers make them:
                 one width for the prompts of a step, one for its answers

All are shares of the trained tokens. Exit code 1 where the model computes more than the limit.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench import kit
from bench.demo_iteration import played
from trainer_backend import job_parts
from trainer_backend.core.collate import cut_packed, pack_segments
from trainer_backend.core.segments import Segment
from trainer_backend.learner.attention import attention_for
from trainer_backend.learner.by_length import groups_of, one_row
from trainer_backend.learner.device import place

LIMIT = 0.03


@dataclass(frozen=True, slots=True)
class Sizes:
    """How a batch is packed: segments an optimizer step, tokens of a row and of a micro-batch."""

    step: int
    row_tokens: int
    micro_batch_tokens: int


def crafter() -> tuple[list[Segment], Sizes]:
    """Every decision of an iteration of the demo, collected by its own job."""
    found = played()
    episodes = job_parts.credit(found.job).credit(found.rollouts, found.measured).episodes
    table = found.job.training
    sizes = Sizes(table.batch_decisions, table.row_tokens, table.micro_batch)
    return [segment for episode in episodes for segment in episode.segments], sizes


def dialogues() -> tuple[list[Segment], Sizes]:
    draw = random.Random(0)
    lengths = [min(4096, max(32, round(draw.lognormvariate(6.4, 0.8)))) for _ in range(512)]
    segments = [_dialogue(f"d{i}", length, draw.uniform(0.1, 0.5)) for i, length in enumerate(lengths)]
    return segments, Sizes(step=64, row_tokens=4096, micro_batch_tokens=16384)


def _dialogue(name: str, length: int, sampled_share: float) -> Segment:
    """A prompt, then an answer with the given share of the tokens."""
    answer = max(1, round(length * sampled_share))
    return Segment.of(name, [1] * length, [0.0] * answer, [(length - answer, length, 0, 0, 1.0)])


def waste(segments: Sequence[Segment], sizes: Sizes) -> dict[str, float]:
    """Padding of each kind, as a share of the trained tokens."""
    order = list(segments)
    random.Random(0).shuffle(order)
    steps = [order[first : first + sizes.step] for first in range(0, len(order), sizes.step)]
    places = dict.fromkeys(("model", "attention", "rows", "left-padded"), 0)
    attention = attention_for(place("auto"), head_dim=32)  # of the demo's preset
    for step in steps:
        width = max(sizes.row_tokens, max(map(len, step)))
        packed = pack_segments(step, row_tokens=width)
        for piece in cut_packed(packed, max(1, sizes.micro_batch_tokens // width)):
            arranged, _ = attention.arranged(piece, piece.target_N.device, piece.temperature_N.dtype)
            places["rows"] += piece.token_ids_BL.numel()
            places["model"] += arranged.token_ids_BL.numel()
            places["attention"] += len(groups_of(one_row(piece)[1]).token_P)
        places["left-padded"] += _left_padded(step)
    tokens = sum(map(len, order))
    return {kind: count / tokens - 1 for kind, count in places.items()}


def _left_padded(step: Sequence[Segment]) -> int:
    """Cells of one batch: everything up to the first sampled token is the prompt."""
    prompts = [int(segment.spans[0]["start"]) for segment in step]
    answers = [len(segment) - prompt for segment, prompt in zip(step, prompts, strict=True)]
    return len(step) * (max(prompts) + max(answers))


def main() -> int:
    options = kit.options(__doc__, ("--limit", LIMIT, "most padding, of trained tokens"))
    worst = 0.0
    for name, (segments, sizes) in (("crafter", crafter()), ("dialogues", dialogues())):
        lengths = sorted(map(len, segments))
        found = waste(segments, sizes)
        worst = max(worst, found["model"])
        print(
            f"{name:9s} {len(lengths)} segments of {lengths[0]} to {lengths[-1]} tokens, median "
            f"{lengths[len(lengths) // 2]}; {sizes.step} a step, rows of {sizes.row_tokens}"
        )
        print("          " + "   ".join(f"{kind} {share:.2%}" for kind, share in found.items()))
    return kit.report(f"padding below {options.limit:.1%} wanted", worst < options.limit, "TOO MUCH")


if __name__ == "__main__":
    sys.exit(main())
