"""Metrics for Prometheus: counts of the service, and last metrics of running and recently ended jobs."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from starlette.responses import Response

from service_kit.observed import metrics_response
from trainer_backend.errors import RunDirectoryError
from trainer_backend.jobs.service import Service
from trainer_backend.rundir.state import read_state
from trainer_backend.store import jobs, reads
from trainer_backend.store.database import StoreUnavailable, UnknownJob
from trainer_backend.store.metrics import list_numbers
from trainer_backend.store.rows import ACTIVE, ENDED, Job, JobState

_PREFIX = "turnwise_trainer"
_KINDS = ("iteration", "evaluation")
_MOST_JOBS = 200
# A collector that scrapes every minute must see the last iteration and evaluation of an ended job.
_SHOWN_FOR = timedelta(minutes=5)


def page(service: Service, *, version: str, accept: str) -> Response:
    """Return all metrics in the text format of the request's Accept header. Call it on a thread."""
    counts: Mapping[str, int] | None = None
    rows: list[tuple[Job, Mapping[str, Mapping[str, Any]]]] = []
    store, home = service.store, service.data.home
    with suppress(StoreUnavailable):
        counts = jobs.counts(store, home)
        running = jobs.find(store, states=ACTIVE, home=home, limit=_MOST_JOBS).items
        since = store.clock() - _SHOWN_FOR
        ended = jobs.find(store, states=ENDED, home=home, ended_since=since, limit=_MOST_JOBS).items
        for job in (*running, *ended):
            with suppress(UnknownJob, RunDirectoryError):  # a deleted job, or its disk does not answer
                lines = reads.last_lines(store, [job.id], _KINDS)[job.id]
                rows.append((job, {kind: line.whole for kind, line in lines.items()}))

    def everything() -> Iterator[Metric]:
        about = {"version": version, "home": service.data.home}
        yield InfoMetricFamily(_PREFIX, "Which trainer this is.", about)
        yield _gauge("store_up", "1 while the database answers.", float(counts is not None))
        if counts is not None:
            family = GaugeMetricFamily(f"{_PREFIX}_jobs", "Jobs in each state.", labels=["state"])
            for state in get_args(JobState):
                family.add_metric([state], counts.get(state, 0))
            yield family
        slots = service.supervisor.slots.values() if service.supervisor is not None else ()
        yield _gauge("processes", "Processes of jobs that run.", sum(s.process is not None for s in slots))
        yield _gauge("event_streams", "Event streams that are open.", service.streams)
        yield from service.watcher.registry.collect()
        yield service.requests.reply_family(f"{_PREFIX}_http_requests")
        text = "Seconds until answers ended; streams left out."
        seconds = CounterMetricFamily(f"{_PREFIX}_http_request_seconds", text, labels=["route"])
        for route, histogram in service.requests.latency.items():
            seconds.add_metric([route], histogram.sum_s)
        yield seconds
        yield from _run_metrics(rows)

    return metrics_response(everything, accept=accept)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", text, value)


def _run_metrics(jobs: Iterable[tuple[Job, Mapping[str, Mapping[str, Any]]]]) -> Iterator[Metric]:
    """Yield jobs' last metrics as gauges, by our name (turnwise_trainer_a_b for `a/b`) and other systems'."""
    families = _Families()
    for job, rows in jobs:
        for kind, row in rows.items():
            for name, value in list_numbers(row):
                if "/" in name:
                    text = f"{name} of the last row."
                    families.add(f"{_PREFIX}_{_plain(name)}", text, value, job, kind=kind)
        for names, kind in ((OF_ITERATIONS, "iteration"), (OF_EVALUATIONS, "evaluation")):
            for name, ours, value in _translate_names(names, rows.get(kind, {})):
                families.add(name, f"{ours} of the last row.", value, job)
        state = read_state(Path(job.run_dir)) if job.run_dir and job.state in ACTIVE else None
        processes = Counter((one.role, one.state) for one in state.processes) if state is not None else {}
        for (role, condition), count in processes.items():
            families.add(
                f"{_PREFIX}_run_processes", "Processes of a run.", count, job, role=role, state=condition
            )
    yield from families.all.values()


