"""The study of two hosts, as far as it needs no root: its jobs, and what it takes for success."""

import tomllib
from dataclasses import replace
from typing import Any

from bench import study_hosts
from bench.study_hosts import CUT, PERFECT
from trainer_backend.job.load import parse_job

GOOD: dict[str, Any] = {"exit_code": 0, "weights": "b", "played_once": True}
ONE_HOST = {"exit_code": 0, "weights": "b", "first_weights": "a"}
ENDED = {
    **GOOD,
    "exit_code": 1,
    "last_words": f"no learner at {study_hosts.LEARNER}",
    "resumed_exit_code": 0,
}


def test_the_job_of_two_hosts_is_that_of_one_but_for_addresses_and_patience():
    one, two = (
        parse_job(tomllib.loads(study_hosts.job_text(two_hosts=both, ranks=2)), where="tests").config
        for both in (False, True)
    )
    assert two.learner.url == study_hosts.LEARNER and two.learner.nnodes == 2
    same = {"cluster": one.cluster, "learner": one.learner, "services": one.services}
    assert two.model_copy(update=same) == one


def test_a_case_that_ends_with_other_weights_or_without_a_word_does_not_hold():
    cases = {"one_host": ONE_HOST, "plain": GOOD, "ranks": {**GOOD, "weights": "c"}, "cut": ENDED}
    assert all(study_hosts.holds(cases).values())
    for name, key, value in (
        ("plain", "weights", "a"),
        ("plain", "played_once", False),
        ("ranks", "exit_code", 1),
        ("cut", "exit_code", -1),
        ("cut", "last_words", "error"),
        ("cut", "resumed_exit_code", 1),
        ("one_host", "first_weights", "b"),
    ):
        assert not all(study_hosts.holds({**cases, name: {**cases[name], key: value}}).values()), (name, key)


def test_a_partition_is_over_after_its_time_and_a_cut_is_not():
    class Wire:
        quality = PERFECT

    wire: Any = Wire()
    study_hosts.CASES["plain"].disturb(wire)
    assert wire.quality is PERFECT
    study_hosts.CASES["cut"].disturb(wire)
    assert wire.quality is CUT
    assert study_hosts.CASES["partition"].later_s == study_hosts.PARTITION_S
    assert replace(study_hosts.CASES["cut"], later_s=0.0).later is CUT
