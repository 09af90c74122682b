"""`turnwise recredit`: applies estimators to a run's stored rollouts and reports how they differ."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean, pvariance
from types import MappingProxyType

from rich.console import Group
from rich.table import Table
from rich.text import Text

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StepMetadata
from trainer_backend import job_parts
from trainer_backend.core.advantages.branch import by_parent
from trainer_backend.core.agreement import correlation, sign_agreement
from trainer_backend.core.critic import ByToken, OfEpisode
from trainer_backend.core.metric import Panel
from trainer_backend.core.statistics import Interval, step_deltas
from trainer_backend.core.truth import TrueAdvantage, TruthScore
from trainer_backend.credit.credit import NOTHING, CreditAssignment, Measured
from trainer_backend.credit.truth_scores import TRUTH, TruthScores, noise_lines
from trainer_backend.errors import AdvantageError, RewardError, RunDirectoryError
from trainer_backend.job.training_table import TrainingTable
from trainer_backend.pages.figures import interval
from trainer_backend.pages.page import saved_page
from trainer_backend.pages.series import make_chart, make_curve
from trainer_backend.parts import CreditedEpisode, Reporter
from trainer_backend.plugins import ESTIMATORS, estimator
from trainer_backend.rundir.checkpoint_paths import model_in
from trainer_backend.rundir.digests import read_digest
from trainer_backend.rundir.files import write_errors
from trainer_backend.rundir.layout import RunDirectory, open_run
from trainer_backend.rundir.rollout_files import (
    Credit,
    finished_rows,
    read_rollouts,
    read_token_scores,
    read_values,
    read_values_after,
    write_rollouts,
)
from trainer_backend.rundir.truth_file import TruthFile, select_rewards


@dataclass(frozen=True, slots=True)
class Recredited:
    """The credit that several estimators give to the same decisions."""

    rollouts: list[Rollout]
    """Finished rollouts in the order of iterations, followed by the trained continuations."""
    credits: Mapping[str, list[Credit]]
    """Credits of `rollouts`, in the same order, by estimator."""
    refused: Mapping[str, str]
    """Why an estimator could not be computed, by estimator."""
    met: Mapping[str, float] = field(default_factory=dict)
    """Share of decisions whose state (key "state") or text (key "text") occurs at least twice in their group.
    First decisions of episodes are left out. A key is absent if no estimator compares decisions by it."""

    @property
    def advantages(self) -> dict[str, list[float]]:
        """The advantages of all decisions of all rollouts in one list, by estimator."""
        return {
            name: list(chain.from_iterable(credit.advantages_T for credit in credits))
            for name, credits in self.credits.items()
        }


def stored_files(run: RunDirectory, iterations: Sequence[int]) -> list[Path]:
    """Return the rollout files of the iterations, in order. If `iterations` is empty, return all files."""
    files = run.iterations()
    missing = [str(number) for number in iterations if number not in files]
    if missing or not files:
        listed = ", ".join(map(str, files)) or "none"
        stored = listed if len(files) < 9 else f"{len(files)} iterations from {min(files)} to {max(files)}"
        which = f"iteration {', '.join(missing)}" if missing else "any iteration"
        raise RunDirectoryError(f"{run.path}: no rollouts of {which}; stored: {stored}")
    return [files[number] for number in sorted(set(iterations) or files)]


def stored_iterations(run: RunDirectory, iterations: Sequence[int]) -> list[list[Rollout]]:
    """Read the finished rollouts by iteration, in order. If `iterations` is empty, read all iterations."""
    read = [read_rollouts(path) for path in stored_files(run, iterations)]
    finished = [[item for item in rollouts if item.trajectory is not None] for rollouts in read]
    if not any(finished):
        raise RunDirectoryError(f"{run.path}: none of the stored rollouts was finished")
    return [rollouts for rollouts in finished if rollouts]


def stored_measured(run: RunDirectory, iterations: Sequence[int]) -> list[Measured]:
    """Read the stored values, branches and log-probs of each iteration that `stored_iterations` returns."""
    files = stored_files(run, iterations)
    return [_read_measured(path) for path in files if finished_rows(path, ["rollout_id"])]


def _read_measured(path: Path) -> Measured:
    """Read the measurements of one iteration. The file of branches may be missing or without rollouts."""
    other = path.with_name(path.name.replace("iteration_", "branches_"))
    if not other.exists():
        return Measured(read_values(path), read_values_after(path), None, read_token_scores(path))
    branches = by_parent(with_records(item) for item in read_rollouts(other))
    scored = {**read_token_scores(path), **read_token_scores(other)}
    values = {**read_values(path), **read_values(other)}
    after = {**(read_values_after(path) or {}), **(read_values_after(other) or {})}
    return Measured(values, after or None, branches, scored)


def recredited(
    credit: CreditAssignment,
    iterations: Sequence[Sequence[Rollout]],
    names: Sequence[str],
    measured: Sequence[Measured] = (),
) -> Recredited:
    """Credit all rollouts once with each of the estimators `names`, with the job's rewards and settings.

    Episodes are compared within the groups of their iteration. If the inputs of an estimator were not
    stored, `Recredited.refused` contains the reason. `measured` comes from `stored_measured`; empty: nothing
    was measured.
    """
    measured = measured or [NOTHING] * len(iterations)
    iterations = [[with_records(rollout) for rollout in rollouts] for rollouts in iterations]
    batches = list(zip(iterations, measured, strict=True))
    for rollouts, measurements in batches:
        for rollout in rollouts:  # an undefined reward fails all estimators: raise it here
            credit.rewards.earned_by(rollout, measurements.scored)
    credits: dict[str, list[Credit]] = {}
    after_forks = chain.from_iterable(map(credit.continuations, measured))
    refused: dict[str, str] = {}
    for name in names:
        try:
            credits[name] = _credits(credit, batches, advantage=name)
        except (AdvantageError, RewardError) as error:  # RewardError: raised by a branch
            refused[name] = str(error)
    kinds = {_compared_kind(name) for name in credits}
    others = {
        kind: [n for item in _credits(credit, batches, **keys) for n in item.parts["compared"][1:]]
        for kind, keys in _EQUAL.items()
        if kind in kinds
    }
    met = {kind: sum(map(bool, row)) / max(len(row), 1) for kind, row in others.items()}
    return Recredited([*chain.from_iterable(iterations), *after_forks], credits, refused, met)


_Batch = tuple[Sequence[Rollout], Measured]


def _credits(credit: CreditAssignment, batches: Sequence[_Batch], **algorithm: object) -> list[Credit]:
    """Compute the credit of all batches. The keywords replace the job's keys in [algorithm]."""
    changed = replace(credit, algorithm=credit.algorithm.model_copy(update=algorithm))
    credits = [item for rollouts, of_them in batches for item in changed.credits(rollouts, of_them)]
    return [*credits, *(item for batch in batches for item in changed.fork_credits(*batch))]


