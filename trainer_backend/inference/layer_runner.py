"""Run forward passes of the running batch through a `transformers` model, with a `LayerCache`."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice, pairwise, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from trainer_backend.errors import ModelFolderError
from trainer_backend.inference.cache import CACHE_NAME
from trainer_backend.inference.layer_cache import Bounds, LayerCache, Stack
from trainer_backend.inference.request import Request
from trainer_backend.models.precision import tokens_for
from trainer_backend.models.routers import Routers

# The largest number of tokens, over all prompts, of a prefill that computes several prompts together.
GROUP_TOKENS = 2048
# The largest relative difference between logits with and without the cache, in float32 and in 16 bits.
EXACT, ROUNDED = 1e-3, 0.1
_AT_SERVERS = 'Sample at vLLM servers: inference.engine = "vllm".'


class LayerRunner:
    """Runs any causal model whose layers `LayerCache` supports. It has the methods of `DecoderRunner`.

    Prompts are not padded, since a recurrent state would treat padding as a token. Prompts are prefilled
    together only if the tokens to compute begin and end at the same positions; any other prompt is prefilled
    alone. A decode step is one forward pass over all rows.
    """

    def __init__(
        self, model: PreTrainedModel, *, slots: int, max_len: int, routers: Routers | None = None
    ) -> None:
        self._pass = Pass(model, routers)
        self.experts = self._pass.experts
        self._config, self._device = model.config, model.device
        self._bounds = Bounds(slots, max_len, self._pass.dtype)
        self.goes_on = self._can_continue()
        self.cache = LayerCache(model.config, self._bounds)

    @property
    def cost(self) -> str:
        prompts = "prompts of different lengths are computed one by one"
        if not self.goes_on:
            return f"{prompts}, each whole: the layers cannot continue from a state with several tokens"
        if self.cache.cuts:
            return prompts
        return (
            f"{prompts}, and a prompt continues only from a kept state, not from any part of a known prompt"
        )

    def prefill(
        self, requests: Sequence[Request], *, first_row: int, keep: Callable[[Request, int, int], None]
    ) -> None:
        """Compute and cache all known tokens of each request except its last token.

        The requests have the rows from `first_row` on. At each mark of a request, `keep` is called with the
        request, the mark and the row, so that the caller can keep the state at this position.
        """
        stops = {
            row: [stop for stop in sorted({*request.marks, request.cached}) if stop > request.reused]
            for row, request in enumerate(requests, first_row)
        }
        while any(stops.values()):
            groups: dict[tuple[int, int], list[int]] = defaultdict(list)
            for row, ahead in stops.items():
                if ahead:
                    groups[self.cache.waiting[row].length, ahead[0]].append(row)
            for (start, stop), rows in groups.items():
                here = {row: requests[row - first_row] for row in rows}
                ids = {row: request.cached_ids() for row, request in here.items()}
                for row, experts_LW in zip(rows, self._compute(ids, start, stop), strict=True):
                    here[row].note_experts(experts_LW)
                    if stops[row].pop(0) in here[row].marks:
                        keep(here[row], stop, row)

    def decode(self, ids_B: NDArray[np.int64], cached_B: NDArray[np.int64]) -> Tensor:
        rows = len(ids_B)
        self.cache.enter(rows)
        stack = self.cache.stack
        mask = stack.mask(rows)
        stack.begin(rows)
        ids_B1, positions_B1 = (torch.from_numpy(x)[:, None].to(self._device) for x in (ids_B, cached_B))
        seen = {} if mask is None else {"attention_mask": mask.to(self._device)}
        logits_BV = self._pass(ids_B1, stack, position_ids=positions_B1, **seen)
        stack.commit(rows, 1)
        return logits_BV

    def take_weights(self) -> None:
        """Do nothing: a pass reads the model's own weights."""

    def _compute(
        self, ids: Mapping[int, Sequence[int]], start: int, stop: int
    ) -> list[NDArray[np.uint16] | None]:
        """Compute the tokens from `start` to `stop` of rows in which `start` tokens are cached.

        `ids` maps each row to its token ids. Return the chosen experts of each row, or a None for each row if
        experts are not recorded.
        """
        most = max(1, GROUP_TOKENS // (stop - start))
        rows = list(ids)
        experts: list[NDArray[np.uint16] | None] = []
        for part in (rows[first : first + most] for first in range(0, len(rows), most)):
            # If rows have keys already, the stack allocates them together with the room for the new tokens.
            spare = stop - start if start else 0
            stack = Stack(self._config, Bounds(len(part), stop, self._pass.dtype, spare))
            for number, row in enumerate(part):
                stack.put(number, self.cache.waiting[row])
            ids_BL = torch.tensor([ids[row][start:stop] for row in part], device=self._device)
            positions_BL = torch.arange(start, stop, device=self._device).expand(len(part), -1)
            stack.begin(len(part))
            self._pass(ids_BL, stack, position_ids=positions_BL)
            stack.commit(len(part), stop - start)
            experts += islice(self.experts(), len(part))
            for number, row in enumerate(part):
                self.cache.waiting[row] = stack.take(number, stop)
        return experts

    def _can_continue(self) -> bool:
        """Return whether a prompt can be computed in several passes, each continuing a cached part.

        The model is run to find this out, since no list of model families would be complete.

        Raises:
            ModelFolderError: texts have other logits in a batch than alone, or the model does not support
                the cache.
        """
        limit = EXACT if self._pass.dtype == torch.float32 else ROUNDED
        try:
            together, goes_on = self._measure_error(pieces=1), self._measure_error(pieces=2)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ModelFolderError(
                f"its layers take no cache of the engine's: {error}", where="model", hint=_AT_SERVERS
            ) from error
        # If weights are not finite, both comparisons are false; the engine then refuses to sample later.
        if together > limit:
            raise ModelFolderError(
                f"its rows give logits up to {together:.3g} of their size from those of each text alone",
                where="model",
                hint=_AT_SERVERS,
            )
        return not goes_on > limit

    @torch.inference_mode()
    def _measure_error(self, *, pieces: int) -> float:
        """Return the largest relative difference between logits with and without the cache.

        With the cache, each prompt is computed in `pieces` passes, and then two more tokens of all prompts
        are decoded together.
        """
        self.cache = LayerCache(self._config, self._bounds)
        texts = [list(range(1, 3 + 6 * row)) for row in range(min(2, self.cache.slots))]
        for row, text in enumerate(texts):
            self.cache.open_row(row, room=len(text) + 2)
            stops = [len(text) * piece // pieces for piece in range(pieces + 1)]
            for start, stop in pairwise(stops):
                self._compute({row: text}, start, stop)
        for token in (7, 3):
            logits_BV = self.decode(np.full(len(texts), token), np.array([len(text) for text in texts]))
            texts = [[*text, token] for text in texts]
        alone_BV = torch.cat([self._pass(torch.tensor([ids], device=self._device), None) for ids in texts])
        return float((logits_BV - alone_BV).abs().max()) / max(1.0, float(alone_BV.abs().max()))


class Pass:
    """Runs forward passes of a `transformers` model, in the arithmetic of `models.precision`.

    If `routers` is given, each pass records the chosen experts, and `experts` yields the last record.
    """

    def __init__(self, model: PreTrainedModel, routers: Routers | None = None) -> None:
        self._model, self._routers = model, routers
        self._experts_BLW: NDArray[np.uint16] | None = None
        # Stored, because these properties of a `transformers` model walk over all its modules.
        self.device, self.dtype = model.device, model.dtype
        self._low = None if self.dtype == torch.float32 else self.dtype

    def __call__(self, ids_BL: Tensor, cache: Any, **positions: Tensor) -> Tensor:
        """Compute tokens, and return the logits at the last token of each row, [B, V].

        Keys, values and states are written to `cache`, unless it is None.
        """
        low = self._low
        tokens = tokens_for(self._model, ids_BL, low)
        routers, nothing = self._routers, nullcontext[list[Tensor]]([])
        arithmetic = nullcontext() if low is None else torch.autocast(self.device.type, dtype=low)
        with arithmetic, nothing if routers is None else routers.recording() as chosen:
            output = self._model(
                **tokens,
                **positions,
                **{CACHE_NAME: cache},
                use_cache=cache is not None,
                logits_to_keep=1,
            )
        if routers is not None:
            self._experts_BLW = routers.columns(chosen, rows=len(ids_BL))
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV

    def experts(self) -> Iterator[NDArray[np.uint16] | None]:
        """Yield the experts that the last pass chose in each row, [tokens, choices of all layers].

        Without recorded experts, yield None forever.
        """
        return repeat(None) if self._experts_BLW is None else iter(self._experts_BLW)
