"""The package `anthropic`: Messages, count_tokens, models."""

import asyncio

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from script import CALL, CITY, LONG, SCHEMA, ULM, City, main, on, refused, script

TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}


def _client(**options):
    return Anthropic(**{"max_retries": 0, "timeout": 30, **options})


def _asked(server, *answers, text="", **more):
    messages = [{"role": "user", "content": script(*answers, text=text)}]
    return {"model": server.claude, "max_tokens": 200, "messages": messages, **more}


@on("capture")
def plain(server):
    reply = _client().messages.create(**_asked(server, "Two.", system="Be short."))
    assert reply.content[0].text == "Two."
    assert reply.stop_reason == "end_turn"


@on("capture")
def cached_system(server):
    """Prompt caching marks blocks, which is no request to change the answer."""
    block = {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}
    reply = _client().messages.create(
        **_asked(server, "Two.", system=[block], tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}])
    )
    assert reply.content[0].text == "Two."


@on("capture")
def thinking(server):
    """A setting of the model's that the policy does not have is without effect."""
    reply = _client().messages.create(
        **_asked(server, "Two.", thinking={"type": "enabled", "budget_tokens": 1024}) | {"max_tokens": 2000}
    )
    assert reply.content[-1].text == "Two."


@on("capture")
def tools(server):
    client, asked = _client(), _asked(server, CALL, "5", tools=[TOOL])
    first = client.messages.create(**asked)
    (call,) = first.content
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "add", {"a": 2, "b": 3})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
    asked["messages"] += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**asked).content[0].text == "5"


@on("capture")
def tool_runner(server):
    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds."""
        return str(a + b)

    runner = _client().beta.messages.tool_runner(**_asked(server, CALL, "5"), tools=[add])
    assert runner.until_done().content[0].text == "5"


@on("capture")
def forced_tool(server):
    for choice in ({"type": "tool", "name": "add"}, {"type": "any"}):
        reply = _client().messages.create(**_asked(server, CALL, tools=[TOOL], tool_choice=choice))
        assert reply.content[0].name == "add"


@on("capture")
def structured(server):
    reply = _client().messages.parse(**_asked(server, CITY), output_format=City)
    assert reply.parsed_output == ULM


@on("capture")
def effort(server):
    reply = _client().messages.create(**_asked(server, "Two.", output_config={"effort": "low"}))
    assert reply.content[0].text == "Two."


@on("capture")
def structured_beta(server):
    reply = _client().beta.messages.parse(**_asked(server, CITY), output_format=City)
    assert reply.parsed_output == ULM


@on("capture")
def structured_older_beta(server):
    """`output_format` as earlier releases sent it in the body."""
    form = {
        "type": "json_schema",
        "schema": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    reply = _client().messages.create(**_asked(server, CITY), extra_body={"output_format": form})
    assert reply.content[0].text == CITY


@on("capture")
def streaming(server):
    with _client().messages.stream(**_asked(server, "One, two.")) as stream:
        assert "".join(stream.text_stream) == "One, two."
        assert stream.get_final_message().usage.output_tokens >= 0


@on("capture")
def streaming_of_calls(server):
    with _client().messages.stream(**_asked(server, CALL, tools=[TOOL])) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_message().content[0].input == {"a": 2, "b": 3}
    assert "input_json" in kinds


@on("capture")
def streaming_structured(server):
    with _client().messages.stream(**_asked(server, CITY), output_format=City) as stream:
        assert stream.get_final_message().parsed_output == ULM


@on("capture")
async def asynchronous(server):
    async with AsyncAnthropic(max_retries=0) as client:
        replies = await asyncio.gather(
            *[client.messages.create(**_asked(server, f"No {i}")) for i in range(4)]
        )
    assert [reply.content[0].text for reply in replies] == [f"No {i}" for i in range(4)]


@on("capture")
def retries(server):
    assert _client(max_retries=1).messages.create(**_asked(server, "ok")).content[0].text == "ok"


@on("capture")
def count_tokens(server):
    client = _client()
    asked = _asked(server, "x", system="Be short.", tools=[TOOL])
    del asked["max_tokens"]
    assert client.messages.count_tokens(**asked).input_tokens > 0
    assert client.beta.messages.count_tokens(**asked).input_tokens > 0


@on("capture")
def models(server):
    client = _client()
    assert server.claude in [model.id for model in client.models.list()]
    model = client.models.retrieve(server.claude)
    assert (model.id, model.type) == (server.claude, "model")
    assert model.display_name and model.created_at
    refused(anthropic.NotFoundError, lambda: client.models.retrieve("no-such"))


@on("capture")
def errors(server):
    client = _client()
    long = refused(
        anthropic.BadRequestError, lambda: client.messages.create(**_asked(server, "x", text=LONG))
    )
    unknown = refused(
        anthropic.NotFoundError, lambda: client.messages.create(**_asked(server, "x") | {"model": "no-such"})
    )
    route = refused(anthropic.NotFoundError, lambda: client.messages.batches.list())
    kinds = [error.body["error"]["type"] for error in (long, unknown, route)]
    assert kinds == ["invalid_request_error", "not_found_error", "not_found_error"], kinds


def wrong_key(server):
    """At `serve`, which does not speak Messages, the key is asked first."""
    error = refused(
        anthropic.AuthenticationError, lambda: _client(api_key="wrong").messages.create(**_asked(server, "x"))
    )
    assert server.kind == "serve" or error.body["error"]["type"] == "authentication_error", error.body


@on("capture")
def auth_token(server):
    """A token in place of a key, which goes out as Bearer."""
    client = _client(api_key=None, auth_token=server.key)
    assert client.messages.create(**_asked(server, "Two.")).content[0].text == "Two."


@on("serve")
def messages_absent(server):
    error = refused(anthropic.NotFoundError, lambda: _client().messages.create(**_asked(server, "x")))
    assert error.body and error.message, error.response.text


if __name__ == "__main__":
    main(globals())