def _compared_kind(name: str) -> str:
    """Return what an estimator compares decisions by: "state" (the state key), "text", or "" for neither."""
    plug = estimator(name)
    return "state" if plug.needs_state_keys else "text" if plug.needs_texts else ""


# Keys of [algorithm] that make an estimator compare only decisions with equal states, or with equal texts.
_EQUAL: Mapping[str, Mapping[str, object]] = {
    "state": {"advantage": "gigpo", "context_depth": 0},
    "text": {"advantage": "gigpo_soft", "similarity_temperature": 0.0},
}


def with_records(rollout: Rollout) -> Rollout:
    """Add missing `decision_rewards` to a rollout, computed from its achievement counters.

    This allows step rewards for a run that was played without them. A rollout without counters is returned
    unchanged.
    """
    episode = rollout.trajectory
    if episode is None or not episode.achievements_counts:
        return rollout
    steps = tuple(
        step
        if step.metadata.decision_rewards is not None or step.next_observation is None
        else step.model_copy(update={"metadata": StepMetadata(decision_rewards=step_deltas(step))})
        for step in episode.steps
    )
    return rollout.model_copy(update={"trajectory": episode.model_copy(update={"steps": steps})})


# Cosine between the gradients of two estimators.
Cosines = Mapping[tuple[str, str], float]