class _Families:
    """Collects gauges by name.

    A sample whose name and labels occurred before gets a longer name; Prometheus would drop one of the two.
    """

    def __init__(self) -> None:
        self.all: dict[str, GaugeMetricFamily] = {}
        self._samples: set[tuple[str, ...]] = set()

    def add(self, name: str, text: str, value: float, job: Job, **more: str) -> None:
        labels = {"job_id": job.id, "run": job.name, **more}
        while (name, *labels.values()) in self._samples:  # for example policies `a-b` and `a_b`
            name += "_"
        self._samples.add((name, *labels.values()))
        family = self.all.setdefault(name, GaugeMetricFamily(name, text, labels=tuple(labels)))
        family.add_metric(tuple(labels.values()), value)


def _translate_names(names: Mapping[str, str], row: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield the other system's name, our name and the value of each metric of a row that `names` lists.

    A `*` at the end of both names matches any ending, which is then the same in both.
    """
    numbers = dict(list_numbers(row)) | {name: row[name] for name in ("iteration",) if name in row}
    for name, ours in names.items():
        if not ours.endswith("*"):
            matches = {name: ours}
        else:
            begin = ours[:-1]
            endings = [one for one in numbers if one.startswith(begin)]
            matches = {name[:-1] + _plain(one.removeprefix(begin)): one for one in endings}
        yield from ((there, here, numbers[here]) for there, here in matches.items() if here in numbers)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


# Other systems' names of our metrics, only where both mean the same quantity; a `*` matches any ending. The
# first names are verl's (prior art: verl HEAD), with `_` for `/`.
OF_ITERATIONS: Mapping[str, str] = {
    "critic_score_mean": "episode/outcome_reward",
    "critic_rewards_mean": "reward/mean",
    "critic_vf_explained_var": "value/explained_variance",
    "critic_vf_loss": "value/loss",
    "critic_values_mean": "value/mean",
    "actor_pg_loss": "loss/policy",
    "actor_entropy": "loss/entropy",
    "actor_kl_loss": "loss/kl",
    "actor_ppo_kl": "loss/approx_kl",
    "actor_grad_norm": "optim/grad_norm",
    "actor_lr": "optim/lr",
    "actor_reward_kl_penalty": "kl/reference",
    "num_turns_mean": "episode/decisions",
    "timing_s_gen": "time/collect_s",
    "timing_s_update_actor": "time/update_s",
    "timing_s_update_weights": "time/publish_s",
    "timing_s_save_checkpoint": "time/checkpoint_s",
    "training_global_step": "iteration",
    # Names of source 4.
    "rollout_policy_choice": "rollout/policy_choice",
    "rollout_using_actor": "rollout/using_actor",
    "rollout_using_fixed": "rollout/using_fixed",
    "actor_importance_sampling": "actor/importance_sampling",
    "actor_importance_weight_mean": "actor/importance_weight_mean",
    "actor_importance_weight_std": "actor/importance_weight_std",
    "actor_importance_weight_min": "actor/importance_weight_min",
    "actor_importance_weight_max": "actor/importance_weight_max",
    # Names of prime-rl and others (prior art: peers, section 4).
    "entropy_mean": "loss/entropy",
    "importance_ratio_mean": "loss/ratio_mean",
    "importance_ratio_min": "loss/ratio_min",
    "importance_ratio_max": "loss/ratio_max",
    "off_policy_mean": "policy/staleness_mean",
    "off_policy_max": "policy/staleness_max",
    "stop_*": "stop/*",
    "optim_lr": "optim/lr",
    "optim_grad_norm": "optim/grad_norm",
    "errored_rollouts": "rollout/failed",
    "decision_count": "decision/count",
    "decision_nonzero_frac": "decision/nonzero_frac",
    "decision_unique_sum": "decision/unique_sum",
    "decision_ach_sum": "decision/ach_sum",
    "gigpo_anchor_groups": "anchors/groups",
    "gigpo_singleton_frac": "anchors/singleton_frac",
}
OF_EVALUATIONS: Mapping[str, str] = {
    "val_core_reward_mean": "eval/outcome_reward",
    "timing_s_testing": "time/evaluate_s",
}
