from datetime import UTC, datetime

from shared_schemas.trajectory import StopReason, transcript
from task_app.dialects.one_call.reply import Episode, Facts, Stepwise, reply
from task_app.dialects.one_call.request import LegacyEnv, LegacyPolicy, LegacyRollout
from task_app.protocols import Observation
from tests.trainer_backend.dialogues import AGAIN, TASK, dialogue, reader

SAID = [("user", TASK.content), ("assistant", "answer 1"), ("user", AGAIN.content), ("assistant", "answer 2")]


def test_a_conversation_says_everything_once():
    assert [(item.role, item.content) for item in transcript(dialogue(0.0, 1.0).steps)] == SAID
    roles = [item.role for item in transcript(reader().steps)]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]


def test_the_legacy_reply_holds_the_whole_prompt_of_each_decision():
    steps = dialogue(0.0, 1.0).steps
    seen = tuple(Observation("", {}, {}, 0.0) for _ in range(3))
    body = LegacyRollout(run_id="r", env=LegacyEnv(), policy=LegacyPolicy(), ops=())
    facts = Facts(
        body, "dialogue", "openai", 0, None, None, {}, Stepwise(), (), datetime(2025, 1, 1, tzinfo=UTC)
    )
    told = reply([Episode(steps, seen, 1.0, StopReason.INTERACTION_DONE)], facts, aborted=False)
    prompts = [
        [(item["role"], item["content"]) for item in step["info"]["meta"]["inference_request"]["messages"]]
        for step in told["trajectories"][0]["steps"]
    ]
    assert prompts == [SAID[:1], SAID[:3]]
