"""The simulation of runs on many GPUs: seconds worked out by hand, and rules that are those of a run."""

import asyncio
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from bench import scale
from bench.scale_model import Conversation, Core, CpuCost, SimulatedReplica, Speed
from bench.scale_run import Cluster, Costs, simulated
from bench.virtual_time import in_virtual_time
from shared_schemas.trajectory import Sampling
from trainer_backend.inference.actor import Extras

FREE = CpuCost(0.0, 0.0)
# 10 ms a step of up to 4 rows; a prompt token takes 1 ms; a cache of 1000 tokens.
SPEED = Speed(weights_s=0.01, row_s=0.0, prompt_s=0.001, cached_s=0.0, room=1000, max_running=4, load_s=3.0)
# Two decisions of 100 tokens, and no waits.
TALK = Conversation(2, 0, 0, 100, 0, spread=0.0, most_decisions=50)
COSTS = Costs(TALK, FREE, FREE, FREE, FREE, update_token_s=0.001, speed=SPEED)
CLUSTER = Cluster(ranks=1, replicas=1, gateways=1, task_apps=1, places=4, max_staleness=0)


def seconds(*requests: tuple[str, int, int], speed: Speed = SPEED, at_once: bool = True) -> float:
    """Virtual seconds until a replica has answered requests of (session, prompt, answer)."""

    async def work() -> None:

        replica = SimulatedReplica("http://replica", speed)
        calls = [
            replica.generate(
                range(prompt), Sampling(max_tokens=answer), request_id="", extras=Extras(session=session)
            )
            for session, prompt, answer in requests
        ]
        if at_once:
            await asyncio.gather(*calls)
            return
        for call in calls:
            await call

    return in_virtual_time(work())[1]


def test_rows_of_a_step_are_decoded_together_and_what_has_no_room_waits():
    assert seconds(("a", 0, 100)) == pytest.approx(1.0)
    assert seconds(*[(name, 0, 100) for name in "abcd"]) == pytest.approx(1.0)
    assert seconds(*[(name, 0, 100) for name in "abcde"]) == pytest.approx(2.0), "four rows, then one"
    small = replace(SPEED, room=150)
    assert seconds(("a", 0, 100), ("b", 0, 100), speed=small) == pytest.approx(2.0), "one fits at a time"


def test_a_prompt_is_computed_once_unless_others_needed_its_room():
    first, second = ("a", 100, 100), ("a", 300, 100)
    # 0.1 + 1 s, then the 100 new ones of 300: 0.1 + 1 s
    assert seconds(first, second, at_once=False) == pytest.approx(2.2)
    between = ("b", 700, 100)  # 0.7 + 1 s, and 200 + 800 tokens fill the cache
    assert seconds(first, between, second, at_once=False) == pytest.approx(1.1 + 1.7 + 1.1)
    longer = ("b", 800, 100)
    assert seconds(first, longer, second, at_once=False) == pytest.approx(1.1 + 1.8 + 1.3), "all 300 anew"


def test_an_iteration_takes_its_stages_in_turn_or_the_longer_of_the_two():
    # 4 episodes of 2 s at once; 800 tokens take 0.8 s of the learner; 3 s of loading
    assert simulated(CLUSTER, COSTS, 4, 6).iteration_s == pytest.approx(2.0 + 0.8 + 3.0)
    quick = replace(COSTS, speed=replace(SPEED, load_s=0.0), update_token_s=0.002)
    turns = simulated(CLUSTER, quick, 4, 12)
    ahead = simulated(replace(CLUSTER, max_staleness=1), quick, 4, 12)
    assert turns.iteration_s == pytest.approx(2.0 + 1.6)
    assert ahead.iteration_s == pytest.approx(2.0, rel=0.1), "the update of 1.6 s is hidden"
    assert ahead.busy["learner"] == pytest.approx(0.8, rel=0.1)


def test_a_process_that_is_its_core_is_the_bottleneck_and_others_beside_it_help():
    # 32 decisions of half a second each on one core
    slow = replace(COSTS, gateway=CpuCost(5e5, 0.0), update_token_s=0.0, speed=replace(SPEED, load_s=0.0))
    roomy = replace(CLUSTER, replicas=4, places=16)
    one = simulated(roomy, slow, 16, 4)
    assert one.iteration_s == pytest.approx(16.0, rel=0.2)
    assert one.busy["gateway"] > 0.8
    four = simulated(replace(roomy, gateways=4), slow, 16, 4)
    assert four.iteration_s < one.iteration_s / 2, "they share the rollouts by hash, so not evenly"


def test_the_same_run_gives_the_same_figures():
    draws = replace(COSTS, conversation=replace(TALK, spread=0.8, wait_s=1.0))
    cluster = replace(CLUSTER, replicas=3, gateways=2, task_apps=2, max_staleness=1)
    assert simulated(cluster, draws, 12, 3) == simulated(cluster, draws, 12, 3)


def test_with_keep_no_row_holds_up_new_weights():
    long = replace(COSTS, conversation=replace(TALK, answer_tokens=1000), update_token_s=0.0)
    ahead = replace(CLUSTER, max_staleness=1, places=8)
    waits = simulated(ahead, long, 4, 6).busy["publish"]
    keeps = simulated(replace(ahead, weight_update="keep"), long, 4, 6).busy["publish"]
    assert keeps < waits


def test_work_on_a_core_waits_for_work_before_it():

    core = Core()

    async def work() -> None:
        await asyncio.gather(core.use(1.0), core.use(2.0))

    assert in_virtual_time(work())[1] == 3.0
    assert core.busy_s == 3.0


def test_costs_of_a_users_file_go_over_ours_and_unknown_ones_are_refused(tmp_path: Path):
    own = tmp_path / "own.toml"
    own.write_text("[gateway]\ndecision_us = 5\n")
    assert scale.tables(own)["gateway"]["decision_us"] == 5.0
    assert scale.tables(own)["gateway"]["token_us"] == scale.tables()["gateway"]["token_us"]
    own.write_text("[gateway]\ndecision_ms = 5\n")
    with pytest.raises(SystemExit, match=r"\[gateway\] decision_ms is no cost"):
        scale.tables(own)


def test_each_cost_says_where_it_is_from():

    for costs in tomllib.loads(scale.COSTS.read_text()).values():
        for cost in costs.values():
            assert cost["kind"] in {"measured", "published", "arithmetic", "assumed"} and cost["source"]


def test_gpus_go_where_learner_and_replicas_take_equally_long():
    planning = scale.Planning(scale.tables())
    cluster, _ = planning.cluster(8, 1000)
    assert cluster.ranks + cluster.replicas == 8
    shared, _ = planning.cluster(1, 1000)
    assert (shared.ranks, shared.replicas, shared.max_staleness) == (1, 1, 0), "they take turns"


def test_replicas_that_are_never_idle_set_the_pace_also_in_the_last_iteration():
    # 8 episodes of two decisions of 1 s, four at a time: 4 s, with hardly an update
    full = replace(COSTS, speed=replace(SPEED, load_s=0.0, prompt_s=0.0), update_token_s=1e-6)
    ahead = replace(CLUSTER, max_staleness=1, places=8, weight_update="keep")
    for iterations in (2, 3, 6):
        figures = simulated(ahead, full, 8, iterations)
        assert figures.iteration_s == pytest.approx(4.0, rel=0.01)
        assert figures.busy["replicas"] == pytest.approx(1.0, rel=0.01)
