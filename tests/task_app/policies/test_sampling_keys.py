"""A record says of the sampling what its request asked for, in each form of the request."""

from typing import Any

import pytest
from pydantic import Field, ValidationError
from pydantic_core import to_json

from shared_schemas.base import Body, with_optional
from shared_schemas.trajectory import PLAIN_SAMPLING, Sampling, SamplingKeys
from task_app.policies.openai import OpenAIAgentPolicy
from task_app.policies.openai_config import OpenAIConfig
from trainer_backend.inference.request_body import NEUTRAL, SamplingRequest, read_request
from trainer_backend.inference.text_completion import TextRequest
from trainer_backend.inference.vllm_engine import VllmEngine

# None has its default's value.
OTHER = Sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, max_tokens=9)


class Newer(Sampling):
    """Sampling with an option more, which today is sent at its value without effect."""

    presence_penalty: float = 0.0


def policy(**config: Any) -> OpenAIAgentPolicy:
    return OpenAIAgentPolicy(OpenAIConfig(inference_url="http://h", model="m", **config))


def test_each_recorded_option_is_sent():
    names = {name for name in Sampling.model_fields if getattr(OTHER, name) != getattr(Sampling(), name)}
    assert names == Sampling.model_fields.keys(), "an option without a value to send in this test"
    assert OTHER.request_keys() == OTHER.model_dump()
    assert OTHER.whole_request_keys() == PLAIN_SAMPLING | OTHER.model_dump()


@pytest.mark.parametrize(
    "config",
    [{}, {"ask_token_ids": False, "max_tokens_name": "max_completion_tokens"}, {"exact_tokens": "vllm"}],
)
def test_a_new_option_is_sent_without_a_word_anywhere_else(config: dict[str, Any]):
    sampling = Newer(presence_penalty=0.25, **OTHER.model_dump())
    body = policy(**config).request_body([], [], sampling)
    sent = {"max_tokens": body.get(config.get("max_tokens_name", "max_tokens"))} | body
    assert sent.items() >= sampling.model_dump().items()
    assert sampling.whole_request_keys()["presence_penalty"] == 0.25


def test_a_vllm_server_of_ours_is_sent_all_but_the_seed():
    engine = VllmEngine("http://h", stop_ids=[1], vocabulary=9, max_model_len=99, wait_s=1.0)
    sampling = Newer(presence_penalty=0.25, temperature=0.5, seed=3, max_tokens=9)
    params = engine._body([1], sampling, 0)["sampling_params"]
    assert params.items() >= sampling.model_dump(include={"presence_penalty", "temperature"}).items()
    assert (params["max_tokens"], params["top_k"]) == (9, -1)
    assert "seed" not in params


def test_the_gateway_samples_as_it_is_asked():
    request = {"model": "m", "prompt": [1], **OTHER.whole_request_keys()}
    assert read_request(TextRequest, to_json(request)).sampling(max_tokens=9) == OTHER
    # An option that it samples with is no longer one that is refused unless it has no effect.
    assert Sampling.model_fields.keys() <= SamplingRequest.model_fields.keys()
    assert not Sampling.model_fields.keys() & (NEUTRAL.keys() | PLAIN_SAMPLING.keys())


def test_a_class_may_leave_out_each_option_of_another():
    @with_optional(Newer, absent="; absent: as there")
    class Own(Body):
        top_k: int | None = Field(default=None, ge=-1)

    assert Own() == Own(**dict.fromkeys(Newer.model_fields))
    assert (Own(top_k=-1).top_k, Own.model_fields["top_k"].description) == (-1, None)
    description = SamplingKeys.model_fields["top_p"].description
    assert Own.model_fields["top_p"].description == f"{description}; absent: as there"
    with pytest.raises(ValidationError, match="top_p"):
        Own(top_p=1.5)


def test_a_policy_has_a_setting_for_each_option():
    values = OTHER.model_dump(exclude={"seed"})
    assert policy(**values).sampling(1) == OTHER.model_copy(update={"seed": None})
