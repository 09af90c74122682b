"""Compares a learner of several ranks with one process, and shows what happens when a rank fails.

    python -m bench.study_ranks            (make study-ranks)

On 2 and on 3 ranks, all ranks compute a step's gradient together. Then the first rank computes it alone, from
the same weights and episodes. Prompts, answers and numbers of decisions are unequal, and proximal log-probs
differ from the policy's. A whole update, and a resume on another number of ranks, are compared in the same
way. Then one rank of two fails in the middle of an update, in three ways: killed, stopped, out of memory.
bench/results/ranks.json has the figures; the exit code is 1 if a bound does not hold.
"""

import json
import math
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bench import kit
from service_kit.own_process import READY
from tests import tiny_families
from trainer_backend import learner_parts
from trainer_backend.core.critic import CriticTargets
from trainer_backend.core.experts import UNKNOWN
from trainer_backend.core.segments import NO_EXPERTS, Segment
from trainer_backend.errors import LearnerLost, OutOfMemory, TrainerError
from trainer_backend.job.load import dump_job, parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import LearnerTable
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.learner.behaviour import weighed
from trainer_backend.learner.calls import LEARNER_KEY
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.device import Placement
from trainer_backend.learner.factory import LocalFactory
from trainer_backend.learner.learner import LocalLearner, build_scorer
from trainer_backend.learner.loading import held_copy
from trainer_backend.learner.ranks import ALONE, Ranks, join_ranks
from trainer_backend.learner.sharding import shard, whole
from trainer_backend.learner.shares import write_weights
from trainer_backend.models import build_preset, train_tokenizer
from trainer_backend.models.folder import collect_weights, load_model_folder, save_model_folder
from trainer_backend.models.routers import Routers, count_experts
from trainer_backend.parts import CreditedEpisode, Learner, Progress
from trainer_backend.processes.learner_process import LearnerConnection, remote_learner

GRADIENTS: dict[str, dict[str, Any]] = {
    **{level: {"algorithm": {"ratio_level": level}} for level in ("token", "decision", "episode")},
    "lora": {"lora": {"rank": 4, "alpha": 8}},
    "checkpointing": {"training": {"gradient_checkpointing": True}},
    "lora, checkpointing, KL": {
        "lora": {"rank": 4}, "training": {"gradient_checkpointing": True, "kl_coef": 0.1},
    },
    "critic": {"algorithm": {"advantage": "gae"}, "training": {"value_trunk_gradient": True}},
    "KL": {"training": {"kl_coef": 0.1}},
    "weights kept after forward": {"learner": {"fsdp_reshard_after_forward": False}},
    "weights in main memory": {"learner": {"fsdp_cpu_offload": True}},
}  # fmt: skip
TRAINING = {
    "iterations": 4, "update_passes": 3, "batch_decisions": 30, "row_tokens": 160, "micro_batch_tokens": 320,
    "mismatch_limit": 1e9, "learning_rate_schedule": "cosine", "threads": 1,
}  # fmt: skip
Make = Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerFast]]
NEAR = 0.15  # nats: standard deviation of the proximal log-probs from the policy's


def make_job(tables: Mapping[str, Mapping[str, Any]], model: Mapping[str, Any] | None = None) -> JobConfig:
    document: dict[str, Any] = {
        "job": {"name": "ranks", "seed": 1},
        **tables,
        "model": {**(model or {"preset": "tiny-0.8m"}), "device": "cpu"},
        "training": {**TRAINING, **tables.get("training", {})},
    }
    return parse_job(document, where="the study").config


def make_config(tables: Mapping[str, Mapping[str, Any]]) -> LearnerConfig:
    return learner_parts.learner_config(make_job(tables))


