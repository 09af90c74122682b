"""What a model copies into its weights by itself, while vLLM reloads it, reaches them once they are there."""

from types import SimpleNamespace

import torch
from torch import nn

from trainer_backend.inference.vllm_worker.turnwise_copies import DirectCopies


class Reload:
    """vLLM's: weights are on the meta device, and a layer gets all that is kept when it is whole."""

    def __init__(self, model: nn.Module) -> None:
        self.infos = {
            layer: SimpleNamespace(
                loaded_weights=[], load_numel=0, load_numel_total=sum(x.numel() for x in layer.parameters())
            )
            for layer in model.modules()
        }
        self.processed: list[nn.Module] = []

    def process(self, layer: nn.Module, info: SimpleNamespace) -> None:
        layer.to_empty(device="cpu")
        for name, copy in info.loaded_weights:
            param = getattr(layer, name)
            copy.arguments["param"] = param
            param.weight_loader(*copy.args, **copy.kwargs)
        self.processed.append(layer)


def test_copies_into_a_weight_and_into_parts_of_it_arrive_when_the_layer_is_whole():
    with torch.device("meta"):
        layer = nn.Linear(2, 4)
    reload = Reload(layer)
    with DirectCopies(layer, reload.infos.__getitem__, reload.process):
        layer.weight.data[:2].copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        layer.weight.data[2:].copy_(torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
        assert not reload.processed
        layer.bias.data.copy_(torch.arange(4.0))
    assert reload.processed == [layer]
    assert layer.weight.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    assert layer.bias.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not hasattr(layer.weight, "weight_loader")


def test_copies_elsewhere_are_carried_out_at_once():
    with torch.device("meta"):
        layer = nn.Linear(1, 1)
    other = torch.zeros(2)
    with DirectCopies(layer, Reload(layer).infos.__getitem__, lambda *_: None):
        other.copy_(torch.ones(2))
    assert other.tolist() == [1.0, 1.0]
