"""The learner sends tokens to the experts that its sampler chose, for families whose routers differ."""

import os
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from shared_schemas.chat import ROLLOUT_HEADER
from shared_schemas.trajectory import ObservationData, PolicyLogprobs, Sampling, StepData
from task_app.episode.records import policy_logprobs
from task_app.policies.replies import OwnReplies, read_reply
from tests.tiny_families import KEYS, VOCABULARY, tiny_model
from tests.trainer_backend.inference.served import KEY, MESSAGES, MODEL, serving
from tests.trainer_backend.learner.hand_made import alone, gradient, sampled, tiny_tokenizer
from trainer_backend.core.collate import pack_segments
from trainer_backend.core.experts import UNKNOWN
from trainer_backend.core.segments import Segment, build_segments
from trainer_backend.errors import ModelFolderError, SegmentError
from trainer_backend.inference.actor import Generation
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.learner.attention import SHARE_FROM
from trainer_backend.learner.device import Placement
from trainer_backend.learner.learner import build_scorer
from trainer_backend.learner.loading import copy_to_serve
from trainer_backend.learner.scoring import refuse_unknown
from trainer_backend.learner.stepping import checkpoint_layers, stepping
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.models.routers import Routers, count_experts, recorded_routers, replaying

# Of softmax and topk; of topk and softmax, in padded rows; of groups of experts with a correction.
FEW = ("qwen3_moe", "gpt_oss", "deepseek_v3")
WITH_EXPERTS = tuple(name for name, keys in KEYS.items() if "num_experts" in keys)
FAMILIES = WITH_EXPERTS if os.environ.get("TURNWISE_TEST_FAMILIES") else FEW
CPU = Placement(torch.device("cpu"))
RECORDED = EngineKeys(max_model_len=256, max_running=8, replay_experts=True)
LOW = Placement(torch.device("cpu"), torch.bfloat16)