def with_ranks(ranks: Ranks, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the tables of a job for this number of ranks."""
    learner = {"nproc_per_node": ranks.count, **tables.get("learner", {})}
    return {**tables, "cluster": {}, "learner": learner}


def tiny_model() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    tokenizer = train_tokenizer(["tree stone coal iron"] * 20, 300, whole_words=["noop", "do"])
    return build_preset("tiny-0.8m", tokenizer, seed=3), tokenizer


def episodes(seed: int = 0, count: int = 37) -> list[CreditedEpisode]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        decisions = rng.randint(1, 4)
        name = f"r{number}"
        ups = [rng.gauss(0, 1) for _ in range(decisions)]
        critic = CriticTargets([0.1] * decisions, [rng.gauss(0, 1) for _ in range(decisions)])
        segments = [_segment(rng, name, t) for t in range(decisions)]
        found.append(CreditedEpisode(name, segments, ups, critic))
    return found


def _segment(rng: random.Random, name: str, t: int) -> Segment:
    prompt, answer = rng.randint(3, 100), rng.randint(1, 9)
    ids = [rng.randrange(5, 200) for _ in range(prompt + answer)]
    return Segment.of(name, ids, [-rng.uniform(3, 7) for _ in range(answer)], [(prompt, len(ids), t, 0, 1.0)])


def gradient(
    config: LearnerConfig, ranks: Ranks, given: list[CreditedEpisode], make: Make = tiny_model
) -> tuple[Tensor, dict[str, float]]:
    """Return a step's gradient as one vector in float64, and the step's metrics."""
    learner = LocalLearner(config, *make(), ranks=ranks)
    if config.value_level is None:
        given = [replace(episode, critic=None) for episode in given]
    else:
        learner.values({episode.rollout_id: episode.segments for episode in given})
    update = learner.policy_update()
    head = () if learner._head is None else learner._head.trained.values()
    trained = [*(weight for weight in learner.model.parameters() if weight.requires_grad), *head]
    with torch.no_grad():
        for weight in trained:
            weight.mul_(1.01)  # away from the reference policy, so that the KL has a gradient
    drafts, rng = update.weighed(given).scored, random.Random(9)
    near = [[own + rng.gauss(0, NEAR) for own in draft.proximal] for draft in drafts]
    step = weighed([replace(draft, proximal=()) for draft in drafts], near, config.objectives).scored
    metrics = update.gradient(step, {episode.rollout_id: episode for episode in given})
    return torch.cat([whole(weight.grad).flatten().double() for weight in trained]), metrics


def judge_gradient(
    tables: dict[str, Any], ranks: Ranks, given: list[CreditedEpisode] | None = None, make: Make = tiny_model
) -> dict[str, float]:
    config, given = make_config(with_ranks(ranks, tables)), given or episodes()
    own, metrics = gradient(config, ranks, given, make)
    if ranks.is_first:
        alone, expected = gradient(config, ALONE, given, make)
        return {
            "gradient": float((own - alone).norm() / alone.norm()),
            "metrics": max(abs(metrics[name] - value) for name, value in expected.items()),
        }
    return {}


def judge_cosines(ranks: Ranks) -> dict[str, float]:
    """Compare gradient cosines with those of one process, for sharded weights and for whole copies."""
    folder, given = ranks.of_every_rank(Path(tempfile.mkdtemp()))[0], episodes(count=9)
    rng = random.Random(4)
    if ranks.is_first:
        save_model_folder(folder, *tiny_model())
    ranks.of_every_rank(0)
    advantages = {
        name: [[rng.gauss(shift, 1) for _ in episode.advantages] for episode in given]
        for name, shift in (("a", 0.0), ("b", 0.5), ("c", 1.0))
    } | {"none": [[0.0] * len(episode.advantages) for episode in given]}

    def cosines(degree: int, ranks: Ranks) -> list[tuple[str, str, float]]:
        learner = {"nproc_per_node": ranks.count, "data_parallel_replicate_degree": degree}
        config = make_config({"cluster": {}, "learner": learner})
        return LocalFactory(config, ranks=ranks).gradient_cosines(folder, given, advantages, lambda *_: None)

    shared, copied = cosines(1, ranks), cosines(ranks.count, ranks)
    if not ranks.is_first:
        return {}
    alone = cosines(1, ALONE)
    shutil.rmtree(folder)
    assert [pair for *pair, _ in alone] == [["a", "b"], ["a", "c"], ["b", "c"]]
    return {
        name: max(abs(mine[2] - one[2]) for mine, one in zip(found, alone, strict=True))
        for name, found in (("cosines", shared), ("cosines_of_copies", copied))
    }


def weights(learner: LocalLearner) -> Tensor:
    return torch.cat([whole(weight).flatten().double() for weight in collect_weights(learner.model).values()])


def judge_update(ranks: Ranks) -> dict[str, float]:
    """Compare three passes of clipped AdamW steps under a schedule with those of one process."""
    config = make_config({"training": {"max_grad_norm": 0.1}})
    learner = LocalLearner(config, *tiny_model(), ranks=ranks)
    before = weights(learner)
    learner.update(episodes(), iteration=1)
    after = weights(learner)
    if not ranks.is_first:
        return {}
    alone = LocalLearner(config, *tiny_model(), ranks=ALONE)
    alone.update(episodes(), iteration=1)
    expected = weights(alone)
    return {"update": float((after - expected).norm() / (expected - before).norm())}


def judge_resume(ranks: Ranks) -> dict[str, float]:
    """Compare a run that is resumed on one rank, and then on all ranks, with a run that never stops."""
    config, folder = make_config({}), ranks.of_every_rank(Path(tempfile.mkdtemp()))[0]
    learner = LocalLearner(config, *tiny_model(), ranks=ranks)
    learner.update(episodes(1), iteration=1)
    learner.save(folder / "iteration_1", Progress(1, 1, 1))
    for iteration in (2, 3):
        learner.update(episodes(iteration), iteration=iteration)
    if ranks.is_first:
        alone, _ = LocalLearner.resumed(config, folder / "iteration_1")
        alone.update(episodes(2), iteration=2)
        alone.save(folder / "iteration_2", Progress(2, 2, 2))
    ranks.of_every_rank(0)
    again, _ = LocalLearner.resumed(config, folder / "iteration_2", ranks)
    again.update(episodes(3), iteration=3)
    learner.publish(folder / "never")
    again.publish(folder / "resumed")
    found = {}
    if ranks.is_first:
        never, resumed = (load_model_folder(folder / name)[0] for name in ("never", "resumed"))
        every = (segment for episode in episodes() for segment in episode.segments)
        ids = torch.tensor([segment.token_ids[:16].tolist() for segment in every if len(segment) >= 16])
        choices = [model(input_ids=ids).logits.argmax(-1) for model in (never, resumed)]
        pairs = zip(never.parameters(), resumed.parameters(), strict=True)
        found = {
            "weights": max(float((a - b).detach().abs().max()) for a, b in pairs),
            "choices_equal": float((choices[0] == choices[1]).double().mean()),
        }
        shutil.rmtree(folder)
    return found


def judge_publish(ranks: Ranks) -> dict[str, float]:
    """Return a rank's extra memory while it writes its share of a model of 108M parameters, in MiB."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, head_dim=64,
        num_key_value_heads=4, intermediate_size=2304, tie_word_embeddings=True,
    )  # fmt: skip
    model, folder = Qwen3ForCausalLM(config), ranks.of_every_rank(Path(tempfile.mkdtemp()))[0]
    sizes = [weight.nbytes / 2**20 for weight in model.parameters()]
    shard(model, ranks, LearnerTable(), torch.device("cpu"))
    for weight in model.parameters():
        whole(weight)  # allocates memory for communication, as the ranks' first update would
    before = kit.peak_mib(reset=True)
    write_weights(folder, collect_weights(model), ranks)
    most = max(ranks.of_every_rank(kit.peak_mib() - before))
    files = [path.stat().st_size / 2**20 for path in folder.glob("*.safetensors")]
    ranks.of_every_rank(0)
    if ranks.is_first:
        shutil.rmtree(folder)
    return {"extra_mib": most, "limit_mib": max(sizes) + max(files), "model_mib": sum(sizes)}


