"""`write_comparison` saves the dashboard page that compares several runs as one HTML file."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from trainer_backend.collect.metrics import outcome_interval
from trainer_backend.core.statistics import Interval
from trainer_backend.errors import JobError
from trainer_backend.evaluation.best import TASKS_DIGEST, paired_difference
from trainer_backend.pages.facts import differing_keys, group_seeds
from trainer_backend.pages.page import saved_page
from trainer_backend.pages.report import save, saved_data
from trainer_backend.pages.story import Story, read_story
from trainer_backend.rundir.data_record import describe_mismatch, find_other_rows
from trainer_backend.rundir.layout import open_run

# If two runs differ in one of these keys, the same seed stands for a different task in each run. A difference
# of their outcomes then has other causes than the policies.
_TASK = (
    "rollout.env_name", "rollout.env_config.", "rollout.max_turns", "rollout.max_invalid_decisions",
    "rollout.termination_regex", "rollout.termination_target", "multi_turn.", "data.interaction",
)  # fmt: skip
_ROWS = ("data.path", "data.split", "data.evaluation_", "data.held_out_")


def read_sides(paths: Sequence[Path]) -> list[Story]:
    """Read the runs in these folders. Each run is named by the shortest end of its path that is unique."""
    folders = [path.resolve() for path in paths]
    if len(folders) < 2:
        raise JobError("a comparison needs at least two runs; `turnwise report RUN` tells of one")
    twice = next((path for path in folders if folders.count(path) > 1), None)
    if twice is not None:
        raise JobError(f"{twice} is given twice; a run compared with itself tells nothing")
    return [read_story(open_run(path), name) for name, path in zip(_names(folders), paths, strict=True)]


def setting_differences(sides: Sequence[Story]) -> list[tuple[str, list[str]]]:
    return differing_keys([side.config for side in sides])


def name_outcomes(sides: Sequence[Story]) -> list[str]:
    """Return the distinct names that the runs give to their outcomes. Runs without episodes are left out."""
    return list(dict.fromkeys(side.outcome for side in sides if side.last_episodes is not None))


def _difference(first: Story, other: Story) -> Interval | None:
    """Return the mean outcome difference, `other` minus `first`, between the last evaluations of two runs.

    Only worlds that both evaluations played count. Return None if there are none, or if a run has no stored
    evaluation.
    """
    before, after = (
        (side.rollouts_file(f"evaluation_{side.last['iteration']}") if side.last else None)
        for side in (first, other)
    )
    other_rows = find_other_rows(first.data, other.data) if first.data and other.data else frozenset()
    return paired_difference(before, after, without=other_rows) if before and after else None


def _doubt(first: Story, other: Story) -> Iterator[str]:
    """Yield reasons why the evaluations of two runs cannot be compared, or only unfairly.

    The runs may differ in job keys that define the tasks, or in their data sets.
    """
    # If row ids are made from the content of the rows, equal ids mean equal rows in any file and split.
    by_content = all(side.data is not None and not side.data.by_position for side in (first, other))
    task = _TASK if by_content else (*_TASK, *_ROWS)
    keys = [key for key, _ in setting_differences([first, other]) if key.startswith(task)]
    if len({side.job.evaluation.evaluation_temperature(side.job.rollout) for side in (first, other)}) > 1:
        keys.append("evaluation.temperature")
    if keys:
        yield (
            f"{', '.join(keys)} differ, so the same world is another task, and the difference is not the "
            "policy's alone"
        )
    if first.data and other.data:
        yield from describe_mismatch(first.data, other.data)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the last n components of each path, for the smallest n with which all results differ."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-parts:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("paths that differ have names that differ")


# Henderson et al. 2018 (arXiv:1709.06560): only because of their seeds, two averages over runs of the same
# setting may differ as much as the averages of two settings.
ONE_SEED = (
    "each setting is trained with one seed; the intervals are over the held-out worlds alone and do not "
    "include how much another training seed changes the outcome"
)
_NONE = "-"


def write_comparison(sides: Sequence[Story], folder: Path) -> Path:
    drawn, data = saved_data(sides)
    html = saved_page(
        "compare",
        drawn,
        **data,
        live=False,
        columns=summary_columns(sides),
        summary=summary_rows(sides),
        doubts=doubts(sides),
        saved_at=datetime.now(UTC),
    )
    return save(folder / "comparison.html", html)


def summary_columns(sides: Sequence[Story]) -> list[str]:
    score, names = ["score"] if _have_score(sides) else [], name_outcomes(sides)
    outcome = names[0] if len(names) == 1 else "outcome"
    return ["run", "done", "at", f"{outcome} (95 %)", *score, "minus the first (95 %)", "episodes"]


def summary_rows(sides: Sequence[Story]) -> list[Sequence[str]]:
    """Return a row per run: its progress, its last evaluation, and its outcome minus the first run's."""
    has_score = _have_score(sides)
    return [
        _summary(side, _difference(sides[0], side) if at else None, has_score=has_score)
        for at, side in enumerate(sides)
    ]


def doubts(sides: Sequence[Story]) -> list[str]:
    """Return a sentence for each reason to doubt that the policies cause the differences between the runs."""
    first = sides[0]
    iterations = {side.last["iteration"] for side in sides if side.last is not None}
    uneven = "the last evaluations are after different numbers of iterations"
    measures = name_outcomes(sides)
    other = f"the figures are not of one kind: {'; '.join(measures)}"
    sentences = [uneven] * (len(iterations) > 1) + [other] * (len(measures) > 1)
    digests = {side.last.get(TASKS_DIGEST) for side in sides if side.last is not None} - {None}
    if len(digests) > 1:
        sentences.append("the last evaluations set different tasks; those with one seed or row id are paired")
    sentences += [
        f"{side.name}: {leak}" for side in sides if side.data and (leak := side.data.describe_leaks())
    ]
    sentences += [
        f"{side.name} against {first.name}: {why}" for side in sides[1:] for why in _doubt(first, side)
    ]
    return [*sentences, *_seed_sentences([side for side in sides if side.last is not None])]


def _seed_sentences(sides: Sequence[Story]) -> list[str]:
    """Return sentences saying that the intervals do not include the effect of the training seed.

    If some runs differ only in their seeds, the sentences name these runs, because they show this effect.
    """
    groups = [[sides[at].name for at in group] for group in group_seeds([side.config for side in sides])]
    groups = [names for names in groups if len(names) > 1]
    if not groups:
        return [ONE_SEED] if len(sides) > 1 else []
    return [
        f"{', '.join(names)} are of one setting with different seeds: they are as far apart as training "
        "seeds make them; the intervals, over the held-out worlds alone, include none of it"
        for names in groups
    ]


def _summary(side: Story, outcome: Interval | None, *, has_score: bool) -> Sequence[str]:
    done = f"{len(side.iterations)} of {side.job.training.iterations}"
    row = side.last
    if row is None:
        return (side.name, done, *[_NONE] * (5 if has_score else 4))
    score = row.get("eval/crafter_score")
    return (
        side.name,
        done,
        str(row["iteration"]),
        outcome_interval(row).word(before=""),
        *([_NONE if score is None else f"{score:.1f} %"] if has_score else []),
        outcome.word("{:+.2f}", "") if outcome else _NONE,
        str(outcome.count if outcome else row["eval/episodes"]),
    )


def _have_score(sides: Sequence[Story]) -> bool:
    return any(side.last is not None and "eval/crafter_score" in side.last for side in sides)
