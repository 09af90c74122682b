"""The learning curve of one run: what is read of its metrics, and a picture of it."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.learning_curve import MEASURES, main

ENDS = ("", "_low", "_high")


def evaluation(iteration: int, unique: float) -> dict[str, Any]:
    told = {f"eval/{name}{end}": unique for name in MEASURES for end in ENDS}
    row = {"kind": "evaluation", "iteration": iteration, "eval/episodes": 2, "time/evaluate_s": 1.0}
    return row | told


def store_games(path: Path, outcomes: dict[int, float]) -> None:
    rows = [
        {"group_id": f"eval/{seed}", "seed": seed, "outcome_reward": outcome, "status": "finished"}
        for seed, outcome in outcomes.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_a_curve_has_every_evaluation_and_iteration_and_the_gain_world_by_world(tmp_path: Path):
    outcomes = {f"episode/outcome_reward{end}": 15.5 for end in ENDS}
    training = {"kind": "iteration", "iteration": 1, "episode/count": 4.0, "optim/lr": 1e-4} | outcomes
    rows = [evaluation(0, 15.0), training, evaluation(1, 16.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    store_games(tmp_path / "evaluation_0.parquet", {7: 14.0, 8: 16.0})
    store_games(tmp_path / "evaluation_1.parquet", {8: 16.5, 7: 15.5})
    out = tmp_path / "out"
    out.mkdir()

    assert main([str(tmp_path), "--name", "curve", "--out", str(out)]) == 0

    found = json.loads((out / "curve.json").read_text())
    assert [row["unique_achievements"] for row in found["evaluations"]] == [15.0, 16.0]
    assert found["training"] == [
        {
            "iteration": 1, "episodes": 4.0, "optim/lr": 1e-4,
            "unique_achievements": 15.5, "unique_achievements_low": 15.5, "unique_achievements_high": 15.5,
        }
    ]  # fmt: skip
    assert found["gains_world_by_world"]["1"]["mean"] == 1.0  # (1.5 + 0.5) / 2
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