def judge_low_precision(ranks: Ranks) -> dict[str, float]:
    """Compare log-probs of a sharded and a whole copy in bfloat16, the reference policy's format on a GPU."""
    model, _ = tiny_model()
    held, alone = held_copy(model, torch.bfloat16), held_copy(model, torch.bfloat16)
    placement = Placement(torch.device("cpu"), low=torch.bfloat16)
    shard(held, ranks, LearnerTable(), placement.device)
    segments = [segment for episode in episodes() for segment in episode.segments]
    keys = LoopKeys(row_tokens=160, micro_batch_tokens=320)
    scored = build_scorer(held, placement, ranks=ranks).score(segments, keys)
    expected = build_scorer(alone, placement).score(segments, keys)
    return {"low": _apart(scored, expected)}


def judge_experts(ranks: Ranks) -> dict[str, float]:
    """Check that tokens go to the experts that their segments name, in packed rows and in padded ones.

    Every token except a segment's last is sent to the expert after the one that its router chooses. `moved`
    is the change of log-probs by this, in the family of models with the smallest change.
    """
    found: dict[str, float] = {"gradient": 0.0, "metrics": 0.0, "logprobs": 0.0, "moved": math.inf}
    for family in ("qwen3_moe", "gpt_oss"):
        tables = {"training": {"gradient_checkpointing": 2}, "inference": {"max_model_len": 256}}

        def make(family: str = family) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
            return tiny_families.tiny_model(family, vocab_size=300), tiny_model()[1]

        given = [_sent_further(episode, make()[0]) for episode in episodes(count=9)]
        case = judge_gradient(tables, ranks, given, make)
        segments = [part for episode in given for part in episode.segments]
        config = make_config(with_ranks(ranks, tables))
        scored = LocalLearner(config, *make(), ranks=ranks).scorer.score(segments, config.training)
        if not ranks.is_first:
            continue
        scorer = LocalLearner(config, *make(), ranks=ALONE).scorer
        expected = scorer.score(segments, config.training)
        free = scorer.score([replace(part, experts=NO_EXPERTS) for part in segments], config.training)
        found["gradient"] = max(found["gradient"], case["gradient"])
        found["metrics"] = max(found["metrics"], case["metrics"])
        found["logprobs"] = max(found["logprobs"], _apart(scored, expected))
        found["moved"] = min(found["moved"], _apart(free, expected))
    return found


