from datetime import UTC, datetime

from shared_schemas.trajectory import StopReason, transcript
from task_app.dialects.one_call.plan import plan_rollout
from task_app.dialects.one_call.reply import Cast, Episode, Result, reply
from task_app.dialects.one_call.request import LegacyEnv, LegacyPolicy, LegacyRollout, Stepwise
from task_app.environments.dialogue import DialogueConfig, DialogueEnvironment
from task_app.plugins import default_plug_boards
from task_app.policies.scripted import RandomPolicy
from task_app.protocols import Observation
from task_app.settings import Settings
from tests.trainer_backend.dialogues import AGAIN, TASK, dialogue, reader

SAID = [("user", TASK.content), ("assistant", "answer 1"), ("user", AGAIN.content), ("assistant", "answer 2")]


def test_a_conversation_says_everything_once():
    assert [(item.role, item.content) for item in transcript(dialogue(0.0, 1.0).steps)] == SAID
    roles = [item.role for item in transcript(reader().steps)]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]


def test_the_legacy_reply_holds_the_whole_prompt_of_each_decision():
    steps = dialogue(0.0, 1.0).steps
    seen = tuple(Observation("", {}, {}, 0.0) for _ in range(3))
    env, policy = LegacyEnv(env_name="dialogue", seed=0), LegacyPolicy(policy_name="random")
    body = LegacyRollout(run_id="r", env=env, policy=policy, ops=("agent", "env"))
    plan = plan_rollout(body, default_plug_boards(), Settings())
    dialogue_of_two = DialogueEnvironment(DialogueConfig(prompt="?"))
    cast = Cast(plan, dialogue_of_two, RandomPolicy(), Stepwise(), None, seed=0, inference_url=None)
    result = Result([Episode(steps, seen, 1.0, StopReason.INTERACTION_DONE)])
    told = reply(result, cast, created_at=datetime(2025, 1, 1, tzinfo=UTC))
    prompts = [
        [(item["role"], item["content"]) for item in step["info"]["meta"]["inference_request"]["messages"]]
        for step in told["trajectories"][0]["steps"]
    ]
    assert prompts == [SAID[:1], SAID[:3]]