def recredit_tables(
    credited: Recredited, cosines: Cosines | None = None, scores: TruthScores | None = None
) -> Group:
    """Return tables that compare the estimators: spread, correlation and sign agreement of their advantages.

    `cosines` and `scores`, if given, are added as further tables.
    """
    advantages, parts = credited.advantages, list[Table | Text | str]()
    if advantages:
        decisions = len(next(iter(advantages.values())))
        parts += [Text(f"{len(credited.rollouts)} episodes, {decisions} decisions"), _spreads(advantages), ""]
        # "Same sign": the share of decisions where two estimators agree, among those where neither is 0.
        parts += [
            _table("correlation", [*advantages], lambda a, b: correlation(advantages[a], advantages[b])),
            "",
            _table("same sign", [*advantages], lambda a, b: sign_agreement(advantages[a], advantages[b])),
        ]
    parts += _describe_matches(credited)
    if cosines:
        names = [*([] if scores is None else [TRUTH]), *advantages]
        title = "cosine of gradients" if scores is None else "cosine of gradients of the measured decisions"
        parts += ["", _table(title, names, lambda a, b: cosines.get((a, b)))]
    parts += [Text(f"{name}: {reason}", style="yellow") for name, reason in credited.refused.items()]
    return Group(*parts) if scores is None else Group(*parts, "", scores.tables())


# The end of the sentence if no state, or no text, occurs twice; `{}` is replaced by names of estimators.
_ALONE = {
    "state": "so {} can compare first decisions only; another algorithm.state_hashing_function may "
    "distinguish fewer states",
    "text": "so {} can only compare different texts by their similarity",
}


def _describe_matches(credited: Recredited) -> list[Text]:
    """Return sentences on how often states and texts occur twice, and which estimators rely on that."""
    lines = []
    for kind, share in credited.met.items():
        by = ", ".join(name for name in credited.credits if _compared_kind(name) == kind)
        ending = f"{kind}s are compared by {by}" if share else _ALONE[kind].format(by)
        sentence = (
            f"{share:.1%} of the decisions after the first of their episode have a {kind} that occurs twice "
            f"in their group{';' if share else ','} {ending}."
        )
        lines.append(Text(sentence, style="" if share else "yellow"))
    return lines and [Text(), *lines]


