"""The package `openai`: Chat Completions, Responses, models."""

import asyncio

import openai
from openai import AsyncOpenAI, OpenAI
from script import CALL, CITY, LONG, TOOL, ULM, City, main, on, refused, script

FLAT_TOOL = {"type": "function", **TOOL["function"], "strict": False}


def _client(**options):
    return OpenAI(**{"max_retries": 0, "timeout": 30, **options})


def _user(*answers, text=""):
    return [{"role": "user", "content": script(*answers, text=text)}]


def plain(server):
    reply = _client().chat.completions.create(
        model=server.model,
        messages=[{"role": "system", "content": "Be short."}, *_user("Two.")],
        temperature=0.5,
    )
    assert reply.choices[0].message.content == "Two."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == server.model


def tools(server):
    client, messages = _client(), _user(CALL, "5")
    first = client.chat.completions.create(model=server.model, messages=messages, tools=[TOOL]).choices[0]
    (call,) = first.message.tool_calls
    assert (first.finish_reason, call.function.name) == ("tool_calls", "add")
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    last = client.chat.completions.create(
        model=server.model, messages=messages, tools=[TOOL], parallel_tool_calls=False
    )
    assert last.choices[0].message.content == "5"


def forced_tool(server):
    for choice in ({"type": "function", "function": {"name": "add"}}, "required"):
        reply = _client().chat.completions.create(
            model=server.model, messages=_user(CALL), tools=[TOOL], tool_choice=choice
        )
        assert reply.choices[0].message.tool_calls[0].function.name == "add"


def structured(server):
    reply = _client().chat.completions.parse(model=server.model, messages=_user(CITY), response_format=City)
    assert reply.choices[0].message.parsed == ULM


def json_mode(server):
    reply = _client().chat.completions.create(
        model=server.model,
        messages=_user(CITY, text="Answer in JSON."),
        response_format={"type": "json_object"},
    )
    assert reply.choices[0].message.content == CITY


def strict_tool(server):
    tool = openai.pydantic_function_tool(City, name="city")
    reply = _client().chat.completions.parse(
        model=server.model,
        messages=_user({"calls": [["city", {"name": "Ulm", "people": 130}]]}),
        tools=[tool],
    )
    assert reply.choices[0].message.tool_calls[0].function.parsed_arguments == ULM


