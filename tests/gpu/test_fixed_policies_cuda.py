"""Two models on one CUDA device: a fixed policy in bfloat16 beside the actor, which nobody touches."""

from pathlib import Path

import pytest
import torch

from shared_schemas.trajectory import Sampling
from tests.conftest import policy_server, tiny_job
from tests.trainer_backend.learner.hand_made import make_learner, segment, tiny_tokenizer
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.models import build_preset, save_model_folder
from trainer_backend.models.folder import fingerprint
from trainer_backend.run.fixed_policies import FixedPolicies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


async def test_it_is_rounded_once_served_next_to_the_actor_and_never_touched(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    model = build_preset("tiny-0.3m", tokenizer, seed=8)
    save_model_folder(tmp_path, model, tokenizer)
    learner = make_learner(tokenizer, model__device="cuda")
    with policy_server(tiny_job()) as gateway:
        fixed = FixedPolicies.of((), {"fixed": tmp_path}, learner.facts(), gateway.table)
        assert fixed.weights["fixed"].sha256 == fingerprint(model), "known again on any device"
        prompt = list(range(5, 40))
        async with gateway.serving(learner, fixed) as server:
            engine = fixed.policies["fixed"].engine
            sampling = Sampling(seed=1, max_tokens=20)
            before = await engine.generate(prompt, sampling, request_id="a")
            await server.publish(1)
            after = await engine.generate(prompt, sampling, request_id="b")
        assert (before.token_ids, before.versions) == (after.token_ids, ((0, 0),))
        assert len(fixed.verify()) == 1
    owner = make_learner(tokenizer, model__device="cuda")
    owner.model.load_state_dict({name: tensor.cuda() for name, tensor in model.state_dict().items()})
    sampled = segment("r", prompt, before.token_ids, before.logprobs)
    (found,) = owner.scorer.score([sampled], LoopKeys(row_tokens=64, micro_batch_tokens=64))
    assert list(before.logprobs) == pytest.approx(found, abs=0.05), "bfloat16 against bfloat16"
