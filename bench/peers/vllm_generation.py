"""Generates with vLLM for bench/generation_speed.py: for each input line, prints a batch's CPU seconds.

python bench/peers/vllm_generation.py FOLDER < lines of {"prompts": [[id, ...], ...], "tokens": number}

It is one process with one thread, so its CPU time is complete. No batch reuses an earlier one's prompts.
"""

import json
import os
import sys
import time

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip


def main(folder: str) -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # so that output of libraries is not read as an answer
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="float32", max_model_len=1024, enable_prefix_caching=False, max_num_seqs=64)
    for line in sys.stdin:
        batch = json.loads(line)
        sampling = SamplingParams(temperature=1.0, max_tokens=batch["tokens"], ignore_eos=True, logprobs=0)
        prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        started_s = time.process_time()
        found = llm.generate(prompts, sampling, use_tqdm=False)
        spent_s = time.process_time() - started_s
        assert all(len(one.outputs[0].token_ids) == batch["tokens"] for one in found)
        os.write(answers, f"{spent_s}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