def streaming(server):
    stream = _client().chat.completions.create(
        model=server.model,
        messages=_user("One, two, three."),
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    assert (
        "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "One, two, three."
    )
    assert parts[-1].usage.total_tokens >= 0


def streaming_of_calls(server):
    with _client().chat.completions.stream(model=server.model, messages=_user(CALL), tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        done = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert done.choices[0].message.tool_calls[0].function.name == "add"


def streaming_structured(server):
    with _client().chat.completions.stream(
        model=server.model, messages=_user(CITY), response_format=City
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed.people == 130


async def asynchronous(server):
    async with AsyncOpenAI(max_retries=0) as client:
        replies = await asyncio.gather(
            *[client.chat.completions.create(model=server.model, messages=_user(f"No {i}")) for i in range(4)]
        )
    assert [reply.choices[0].message.content for reply in replies] == [f"No {i}" for i in range(4)]


def retries(server):
    client = _client(max_retries=1)
    assert client.chat.completions.create(model=server.model, messages=_user("ok")).choices[0].finish_reason
    if server.kind == "capture":
        assert client.responses.create(model=server.model, input=script("ok")).output_text == "ok"


def errors(server):
    def asks(model=server.model, text="", **options):
        return _client(**options).chat.completions.create(model=model, messages=_user("x", text=text))

    assert refused(openai.NotFoundError, lambda: asks("no-such")).code == "model_not_found"
    assert refused(openai.BadRequestError, lambda: asks(text=LONG)).code == "context_length_exceeded"
    for kind, call in (
        (openai.AuthenticationError, lambda: asks(api_key="wrong")),
        (openai.NotFoundError, lambda: _client().embeddings.create(model=server.model, input="x")),
        (openai.APIStatusError, lambda: _client().models.delete(server.model)),
    ):
        error = refused(kind, call)
        assert error.body and error.body["message"], error.response.text


def models(server):
    client = _client()
    assert server.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(server.model).id == server.model
    error = refused(openai.NotFoundError, lambda: client.models.retrieve("no-such"))
    assert error.code == "model_not_found", error.body


@on("serve")
def logprobs(server):
    reply = _client().chat.completions.create(
        model=server.model, messages=_user("Zoë 🦊"), logprobs=True, top_logprobs=2
    )
    tokens = reply.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode().startswith("Zoë 🦊")
    assert all(token.top_logprobs for token in tokens)


def several_choices(server):
    """A capture answers once a call, and says so."""
    if server.kind == "capture":
        refused(
            openai.BadRequestError,
            lambda: _client().chat.completions.create(model=server.model, messages=_user("x"), n=2),
        )
        return
    reply = _client().chat.completions.create(model=server.model, messages=_user("x"), n=2)
    assert len(reply.choices) == 2


def stop_strings(server):
    _client().chat.completions.create(
        model=server.model, messages=_user("One"), stop=["."], max_completion_tokens=50
    )


@on("serve")
def completions(server):
    reply = _client().completions.create(model=server.model, prompt=script("Two."), max_tokens=20)
    assert reply.choices[0].text.startswith("Two.")


@on("capture")
def responses_plain(server):
    reply = _client().responses.create(model=server.model, instructions="Be short.", input=script("Two."))
    assert reply.output_text == "Two."


@on("capture")
def responses_tools(server):
    client, items = _client(), [{"role": "user", "content": script(CALL, "5")}]
    first = client.responses.create(model=server.model, input=items, tools=[FLAT_TOOL])
    (call,) = first.output
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
    assert client.responses.create(model=server.model, input=items, tools=[FLAT_TOOL]).output_text == "5"


@on("capture")
def responses_forced_tool(server):
    for choice in ({"type": "function", "name": "add"}, "required"):
        reply = _client().responses.create(
            model=server.model, input=script(CALL), tools=[FLAT_TOOL], tool_choice=choice
        )
        assert reply.output[0].name == "add"


@on("capture")
def responses_structured(server):
    reply = _client().responses.parse(model=server.model, input=script(CITY), text_format=City)
    assert reply.output_parsed == ULM


@on("capture")
def responses_json_mode(server):
    reply = _client().responses.create(
        model=server.model, input=script(CITY, text="JSON"), text={"format": {"type": "json_object"}}
    )
    assert reply.output_text == CITY


@on("capture")
def responses_streaming(server):
    with _client().responses.stream(model=server.model, input=script("One, two.")) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas) == "One, two."


@on("capture")
def responses_streaming_of_calls(server):
    stream = _client().responses.create(
        model=server.model, input=script(CALL), tools=[FLAT_TOOL], stream=True
    )
    kinds = [event.type for event in stream]
    assert "response.function_call_arguments.done" in kinds and kinds[-1] == "response.completed"


@on("capture")
def responses_errors(server):
    client = _client()
    refused(openai.NotFoundError, lambda: client.responses.create(model="no-such", input="x"))
    refused(openai.BadRequestError, lambda: client.responses.create(model=server.model, input=LONG))
    error = refused(openai.NotFoundError, lambda: client.responses.retrieve("resp_1"))
    assert error.body and error.body["message"], error.response.text


@on("capture")
def responses_input_tokens(server):
    assert _client().responses.input_tokens.count(model=server.model, input="Two.").input_tokens > 0


@on("serve")
def responses_absent(server):
    """`serve` speaks Chat Completions, and says so in OpenAI's form."""
    error = refused(openai.NotFoundError, lambda: _client().responses.create(model=server.model, input="x"))
    assert error.body and error.body["message"], error.response.text


if __name__ == "__main__":
    main(globals())
