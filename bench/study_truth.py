"""Which estimator is nearest to the truth? Compares all estimators with measured advantages.

    python -m bench.study_truth [--seed 0 …] [--setting crafter …] [--decisions 300] [--continuations 16]
    python -m bench.study_truth --rescore

For each setting and seed, a run trains for a few iterations with the estimator `gae`, so that its rollouts
hold values and state keys. `turnwise truth` then measures decisions of the run's last iteration, and every
estimator is scored on these decisions (`turnwise recredit --truth`). `branch` and `gae_token` are left out,
because they need other rollouts. `gae` is scored at other lambdas too.

    crafter     configs/crafter_cpu.toml in groups of four: 50 decisions of at most 4 actions
    one_action  the same with one action a decision, 100 decisions
    whole_games configs/crafter_laptop.toml in groups of four: whole games, after imitating a teacher
    rooms       the environment that `turnwise new env` writes: a key, and a door at the corridor's end. Its
                world has no chance and few states; the policy imitates a teacher of random pace
    one_box     configs/sokoban.toml: boards of 6 by 6 with one box, which a push may make unsolvable

Finished parts are skipped, interrupted parts are resumed. bench/results/truth.json is written after each
seed: for each estimator the median, least and greatest over seeds, and every seed's numbers.
truth_decisions.jsonl, in the same folder, has for each seed a line of the measured decisions, with the
advantages of all estimators. `--rescore` computes truth.json again from these lines; seeds without a line
keep their numbers. The settings `whole` and `sokoban` in truth.json are former states of two of these jobs.
"""

import asyncio
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, median, pstdev, pvariance
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from bench.kit import ROOT, options, write_results
from bench.study_results import IN_GROUPS
from bench.study_runs import finished
from trainer_backend.core.truth import TrueAdvantage, pooled_errors
from trainer_backend.credit.recredit import recredit_run
from trainer_backend.credit.truth_scores import TruthScores
from trainer_backend.evaluation.truth import TruthOptions, measure_truth
from trainer_backend.job.load import load_job
from trainer_backend.plugins import ESTIMATORS
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import finished_rows
from trainer_backend.rundir.truth_file import TruthFile, TruthSetting, locate_truth
from trainer_backend.terminal.progress import ConsoleReporter
from trainer_backend.terminal.templates import write_environment

ITERATIONS = 4
COMMON = (
    "algorithm.advantage=gae", 'rollout.state_keys=["default"]', f"training.iterations={ITERATIONS}",
    "training.checkpoint_every=1", "training.keep_checkpoints=2", "evaluation.instances=32",
    f"evaluation.every_n_iters={ITERATIONS}",
)  # fmt: skip
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "crafter": IN_GROUPS,
    "one_action": (
        *IN_GROUPS,
        "rollout.env_config.max_actions=1", "warmup.policy_config.max_actions=1", "rollout.max_turns=100",
    ),
    "whole_games": ("training.group_size=4", "training.max_staleness=0"),
    "rooms": ("algorithm.gamma=0.95", "model.device=cpu", "rollout.episodes_per_batch=128"),
    "one_box": (),
}  # fmt: skip
_TRUTH = TypeAdapter(TrueAdvantage)
_JOBS = {"one_box": "sokoban.toml", "whole_games": "crafter_laptop.toml"}
_PLUGINS = """from rooms import ENVIRONMENT, TEACHER

ENVIRONMENTS, POLICIES = {"rooms": ENVIRONMENT}, {"rooms_teacher": TEACHER}
"""
GAE_LAMBDAS = (0.0, 0.5, 0.8, 1.0)  # in addition to the job's lambda
FIGURES = (
    "correlation", "unbiased", "noiseless", "rank", "sign_agreement", "explained", "zero_share",
    "gradient_cosine",
)  # fmt: skip


