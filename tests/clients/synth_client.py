"""synth-ai 0.2.16: its client of task apps, its checks of their replies, and its clients of models."""

import os

from script import CALL, TOOL, main, on, script
from synth_ai.task.client import TaskAppClient
from synth_ai.task.contracts import RolloutEnvSpec, RolloutMode, RolloutPolicySpec, RolloutRequest
from synth_ai.task.validators import validate_rollout_response_for_rl, validate_task_app_endpoint
from synth_ai.v0.lm.vendors.synth_client import AsyncOpenAI, OpenAI


def _user(*answers):
    return [{"role": "system", "content": "Be short."}, {"role": "user", "content": script(*answers)}]


def _client(server):
    return OpenAI(api_key=server.key, base_url=server.openai_url)


def plain(server):
    reply = _client(server).chat.completions.create(
        model=server.model, messages=_user("Two."), temperature=0.5
    )
    assert reply.choices[0].message.content == "Two."


@on("capture")
async def thinking_budget(server):
    """A setting of its own servers, which it adds to each call where two variables are set."""
    os.environ |= {"SYNTH_THINKING_MODE": "no_think", "SYNTH_THINKING_BUDGET": "64"}
    client = AsyncOpenAI(api_key=server.key, base_url=server.openai_url)
    try:
        reply = await client.chat.completions.create(model=server.model, messages=_user("Two."))
    finally:
        del os.environ["SYNTH_THINKING_MODE"], os.environ["SYNTH_THINKING_BUDGET"]
    assert reply.choices[0].message.content == "Two."


def tools(server):
    for choice in ("auto", "required"):
        reply = _client(server).chat.completions.create(
            model=server.model, messages=_user(CALL), tools=[TOOL], tool_choice=choice
        )
        assert reply.choices[0].message.tool_calls[0]["function"]["name"] == "add"


def json_mode(server):
    reply = _client(server).chat.completions.create(
        model=server.model, messages=_user('{"a": 1}'), response_format={"type": "json_object"}
    )
    assert reply.choices[0].message.content == '{"a": 1}'


async def streaming(server):
    client = AsyncOpenAI(api_key=server.key, base_url=server.openai_url)
    stream = await client.chat.completions.create(
        model=server.model, messages=_user("One, two."), stream=True
    )
    texts = [part.choices[0].delta.content or "" async for part in stream if part.choices]
    assert "".join(texts) == "One, two."


@on("capture")
def retries(server):
    """It repeats a 429, and no 503."""
    reply = _client(server).chat.completions.create(model=server.model, messages=_user("ok"))
    assert reply.choices[0].message.content == "ok"


@on("capture")
async def task_app(server):
    async with TaskAppClient(server.service, server.service_key) as client:
        assert (await client.health())["status"]
        assert await client.info()
        assert (await client.task_info()).environment
        first, second = await client.task_info(seeds=[7, 8])
        assert first.task.id and second.limits


@on("capture")
async def environment(server):
    async with TaskAppClient(server.service, server.service_key) as client:
        made = await client.env.initialize("counting", {"seed": 1})
        calls = [{"tool": "add", "args": {"names": ["a"]}}]
        step = await client.env.step("counting", {"env_id": made["env_id"], "action": {"tool_calls": calls}})
        assert step["reward"] == 1.0, step
        assert await client.env.terminate("counting", {"env_id": made["env_id"]})


def _rollout(server, mode):
    config = {
        "inference_url": f"{server.openai_url}?cid=trace_1",
        "model": server.model,
        "api_key": server.key,
    }
    return RolloutRequest(
        run_id="run",
        env=RolloutEnvSpec(env_name="counting", seed=1),
        policy=RolloutPolicySpec(policy_name="openai", config=config),
        ops=["agent", "env"] * 2,
        on_done="terminate",
        mode=mode,
    )


@on("capture")
async def rollout(server):
    """A rollout in its form, which its check for RL accepts; the model is this capture."""
    async with TaskAppClient(server.service, server.service_key) as client:
        for mode in RolloutMode:
            reply = await client.rollout(_rollout(server, mode))
            assert reply.metrics.num_steps == 2, reply
            assert validate_rollout_response_for_rl(reply.model_dump()) == []


@on("capture")
async def endpoint(server):
    """Its check of a deployed task app."""
    has_passed, results = await validate_task_app_endpoint(
        server.service, server.service_key, min_instances=1
    )
    assert has_passed, results


if __name__ == "__main__":
    main(globals())
