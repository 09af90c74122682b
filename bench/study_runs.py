"""Runs the arms of a study, which start from one checkpoint per seed; a stopped study can be resumed.

A study defines its arms (`Study`) and calls `main`. Finished runs are skipped, and interrupted ones are
resumed. After each arm the results are written again from all runs on disk, so the arms may be run in any
number of calls.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.kit import ROOT, write_results
from bench.study_results import Study, collect, draw, table
from trainer_backend.job.code_files import with_files_of_now
from trainer_backend.job.load import dump_job, load_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import ModelTable
from trainer_backend.run.beginning import Stopped
from trainer_backend.rundir.layout import RunDirectory, create_run, open_run
from trainer_backend.start import run_job
from trainer_backend.terminal.progress import ConsoleReporter


def run_study(
    study: Study,
    folder: Path,
    results: Path,
    *,
    seeds: Sequence[int],
    arms: Sequence[str],
    settings: Sequence[str],
) -> dict[str, Any]:
    """Run missing arms, and write the results after each."""
    outcome: dict[str, Any] = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    made = study.models(study, folder, settings) if study.models else {}
    for seed in seeds:
        common = named((*settings, f"job.seed={seed}"), made)
        for arm in arms:
            switches = (*common, *named(study.arms[arm].switches, made))
            of_seed = folder / f"seed_{seed}"
            if study.from_the_start:
                job = load_job(ROOT / study.job, switches).config
            else:
                warmed_by = switches if study.own_warm_starts else common
                name = f"{arm}_warm" if study.own_warm_starts else "warm_start"
                warm_start = finished(of_seed / name, warm_start_job(study, warmed_by))
                job = arm_job(study, switches, warm_start.checkpoints / "iteration_0")
            finished(of_seed / arm, job)
            outcome = collect(study, folder, settings, outcome)
            write_results(results, outcome, allow_nan=False)
            draw(study, outcome, results.with_suffix(".png"))
    return outcome


def named(settings: Sequence[str], made: Mapping[str, str]) -> tuple[str, ...]:
    """Return the settings with each `{name}` of a model replaced by the model's path."""
    found = list(settings)
    for name, path in made.items():
        found = [item.replace(f"{{{name}}}", path) for item in found]
    return tuple(found)


def warm_start_job(study: Study, settings: Sequence[str]) -> JobConfig:
    """Return the job of the warm-up and its evaluation, without RL."""
    return load_job(ROOT / study.job, (*settings, "training.iterations=0")).config


def arm_job(study: Study, settings: Sequence[str], checkpoint: Path) -> JobConfig:
    """Return an arm's job of RL, which begins at the warm start's checkpoint."""
    job = load_job(ROOT / study.job, settings).config
    return job.model_copy(update={"warmup": None, "model": ModelTable(path=checkpoint)})


def finished(path: Path, job: JobConfig) -> RunDirectory:
    """Return the run in `path`; start or resume it if it is not finished."""
    resume = (path / "run.json").exists()
    directory = open_run(path) if resume else create_run(job, path)
    if resume and dump_job(with_files_of_now(directory.job())) != dump_job(with_files_of_now(job)):
        raise SystemExit(f"{path} was made with other settings; move it away, or give another --out")
    if directory.is_finished(job.training.iterations):
        return directory
    with ConsoleReporter(Console()) as reporter:
        reporter.say(f"{path}: {'resumed' if resume else 'started'}")
        ended = asyncio.run(run_job(job, directory, reporter, resume=resume))
    if ended.stopped or not directory.is_finished(job.training.iterations):
        raise Stopped(f"{path} is not finished")
    return directory


def main(study: Study, arguments: Sequence[str] | None = None) -> int:
    """Run the command line of a study's script, and return the exit code."""
    options = _parser(study).parse_args(arguments)
    name = f"{study.name}_quick" if options.quick else study.name
    folder = (options.out or ROOT / "runs" / name).resolve()
    results = options.results or (folder if options.quick else ROOT / "bench" / "results") / f"{name}.json"
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    settings = study.quick if options.quick else study.settings
    try:
        outcome = run_study(study, folder, results, seeds=seeds, arms=options.arms, settings=settings)
    except Stopped as stopped:
        print(f"stopped: {stopped}; the same command goes on from there")
        return 130
    Console().print(table(study, outcome))
    print(json.dumps({"study": name, "results": str(results), **outcome["summary"]}))
    return 0


def _parser(study: Study) -> argparse.ArgumentParser:
    names = list(study.arms)
    parser = argparse.ArgumentParser(description=study.title)
    parser.add_argument("--quick", action="store_true", help="20 seconds; shows that it works, no more")
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="default: 0 1 2")
    parser.add_argument("--arms", nargs="+", choices=names, default=names, help="default: all, in this order")
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs")
    parser.add_argument("--results", type=Path, default=None, help="JSON file to write")
    return parser
