"""Conversations whose context is edited, from a scripted model through gateway, task app and credit.

The model reads a document chunk by chunk and deletes what it has read. Everything but its weights is real.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StopReason
from tests.contract.scripted_model import ScriptedEngine, played
from trainer_backend import job_parts, learner_parts
from trainer_backend.core.aggregation import episode_equal
from trainer_backend.core.segments import Segment, build_segments
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.job.load import parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.models import build_preset, train_tokenizer

torch.set_num_threads(1)

QUESTION, ANSWER = "What is the code of Amber Harbour?", "48213"
CHUNK = 4_000


def document(chunks: int, *, chunk: int = CHUNK) -> str:
    """The answer stands in its last sentence, so that all of it has to be read."""
    fact = f"The code of Amber Harbour is {ANSWER}."
    filler = "".join(f"Entry {i}: nobody walked along the river and little was said. " for i in range(9_999))
    return filler[: chunks * chunk - chunk // 2] + " " + fact


def job_on(text: str, *, chunk: int = CHUNK, edits: bool = True, window: int = 100_000) -> JobConfig:
    tables = {
        "job": {"name": "scripted", "seed": 1},
        "model": {"preset": "tiny-0.3m", "device": "cpu"},
        "inference": {"max_model_len": 2_048},
        "multi_turn": {"enable": True, "statelm_enabled": edits, "max_model_length": window},
        "rollout": {
            "env_name": "documents",
            "env_config": {
                "document_content": text,
                "question": QUESTION,
                "ground_truth": ANSWER,
                "text": "compact",
                "chunk_size": chunk,
                "indexed": True,
                "tools": ["readChunk", "finish"],
            },
            "max_turns": 80,
            "max_tokens": 200,
            "episodes_per_batch": 1,
        },
        "training": {"group_size": 1, "threads": 1},
        "algorithm": {"advantage": "grpo"},
    }
    return parse_job(tables, where="tests").config


def call(name: str, **arguments: object) -> str:
    return f"<|call|> {name} {json.dumps(arguments)}"


def reader(prompt: str) -> str:
    """Reads on until the fact stands there; what it has read it deletes, where messages show their ids."""
    fact = re.search(r"The code of Amber Harbour is (\d+)\.", prompt)
    if fact:
        return call("finish", answer=fact[1])
    ids = re.findall(r'"msg_id": (\d+), "msg_id\(invoking_assistant\)": (\d+)', prompt)
    read = call("readChunk", enable_scan=True)
    if not ids:
        return read
    # Of what is deleted the stubs show no ids: these are the last turn's.
    assert len({asked for _, asked in ids}) == 1
    return call("deleteContext", message_ids=[int(ids[0][1]), *(int(own) for own, _ in ids)]) + read


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    # Stubs, too, are texts that a tokenizer has met.
    texts = [document(2), QUESTION, *["[deleted]"] * 500]
    return train_tokenizer(texts, 512, whole_words=("deleteContext", "readChunk", "finish"))


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return build_preset("tiny-0.3m", tokenizer, seed=1)


def segments(rollout: Rollout) -> list[Segment]:
    assert rollout.trajectory is not None
    return build_segments(rollout.trajectory.steps, rollout_id=rollout.rollout_id)


async def alone(job: JobConfig, engine: ScriptedEngine, folder: Path) -> Rollout:
    (rollout,) = await played(job, engine, folder)
    return rollout


async def test_what_is_trained_is_what_the_engine_saw_and_sampled(tokenizer, tmp_path):
    engine = ScriptedEngine(tokenizer, reader, by_character=True)
    rollout = await alone(job_on(document(8, chunk=400), chunk=400), engine, tmp_path)
    assert rollout.trajectory.outcome_reward == 1.0 and len(engine.seen) == 9
    trained: list[int] = []
    for segment in segments(rollout):
        for t in sorted(set(segment.decision)):
            own = segment.sampled_positions[segment.decision == t]
            assert tuple(segment.token_ids[: own[0]]) == engine.seen[t].prompt
            assert tuple(segment.token_ids[own]) == engine.seen[t].sampled
            trained.append(t)
    assert trained == list(range(9)), "each decision in one segment, and none twice"
    masked = sum(len(segment.sampled_positions) for segment in segments(rollout))
    assert masked == sum(len(seen.sampled) for seen in engine.seen)


async def test_50_chunks_are_answered_in_a_window_of_3_and_without_edits_the_same_script_runs_over(
    tokenizer, tmp_path
):
    text = document(50)
    window = 3 * len(ChatRenderer(tokenizer).encode(text[:CHUNK]))
    engine = ScriptedEngine(tokenizer, reader)
    edits = (await alone(job_on(text, window=window), engine, tmp_path)).trajectory
    assert (edits.outcome_reward, edits.stop_reason) == (1.0, StopReason.ENVIRONMENT_DONE)
    assert len(edits.steps) == 51 and edits.had_delete_operation
    assert max(len(seen.prompt) + len(seen.sampled) for seen in engine.seen) <= window
    job = job_on(text, window=window, edits=False)
    rollout = await alone(job, ScriptedEngine(tokenizer, reader), tmp_path)
    over = rollout.trajectory
    assert (over.outcome_reward, over.stop_reason) == (0.0, StopReason.CONTEXT_LENGTH)
    assert [part.source for step in over.steps[:-1] for part in step.reward_parts] == []
    (part,) = over.steps[-1].reward_parts
    assert (part.source, part.value) == ("penalty", -1.0)
    (credited,) = job_parts.credit(job).credit([rollout]).credits
    assert list(credited.rewards_T) == [0.0] * (len(over.steps) - 1) + [-1.0]


async def test_log_probs_computed_again_under_each_view_are_those_of_the_sampling(tokenizer, model, tmp_path):
    job = job_on(document(6, chunk=400), chunk=400)
    real = LocalEngine(
        build_preset("tiny-0.3m", tokenizer, seed=1),
        stop_ids=(),
        keys=EngineKeys(max_model_len=1_024),
    )
    real.start()
    try:
        engine = ScriptedEngine(tokenizer, reader, max_model_len=1_024, real=real)
        rollout = await alone(job, engine, tmp_path)
    finally:
        real.stop()
    views = segments(rollout)
    assert len(views) == 6
    again = LocalLearner(learner_parts.learner_config(job), model, tokenizer).scorer.score(
        views, LoopKeys(row_tokens=1_024, micro_batch_tokens=4_096)
    )
    for view, found in zip(views, again, strict=True):
        sampled = view.logprobs.tolist()
        torch.testing.assert_close(torch.tensor(found), torch.tensor(sampled), atol=1e-4, rtol=0)


async def test_an_episode_counts_once_in_its_group_in_however_many_segments_it_lies(tokenizer, tmp_path):
    job = job_on(document(5, chunk=400), chunk=400)
    scripts = [
        reader,
        lambda prompt: call("finish", answer=ANSWER),
        lambda prompt: call("finish", answer="0"),
    ]
    siblings = []
    for number, script in enumerate(scripts):
        rollout = await alone(job, ScriptedEngine(tokenizer, script), tmp_path)
        siblings.append(rollout.model_copy(update={"rollout_id": f"r{number}", "sibling": number}))
    found = job_parts.credit(job).credit(siblings)
    many, one, wrong = found.episodes
    assert [len(episode.segments) for episode in found.episodes] == [5, 1, 1]
    # Scores 1, 1, 0: were the segments counted, five of seven would have the first one's.
    (right,) = set(found.credits[0].advantages_T)
    assert list(found.credits[1].advantages_T) == [right]
    assert list(found.credits[2].advantages_T) == [pytest.approx(-2 * right)]
    parts = [*many.segments, *one.segments, *wrong.segments]
    weight_of = dict.fromkeys(("r0", "r1", "r2"), 0.0)
    for segment, weights in zip(parts, episode_equal(parts), strict=True):
        weight_of[segment.rollout_id] += sum(weights)
    assert list(weight_of.values()) == pytest.approx([1 / 3] * 3)