def prompts() -> list[list[int]]:
    """Of several lengths; half of them begin as one of the others does, longer than what is worth a copy."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, VOCABULARY, (100,), generator=generator).tolist()
    rests = [torch.randint(3, VOCABULARY, (5 + 9 * k,), generator=generator).tolist() for k in range(4)]
    first = [rests[3], [*shared, *rests[1]], [*shared, *rests[0]]]
    return [*first, [*shared, *rests[2]], rests[2], rests[1]]


def segment_from(ids: list[int], found: Generation) -> Segment:
    experts = np.full((len(ids) + len(found.token_ids), found.experts.shape[1]), UNKNOWN, np.uint16)
    experts[:-1] = found.experts
    span = (len(ids), len(ids) + len(found.token_ids), 0, 0, 1.0)
    return Segment.of("r", [*ids, *found.token_ids], found.logprobs, [span], experts.ravel())


def scorer_for(family: str, placement: Placement):
    model = tiny_model(family)
    scorer = build_scorer(model, placement, why_apart=refuse_unsupported(model, longest=256))
    return replace(scorer, share_from=SHARE_FROM if scorer.attention.takes_tries else None)


def named_segments(asked: list[list[int]], found: list[Generation]) -> list[Segment]:
    return [segment_from(ids, one) for ids, one in zip(asked, found, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_every_token_are_recorded_also_behind_a_prefix_that_was_copied(family: str):
    model, asked = tiny_model(family), prompts()
    routers = Routers(model)
    found = sampled(model, asked[:3], asked[3:], keys=RECORDED)
    assert any(one.prompt_tokens_reused for one in found)
    for ids, one in zip(asked, found, strict=True):
        with torch.no_grad(), routers.recording() as chosen:
            model(input_ids=torch.tensor([[*ids, *one.token_ids[:-1]]]), use_cache=False)
        assert np.array_equal(one.experts, routers.columns(chosen, rows=1)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_go_to_the_experts_that_a_segment_names_and_the_gradient_is_that_of_each_alone(family: str):
    scorer, asked = scorer_for(family, CPU), prompts()
    parts = named_segments(asked, sampled(tiny_model(family), asked[:3], asked[3:], keys=RECORDED))
    others = [np.where(part.experts < UNKNOWN, (part.experts + 1) % 4, UNKNOWN) for part in parts]
    turned = [replace(part, experts=row.astype(np.uint16)) for part, row in zip(parts, others, strict=True)]
    model = tiny_model(family)
    rows = [replayed_alone(model, part) for part in turned]
    expected = gradient(model, sum(row.sum() for row in rows))
    packed = pack_segments(turned, row_tokens=300, tries=scorer.tries(turned))
    own_N = scorer.logprobs(packed)
    order = dict.fromkeys(packed.segment_N.tolist())
    torch.testing.assert_close(own_N, torch.cat([rows[k] for k in order]), rtol=0, atol=1e-4)
    assert (own_N - packed.behaviour_logprob_N).abs().max() > 0.01
    together = gradient(scorer.model, own_N.sum())
    assert float((together - expected).norm() / expected.norm()) <= 1e-5
    checkpoint_layers(scorer.model)
    with stepping(scorer.model):
        again = gradient(scorer.model, scorer.logprobs(packed).sum())
    torch.testing.assert_close(again, together, rtol=1e-4, atol=1e-6 * float(together.abs().max()))


@pytest.mark.parametrize("family", FEW)
def test_layers_computed_again_amid_a_replay_go_where_they_went_whichever_it_is(family: str):
    model, ids_1L = tiny_model(family), torch.randint(3, VOCABULARY, (1, 12))
    with torch.no_grad(), Routers(model).recording() as chosen:
        model(input_ids=ids_1L, use_cache=False)
    own_1LW = torch.cat(chosen, 1)[None]
    turned_1LW = torch.cat(((own_1LW[:, :-1] + 1) % 4, torch.full_like(own_1LW[:, -1:], -1)), 1)
    with replaying(model, turned_1LW):
        expected = gradient(model, scores(model, ids_1L))
    checkpoint_layers(model)
    with stepping(model):
        with replaying(model, turned_1LW):  # and the end of the backward pass lies inside it
            assert torch.equal(gradient(model, scores(model, ids_1L)), expected)
        with replaying(model, turned_1LW):
            loss = scores(model, ids_1L)
        with replaying(model, own_1LW[:, :7]):  # as if the next piece had begun
            assert torch.equal(gradient(model, loss), expected)


def scores(model, ids_1L: torch.Tensor) -> torch.Tensor:
    logits_1LV = model(input_ids=ids_1L, use_cache=False).logits
    return logits_1LV.log_softmax(-1)[..., 5].sum()


def replayed_alone(model, part: Segment) -> torch.Tensor:
    """[N] as `alone`, with the experts that the segment names."""
    experts_1LW = torch.from_numpy(part.experts.astype(np.int16).reshape(1, len(part), -1))
    with replaying(model, experts_1LW), Routers(model).recording() as chosen:
        logprobs_N = alone(model, part)
    # Of the last token nothing is recorded.
    assert torch.equal(torch.cat(chosen, 1)[:-1], experts_1LW[0, :-1].long())
    return logprobs_N


def test_in_bfloat16_sampler_and_learner_lie_closer_with_the_same_experts():
    scorer, asked = scorer_for("gpt_oss", LOW), prompts()
    served = copy_to_serve(scorer.model, torch.bfloat16)
    keys = RECORDED.model_copy(update={"replay_experts": None})
    parts = named_segments(asked, sampled(served, asked[:3], asked[3:], tokens=24, keys=keys))
    packed = pack_segments(parts, row_tokens=300)
    with torch.no_grad():
        apart = [
            (scorer.logprobs(one) - packed.behaviour_logprob_N).abs().max()
            for one in (packed, replace(packed, experts_BLW=None))
        ]
    assert 2 * apart[0] < apart[1]


def test_experts_travel_with_the_exact_tokens_of_a_conversation_to_its_segment():
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen3_moe", vocab_size=300, max_position_embeddings=512)
    messages, steps = [*MESSAGES], []
    headers = {"Authorization": f"Bearer {KEY}", ROLLOUT_HEADER: "r"}
    with serving(model, tokenizer, stop_ids=(), replay_experts=True) as served, httpx.Client() as http:
        for turn in (1, 2, 3):
            body = {"model": MODEL, "messages": messages, "max_tokens": 6, "seed": turn}
            reply = http.post(f"{served.url}/v1/chat/completions", json=body, headers=headers)
            tokens = read_reply(reply.content, OwnReplies()).tokens
            exact = policy_logprobs({name: getattr(tokens, name) for name in PolicyLogprobs.model_fields})
            step = StepData(
                turn=turn, observation_data=ObservationData(), action_taken={"type": "text"},
                policy_name="openai", sampling=Sampling(), policy_logprobs=exact,
            )  # fmt: skip
            steps.append(StepData.model_validate_json(step.model_dump_json()))
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": f"stone {turn}"}]
    segments = build_segments(steps, rollout_id="r")
    assert len(segments) == 1 and steps[1].policy_logprobs.prompt_ids_reused > 0
    routers = Routers(model)
    for part in segments:
        with torch.no_grad(), routers.recording() as chosen:
            model(input_ids=torch.from_numpy(part.token_ids.astype(np.int64))[None], use_cache=False)
        named_LW = part.experts.reshape(len(part), -1)
        assert np.array_equal(named_LW[:-1], routers.columns(chosen, rows=1)[0, :-1])
        assert (named_LW[-1] == UNKNOWN).all()


class BySorting(Qwen3MoeTopKRouter):
    """A router of another family, which calls no topk."""

    def forward(self, hidden_states):
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        best = logits.softmax(-1).sort(descending=True)
        return logits, best.values[:, : self.top_k], best.indices[:, : self.top_k]


def test_where_experts_cannot_be_recorded_the_key_is_an_error_and_by_default_the_log_says_so():
    model = tiny_model("qwen3_moe").to(torch.bfloat16)
    model.model.layers[2].mlp.gate.__class__ = BySorting
    says = "its 4 routers made 3 choices of experts in one pass"
    with pytest.raises(ModelFolderError, match=says):
        recorded_routers(model, wanted=True)
    with capture_logs() as logs:
        assert recorded_routers(model, wanted=None) is None
    (line,) = logs
    assert line["event"] == "engine_records_no_experts" and says in line["reason"]


def test_experts_that_the_model_has_not_are_refused():
    model, ids = tiny_model("qwen3_moe"), list(range(3, 7))
    count, routers = count_experts(model), len(Routers(model))
    known = np.full((5, routers * 2), count - 1, np.uint16)
    refuse_unknown(
        [segment_from(ids, Generation((8, 9), (0.0, 0.0), "length", ((0, 0),), experts=known))], model
    )
    known[1, 0] = count
    part = segment_from(ids, Generation((8, 9), (0.0, 0.0), "length", ((0, 0),), experts=known))
    with pytest.raises(SegmentError, match=f"experts up to {count}, but a layer of the actor has {count}"):
        refuse_unknown([part], model)
    one_each = torch.zeros((1, 4, routers), dtype=torch.int64)
    with pytest.raises(ModelFolderError, match="1 experts a layer are recorded"), replaying(model, one_each):
        model(input_ids=torch.tensor([ids]))
