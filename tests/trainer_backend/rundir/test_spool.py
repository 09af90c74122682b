"""What an interrupted stage has left: when it stands for a request of the next start, and when not."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared_schemas.rollouts import Rollout, RolloutRequest
from shared_schemas.trajectory import PolicyLogprobs
from tests.trainer_backend.rundir.disk import full_disk
from tests.trainer_backend.rundir.test_whole_files import Disk
from tests.trainer_backend.test_train import finished
from trainer_backend.collect.plan import retried
from trainer_backend.errors import RunNotWritten
from trainer_backend.rundir.spool import Spool, plan_digest, tidy_spools

HEADER = '{"policy_version": 0}'


def request(
    run: str, sibling: int, *, gateway: str = "http://a", key: str = "k", **changes: Any
) -> RolloutRequest:
    body = {
        "rollout_id": f"{run}/train/1/0/{sibling}",
        "run_id": run,
        "group_id": "train/1/0",
        "sibling": sibling,
        "start": {"seed": 5},
        "env": {"env_name": "crafter"},
        "policy": {
            "policy_name": "openai",
            "config": {"inference_url": gateway, "temperature": 1.0, "seed": sibling},
            "inference_key": key,
        },
    }
    return RolloutRequest.model_validate(body | changes)


def plan(run: str, **changes: Any) -> list[RolloutRequest]:
    return [request(run, sibling, **changes) for sibling in range(3)]


def begun(
    path: Path,
    requests: list[RolloutRequest],
    told: list[str],
    *,
    version: int = 4,
    gateway: str = "http://a",
):
    return Spool.open(
        path, requests, versions=range(version, version + 1), gateway_urls=(gateway,), tell=told.append
    )


def sampled_by(version: int, rollout: Rollout) -> Rollout:
    """The rollout, as this version would have played it."""
    assert rollout.trajectory is not None
    steps = []
    for step in rollout.trajectory.steps:
        assert isinstance(step.policy_logprobs, PolicyLogprobs)
        call = step.policy_logprobs.model_copy(update={"versions": ((0, version),)})
        steps.append(step.model_copy(update={"policy_logprobs": call}))
    trajectory = rollout.trajectory.model_copy(update={"steps": tuple(steps)})
    return rollout.model_copy(update={"trajectory": trajectory})


KEPT = finished(request("run.1", 0)).model_dump_json(exclude_unset=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "iteration_1.spool.jsonl"


def left(path: Path) -> list[Rollout]:
    """A first start has kept two of three, the second in its second attempt."""
    told: list[str] = []
    spool, requests = begun(path, plan("run.1"), told), plan("run.1")
    assert spool.rollouts_for(requests) == {}
    kept = [finished(item) for item in (requests[0], retried(requests[1]))]
    for rollout in kept:
        spool.keep(rollout)
    assert told == []
    return kept


def test_what_was_kept_stands_for_its_requests_in_the_next_start_under_its_ids(path: Path):
    kept, told = left(path), []
    requests = plan("run.2", gateway="http://b", key="another")
    found = begun(path, requests, told, gateway="http://b").rollouts_for(requests)
    assert list(found) == ["run.2/train/1/0/0", "run.2/train/1/0/1"]
    for before, after in zip(kept, found.values(), strict=True):
        assert (after.trajectory, after.run_id) == (before.trajectory, "run.2")
        assert after.rollout_id == before.rollout_id.replace("run.1/", "run.2/")
    assert told == ["2 rollouts of iteration_1.spool.jsonl were collected before, and are used"]


def test_a_branch_leaves_the_parent_of_this_start(path: Path):
    group = "train/1/0/0/branch-2"
    spool = begun(path, plan("run.1"), [])
    played = finished(request("run.1", 0, rollout_id=f"run.1/{group}/0"))
    trajectory = played.trajectory.model_copy(
        update={"parent_rollout_id": "run.1/train/1/0/0", "parent_turn": 1}
    )
    spool.keep(played.model_copy(update={"trajectory": trajectory}))
    start = {"snapshot": "s", "parent_rollout_id": "run.2/train/1/0/0", "parent_turn": 1}
    asked = request("run.2", 0, rollout_id=f"run.2/{group}/0", group_id=f"run.2/{group}", start=start)
    (found,) = begun(path, plan("run.2"), []).rollouts_for([asked]).values()
    assert found.group_id == f"run.2/{group}"
    assert found.trajectory is not None and found.trajectory.parent_rollout_id == "run.2/train/1/0/0"


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": {"policy_name": "openai", "config": {"temperature": 0.7}}},
        {"env": {"env_name": "crafter", "config": {"text": "full"}}},
        {"start": {"seed": 6}},
        {"gateway": "http://theirs"},
    ],
    ids=["temperature", "environment", "world", "a foreign server"],
)
def test_what_was_collected_for_something_else_stays_and_is_used_when_that_is_asked_for_again(
    path: Path, changes: Any, monkeypatch: pytest.MonkeyPatch
):
    left(path)
    told: list[str] = []
    requests = plan("run.2", **changes)
    spool = begun(path, requests, told)
    assert spool.rollouts_for(requests) == {}
    assert told == [
        f"2 rollouts of {path.name} answer no request of this job; they stay there until the stage has "
        "ended, in case a later start asks for them again"
    ]
    disk = Disk(path.parent, monkeypatch)
    spool.keep(finished(requests[2]))
    spool.keep(finished(requests[0]))
    assert disk.heard == [f"flush {path.name}"], "without the header they would answer the requests above"
    assert len(begun(path, plan("run.3"), []).rollouts_for(plan("run.3"))) == 2
    again = begun(path, plan("run.4", **changes), [])
    assert [one.sibling for one in again.rollouts_for(plan("run.4", **changes)).values()] == [0, 2]


def test_rollouts_of_other_weights_are_set_aside_under_names_of_their_own_and_told(path: Path):
    kept, told = left(path), []
    before = path.read_bytes()
    spool = begun(path, plan("run.2"), told, version=5)
    assert spool.rollouts_for(plan("run.2")) == {}
    (aside,) = path.parent.glob("*.unused-1.jsonl")
    assert aside.read_bytes() == before
    assert told == [
        f"{len(kept)} rollouts of {path.name} were collected by other weights, or their header is lost; they "
        f"are left in {aside.name}, unused"
    ]
    spool.keep(finished(request("run.2", 0)))
    begun(path, plan("run.3"), [], version=6)
    assert [item.name[-14:] for item in sorted(path.parent.glob("*.unused-*"))] == [
        "unused-1.jsonl", "unused-2.jsonl",
    ]  # fmt: skip


def test_a_rejected_rollout_leaves_those_of_other_plans_where_they_are(path: Path):
    left(path)
    others = plan("run.2", start={"seed": 6})
    spool = begun(path, others, [])
    spool.keep(finished(others[0]))
    begun(path, plan("run.3"), []).reject([finished(plan("run.3")[0])])
    assert [one.sibling for one in begun(path, plan("run.4"), []).rollouts_for(plan("run.4")).values()] == [1]
    assert len(begun(path, others, []).rollouts_for(others)) == 1


def test_the_header_of_an_earlier_version_names_its_requests_where_they_are_these(path: Path):
    left(path)
    rollouts = path.read_text().splitlines()[1:]
    header = {"plan": plan_digest(plan("run.1"), ("http://a",)), "policy_version": 4}
    path.write_text("".join(f"{line}\n" for line in (json.dumps(header), *rollouts)))
    assert begun(path, plan("run.2")[:2], []).rollouts_for(plan("run.2")) == {}
    assert len(begun(path, plan("run.3"), []).rollouts_for(plan("run.3"))) == 2
    assert len(begun(path, plan("run.4")[:1], []).rollouts_for(plan("run.4"))) == 1


def test_a_rollout_that_a_kill_cut_short_is_asked_for_again(path: Path):
    left(path)
    path.write_bytes(path.read_bytes()[:-20])
    requests = plan("run.2")
    spool = begun(path, requests, [])
    assert list(spool.rollouts_for(requests)) == ["run.2/train/1/0/0"]
    spool.keep(finished(requests[1]))
    assert len(begun(path, plan("run.3"), []).rollouts_for(plan("run.3"))) == 2


def test_a_header_that_was_cut_short_has_nothing_behind_it(path: Path):
    path.write_text('{"plan": "12')
    told: list[str] = []
    begun(path, plan("run.1"), told).keep(finished(request("run.1", 0)))
    assert len(begun(path, plan("run.2"), []).rollouts_for(plan("run.2"))) == 1
    assert told == []


def test_a_rollout_that_does_not_fit_the_disk_is_not_kept_and_those_before_it_are(path: Path):
    left(path)
    spool = begun(path, plan("run.2"), [])
    with (
        full_disk(path.stat().st_size + 9),
        pytest.raises(RunNotWritten, match=r"spool\.jsonl cannot be written"),
    ):
        spool.keep(finished(request("run.2", 2)))
    assert len(begun(path, plan("run.3"), []).rollouts_for(plan("run.3"))) == 2


def test_going_back_to_an_iteration_leaves_the_spools_that_are_of_its_weights(tmp_path: Path):
    spools = {"iteration": (2, 3, 4, 5), "evaluation": (2, 3, 4)}
    names = [f"{stage}_{number}" for stage, numbers in spools.items() for number in numbers]
    for name in ("warmup", *names):
        (tmp_path / f"{name}.spool.jsonl").write_text(f"{HEADER}\n{KEPT}\n")
    told: list[str] = []
    tidy_spools(tmp_path, 3, told.append)
    assert {path.name for path in tmp_path.iterdir()} == {
        "warmup.spool.jsonl",
        "iteration_4.spool.jsonl",
        "evaluation_3.spool.jsonl",
        "iteration_5.unused-1.jsonl",
        "evaluation_4.unused-1.jsonl",
    }
    assert len(told) == 2 and all("1 rollouts" in line and "no checkpoint holds" in line for line in told)
    # A run that begins again has only the rollouts that it began with.
    tidy_spools(tmp_path, -1, lambda line: None)
    assert {path.name for path in tmp_path.glob("*.spool.jsonl")} == {"warmup.spool.jsonl"}


def test_later_spools_stay_but_for_tokens_of_later_weights(tmp_path: Path):
    told: list[str] = []
    spools = {number: tmp_path / f"iteration_{number}.spool.jsonl" for number in (4, 5, 6)}
    for path in spools.values():
        spool = begun(path, plan("run.1"), told, version=3)
        for item, version in zip(plan("run.1"), (2, 3, 4), strict=True):
            spool.keep(sampled_by(version, finished(item)))
    tidy_spools(tmp_path, 3, told.append, policy_version=3)
    assert {path.name for path in tmp_path.glob("*.spool.jsonl")} == {path.name for path in spools.values()}
    requests = plan("run.2")
    # The last one is of use where no update until then takes a step, as while a critic warms up.
    for path in spools.values():
        spool = Spool.open(path, requests, versions=range(2, 4), gateway_urls=("http://a",), tell=told.append)
        assert [item.sibling for item in spool.rollouts_for(requests).values()] == [0, 1]
        assert len(path.with_name(path.name.replace(".spool.", ".unused-1.")).read_text().splitlines()) == 2
    old = Spool.open(spools[4], requests, versions=range(4, 6), gateway_urls=("http://a",), tell=told.append)
    assert old.rollouts_for(requests) == {}, "older than the iteration may be"


def test_what_a_full_disk_refuses_is_held_until_it_is_written(path: Path):
    requests = plan("run.1")
    spool = begun(path, requests, [])
    spool.hold()
    for item in requests:
        spool.keep(finished(item))
    with full_disk(), pytest.raises(RunNotWritten):
        spool.release()
    spool.release()
    assert list(begun(path, requests, []).rollouts_for(requests)) == [item.rollout_id for item in requests]
