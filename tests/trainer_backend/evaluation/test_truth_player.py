"""The player of continuations, on stand-ins for task app and gateway: what they fail is in no mean.

Each stored or sampled decision says "stay" or "go"; numbers are worked by hand.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from shared_schemas.replay import ReplayRequest
from shared_schemas.rollouts import Rollout, RolloutFailure, RolloutRequest
from tests.conftest import tiny_job
from tests.trainer_backend.collect.scripted_task_app import wrap
from tests.trainer_backend.pages.hand_made import rollout
from trainer_backend import job_parts
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.plan import Inference
from trainer_backend.collect.wire import TaskAppLost
from trainer_backend.core.truth import CHOICES, Departures
from trainer_backend.credit.rewards import Rewards
from trainer_backend.data.dataset import RowIdentity
from trainer_backend.errors import RunDirectoryError
from trainer_backend.evaluation.truth import Source, find_playable
from trainer_backend.evaluation.truth_player import ContinuationPlayer, StoredDecision
from trainer_backend.rundir.data_record import DataRecord
from trainer_backend.rundir.truth_file import TruthSetting, select_play, select_rewards

PAIRS = 4
CHOSEN = CHOICES * PAIRS
JOB = tiny_job(training__step_rewards_mode="env_sparse")
SETTING = TruthSetting(
    run_id="r", iteration=1, checkpoint="iteration_0", gamma=0.5, continuations=PAIRS, horizon=None,
    fresh_draws=False, seed=0, rewards=select_rewards(JOB.training), play=select_play(JOB.rollout),
)  # fmt: skip
# None: infrastructure fails it.
Answer = Callable[[RolloutRequest], Rollout | None]


def played(*decisions: tuple[str, float]) -> Rollout:
    """An episode of these words and rewards."""
    episode = rollout(1, [()] * len(decisions), group="train/1/0")
    steps = tuple(
        step.model_copy(update={"action_taken": {"type": "text", "content": word}, "env_rewards": (reward,)})
        for step, (word, reward) in zip(episode.trajectory.steps, decisions, strict=True)
    )
    trajectory = episode.trajectory.model_copy(
        update={"steps": steps, "final_snapshot": f"after {decisions[-1][0]}"}
    )
    return episode.model_copy(update={"trajectory": trajectory})


LOST = played(("", 0.0))


class Desk:
    """Stands in for a dispatcher: answers each request by a function of it."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.acked: list[int] = []

    async def collect(self, requests: Sequence[RolloutRequest]) -> Batch:
        answers = {request.sibling: self._answer(request) for request in requests}
        failure = RolloutFailure(code="inference_unavailable", detail="connection refused")
        failed = {"status": "failed", "trajectory": None, "failure": failure}
        return Batch(
            tuple(item.model_copy(update={"sibling": n}) for n, item in answers.items() if item is not None),
            tuple(
                LOST.model_copy(update={"sibling": n, **failed})
                for n, item in answers.items()
                if item is None
            ),
        )

    async def ack(self, run_id: str, rollouts: Sequence[Rollout]) -> None:
        self.acked += [item.sibling for item in rollouts]


class Client:
    """Stands in for a task app's client; `outages` of its replays end without an answer."""

    fault = None
    url = "http://127.0.0.1:1"

    def __init__(self, outages: int = 0) -> None:
        self.outages, self.replays = outages, 0

    async def snapshots(self, record: ReplayRequest) -> dict[int, str]:
        self.replays += 1
        if self.replays <= self.outages:
            raise TaskAppLost("no answer")
        return {turn: f"the moment after {turn}" for turn in record.snapshots}


def player(answer: Answer, client: Client | None = None) -> ContinuationPlayer:
    inference = Inference("http://127.0.0.1:1", "tiny/actor", SecretStr("k"))
    return ContinuationPlayer(
        job_parts.planner(JOB, "tiny.truth", inference), Desk(answer), wrap([client or Client()]),
        Rewards(JOB.training, JOB.max_decisions), SETTING,
    )  # fmt: skip


def stored() -> StoredDecision:
    """The first of two decisions: it stayed, which earned 1."""
    kept = played(("stay", 1.0), ("stay", 0.0))
    return StoredDecision(kept, kept.trajectory.steps[0])


def is_first(request: RolloutRequest) -> bool:
    return request.group_id.endswith("-first")


def half_go(request: RolloutRequest) -> Rollout | None:
    """Half of the choices stay, as stored, and half go; who stayed earns 2 after it, and who went 0."""
    if is_first(request):
        return played(("stay", 1.0)) if request.sibling < CHOSEN // 2 else played(("go", 0.0))
    return played(("on", 2.0 if request.sibling % 2 == 0 else 0.0))


