"""The package `litellm`: the server as `openai/…`, `hosted_vllm/…` and `anthropic/…`."""

from functools import partial

import litellm
from script import CALL, CITY, LONG, TOOL, City, main, on, refused, script

litellm.suppress_debug_info = True


def _ways(server):
    """Arguments that name the model, for each dialect."""
    yield {"model": f"openai/{server.model}"}
    yield {"model": f"hosted_vllm/{server.model}", "api_base": server.openai_url, "api_key": server.key}
    if server.kind == "capture":
        yield {"model": f"anthropic/{server.claude}"}
        yield {"model": "openai/gpt-5"}


def _user(*answers, text=""):
    return [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": script(*answers, text=text)},
    ]


def _completion(way, *answers, text="", **more):
    options = {"num_retries": 0, "max_retries": 0, **more}
    return litellm.completion(**way, messages=_user(*answers, text=text), **options)


def plain(server):
    for way in _ways(server):
        assert _completion(way, "Two.").choices[0].message.content == "Two."


def tools(server):
    for way in _ways(server):
        messages = _user(CALL, "5")
        first = litellm.completion(**way, messages=messages, tools=[TOOL]).choices[0].message
        (call,) = first.tool_calls
        messages += [first, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        assert litellm.completion(**way, messages=messages, tools=[TOOL]).choices[0].message.content == "5"


def forced_tool(server):
    for way in _ways(server):
        for choice in ({"type": "function", "function": {"name": "add"}}, "required"):
            reply = _completion(way, CALL, tools=[TOOL], tool_choice=choice)
            assert reply.choices[0].message.tool_calls[0].function.name == "add"


def structured(server):
    for way in _ways(server):
        # Its own translation for Anthropic's older models is a forced call.
        by_call = {"calls": [["json_tool_call", {"name": "Ulm", "people": 130}]]}
        answers = [by_call] if way["model"].startswith("anthropic/") else [CITY]
        reply = _completion(way, *answers, response_format=City)
        assert City.model_validate_json(reply.choices[0].message.content).people == 130


def json_mode(server):
    for way in list(_ways(server))[:2]:
        reply = _completion(way, CITY, response_format={"type": "json_object"})
        assert reply.choices[0].message.content == CITY


def streaming(server):
    for way in _ways(server):
        parts = list(_completion(way, "One, two.", stream=True, stream_options={"include_usage": True}))
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "One, two."


def streaming_of_calls(server):
    for way in _ways(server):
        messages = _user(CALL)
        parts = list(litellm.completion(**way, messages=messages, tools=[TOOL], stream=True))
        whole = litellm.stream_chunk_builder(parts, messages=messages)
        assert whole.choices[0].message.tool_calls[0].function.name == "add"


@on("capture")
def responses(server):
    reply = litellm.responses(model=f"openai/{server.model}", input=script("Two."))
    assert reply.output[0].content[0].text == "Two."


@on("capture")
async def anthropic_messages(server):
    reply = await litellm.anthropic.messages.acreate(
        model=f"anthropic/{server.claude}", api_base=server.url, max_tokens=100,
        messages=[{"role": "user", "content": script("Two.")}],
    )  # fmt: skip
    assert reply["content"][0]["text"] == "Two."


def errors(server):
    for way in _ways(server):
        unknown = way | {"model": f"{way['model'].partition('/')[0]}/no-such"}
        refused(litellm.ContextWindowExceededError, partial(_completion, way, "x", text=LONG))
        refused(litellm.NotFoundError, partial(_completion, unknown, "x"))


def retries(server):
    for way in _ways(server):
        assert _completion(way, "ok", max_retries=1, num_retries=1).choices[0].message.content == "ok"


if __name__ == "__main__":
    main(globals())