def scored(
    run: RunDirectory, setting: str, seed: int, *, decisions: int, continuations: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure the decisions that are not measured yet, and score all estimators and their gradients.

    Returns:
        The seed's numbers, and the measured decisions from which they are computed.
    """
    started = time.monotonic()
    truth_options = TruthOptions(
        decisions=decisions, continuations=continuations, horizon=None, budget=None, iteration=ITERATIONS,
        checkpoint=None, out=locate_truth(run.path), seed=seed,
    )  # fmt: skip
    tell = partial(print, f"{setting} {seed}, decisions done and in all:", end="\r", flush=True)
    measured = asyncio.run(measure_truth(run, run.job(), truth_options, tell))
    seconds = time.monotonic() - started
    checkpoint = run.checkpoints / measured.file.setting.checkpoint
    figures = _figures(run, list(ESTIMATORS), checkpoint)
    found = figures["truth"]
    rows = [asdict(item) for item in measured.file.truths.values()]
    advantages = {name: _advantages(run, rows, name) for name in found["estimators"]}
    for weight in GAE_LAMBDAS:
        setting, name = f"algorithm.gae_lambda={weight:g}", f"gae, lambda {weight:g}"
        found["estimators"][name] = _figures(run, ["gae"], checkpoint, setting)["truth"]["estimators"]["gae"]
        advantages[name] = _advantages(run, rows, "gae", setting)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    by_rollout = finished_rows(_scores(run) / "gae.parquet", ["rollout_id", "group_id"])
    groups = {row["rollout_id"]: row["group_id"] for row in by_rollout}
    groups = {name: group for name, group in groups.items() if name in columns["rollout_id"]}
    measures = {"truths": columns, "advantages": advantages, "groups": groups}
    found |= {"refused": figures["refused"], "last_call_s": round(seconds, 1)}
    return rescored(found, measures), measures


def _where_it_hesitates(truths: Collection[TrueAdvantage], gae: Sequence[float]) -> dict[str, float]:
    """Return the share of decisions where some pairs chose otherwise, and standard deviations over these.

    `true_std` is that of the true advantages, without the measurement's noise, `gae_std` that of `gae`'s.
    """
    pairs = [(item, a) for item, a in zip(pooled_errors(list(truths)), gae, strict=True) if item.others]
    if not pairs:
        return {"share": 0.0}
    noise = fmean(item.error**2 for item, _ in pairs)
    return {
        "share": len(pairs) / len(truths),
        "true_std": max(pvariance(item.advantage for item, _ in pairs) - noise, 0.0) ** 0.5,
        "gae_std": pstdev(a for _, a in pairs),
    }


def _scores(run: RunDirectory, *overrides: str) -> Path:
    return run.path / "scores" / "_".join(overrides)


def _advantages(
    run: RunDirectory, truths: Sequence[Mapping[str, Any]], name: str, *overrides: str
) -> list[float]:
    """Return an estimator's advantages of the measured decisions, rounded to five digits."""
    path = _scores(run, *overrides) / f"{name}.parquet"
    rows = finished_rows(path, ["rollout_id", "decisions"])
    by_rollout = {row["rollout_id"]: [item["advantage"] for item in row["decisions"]] for row in rows}
    return [float(f"{by_rollout[item['rollout_id']][item['turn'] - 1]:.5g}") for item in truths]


def rescored(found: Mapping[str, Any], decisions: Mapping[str, Any]) -> dict[str, Any]:
    """Compute a seed's numbers again from its measured decisions.

    Args:
        decisions: the second result of `scored`.
    """
    columns = decisions["truths"]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    truths = [_TRUTH.validate_python(row) for row in rows]
    file = TruthFile(Path(), TruthSetting.model_validate(found["setting"]), truths)
    again: dict[str, Any] = {"estimators": {}}
    for name, values in decisions["advantages"].items():
        of_rollouts: dict[str, dict[int, float]] = {}
        for item, value in zip(truths, values, strict=True):
            of_rollouts.setdefault(item.rollout_id, {})[item.turn] = value
        advantages = {
            rollout: [of_turns.get(turn, 0.0) for turn in range(1, max(of_turns) + 1)]
            for rollout, of_turns in of_rollouts.items()
        }
        plug = name.partition(",")[0]  # the name without a lambda
        figures: dict[str, Any] = TruthScores(file, {plug: advantages}, decisions["groups"]).figures()
        cosine = found["estimators"][name]["gradient_cosine"]
        again["estimators"][name] = {**figures["estimators"][plug], "gradient_cosine": cosine}
        again["noise"] = figures["noise"]
    hesitant = _where_it_hesitates(truths, decisions["advantages"]["gae"])
    return {**found, **again, "hesitant": hesitant}


def _figures(run: RunDirectory, names: Sequence[str], checkpoint: Path, *overrides: str) -> dict[str, Any]:
    """Return the numbers that `turnwise recredit --truth --checkpoint` writes."""
    _, folder = recredit_run(
        run.path, names, (), checkpoint, _scores(run, *overrides), overrides,
        truth=locate_truth(run.path), reporter=ConsoleReporter(Console()),
    )  # fmt: skip
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    return figures


def config_of(setting: str, folder: Path) -> tuple[Path, Sequence[str]]:
    """Return a setting's job file, and the settings that it needs; write the files of `rooms` to `folder`."""
    if setting != "rooms":
        return ROOT / "configs" / _JOBS.get(setting, "crafter_cpu.toml"), ()
    package = folder / "rooms"
    plugins = package / "src" / "plugins.py"  # replaces the package's entry points, since it is not installed
    if not package.exists():
        write_environment("rooms", folder)
        plugins.write_text(_PLUGINS, encoding="utf-8")
    return package / "job.toml", (f"services.task_plugins=['{plugins}']",)


def summary(seeds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return, by estimator and figure, [median, least, greatest, number] over the seeds that have it."""
    names = {name for found in seeds.values() for name in found["estimators"]}
    told: dict[str, Any] = {name: {} for name in sorted(names)}
    for name, figures in told.items():
        for figure in FIGURES:
            scores = [seed["estimators"].get(name, {}).get(figure) for seed in seeds.values()]
            if values := [value for value in scores if value is not None]:
                figures[figure] = [median(values), min(values), max(values), len(values)]
    return told


def _stored_lines(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Read the measured decisions by setting and seed."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    return {(line["setting"], line["seed"]): line for line in lines}


def _write(results: Path, outcome: Mapping[str, Any], lines: Mapping[Any, Mapping[str, Any]]) -> None:
    write_results(results, outcome, allow_nan=False)
    text = "".join(json.dumps(lines[key], separators=(",", ":")) + "\n" for key in sorted(lines))
    if text:
        _lines_of(results).write_text(text, encoding="utf-8")


def _lines_of(results: Path) -> Path:
    return results.with_name(f"{results.stem}_decisions.jsonl")


def _rescore(results: Path, outcome: dict[str, Any]) -> None:
    lines = _stored_lines(_lines_of(results))
    for name, of_setting in outcome.items():
        for seed, found in of_setting["seeds"].items():
            if (name, seed) in lines:
                of_setting["seeds"][seed] = rescored(found, lines[name, seed])
        of_setting["summary"] = summary(of_setting["seeds"])
    _write(results, outcome, lines)
    print(f"rescored: {results}; {len(lines)} seeds by their decisions")


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(
        __doc__,
        ("--seed", [], "a seed; may be repeated; absent: 0 to 4"),
        ("--setting", [], f"of {', '.join(SETTINGS)}; may be repeated; absent: all"),
        ("--set", [], "`table.key=value` over every setting; may be repeated"),
        ("--decisions", 300, "measured for each seed"),
        ("--continuations", 16, "pairs for each decision"),
        ("--out", str(ROOT / "runs" / "truth"), "folder of the runs"),
        ("--results", str(ROOT / "bench" / "results" / "truth.json"), "the file to write"),
        ("--rescore", False, "measures nothing, and computes the file again from the stored decisions"),
        arguments=arguments,
    )
    results = Path(given.results)
    outcome: dict[str, Any] = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    if given.rescore:
        _rescore(results, outcome)
        return 0
    lines = _stored_lines(_lines_of(results))
    for name in given.setting or SETTINGS:
        for seed in map(int, given.seed or range(5)):
            out = Path(given.out).resolve()
            config, finds = config_of(name, out / "environments")
            settings = (*COMMON, *SETTINGS[name], *finds, f"job.seed={seed}", *given.set)
            job = load_job(config, settings).config
            run = finished(out / name / f"seed_{seed}", job)
            found, decisions = scored(
                run, name, seed, decisions=given.decisions, continuations=given.continuations
            )
            of_setting = outcome.setdefault(name, {"seeds": {}})
            of_setting["seeds"][str(seed)] = found
            of_setting["summary"] = summary(of_setting["seeds"])
            lines[name, str(seed)] = {"setting": name, "seed": str(seed), **decisions}
            _write(results, outcome, lines)
            print(f"{name} seed {seed}: written to {results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