def _sent_further(episode: CreditedEpisode, model: PreTrainedModel) -> CreditedEpisode:
    routers, count, parts = Routers(model), count_experts(model), []
    for part in episode.segments:
        ids_1L = torch.from_numpy(part.token_ids.astype(np.int64))[None]
        with torch.no_grad(), routers.recording() as chosen:
            model(input_ids=ids_1L, use_cache=False)
        experts_LW = (routers.columns(chosen, rows=1)[0] + 1) % count
        experts_LW[-1] = UNKNOWN
        parts.append(replace(part, experts=experts_LW.astype(np.uint16).ravel()))
    return replace(episode, segments=parts)


def _apart(some: Sequence[NDArray[Any]], others: Sequence[NDArray[Any]]) -> float:
    return max(float(abs(a - b).max()) for a, b in zip(some, others, strict=True))


OTHERS: dict[str, Callable[[Ranks], dict[str, float]]] = {
    # With this setting, every rank holds all weights.
    "copies": lambda ranks: judge_gradient(
        {"learner": {"data_parallel_replicate_degree": ranks.count}}, ranks
    ),
    "cosines": judge_cosines,
    "update": judge_update,
    "resume": judge_resume,
    "publish": judge_publish,
    "low precision": judge_low_precision,
    "experts": judge_experts,
}


def judge_all(out: Path, names: Sequence[str], count: int) -> int:
    """Fork the ranks, which share the imports of this process; return 0 if all of them end well."""
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kit.free_port())}
    ranks = []
    for rank in range(count):
        if not (pid := os.fork()):
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                judge(out, names)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        ranks.append(pid)
    return max(os.waitpid(pid, 0)[1] for pid in ranks)


def judge(out: Path, names: Sequence[str]) -> NoReturn:
    """Be a rank: compute each case with all ranks, then on the first rank alone, and compare."""
    torch.set_num_threads(1)
    ranks = join_ranks()
    found = {}
    for name in names or (*GRADIENTS, *OTHERS):
        found[name] = judge_gradient(GRADIENTS[name], ranks) if name in GRADIENTS else OTHERS[name](ranks)
        ranks.of_every_rank(0)
        if ranks.is_first:
            print(name, found[name], flush=True)
    if ranks.is_first:
        out.write_text(json.dumps(found), encoding="utf-8")
    ranks.of_every_rank(0)
    os._exit(0)


LIMITS = {
    "gradient": 1e-6, "metrics": 1e-9, "cosines": 1e-6, "cosines_of_copies": 1e-6, "update": 1e-5,
    "weights": 1e-6, "low": 0.0, "logprobs": 1e-5,
}  # fmt: skip
REPEATS, TIMEOUT_S = 3, 5.0
RESULTS = kit.ROOT / "bench/results/ranks.json"


class Group:
    """A learner of two ranks in a process group, with the methods of a learner's factory."""

    def __init__(self, job: JobConfig, folder: Path) -> None:
        group = ("trainer_backend.learner.group", "--standalone", "--nproc-per-node=2")
        self.log = folder / "learner.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                (sys.executable, "-m", *group), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, env={**os.environ, LEARNER_KEY: "key"},
            )  # fmt: skip
        assert self.process.stdout is not None
        url = next(line for line in self.process.stdout if line.startswith(READY)).removeprefix(READY).strip()
        self.connection = LearnerConnection(url, "key", silence_s=120, log_file=self.log, session="study/1")
        self.connection.ask("open", dump_job(job))
        self.learner = remote_learner(self.connection.ask)

    def fresh(self, prompts: Any, tokenizer_folder: Path | None) -> Learner:
        self.connection.ask("fresh", prompts, tokenizer_folder)
        return self.learner

    def resumed(self, checkpoint: Path) -> tuple[Learner, Progress]:
        return self.learner, self.connection.ask("resumed", checkpoint)

    def rank(self, number: int) -> psutil.Process:
        ranks = psutil.Process(self.process.pid).children()
        return next(rank for rank in ranks if rank.environ().get("RANK") == str(number))

    def end(self) -> None:
        self.connection.close()
        with self.process:  # closes its pipes
            self.process.kill()