def _spreads(advantages: Mapping[str, Sequence[float]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("advantages", "mean", "variance", "share of 0"):
        table.add_column(column, justify="left" if column == "advantages" else "right")
    for name, values in advantages.items():
        mean, variance, zeros = _spread(values).values()
        table.add_row(name, f"{mean:+.4f}", f"{variance:.4f}", f"{zeros:.0%}")
    return table


def _spread(advantages: Sequence[float]) -> dict[str, float]:
    """Compute the mean, the variance and the share of zeros of advantages."""
    return {
        "mean": fmean(advantages),
        "variance": pvariance(advantages),
        "zero_frac": advantages.count(0.0) / len(advantages),
    }


def _table(title: str, names: Sequence[str], of: Callable[[str, str], float | None]) -> Table:
    """Return a lower triangular table of `of(a, b)` for all pairs of names; column headers are numbers."""
    table = Table(box=None, pad_edge=False)
    table.add_column(title, no_wrap=True, min_width=3 + max(map(len, names), default=0))
    for number in range(1, len(names)):
        table.add_column(str(number), justify="right", no_wrap=True, min_width=5)
    for row, name in enumerate(names):
        values = (of(name, other) for other in names[:row])
        cells = ("-" if value is None else f"{value:+.2f}" for value in values)
        table.add_row(f"{row + 1:>2} {name}", *cells)
    return table


_POINTS = 4_000


def write_recredit(
    credited: Recredited, folder: Path, cosines: Cosines | None = None, scores: TruthScores | None = None
) -> None:
    """Write the results of `turnwise recredit` to a folder.

    These are `figures.json`, `agreement.html` (for two or more estimators), `truth.html` (if `scores` are
    given), and a file NAME.parquet per estimator with the rollouts and the estimator's credit.
    """
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        numbers = figures(credited, cosines) | ({} if scores is None else {TRUTH: scores.figures()})
        (folder / "figures.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
        if scores is not None:
            (folder / "truth.html").write_bytes(truth_page(scores))
        if len(credited.credits) > 1:
            (folder / "agreement.html").write_bytes(agreement_page(credited.advantages))
    for name, credits in credited.credits.items():
        write_rollouts(folder / f"{name}.parquet", credited.rollouts, credits)


def truth_page(scores: TruthScores) -> bytes:
    """Return an HTML page: the noise of the measured truth, and charts of estimators against the truth."""
    above = noise_lines(scores.setting, scores.noise).plain.splitlines()
    return agreement_page(
        {TRUTH: scores.true, **scores.advantages},
        {name: _describe_score(score, scores.unbiased[name]) for name, score in scores.scores.items()},
        [*above, "A point may lie to the left or right of its true place by about that standard error."],
    )


def _describe_score(score: TruthScore, unbiased: float | None) -> str:
    """Return the sentence that is shown below an estimator's chart."""
    if score.correlation is None:
        return "No correlation: all its advantages, or all true ones, are the same."
    correlation = interval(Interval(score.correlation, score.low, score.high, score.decisions), "+")
    noiseless = "" if score.noiseless is None else f"; without the noise of the truth {score.noiseless:+.2f}"
    reach = "" if unbiased is None else f"; an unbiased estimator as noisy would have {unbiased:+.2f}"
    return f"Correlation {correlation}{reach}{noiseless}."


def agreement_page(
    advantages: Mapping[str, Sequence[float]],
    notes: Mapping[str, str] = MappingProxyType({}),
    above: Sequence[str] = (),
) -> bytes:
    """Return an HTML page with scatter charts of each estimator against the first, a point per decision.

    `notes` are sentences below the charts, by estimator; `above` are sentences above all charts.
    """
    first, *others = advantages
    # Every step-th decision only, because a chart of all decisions would be unreadable.
    step = max(1, len(advantages[first]) // _POINTS)
    charts = []
    for name in others:
        points = sorted(zip(advantages[first][::step], advantages[name][::step], strict=True))
        note = notes.get(name, f"Advantage of a decision, over that by {first}.")
        panel = Panel(name, "", name, note, (), unit=first, scatter=True)
        curve = make_curve(name, [y for _, y in points])
        charts.append(make_chart(panel, [x for x, _ in points], [curve]))
    return saved_page("agreement", {"charts": charts}, first=first, panels=charts, above=above)


def figures(credited: Recredited, cosines: Cosines | None = None) -> dict[str, object]:
    """Return the numbers of the tables as JSON values."""
    advantages = credited.advantages
    return {
        "episodes": len(credited.rollouts),
        "estimators": {name: _spread(values) for name, values in advantages.items()},
        "pairs": [
            {
                "estimators": [a, b],
                "correlation": correlation(advantages[a], advantages[b]),
                "sign_agreement": sign_agreement(advantages[a], advantages[b]),
                "gradient_cosine": (cosines or {}).get((b, a)),
            }
            for a, b in combinations(advantages, 2)
        ],
        "refused": dict(credited.refused),
        "met_after_start_frac": dict(credited.met),
    }


def recredit_run(
    path: Path,
    names: Sequence[str],
    iterations: Sequence[int],
    checkpoint: Path | None,
    out: Path | None,
    overrides: Sequence[str],
    *,
    truth: Path | None = None,
    reporter: Reporter,
) -> tuple[Group, Path]:
    """Credit a run's stored rollouts again, write the results, and return the tables and the folder.

    Args:
        names: the estimators; empty: all.
        iterations: the iterations to credit; empty: all, or the iteration of `truth`.
        checkpoint: the policy whose gradients under the estimators are compared; None: no gradients.
        out: the folder to write to; None: the run's own.
        overrides: `table.key=value` for the run's job.
        truth: a file of `turnwise truth`, whose true advantages the estimators are compared with.
    """
    run = open_run(path)
    loaded = run.job_of_stored(overrides)
    for warning in loaded.left_out.values():  # other estimators of the table read these keys
        reporter.say(warning)
    job = loaded.config
    checkpoint = None if checkpoint is None else model_in(checkpoint)
    for name in names:
        estimator(name)
    file = None if truth is None else _read_truth(truth, run, iterations, job.training, job.algorithm.gamma)
    if file is not None:
        iterations = [file.setting.iteration]
        if checkpoint is not None:
            _refuse_other_policy(file, run, checkpoint)
    stored = stored_iterations(run, iterations)
    credit = job_parts.credit(job)
    credited = recredited(credit, stored, names or list(ESTIMATORS), stored_measured(run, iterations))
    if not credited.credits:
        reasons = "; ".join(f"{name}: {why}" for name, why in credited.refused.items())
        raise AdvantageError(f"{path}: no estimator can be computed. {reasons}")
    cosines = None
    if checkpoint is not None:
        advantages = select_advantages(credited, None if file is None else file.truths)
        policies = credit.policies
        played = [
            CreditedEpisode(item.rollout_id, policies.segments_by(item), (), policy=policies.policy_by(item))
            for item in credited.rollouts
        ]
        cosines = job_parts.gradient_cosines(job, checkpoint, run, played, advantages, reporter=reporter)
    scores = None
    if file is not None:
        groups = {rollout.rollout_id: rollout.group_id for rollout in credited.rollouts}
        of_rollouts = {
            name: dict(zip(groups, (credit.advantages_T for credit in credits), strict=True))
            for name, credits in credited.credits.items()
        }
        scores = TruthScores(file, of_rollouts, groups, cosines)
    folder = out or run.recredit
    write_recredit(credited, folder, cosines, scores)
    return recredit_tables(credited, cosines, scores), folder


def _read_truth(
    path: Path, run: RunDirectory, iterations: Sequence[int], training: TrainingTable, gamma: float
) -> TruthFile:
    """Read a file of `turnwise truth`.

    Raises RunDirectoryError if `TruthFile.read` refuses the file, or if the truth was measured for another
    iteration, with other rewards or with another gamma.
    """
    file = TruthFile.read(path, run)
    setting = file.setting
    if iterations and set(iterations) != {setting.iteration}:
        numbers = ", ".join(map(str, iterations))
        raise RunDirectoryError(
            f"{path} is the truth of iteration {setting.iteration}, and --iteration asks for {numbers}"
        )
    stored = {**setting.rewards, "gamma": setting.gamma}
    own = {**select_rewards(training), "gamma": gamma}
    if others := [name for name in own if own[name] != stored.get(name)]:
        changes = ", ".join(f"{name} = {stored.get(name)!r} instead of {own[name]!r}" for name in others)
        raise RunDirectoryError(
            f"{path} is the truth of other returns, with {changes}; give the same --set to both commands"
        )
    return file


def _refuse_other_policy(file: TruthFile, run: RunDirectory, checkpoint: Path) -> None:
    """Raise RunDirectoryError if the checkpoint is not the policy whose true advantages were measured."""
    known, found = file.setting.digest, read_digest(checkpoint)
    if known and found and known != found:
        own = run.checkpoints / file.setting.checkpoint
        raise RunDirectoryError(
            f"{file.path} is the truth of the policy {own}; gradients at another policy, {checkpoint}, "
            f"cannot be compared with it; give --checkpoint {own}"
        )


def select_advantages(
    credited: Recredited, truths: Mapping[tuple[str, int], TrueAdvantage] | None
) -> dict[str, list[OfEpisode]]:
    """Return the advantages by estimator, in the order of the rollouts.

    Each is by token if the estimator computed that, else by decision. `truths`, by rollout id and turn, are
    added as TRUTH. If given, advantages without a true one are set to 0, and so add nothing to gradients.
    """
    if truths is None:
        return {
            name: [credit.token_advantages or credit.advantages_T for credit in credits]
            for name, credits in credited.credits.items()
        }

    def masked(rollout_id: str, credit: Credit) -> OfEpisode:
        kept_T = [(rollout_id, turn + 1) in truths for turn in range(len(credit.advantages_T))]
        if credit.token_advantages is not None:
            rows_T = zip(kept_T, credit.token_advantages.rows_T, strict=True)
            return ByToken([row if kept else [0.0] * len(row) for kept, row in rows_T])
        return [value if kept else 0.0 for kept, value in zip(kept_T, credit.advantages_T, strict=True)]

    def true(rollout: Rollout) -> OfEpisode:
        assert rollout.trajectory is not None, "only finished rollouts are credited"
        found = [truths.get((rollout.rollout_id, step.turn)) for step in rollout.trajectory.steps]
        return [0.0 if item is None else item.advantage for item in found]

    return {TRUTH: list(map(true, credited.rollouts))} | {
        name: [
            masked(item.rollout_id, credit) for item, credit in zip(credited.rollouts, credits, strict=True)
        ]
        for name, credits in credited.credits.items()
    }
