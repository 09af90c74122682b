"""Exact tokens of a server that is no gateway of ours: asked for in vLLM's words, or there is no rollout."""

import json
from typing import Any

import pytest

from shared_schemas.chat import ROLLOUT_HEADER
from shared_schemas.messages import Message
from task_app.errors import ContextLengthExceeded, PolicyUnavailable
from task_app.policies.openai_config import OpenAIConfig
from task_app.policies.replies import WholeReplies, read_reply
from task_app.protocols import PolicyObservation
from tests.task_app.fake_inference import Answer, calling
from tests.task_app.test_openai_policy import SEEN, TOOLS, asking

VLLM: dict[str, Any] = {"exact_tokens": "vllm"}


def whole(prompt: list[int], sampled: list[int], **changes: Any) -> Answer:
    """A reply of vLLM's; `changes` to its first choice."""
    entries = [{"token": "t", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in sampled]
    choice = {"token_ids": sampled, "logprobs": {"content": entries}, "finish_reason": "stop", **changes}
    return calling("a", reply={"prompt_token_ids": prompt, "model": "Qwen/Qwen3-8B"}, choice=choice)


async def test_every_request_asks_for_all_of_it_and_leaves_nothing_to_the_servers_defaults():
    config = {"max_model_length": 99, "chat_template_kwargs": {"enable_thinking": False}, **VLLM}
    async with asking(whole([1, 2], [7]), **config) as (fake, policy):
        await policy.get_action(SEEN, TOOLS)
        await policy.get_action(SEEN, TOOLS)
    asked = {"return_token_ids": True, "logprobs": True, "chat_template_kwargs": {"enable_thinking": False}}
    plainly = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0}
    for body, headers in zip(fake.bodies, fake.headers, strict=True):
        assert body.items() >= (asked | plainly).items()
        assert "max_model_length" not in body and ROLLOUT_HEADER.lower() not in headers


async def test_what_is_drawn_from_is_asked_for_by_name_and_its_tokens_are_recorded():
    config = {"top_k": 5, "processed_logprobs": True, **VLLM}
    async with asking(whole([1, 2, 3], [7, 8]), **config) as (fake, policy):
        *_, log_probs, _ = await policy.get_action(SEEN, TOOLS)
    assert (fake.bodies[0]["top_k"], fake.bodies[0]["processed_logprobs"]) == (5, True)
    exact = ("prompt_ids_reused", "prompt_token_ids", "token_ids", "logprobs", "versions")
    assert [log_probs[name] for name in exact] == [0, (1, 2, 3), (7, 8), (-0.5, -0.5), ((0, 0),)]


def test_a_prompt_that_goes_on_is_kept_as_what_it_adds():
    read = WholeReplies()

    def kept(prompt: list[int], sampled: list[int]) -> tuple[int, tuple[int, ...]]:
        content = [{"logprob": -1.0}] * len(sampled)
        choice = {"message": {}, "token_ids": sampled, "logprobs": {"content": content}}
        reply = {"prompt_token_ids": prompt, "choices": [choice]}
        tokens = read_reply(json.dumps(reply).encode(), read).tokens
        assert tokens is not None
        return tokens.prompt_ids_reused, tokens.prompt_token_ids

    assert kept([1, 2], [3]) == (0, (1, 2))
    assert kept([1, 2, 3, 4], [5]) == (3, (4,))  # all of prompt and answer, and one more
    assert kept([1, 2, 9, 4], [5, 6]) == (2, (9, 4))  # its template rewrote the answer
    assert kept([1, 2, 9, 4], [7]) == (4, ())  # the same prompt once more
    assert kept([8], [7]) == (0, (8,))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (whole([1], [7], token_ids=None), r"choices\.0\.token_ids is None .* \(return_token_ids"),
        (whole([1], [7], logprobs=None), r"choices\.0\.logprobs is None"),
        (whole([1], [7], logprobs={"content": None}), r"logprobs\.content is None"),
        (calling("a", choice={"token_ids": [7]}), r"choices\.0\.logprobs is missing"),
        (whole([1], [7], logprobs={"content": []}), "token_ids has 1 ids, and logprobs has 0"),
        (whole([1], [7], logprobs={"content": [{"logprob": None}]}), r"logprobs\.content\.0"),
        (whole([1], [7], logprobs={"content": ["-0.5"]}), r"logprobs\.content\.0"),
        (whole([1], [7], logprobs={"content": [{"logprob": 0.5}]}), "is 0.5 .* equal to 0.001"),
        (whole([1], [7], logprobs={"content": [{"logprob": -9999.0}]}), "is -9999.0"),
    ],
)
async def test_a_sample_that_nothing_could_weigh_is_a_failure_and_never_data(answer: Answer, told: str):
    async with asking(answer, **VLLM) as (_, policy):
        with pytest.raises(PolicyUnavailable, match=told) as caught:
            await policy.get_action(SEEN, TOOLS)
    assert caught.value.code == "inference_protocol"


KEYS = ("repetition_penalty", "frequency_penalty", "logit_bias", "guided_json")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({"extra_body": {key: 0.5}}, f"extra_body: '{key}' would change the sampling") for key in KEYS),
        ({"tool_choice": "required"}, "tool_choice: 'required' makes the server sample under a grammar"),
    ],
)
def test_what_is_drawn_cannot_be_changed_past_the_record(changes: dict[str, Any], words: str):
    asked = {"inference_url": "http://h", "model": "m", **changes}
    assert OpenAIConfig(**asked).model_dump().items() >= changes.items()
    with pytest.raises(ValueError, match=words):
        OpenAIConfig(**asked, **VLLM)


async def test_a_prompt_that_only_grew_is_checked_here_since_the_server_has_no_limit_of_the_jobs():
    longer = PolicyObservation((*SEEN, Message(role="user", content="and now?")), {})
    async with asking(whole([1, 2, 3], [7]), max_model_length=10, max_tokens=6, **VLLM) as (_, policy):
        await policy.get_action(SEEN, TOOLS)  # 4 + 2 tokens, says its usage
        with pytest.raises(ContextLengthExceeded, match="a prompt of at least 6 tokens"):
            await policy.get_action(longer, TOOLS)
