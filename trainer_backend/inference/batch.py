"""The running batch: which requests occupy which rows, their prefill, and one decode step for all of them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer_backend.errors import ModelFolderError
from trainer_backend.inference.cache import SlotCache
from trainer_backend.inference.request import Request
from trainer_backend.inference.sampler import sample, uniforms

SUPPORTED_LAYERS = ("full_attention", "sliding_attention")


class RunningBatch:
    """Row i of the cache belongs to `rows[i]`; rows are always compact, so a step works on slices.

    Not thread-safe: the engine thread alone uses it, inside `torch.inference_mode()`.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, max_len: int) -> None:
        refuse_unsupported_attention(model, max_len=max_len)
        self.model = model
        self.rows: list[Request] = []
        self._cache = SlotCache(slots=slots, max_len=max_len)

    @property
    def free_slots(self) -> int:
        return self._cache.slots - len(self.rows)

    def join(self, requests: Sequence[Request]) -> None:
        """Prefill the prompts of new requests, padded on the right to the longest, and give them rows.

        The last token of a prompt is left for the first decode step. So sampling has one home, a prefill
        needs no logits, and rows of different lengths need no gathering of their last positions.
        """
        length = max(request.cached for request in requests)
        if length > 0:
            ids = [list(request.prompt_ids[:-1]) for request in requests]
            padded_BL = self._tensor([row + [0] * (length - len(row)) for row in ids])
            positions_1L = torch.arange(length, device=self.model.device)[None]
            self._cache.begin_prefill(first_row=len(self.rows), length=length)
            # No mask: with padding on the right, causal attention never shows a pad to a token.
            self.model(
                input_ids=padded_BL,
                position_ids=positions_1L,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self.rows.extend(requests)

    def step(self) -> list[tuple[int, float]]:
        """Feed each row its next token; returns the token sampled after it and its log-prob, row by row."""
        logits_BV = self._decode()
        samplings = [row.sampling for row in self.rows]
        keys_B = np.array([row.key for row in self.rows], dtype=np.uint64)
        counters_B = np.array([len(row.token_ids) for row in self.rows], dtype=np.uint64)
        truncates = any(sampling.is_truncated for sampling in samplings)
        tokens_B, logprobs_B = sample(
            logits_BV,
            temperatures_B=self._tensor([sampling.temperature for sampling in samplings]).float(),
            top_ps_B=self._tensor([sampling.top_p for sampling in samplings]) if truncates else None,
            top_ks_B=self._tensor([sampling.top_k for sampling in samplings]) if truncates else None,
            uniforms_B=torch.from_numpy(uniforms(keys_B, counters_B)).to(self.model.device),
        )
        # Ids up to 2**53 and fp32 log-probs are exact in float64: one transfer from the device for both.
        tokens, logprobs = torch.stack((tokens_B.double(), logprobs_B.double())).tolist()
        return [(int(token), logprob) for token, logprob in zip(tokens, logprobs, strict=True)]

    def drop(self, index: int) -> None:
        """Free a row; the last row moves into the gap."""
        last = self.rows.pop()
        if index < len(self.rows):
            self._cache.move_row(len(self.rows), index, last.cached)
            self.rows[index] = last

    def _decode(self) -> Tensor:
        positions_B = self._tensor([row.cached for row in self.rows])
        visible = 1 + max(row.cached for row in self.rows)
        columns_L = torch.arange(visible, device=positions_B.device)
        hidden = torch.finfo(self.model.dtype).min
        mask_BL = torch.where(columns_L <= positions_B[:, None], 0.0, hidden).to(self.model.dtype)
        self._cache.begin_decode(positions_B, visible=visible)
        output = self.model(
            input_ids=self._tensor([row.next_token for row in self.rows])[:, None],
            attention_mask=mask_BL[:, None, None, :],
            position_ids=positions_B[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, device=self.model.device)


def refuse_unsupported_attention(model: PreTrainedModel, *, max_len: int) -> None:
    """The cache keeps every position of every layer: a window that cuts some off would be ignored.

    Raises:
        ModelFolderError: a recurrent layer, or a sliding window shorter than `max_len`.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    unknown = sorted(kinds - set(SUPPORTED_LAYERS))
    if unknown:
        raise ModelFolderError(
            f"the local engine knows {', '.join(SUPPORTED_LAYERS)}; the model has {', '.join(unknown)}",
            where="config.layer_types",
        )
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and window is not None and window < max_len:
        raise ModelFolderError(
            f"the model's sliding window of {window} is shorter than max_model_len {max_len}",
            where="config.sliding_window",
            hint=f"Serve it with max_model_len {window} or less.",
        )