def judged(count: int, *cases: str) -> dict[str, dict[str, float]]:
    """Return the differences between `count` ranks and one, by case; without `cases`, of all cases."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = [word for case in cases for word in ("--case", case)]
        command = (sys.executable, "-m", "bench.study_ranks", "--judge", str(out), "--count", str(count))
        subprocess.run((*command, *words), check=True, stderr=subprocess.DEVNULL)
        found: dict[str, dict[str, float]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def after_a_fault(fault: Callable[[psutil.Process], None], timeout_s: float) -> dict[str, Any]:
    """Let rank 1 fail during an update; return the call's error, and the seconds until it and rank 0 end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model_folder(folder / "model", *tiny_model())
        training = {"update_passes": 400, "batch_decisions": 1000}
        tables = {"learner": {"nproc_per_node": 2, "timeout_s": timeout_s}, "training": training}
        group = Group(make_job({"cluster": {}, **tables}, model={"path": str(folder / "model")}), folder)
        group.fresh([], None)
        first = group.rank(0)
        ended: dict[str, Any] = {}

        def update() -> None:
            try:
                group.learner.update(episodes(), iteration=1)
            except TrainerError as error:
                ended["error"] = type(error).__name__
            ended["call_s"] = time.monotonic()

        thread = threading.Thread(target=update)
        thread.start()
        time.sleep(2.0)  # the call is then in the middle of its steps
        began = time.monotonic()
        fault(group.rank(1))
        psutil.wait_procs([first], timeout=120)
        others_s = time.monotonic() - began
        thread.join()
        group.end()
        return {"error": ended["error"], "call_s": ended["call_s"] - began, "others_s": others_s}


def without_memory(rank: psutil.Process) -> None:
    """Limit the rank's address space to its present size."""
    rank.rlimit(resource.RLIMIT_AS, (rank.memory_info().vms, resource.RLIM_INFINITY))


# By name: the fault, the learner's timeout, the call's error, the most seconds until the other rank ends.
FAULTS: dict[str, tuple[Callable[[psutil.Process], None], float, type[TrainerError], float]] = {
    "killed": (lambda rank: rank.send_signal(signal.SIGKILL), 120.0, LearnerLost, 1.0),
    "stands still": (lambda rank: rank.send_signal(signal.SIGSTOP), TIMEOUT_S, LearnerLost, TIMEOUT_S + 5.0),
    "out of memory": (without_memory, 120.0, OutOfMemory, 30.0),
}


def main() -> int:
    options = kit.options(
        __doc__,
        ("--judge", Path, "be all ranks; used by the script itself"),
        ("--count", 2, "of ranks, for --judge"),
        ("--case", [], "for --judge; default: all"),
    )
    if options.judge:
        return int(judge_all(options.judge, options.case, options.count) != 0)
    held = 0
    found: dict[str, Any] = {"ranks": {}, "faults": {}}
    for count in (2, 3):
        found["ranks"][count] = cases = judged(count)
        for figure, limit in LIMITS.items():
            worst = max(case[figure] for case in cases.values() if figure in case)
            held |= kit.report(
                f"{count} ranks, {figure}: {worst:.1e} at most, limit {limit:g}", worst <= limit
            )
        held |= kit.report(f"{count} ranks, choices after a resume", cases["resume"]["choices_equal"] == 1.0)
        publish = cases["publish"]
        held |= kit.report(
            f"{count} ranks, a publish: {publish['extra_mib']:.0f} MiB extra, of {publish['limit_mib']:.0f}",
            publish["extra_mib"] <= publish["limit_mib"],
        )
    for name, (fault, timeout_s, expected, most_s) in FAULTS.items():
        runs = [after_a_fault(fault, timeout_s) for _ in range(REPEATS)]
        middle = statistics.median(run["others_s"] for run in runs)
        found["faults"][name] = runs
        kinds = {run["error"] for run in runs}
        held |= kit.report(
            f"a rank {name}: {middle:.2f} s (median of {REPEATS}) until the other ended; the call: {kinds}",
            middle <= most_s and kinds == {expected.__name__},
        )
    kit.write_results(RESULTS, found)
    return held


if __name__ == "__main__":
    sys.exit(main())
