"""New weights: nothing is lost, each token carries the version that sampled it, misfits are refused."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.naive import ask, logprobs_under, running, together
from tests.trainer_backend.learner.hand_made import make_learner, segment
from trainer_backend.core.critic import make_targets
from trainer_backend.errors import EngineOutOfMemory, EngineStopped, InferenceError, WeightsRefused
from trainer_backend.inference.actor import Generation
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.models import build_preset, load_model_folder
from trainer_backend.parts import CreditedEpisode, Progress

StartEngine = Callable[..., LocalEngine]
PROMPT = [10, 11, 12, 13]
NORM = "model.norm.weight"


def other_model(tokenizer: PreTrainedTokenizerFast, version: int) -> PreTrainedModel:
    return build_preset("tiny-0.3m", tokenizer, seed=version + 1)


async def sampled_by(engine: LocalEngine, model: PreTrainedModel, version: int) -> None:
    """Sample a few tokens, which must be those of this model under this version."""
    result = await ask(engine, PROMPT)
    assert result.versions == ((0, version),)
    expected = logprobs_under(model, PROMPT, result.token_ids)
    assert result.logprobs == pytest.approx(expected, abs=1e-5)


async def paused_amid(engine: LocalEngine) -> "asyncio.Task[Generation]":
    """Pause the engine amid a request, which has sampled some tokens."""
    task = await running(engine, PROMPT, seed=None)
    await engine.pause()
    return task


async def test_swaps_amid_traffic_lose_nothing_and_every_token_is_of_the_version_it_names(
    start_engine: StartEngine, tokenizer: PreTrainedTokenizerFast
):
    engine = start_engine(max_model_len=64, max_running=4)
    models = {version: other_model(tokenizer, version) for version in range(4)}
    finished: list[tuple[list[int], object]] = []

    async def caller(k: int) -> None:
        for t in range(12):
            prompt = [k + 1, t + 1, 20, 21]
            sampling = Sampling(seed=t, max_tokens=2 + (k + t) % 5)
            finished.append((prompt, await engine.generate(prompt, sampling, request_id=f"{k}.{t}")))

    async def publisher() -> None:
        for version in (1, 2, 3):
            await engine.load_weights(version, models[version].state_dict())
            # The next swap comes after some more requests were answered: an event, not a time.
            await ask(engine, PROMPT, tokens=8)

    await asyncio.gather(*(caller(k) for k in range(6)), publisher())
    assert len(finished) == 72
    seen = set()
    for prompt, result in finished:
        ((first_token, version),) = result.versions  # drained: one version for the whole completion
        assert first_token == 0
        seen.add(version)
        expected = logprobs_under(models[version], prompt, result.token_ids)
        assert result.logprobs == pytest.approx(expected, abs=1e-5)
    assert len(seen) > 1 and engine.version == 3


async def test_between_pause_and_resume_a_swap_is_immediate_and_the_versions_tell_where(
    start_engine: StartEngine, tokenizer: PreTrainedTokenizerFast
):
    engine = start_engine()
    task = await paused_amid(engine)
    await engine.load_weights(5, other_model(tokenizer, 5).state_dict())
    await engine.resume()
    await ask(engine, PROMPT)
    await engine.abort("running")
    (zero, old), (switch, new) = (await task).versions
    assert (zero, old, new) == (0, 0, 5) and 0 < switch < len((await task).token_ids)


def files_that_vllm_loads(folder: Path) -> list[Path]:
    """By the rules of vLLM 0.32: `DefaultModelLoader._prepare_weights` with a local folder, and
    `filter_duplicate_safetensors_files`."""
    files = [path for pattern in ("*.safetensors", "*.bin", "*.pt") for path in folder.glob(pattern)]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        assert named <= set(files)
        files = [path for path in files if path in named]
    return files


async def test_a_checkpoint_with_all_that_a_run_keeps_in_it_serves_in_the_engine_and_in_vllm(
    start_engine: StartEngine, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    settings = {"algorithm__advantage": "gae", "lora__rank": 2}
    learner = make_learner(tokenizer, **settings)
    episode = CreditedEpisode(
        "r", [segment("r", [5, 6], [7, 8], [-6.0, -6.0])], [1.0], make_targets([0.0], [1.0])
    )
    learner.update([episode], iteration=1)
    learner.save(tmp_path / "iteration_1", Progress(1, 1, 2))
    model, _ = load_model_folder(tmp_path / "iteration_1")
    served = {
        name: tensor
        for path in files_that_vllm_loads(tmp_path / "iteration_1")
        for name, tensor in load_file(path).items()
    }
    # A tied head is in the file once, under the name of the embedding.
    assert served.keys() == model.state_dict().keys() - {"lm_head.weight"}
    engine = start_engine()
    await engine.load_weights(9, tmp_path / "iteration_1")
    await sampled_by(engine, model, 9)


async def test_of_a_folder_with_an_index_the_files_that_it_names_are_read(start_engine, tokenizer, tmp_path):
    engine, new = start_engine(), other_model(tokenizer, 9)
    new.save_pretrained(tmp_path, max_shard_size="500KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    save_file({"of another format": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    await engine.load_weights(9, tmp_path)
    await sampled_by(engine, new, 9)
    next(tmp_path.glob("model-00001-*")).unlink()
    with pytest.raises(WeightsRefused, match=r"1 of \d shards are missing, such as model-00001"):
        await engine.load_weights(10, tmp_path)


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_keep_serving(
    start_engine: StartEngine, model: PreTrainedModel, tmp_path: Path
):
    engine, good = start_engine(), model.state_dict()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/model.safetensors").write_bytes(b"nonsense")
    unfit = {
        rf"missing: {NORM}": {name: tensor for name, tensor in good.items() if name != NORM},
        "unknown: extra": {**good, "extra": torch.zeros(1)},
        rf"another shape: {NORM} \(3,\) for \(96,\)": {**good, NORM: torch.zeros(3)},
        rf"another type: {NORM} torch.int64 for torch.float32": {**good, NORM: good[NORM].long()},
        "no weights in this folder": tmp_path,
        "cannot be read": tmp_path / "broken",
    }
    for told, source in unfit.items():
        with pytest.raises(WeightsRefused, match=told):
            await engine.load_weights(1, source)
    await sampled_by(engine, model, 0)


class Uncopied(Tensor):
    """A tensor that raises the next of `errors` where it is copied from, until there is none."""

    errors: Iterator[RuntimeError]

    @classmethod
    def of(cls, tensor: Tensor, *errors: RuntimeError) -> "Uncopied":
        uncopied = tensor.as_subclass(cls)
        uncopied.errors = iter(errors)
        return uncopied

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is Tensor.copy_ and (error := next(args[1].errors, None)) is not None:
            raise error
        return super().__torch_function__(func, types, args, kwargs)


FULL = torch.OutOfMemoryError("out of memory")


def new_weights(model: PreTrainedModel, *errors: RuntimeError) -> dict[str, Tensor]:
    """Those of a model; the copy of the last norm, after all layers, meets the errors."""
    weights = model.state_dict()
    return {**weights, NORM: Uncopied.of(weights[NORM], *errors)}


async def test_a_swap_that_runs_out_of_memory_midway_gives_no_token_until_a_whole_one(
    start_engine: StartEngine, tokenizer: PreTrainedTokenizerFast
):
    engine = start_engine()
    paused = await paused_amid(engine)
    with pytest.raises(EngineOutOfMemory, match="ran out of memory while loading version 5"):
        await engine.load_weights(5, new_weights(other_model(tokenizer, 5), FULL, FULL))
    await engine.resume()
    mixed = "version 5 was loaded, and some weights are of an earlier one: the engine samples nothing until"
    with pytest.raises(EngineOutOfMemory, match=mixed):
        await paused
    with pytest.raises(WeightsRefused, match="missing"):
        await engine.load_weights(6, {})
    with pytest.raises(EngineOutOfMemory, match=mixed):
        await ask(engine, PROMPT)
    assert engine.version == 0
    new = other_model(tokenizer, 7)
    await engine.load_weights(7, new_weights(new, FULL))  # what fails once is repeated
    await sampled_by(engine, new, 7)


async def test_a_request_that_is_paused_goes_on_where_a_whole_swap_follows_one_that_failed(
    start_engine: StartEngine, tokenizer: PreTrainedTokenizerFast
):
    engine = start_engine()
    paused = await paused_amid(engine)
    with pytest.raises(EngineOutOfMemory):
        await engine.load_weights(5, new_weights(other_model(tokenizer, 5), FULL, FULL))
    await engine.load_weights(6, other_model(tokenizer, 6).state_dict())
    await engine.resume()
    await ask(engine, PROMPT)
    await engine.abort("running")
    assert [version for _, version in (await paused).versions] == [0, 6]


async def test_a_swap_that_meets_another_error_midway_ends_the_engine(start_engine, tokenizer):
    engine = start_engine()
    weights = new_weights(other_model(tokenizer, 5), RuntimeError("an illegal memory access"))
    with capture_logs():  # a traceback for people takes seconds
        with pytest.raises(EngineStopped, match="an illegal memory access"):
            await engine.load_weights(5, weights)
        assert "illegal memory access" in await asyncio.to_thread(engine.breakdown.result, 30)
    with pytest.raises(EngineStopped):
        await ask(engine, PROMPT)


async def test_weights_that_are_not_finite_give_errors_and_leave_nothing_in_the_cache(start_engine, model):
    engine, long, short = start_engine(), [5] * 100, [6] * 3
    await engine.load_weights(1, {name: t * torch.nan for name, t in model.state_dict().items()})
    for failed in await together(engine, *(ask(engine, long, seed=i) for i in range(3))):
        with pytest.raises(InferenceError, match="version 1 give logits that are not finite"):
            failed.result()
    await engine.load_weights(2, model.state_dict())
    # The short one is decoded beside the long one: its row is read as far as the long one reaches.
    results = [task.result() for task in await together(engine, ask(engine, long), ask(engine, short))]
    assert results[0].prompt_tokens_reused == 0
    for prompt, result in zip((long, short), results, strict=True):
        expected = logprobs_under(model, prompt, result.token_ids)
        assert result.logprobs == pytest.approx(expected, abs=1e-5)
