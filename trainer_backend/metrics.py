"""Collects all declared metrics; `python -m trainer_backend.metrics` prints docs/metrics.md from them.

A metric is declared next to the code that computes it (see `core/metric.py`). This file lists the
declarations in the order of the page. Tests in `tests/house` compare the page with this output, and fail if
the code writes a metric that no file declares.
"""

from collections.abc import Iterator

from trainer_backend.collect import losses, metrics
from trainer_backend.core import conversations, loss_metrics, mixture_history, router_loss, statistics
from trainer_backend.core.advantages import (
    branch,
    episodes,
    gae,
    gigpo_soft,
    graphgpo,
    levels,
    state_graph,
    stepwise,
)
from trainer_backend.core.metric import Metric, Row
from trainer_backend.credit import credit, rewards
from trainer_backend.learner import metrics as learner
from trainer_backend.run import curriculum, iteration_metrics, timeline

# The chapters of docs/metrics.md: each heading with an introductory text (may be empty) and table rows.
CHAPTERS: dict[str, tuple[str, tuple[Row, ...]]] = {
    "Decisions and rewards": ("", (*statistics.DECISION_METRICS, *statistics.USER_REWARD_METRICS)),
    "Episodes": (
        "",
        (*statistics.EPISODE_METRICS, *losses.METRICS, *metrics.EVALUATION_METRICS),
    ),
    "Conversations": (
        "Present only where answers were scored (`interaction/*`) or a history was kept (`statelm/*`); "
        "evaluations have them too.",
        (*conversations.INTERACTION_METRICS, *conversations.CONTEXT_METRICS),
    ),
    "Advantages": (
        "",
        (
            *episodes.METRICS, *stepwise.METRICS, *credit.GROUP_METRICS, *gae.METRICS, *branch.METRICS,
            *credit.FORK_METRICS, *losses.BRANCH_METRICS, *state_graph.METRICS, *gigpo_soft.METRICS,
            *graphgpo.METRICS, *levels.METRICS,
        ),
    ),
    "Updates": (
        "",
        (
            *learner.UPDATE_METRICS, *rewards.METRICS, *loss_metrics.METRICS, *learner.MISMATCH_METRICS,
            *learner.STEP_METRICS, *router_loss.METRICS, *statistics.STALENESS_METRICS, *gae.CRITIC_METRICS,
            *learner.VALUE_METRICS, *learner.WARMUP_METRICS,
        ),
    ),
    "Inference": ("", iteration_metrics.INFERENCE_METRICS),
    "Task apps, recovery, time": (
        "",
        (
            *metrics.APP_METRICS, *iteration_metrics.RECOVERY_METRICS, *iteration_metrics.TIME_METRICS,
            *timeline.METRICS, *curriculum.METRICS,
        ),
    ),
    "Mixture": (
        "Only with fixed policies. `mixture/*/…` is by policy, the actor too; mu sampled the token, and p is "
        "the learner just before the update. [mixture.md](mixture.md#what-the-metrics-say) has what the "
        "other metrics count there.",
        (*iteration_metrics.CHOICE_METRICS, *learner.WEIGHT_METRICS, *mixture_history.METRICS),
    ),
}  # fmt: skip
DECLARED: tuple[Metric, ...] = tuple(
    metric for _, rows in CHAPTERS.values() for row in rows for metric in row.metrics
)

_HEAD = """\
# Metrics

Made by `python -m trainer_backend.metrics > docs/metrics.md`; do not edit by hand.

`metrics.jsonl` in a run directory holds one JSON object per line. Each has `kind` and `iteration`. The kinds:

| kind | written after |
|---|---|
| `teacher` | the episodes that the warm-up imitates |
| `warmup` | the supervised steps |
| `prompts` | random play, which trains a preset's tokenizer where the job has no warm-up |
| `iteration` | each iteration |
| `evaluation` | each evaluation on held-out worlds or rows |

The same names stand on the dashboard, in the report, in TensorBoard, W&B and Trackio (`[sinks]`), and at
`GET /metrics` of a service ([operations.md](operations.md#jobs-over-http)). A `*` stands for any text. A
metric of the same name with `_low` or `_high` is a bound of its 95 % interval."""


def metrics_markdown() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    for heading, (intro, rows) in CHAPTERS.items():
        yield f"\n## {heading}\n"
        if intro:
            yield f"{intro}\n"
        yield "| name | means |"
        yield "|---|---|"
        yield from map(str, rows)


if __name__ == "__main__":
    print(metrics_markdown(), end="")
