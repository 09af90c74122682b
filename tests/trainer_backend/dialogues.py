"""Conversations that can be worked by hand, as a task app would bring them."""

from shared_schemas.messages import FunctionCall, Message, ToolCall
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import ObservationData, RewardPart, StepData, StepInfo, StopReason, Trajectory

DEFINITION = "last turn score: of the last answer"
TASK = Message(role="user", content="2 + 2?")
AGAIN = Message(role="user", content="try again")


def said(text):
    return Message(role="assistant", content=text)


def decision(turn, new, *, reused, score=None, changed=None, text="", calls=(), prompt_tokens=None):
    return StepData(
        turn=turn,
        observation_data=ObservationData(messages=tuple(new), messages_reused=reused, changed=changed or {}),
        action_taken={"type": "text", "content": text},
        tool_calls=tuple(calls),
        env_rewards=(0.0,),
        reward_parts=() if score is None else (RewardPart(source="interaction", value=score),),
        step_info=StepInfo(prompt_tokens=prompt_tokens, completion_tokens=3),
    )


def trajectory(steps, history, **changes):
    fields = {
        "env_name": "dialogue", "policy_name": "openai", "seed": 0, "steps": tuple(steps),
        "outcome_reward": 0.0, "outcome_definition": DEFINITION, "env_steps": len(steps), "terminated": True,
        "truncated": False, "stop_reason": StopReason.INTERACTION_DONE, "wall_s": 0.1,
        "full_history": tuple(
            Message(**{**message.model_dump(), "msg_id": number}) for number, message in enumerate(history)
        ),
    }  # fmt: skip
    return Trajectory(**(fields | changes))


def dialogue(*scores, **changes):
    """An answer for each score; between two the user says `AGAIN`."""
    steps, history = [], [TASK]
    for turn, score in enumerate(scores, start=1):
        text = f"answer {turn}"
        new = [TASK] if turn == 1 else [said(f"answer {turn - 1}"), AGAIN]
        reused = len(history) - len(new) if turn > 1 else 0
        steps.append(decision(turn, new, reused=reused, score=score, text=text, prompt_tokens=10 * turn))
        history += [said(text), AGAIN] if turn < len(scores) else [said(text)]
    return trajectory(steps, history, **({"outcome_reward": scores[-1]} | changes))


def tool_result(name, text):
    return Message(role="tool", content=text, tool_call_id="c", tool_name=name)


def call(name, arguments="{}"):
    return ToolCall(id="c", function=FunctionCall(name=name, arguments=arguments))


def reader():
    """Reads a chunk, deletes it with an id that is refused in the same reply, and answers."""
    read, cut = call("readChunk", '{"n": 1}'), call("deleteContext", '{"message_ids": [0, 2]}')
    calls_1 = Message(role="assistant", content="", tool_calls=(read,))
    calls_2 = Message(role="assistant", content="", tool_calls=(cut,))
    chunk = tool_result("readChunk", "the whole chunk")
    deleted = tool_result(
        "deleteContext",
        '{"status": "success", "deleted_msg_ids": [2], "message": "refused 0 (the task stays)"}',
    )
    stub = Message(role="tool", content="[deleted]", tool_call_id="c")
    steps = [
        decision(1, [TASK], reused=0, calls=[read], prompt_tokens=5),
        decision(2, [calls_1, chunk], reused=1, calls=[cut], prompt_tokens=50),
        decision(3, [calls_2, deleted], reused=3, changed={2: stub}, text="four", prompt_tokens=30),
    ]
    history = [TASK, calls_1, chunk, calls_2, deleted, said("four")]
    return trajectory(steps, history, deleted_msg_ids=(2,), had_delete_operation=True)


def finished(trajectory, seed=0, *, group="g0", sibling=0):
    played = trajectory.model_copy(update={"seed": seed})
    return Rollout(
        rollout_id=f"r/{group}/{seed}/{sibling}", run_id="r", iteration=0, group_id=group, sibling=sibling,
        attempt=0, instance_id="i", status="finished", trajectory=played,
    )  # fmt: skip
