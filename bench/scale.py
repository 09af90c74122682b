"""Which part of a run is its bottleneck, from 1 to 64 GPUs and 100 to 10,000 conversations at a time.

    python -m bench.scale [--costs FILE] [--gpus 8] [--conversations 1000] [--iterations 3] [--results FILE]

A run in virtual time (`scale_run`): the project's own code shares out the work, over parts that take the time
that bench/scale_costs.toml says (what of it is measured, published or assumed, and by whom). An iteration
plays as many episodes as there are conversations at a time, with `max_staleness = 1`; a single GPU is shared
by learner and replica, which take turns. The learner gets the number of GPUs with which it and the replicas
take equally long by arithmetic; gateways and task apps are so many that none is busier than half of the time.

The bottleneck is what shortens an iteration most when there is twice of it; `alone` is the iteration with one
gateway and one task app instead. Seconds are of the model, not of any machine. The same arguments give the
same figures.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from bench import kit
from bench.model_flops import Peak
from bench.scale_model import Conversation, CpuCost, Table, compute_speed, count_tokens, scale_mfu, update_s
from bench.scale_run import Cluster, Costs, Figures, doubled, simulated
from trainer_backend.learner.shapes import BFLOAT16, ModelShape

COSTS = Path(__file__).with_name("scale_costs.toml")
GPUS, CONVERSATIONS = (1, 2, 4, 8, 16, 32, 64), (100, 1000, 10_000)
# Of a process, so that what comes at random finds it free.
_BUSY = 0.5
# Of an iteration, at the least, for a resource to be tried.
_LEAST_BUSY = 0.1
# Of the memory of a GPU that a learner shares.
_SHARED = 0.35
# What a resource is not worth: an iteration that is shorter by this share.
_LEAST_GAIN = 0.03
_SAMPLE = 1000


def tables(file: Path | None = None) -> dict[str, dict[str, float]]:
    """The costs, with those of a file over them.

    Raises:
        SystemExit: the file names what is no cost.
    """
    known = {
        table: {key: float(cost["value"]) for key, cost in costs.items()}
        for table, costs in tomllib.loads(COSTS.read_text()).items()
    }
    for table, costs in (tomllib.loads(file.read_text()) if file else {}).items():
        for key, value in costs.items():
            if key not in known.get(table, {}):
                raise SystemExit(f"{file}: [{table}] {key} is no cost; {COSTS} has all of them")
            known[table][key] = float(value)
    return known


@dataclass(frozen=True, slots=True)
class Workload:
    """What a conversation takes on average.

    Attributes:
        learner_s: of an update on one GPU.
        input_s: of each rank to read it.
    """

    decisions: float
    tokens: float
    sampled: float
    learner_s: float
    input_s: float


class Planning:
    """From tables of costs to clusters and their costs."""

    def __init__(self, costs: Mapping[str, Table]) -> None:
        self.costs = costs
        self.conversation = Conversation(**costs["conversation"])
        self.shape = ModelShape(**{key: int(value) for key, value in costs["model"].items()})
        self.load = self._workload()

    def _workload(self) -> Workload:
        episodes = [self.conversation.turns(str(number)) for number in range(_SAMPLE)]
        lengths = [count_tokens(turns) for turns in episodes]
        sampled = sum(turn.answer for turns in episodes for turn in turns)
        decisions = sum(map(len, episodes))
        gpu, learner = self.costs["gpu"], self.costs["learner"]
        peak = Peak(1e12 * gpu["tflops"], 1e12 * gpu["bandwidth_tb_s"])
        whole_s = update_s(self.shape, lengths, sampled, peak=peak, mfu=learner["mfu"]) * learner["passes"]
        input_s = self._cpu("learner_input").seconds(sum(lengths), decisions)
        return Workload(*(total / _SAMPLE for total in (decisions, sum(lengths), sampled, whole_s, input_s)))

    def _cpu(self, table: str) -> CpuCost:
        return CpuCost(**self.costs[table])

    def update_s(self, ranks: int) -> float:
        """Of a conversation."""
        learner = self.costs["learner"]
        return self.load.learner_s * learner["mfu"] / (ranks * scale_mfu(learner, ranks)) + self.load.input_s

    def price(self, ranks: int, *, is_shared: bool) -> Costs:
        publish, replica = self.costs["publish"], self.costs["replica"]
        load_s = publish["fixed_s"] + BFLOAT16 * self.shape.parameters / (1e9 * publish["gb_per_s"])
        share = _SHARED if is_shared else replica["memory_share"]
        return Costs(
            self.conversation,
            task_app=self._cpu("task_app"),
            gateway=self._cpu("gateway"),
            collect=self._cpu("collect"),
            credit=self._cpu("credit"),
            update_token_s=self.update_s(ranks) / self.load.tokens,
            speed=compute_speed(self.shape, self.costs["gpu"], replica, memory_share=share, load_s=load_s),
        )

    def collect_s(self, costs: Costs, replicas: int, conversations: int) -> float:
        """Of a conversation at replicas that are never idle, its prompts computed once."""
        load, speed = self.load, costs.speed
        context = load.tokens / 2
        rows = min(speed.max_running, conversations / replicas, speed.room / context)
        decode_s = load.sampled * speed.step_s(ceil(rows), rows * context) / rows
        return (decode_s + (load.tokens - load.sampled) * speed.prompt_s) / replicas

    def cluster(self, gpus: int, conversations: int) -> tuple[Cluster, Costs]:
        """GPUs where learner and replicas take equally long, and processes for that pace."""
        is_shared = gpus == 1
        splits = sorted({ranks for power in range(7) for ranks in (2**power, gpus - 2**power)})
        candidates = [1] if is_shared else [ranks for ranks in splits if 0 < ranks < gpus]

        def slower_s(ranks: int) -> float:
            costs = self.price(ranks, is_shared=is_shared)
            return max(self.update_s(ranks), self.collect_s(costs, max(1, gpus - ranks), conversations))

        ranks = min(candidates, key=slower_s)
        costs, replicas = self.price(ranks, is_shared=is_shared), max(1, gpus - ranks)
        decisions, tokens = self.load.decisions, self.load.tokens

        def processes(cost: CpuCost) -> int:
            return max(1, ceil(cost.seconds(tokens, decisions) / slower_s(ranks) / _BUSY))

        cluster = Cluster(
            ranks=ranks,
            replicas=replicas,
            gateways=min(replicas, processes(costs.gateway)),
            task_apps=processes(costs.task_app),
            places=conversations,
            max_staleness=0 if is_shared else 1,
        )
        return cluster, costs


def places_that_fit(cluster: Cluster, costs: Costs) -> int:
    """Conversations whose keys and values the replicas hold at the same time."""
    episodes = [costs.conversation.turns(str(number)) for number in range(_SAMPLE)]
    return max(1, round(cluster.replicas * costs.speed.room / (sum(map(count_tokens, episodes)) / _SAMPLE)))


def gains(cluster: Cluster, costs: Costs, figures: Figures, iterations: int) -> dict[str, float]:
    """By resource: how much shorter an iteration is with twice of it, as a share; the largest first.

    So is one with another rule, or with no more conversations at a time than the caches hold.
    """
    others, shorter = doubled(costs, cluster), {}
    if (places := places_that_fit(cluster, costs)) < cluster.places:
        others["fewer places"] = costs, replace(cluster, places=places)
    for name, (more_costs, more) in others.items():
        if figures.busy.get(name, 1.0) > _LEAST_BUSY:  # what is idle cannot hold anything up
            twice = simulated(more, more_costs, cluster.places, iterations)
            shorter[name] = 1.0 - twice.iteration_s / figures.iteration_s
    return dict(sorted(shorter.items(), key=lambda item: -item[1]))


def rows(planning: Planning, sizes: Iterator[tuple[int, int]], iterations: int) -> Iterator[dict[str, Any]]:
    """What is found, a size at a time."""
    for conversations, gpus in sizes:
        cluster, costs = planning.cluster(gpus, conversations)
        figures = simulated(cluster, costs, conversations, iterations)
        single = replace(cluster, gateways=1, task_apps=1)
        alone = figures if single == cluster else simulated(single, costs, conversations, iterations)
        found = gains(cluster, costs, figures, iterations)
        yield {
            "gpus": gpus,
            "conversations": conversations,
            "cluster": asdict(cluster),
            **{key: rounded(value) for key, value in asdict(figures).items()},
            "places_that_fit": places_that_fit(cluster, costs),
            "alone_s": rounded(alone.iteration_s),
            "gains": rounded(found),
            "bottleneck": [name for name, gain in found.items() if gain >= _LEAST_GAIN][:2],
        }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.3g}")


def format_row(row: dict[str, Any]) -> str:
    cluster, busy = row["cluster"], row["busy"]
    shares = " ".join(f"{busy[name]:4.0%}" for name in busy)
    found = (
        ", ".join(f"{name} {row['gains'][name]:.0%}" for name in row["bottleneck"]) or "the longest episode"
    )
    return (
        f"{row['conversations']:6d} {row['gpus']:4d} {cluster['ranks']:4d}+{cluster['replicas']:<3d}"
        f"{cluster['gateways']:4d} {cluster['task_apps']:4d} {row['iteration_s']:8.0f} {row['alone_s']:8.0f} "
        f"{row['decisions_per_s']:7.0f} {row['reused']:5.0%}  {shares}  {found}"
    )


HEAD = (
    "places GPUs  lrn+rep gws apps  s/iter    alone   dec/s cache  "
    "busy: learner replicas gateway task-app orchestrator publish; twice of it shortens by"
)


def main() -> int:
    options = kit.options(
        __doc__,
        ("--costs", Path, "a TOML file with costs of your own"),
        ("--gpus", [], "a number of them; may be repeated (default: 1, 2, 4 .. 64)"),
        ("--conversations", [], "at a time; may be repeated (default: 100, 1000, 10000)"),
        ("--iterations", 3, "the first one is left out of the figures"),
        ("--results", kit.ROOT / "bench" / "results" / "scale.json"),
    )
    costs = tables(options.costs)
    sizes = [
        (int(places), int(gpus))
        for places in options.conversations or CONVERSATIONS
        for gpus in options.gpus or GPUS
    ]
    print(HEAD)
    found = []
    for row in rows(Planning(costs), iter(sizes), options.iterations):
        print(format_row(row), flush=True)
        found.append(row)
        outcome = {"bench": "scale", "iterations": options.iterations, "costs": costs, "sizes": found}
        kit.write_results(options.results, outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
