"""Weights from the learner to workers of servers by gloo: what arrives, and what becomes of a lost member."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore

from tests.trainer_backend.learner.hand_made import are_equal, copy_tensors, make_episodes, make_learner
from tests.trainer_backend.learner.receiver import Receiver
from trainer_backend.inference.vllm_worker import turnwise_transfer
from trainer_backend.inference.vllm_worker.turnwise_transfer import Worker
from trainer_backend.learner.broadcast import WeightSender, checkpoint_tensors, own_address
from trainer_backend.learner.device import Placement
from trainer_backend.models import build_preset, save_model_folder

WEIGHTS = [(f"layer.{number}", torch.full((300, 70), float(number))) for number in range(6)]


def ready(offer: WeightSender, expected: int) -> int:
    """How many servers will be sent to, once there is one."""
    since = time.monotonic()
    while not (count := offer.ready(expected, since)):
        pass
    return count


def quiet(done: int, total: int) -> None:
    """For a wait that is not ended from outside."""


@contextmanager
def sender(timeout_s: float = 30.0) -> Iterator[WeightSender]:
    offer = WeightSender("127.0.0.1", backend="gloo", timeout_s=timeout_s)
    try:
        yield offer
    finally:
        offer.close()


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_all_workers_of_all_servers_get_the_checkpoint_s_tensors_in_the_precision_that_serves(
    tokenizer, tmp_path: Path, low: torch.dtype | None
):
    model = build_preset("tiny-0.3m", tokenizer, seed=1)
    save_model_folder(tmp_path, model)
    stored = load_file(tmp_path / "model.safetensors")
    assert model.config.tie_word_embeddings and "lm_head.weight" not in stored
    expected = {name: tensor.to(low or torch.float32) for name, tensor in stored.items()}
    with sender() as offer:
        receivers = [Receiver(offer.address, Worker(name, rank, 2)) for name in "ab" for rank in range(2)]
        assert ready(offer, 2) == 2
        assert offer.send(checkpoint_tensors(model, Placement(torch.device("cpu"), low))) == 2
        for receiver in receivers:
            receiver.join()
            assert are_equal(receiver.weights, expected)


def test_one_tensor_is_alive_at_a_time():
    alive: list[int] = []

    def made() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in WEIGHTS:
            alive.append(1)
            yield name, tensor.clone()
            alive.pop()
            assert not alive

    with sender() as offer:
        Receiver(offer.address, Worker("a", 0, 1))
        assert ready(offer, 1)
        assert offer.send(made()) == 1


def test_a_server_that_gives_up_amid_a_pass_costs_the_others_one_pass():
    def give_up(name: str) -> None:
        if name == "layer.3":
            raise ValueError("no such layer")

    taken: list[str] = []

    def made() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in WEIGHTS:
            taken.append(name)
            yield name, tensor

    with sender() as offer:
        good = [Receiver(offer.address, Worker(name, 0, 1)) for name in "ab"]
        bad = Receiver(offer.address, Worker("c", 0, 1), give_up)
        assert ready(offer, 3) == 3
        assert offer.send(made()) == 0
        assert len(taken) == len(WEIGHTS), "another rank may take part in making each"
        bad.join()
        assert "no such layer" in str(bad.error)
        assert ready(offer, 2) == 2
        assert offer.send(WEIGHTS) == 2
        for receiver in good:
            receiver.join()
            assert receiver.passes == 2
            assert {name: tensor[0, 0].item() for name, tensor in receiver.weights.items()} == {
                f"layer.{number}": float(number) for number in range(6)
            }


CHILD = """
import os, signal, sys
from turnwise_transfer import Worker, receive
import torch

host, port, name, place, number = sys.argv[1:]

def load(tensors):
    for name, tensor in tensors:
        if name == place:
            os.kill(os.getpid(), int(number))
            signal.pause()  # another thread may take the signal, and this one would go on meanwhile

receive((host, int(port)), Worker(name, 0, 1), load, device=torch.device("cpu"), wait_s=30.0)
"""


@contextmanager
def child(offer: WeightSender, name: str, place: str, number: int) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process of its own, which a signal meets at a tensor of that name."""
    host, port = offer.address
    folder = str(Path(turnwise_transfer.__file__).parent)
    words = [sys.executable, "-c", CHILD, host, str(port), name, place, str(int(number))]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": folder}) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_that_stands_still_costs_a_pass_and_one_that_dies_at_the_end_costs_none():
    with (
        sender(timeout_s=2.0) as offer,
        child(offer, "stops", "layer.2", signal.SIGSTOP),
        child(offer, "dies", "layer.5", signal.SIGKILL),
    ):
        while len(offer._whole_servers()) < 2:  # they import torch, which takes seconds
            time.sleep(0.01)
        good = Receiver(offer.address, Worker("good", 0, 1))
        assert ready(offer, 3) == 3
        assert offer.send(WEIGHTS) == 0
        assert ready(offer, 2) == 2
        assert offer.send(WEIGHTS) == 1
        good.join()
        assert good.error is None and len(good.weights) == len(WEIGHTS)


def test_a_server_that_dies_while_it_waits_is_left_out():
    with sender() as offer:
        offer.answer_s = 0.2
        dead = TCPStore(*offer.address, is_master=False, timeout=timedelta(seconds=30))
        number = dead.add("asked", 1)
        dead.set(f"worker/{number}", json.dumps({"server": "dead", "rank": 0, "size": 1}))
        good = Receiver(offer.address, Worker("good", 0, 1))
        assert ready(offer, 2) == 1
        assert offer.send(WEIGHTS) == 1
        good.join()
        assert len(good.weights) == len(WEIGHTS)


def test_a_receiver_that_waits_for_weights_that_are_gone_is_told():
    offer = WeightSender("127.0.0.1", backend="gloo", timeout_s=30.0)
    receiver = Receiver(offer.address, Worker("a", 0, 1))
    while not offer._whole_servers():
        time.sleep(0.01)
    offer.close()
    receiver.join()
    assert isinstance(receiver.error, RuntimeError)


def test_the_own_address_on_the_way_to_this_machine_is_the_loopback():
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_a_learner_hands_its_weights_out_until_they_change(tokenizer):
    learner = make_learner(tokenizer)
    assert learner.broadcast(1, 30.0, quiet) == 0, "nothing is on offer"
    before = copy_tensors(learner)
    address = learner.offer("127.0.0.1")
    for name in "ab":  # one after the other, as when a server comes back
        receiver = Receiver(address, Worker(name, 0, 1))
        assert learner.broadcast(1, 30.0, quiet) == 1
        receiver.join()
        assert all(torch.equal(tensor, before[key]) for key, tensor in receiver.weights.items())
    learner.update(make_episodes(learner, [1.0, -1.0]), iteration=1)
    assert learner.broadcast(1, 30.0, quiet) == 0
    late = Receiver(address, Worker("c", 0, 1))
    late.join()
    assert isinstance(late.error, ConnectionRefusedError)


def test_no_server_is_waited_for_longer_than_allowed_or_after_an_error(tokenizer):
    class Enough(Exception):
        pass

    def end(done: int, total: int) -> None:
        assert (done, total) == (0, 3)
        raise Enough

    learner = make_learner(tokenizer)
    learner.offer("127.0.0.1")
    assert learner.broadcast(1, 0.0, quiet) == 0
    with pytest.raises(Enough):
        learner.broadcast(3, 60.0, end)
