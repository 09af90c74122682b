"""A worker of a server, on a thread, that takes the weights that a learner sends."""

import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trainer_backend.inference.vllm_worker.turnwise_transfer import Worker, receive


class Receiver(threading.Thread):
    """A worker of a server; `weights` are those of its last pass."""

    def __init__(
        self, address: tuple[str, int], worker: Worker, meets: Callable[[str], None] = lambda name: None
    ) -> None:
        super().__init__(daemon=True)
        self._address, self._worker, self._meets = address, worker, meets
        self.weights: dict[str, Tensor] = {}
        self.passes = 0
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            receive(self._address, self._worker, self._load, device=torch.device("cpu"), wait_s=30.0)
        except (RuntimeError, OSError, ValueError) as error:
            self.error = error

    def _load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.passes += 1
        self.weights = {}
        for name, tensor in tensors:
            self._meets(name)
            self.weights[name] = tensor
