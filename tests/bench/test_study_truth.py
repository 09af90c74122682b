"""The study of the truth: its figures follow from stored decisions."""

import json
from dataclasses import asdict

import pytest

from bench.kit import ROOT
from bench.study_truth import rescored
from trainer_backend.core.truth import Departures, TrueAdvantage, measure_noise

RESULTS = ROOT / "bench" / "results" / "truth.json"


def test_figures_follow_from_the_decisions():
    truths = [
        TrueAdvantage(f"r{n}", 1, 0.0, float(n % 2), 0.25, None, 4, 0, 2, 9, Departures(16, 8.0, 2, 1.0))
        for n in range(4)
    ]
    columns = {name: [asdict(item)[name] for item in truths] for name in asdict(truths[0])}
    seed = json.loads(RESULTS.read_text(encoding="utf-8"))["whole"]["seeds"]["0"]
    advantages = {"gae": [1.0, 2.0, 3.0, 4.0], "gae, lambda 0": [0.0, 2.0, 0.0, 2.0]}
    groups = {item.rollout_id: "a" for item in truths}
    found = rescored(seed, {"truths": columns, "advantages": advantages, "groups": groups})
    assert found["noise"] == {**asdict(measure_noise(truths)), "ratio": measure_noise(truths).ratio}
    # T is 0 or 1: variance 0.25, of which 0.0625 is noise; A, twice T, has std 1
    other = found["estimators"]["gae, lambda 0"]
    assert (other["correlation"], other["std"]) == (pytest.approx(1.0), 1.0)
    assert other["unbiased"] == pytest.approx(0.1875 / 0.5)
    assert other["gradient_cosine"] == seed["estimators"]["gae, lambda 0"]["gradient_cosine"]