def lost(*siblings: int, first: bool = False, answer: Answer = half_go) -> Answer:
    """The same, but these fail."""
    return lambda item: None if item.sibling in siblings and is_first(item) is first else answer(item)


async def test_a_measured_decision_is_the_difference_of_both_sides_over_the_policys_choices():
    truth = await player(half_go).truth(stored())
    # Q = 1 + 2/2, and who goes has 0; half of the choices stay: A = 1/2 * 0 + 1/2 * 2
    assert (truth.advantage, truth.action_value, truth.reward) == (1.0, 2.0, 1.0)
    assert (truth.pairs, truth.others, truth.failed) == (4, 2, 0)
    assert truth.error == math.sqrt(1 / CHOSEN), "all that varies is the choice"
    assert truth.departures == Departures(CHOSEN, CHOSEN / 2, pairs=2, square=4.0)


@pytest.mark.parametrize("side", [0, 1])
async def test_a_pair_of_which_infrastructure_fails_one_side_is_counted_and_in_no_mean(side: int):
    # The first of the two pairs that went is number 8, so its sides are 16 and 17.
    truth = await player(lost(CHOSEN + side)).truth(stored())
    assert (truth.advantage, truth.action_value) == (1.0, 2.0)
    assert (truth.pairs, truth.others, truth.failed) == (3, 1, 1)
    assert truth.error > math.sqrt(1 / CHOSEN)


async def test_the_zeros_of_pairs_that_chose_as_stored_do_not_stand_for_what_was_lost():
    # 7 of 16 stay, which is not two pairs of 4, and each other choice is another one: all are one stratum.
    def each_another(request: RolloutRequest) -> Rollout | None:
        if is_first(request):
            stays = request.sibling < 7
            return played(("stay", 1.0)) if stays else played((f"go {request.sibling}", 0.0))
        return half_go(request)

    whole = await player(each_another).truth(stored())
    one_less = await player(lost_pair(each_another)).truth(stored())
    assert (whole.others, one_less.others, one_less.failed) == (2, 1, 1)
    # 2 of 4 pairs went, also where one of them was lost; (2 + 0 + 0) / 3 would be less.
    assert whole.advantage == one_less.advantage == 2 / 4 * 2


def lost_pair(answer: Answer) -> Answer:
    """Fails one of the pairs that are played: the first of which it is asked for both sides."""
    failing: list[int] = []

    def answered(request: RolloutRequest) -> Rollout | None:
        if not is_first(request) and not failing:
            failing.append(request.sibling // 2)
        return None if not is_first(request) and request.sibling // 2 in failing else answer(request)

    return answered


async def test_a_decision_is_lost_where_nothing_is_left_of_a_choice():
    # All pairs that went; two zeros of those that stayed are left, and say nothing about it.
    assert await player(lost(16, 17, 18, 19)).truth(stored()) is None


async def test_a_choice_that_infrastructure_fails_is_not_the_policys():
    # 2 of 8 that stayed fail, so A = 6/14 * 0 + 8/14 * 2.
    truth = await player(lost(0, 1, first=True)).truth(stored())
    assert truth.advantage == pytest.approx(8 / 14 * 2)
    assert await player(lost(*range(CHOSEN), first=True)).truth(stored()) is None


async def test_a_moment_is_asked_for_twice_before_a_decision_is_lost():
    one, two = Client(outages=1), Client(outages=2)
    assert (await player(half_go, one).truth(stored())).advantage == 1.0
    assert await player(half_go, two).truth(stored()) is None
    assert (one.replays, two.replays) == (2, 2)


async def test_what_failed_is_forgotten_by_the_task_app_too():
    playing = player(lost(CHOSEN))
    await playing.truth(stored())
    assert sorted(playing.dispatcher.acked) == [*range(CHOSEN), *range(CHOSEN, CHOSEN + 4)]


def test_rollouts_whose_row_was_replaced_since_are_left_out():
    rollouts = [
        rollout(number, [()]).model_copy(update={"rollout_id": f"r{row}", "group_id": f"train/1/0/{row}"})
        for number, row in enumerate("abc")
    ]
    source = Source(1, rollouts, Path("iteration_0"))
    rows = {name: RowIdentity("training", name, f"content {name}", "task", "") for name in "abc"}
    record = DataRecord(tuple(rows.values()), by_position=False)
    changed = record.followed_by([rows["a"], rows["b"]._replace(content="other")], 1)
    assert find_playable(source, None) == find_playable(source, record) == rollouts
    assert [item.rollout_id for item in find_playable(source, changed)] == ["ra"]
    with pytest.raises(RunDirectoryError, match="rows of all 3 rollouts of iteration 1 are gone or changed"):
        find_playable(source, changed.followed_by([], 1))
    later = replace(source, iteration=2)
    assert find_playable(later, changed) == rollouts, "played on rows of now"
