"""A run on two hosts, the orchestrator on one, learner and task app on the other, and a bad network between.

    sudo -E python -m bench.study_hosts [--out runs/hosts] [--only slow] (make study-hosts; Linux, as root)

Two network namespaces stand for the hosts, and between them a cable of our own; both see the
same disk, as hosts of a cluster see a shared one. Host A runs `turnwise train` with `[cluster] launcher =
"external"`, and so the gateway; host B a learner and a task app that others started. The cable:

    plain       nothing
    ranks       nothing; the learner has two ranks under torchrun, the first on B, the second on A
    slow        20 to 25 ms each way, 1 packet in 100 lost
    partition   nothing passes for 20 s, while iteration 1 is saved and iteration 2 collected
    cut         nothing passes any more from then on, and the run waits a minute at most for
                what is lost

The job is deterministic. All but `cut` must end with each rollout played once, and with the weights of a run
on one host, to the bit (not with two ranks, whose sums are rounded otherwise). `cut` must end within minutes,
with a sentence that names who does not answer, and the newest complete checkpoint kept. Then `turnwise train
--resume`, on a whole cable, must end with the same weights.

bench/results/hosts.json has what happened. Exit code 1 when something does not hold.

Each end of the cable is a TUN device in its namespace; a thread of this process carries the packets. So it
needs no module of the kernel, where `tc netem` needs one that not every machine has.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray
from safetensors.numpy import load_file

from bench import kit
from trainer_backend.job.load import dump_job, parse_job
from trainer_backend.rundir.checkpoint_paths import latest_checkpoint
from trainer_backend.rundir.spool import read_ledger

# From linux/if_tun.h: the request, and a device of IP packets without a header of its own.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MOST_BYTES, _LOOK_S = 65_536, 0.05


@dataclass(frozen=True, slots=True)
class Quality:
    """What happens to a packet in either direction.

    Attributes:
        delay_s: it takes so long, and up to `jitter_s` more; none overtakes another.
        loss: the share of packets that are lost.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


PERFECT = Quality()
CUT = Quality(loss=1.0)


@dataclass(frozen=True, slots=True)
class End:
    """One end: the namespace, which it makes, and its address there."""

    namespace: str
    address: str
    device: str

    def on(self, *command: str) -> tuple[str, ...]:
        """A command in that namespace."""
        return ("ip", "netns", "exec", self.namespace, *command)


class Cable:
    """Two namespaces and the cable between them, as a context manager.

    Attributes:
        quality: may be changed at any time.
    """

    def __init__(self, ends: Sequence[End], *, seed: int = 0) -> None:
        self.ends, self.quality = tuple(ends), PERFECT
        self._random, self._over = random.Random(seed), threading.Event()
        self._files: list[int] = []
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Self:
        self._remove()
        for end in self.ends:
            _run("ip", "netns", "add", end.namespace)
            self._files.append(_tun(end.device))
            _run("ip", "link", "set", end.device, "netns", end.namespace)
            _run(*end.on("ip", "address", "add", f"{end.address}/24", "dev", end.device))
            _run(*end.on("ip", "link", "set", end.device, "up"))
            _run(*end.on("ip", "link", "set", "lo", "up"))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for file in self._files:
            os.close(file)
        self._remove()

    def _remove(self) -> None:
        for end in self.ends:
            subprocess.run(["ip", "netns", "delete", end.namespace], check=False, capture_output=True)

    def _carry(self) -> None:
        """Read packets at each end, and write them at the other when they are due."""
        others = dict(zip(self._files, reversed(self._files), strict=True))
        last_due, number = dict.fromkeys(self._files, 0.0), count()
        packets: list[tuple[float, int, int, bytes]] = []
        while not self._over.is_set():
            wait_s = max(0.0, packets[0][0] - time.monotonic()) if packets else _LOOK_S
            ready, _, _ = select.select(self._files, [], [], min(wait_s, _LOOK_S))
            for file in ready:
                packet, quality = os.read(file, _MOST_BYTES), self.quality
                if self._random.random() < quality.loss:
                    continue
                due = time.monotonic() + quality.delay_s + quality.jitter_s * self._random.random()
                last_due[file] = max(due, last_due[file])
                heapq.heappush(packets, (last_due[file], next(number), others[file], packet))
            while packets and packets[0][0] <= time.monotonic():
                _, _, file, packet = heapq.heappop(packets)
                os.write(file, packet)


def _tun(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


A, B = End("turnwise-a", "10.197.0.1", "tw-a"), End("turnwise-b", "10.197.0.2", "tw-b")
LEARNER, TASK_APP = f"http://{B.address}:9000", f"http://{B.address}:8001"
KEYS = {"TURNWISE_LEARNER_KEY": "key-of-the-learner", "ENVIRONMENT_API_KEY": "key-of-the-task-app"}
ITERATIONS = 3
PARTITION_S, LONGEST_S = 20.0, 900.0
SLOW = Quality(delay_s=0.02, jitter_s=0.005, loss=0.01)
# Who waits how long for whom, where nothing passes any more.
IMPATIENT = {
    "cluster": {"wait_s": 60.0},
    "learner": {"timeout_s": 20.0, "max_restarts": 1},
    "services": {"task_app_wait_s": 20.0, "request_timeout_s": 20.0},
}


def job_text(*, two_hosts: bool, impatient: bool = False, ranks: int = 1) -> str:
    """The same job for one host and for two."""
    document: dict[str, Any] = {
        "job": {"name": "hosts", "seed": 3},
        "model": {"preset": "tiny-0.3m", "device": "cpu"},
        "inference": {"max_model_len": 256, "max_running": 8, "threads": 1, "deterministic": True},
        "rollout": {
            "env_config": {"text": "compact", "max_actions": 4},
            "max_turns": 6, "episodes_per_batch": 8, "max_tokens": 8,
        },
        "warmup": {
            "episodes": 24, "epochs": 3, "batch_decisions": 12, "learning_rate": 6e-3,
            "policy_config": {"memory": False, "max_actions": 4},
        },
        "training": {
            "iterations": ITERATIONS, "group_size": 4, "threads": 1,
            "checkpoint_every": 1, "keep_checkpoints": ITERATIONS + 1,
            "step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise",
        },
        "evaluation": {"instances": 2, "every_n_iters": ITERATIONS},
    }  # fmt: skip
    if two_hosts:
        document["services"] = {
            "task_url": TASK_APP, "gateway_host": A.address,
        } | (IMPATIENT["services"] if impatient else {})  # fmt: skip
        document["cluster"] = {"launcher": "external"} | (IMPATIENT["cluster"] if impatient else {})
        document["learner"] = {"url": LEARNER, "nnodes": ranks} | (IMPATIENT["learner"] if impatient else {})
    return dump_job(parse_job(document, where="study").config)


@contextmanager
def child(command: Sequence[str], log: Path, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            env={**os.environ, **KEYS, "PYTHONUNBUFFERED": "1", **environment},
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()


@contextmanager
def services(folder: Path, ranks: int = 1) -> Iterator[None]:
    """What others start on host B; of several ranks the others on host A."""
    python, host = sys.executable, B.address
    process = ("-m", "trainer_backend.learner.process", "--host", host, "--port", "9000")
    group = (
        "-m", "torch.distributed.run", f"--nnodes={ranks}", "--nproc-per-node=1", "--max-restarts=0",
        f"--master-addr={host}", "--master-port=29500",
    )  # fmt: skip
    task_app = (python, "-m", "task_app", "--host", host, "--port", "8001")
    with ExitStack() as stack:
        for rank, end in enumerate((B, A)[:ranks]):
            words = (*group, f"--node-rank={rank}", *process) if ranks > 1 else process
            log = folder / f"learner_{rank}.log"
            stack.enter_context(child(end.on(python, *words), log, GLOO_SOCKET_IFNAME=end.device))
        allowed = {"TURNWISE_ALLOWED_INFERENCE_HOSTS": A.address}
        stack.enter_context(child(B.on(*task_app), folder / "task_app.log", **allowed))
        yield


def trained(prefix: Sequence[str], words: Sequence[str], log: Path, disturb: Callable[[], None]) -> int:
    """`turnwise train` until its end; its exit code.

    Args:
        disturb: is called when iteration 1 is done.
    """
    module = ("-m", "trainer_backend", "train", "--no-report")
    begun = log.stat().st_size if log.exists() else 0
    with child((*prefix, sys.executable, *module, *words), log) as process:
        end, disturbed = time.monotonic() + LONGEST_S, False
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            if not disturbed and b" iteration 1 " in log.read_bytes()[begun:]:
                disturbed = True
                disturb()
        return -1 if process.poll() is None else process.returncode


def digest_weights(run: Path, iteration: int = ITERATIONS) -> str:
    """The start of a digest of an iteration's weights, however they lie in files; "" without any."""
    weights = read_weights(run, iteration)
    whole = b"".join(weights[name].tobytes() for name in sorted(weights))
    return sha256(whole).hexdigest()[:16] if weights else ""


def read_weights(run: Path, iteration: int = ITERATIONS) -> dict[str, NDArray[Any]]:
    """An iteration's weights by name."""
    folder = run / "checkpoints" / f"iteration_{iteration}"
    files = [load_file(path) for path in sorted(folder.glob("model*.safetensors"))]
    return {name: tensor for file in files for name, tensor in file.items()}


def apart(run: Path, other: Path) -> float | None:
    """The largest difference of the weights of two runs; None where one has none."""
    mine, theirs = read_weights(run), read_weights(other)
    return (
        max((float(abs(mine[name] - theirs[name]).max()) for name in theirs), default=None) if mine else None
    )


def played_once(run: Path) -> bool:
    """Whether the ledger has every iteration once, and no rollout twice."""
    ledger = read_ledger(run)
    consumed = [name for entry in ledger for name in entry.rollout_ids]
    return [entry.iteration for entry in ledger] == [*range(1, ITERATIONS + 1)] and len(consumed) == len(
        {*consumed}
    )


def last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


@dataclass(frozen=True, slots=True)
class Case:
    """What the cable is like: at first, and once iteration 1 is done, for a time or for ever.

    Attributes:
        ranks: of the learner.
        impatient: whether the run waits a minute at most for
            what is lost.
    """

    first: Quality = PERFECT
    later: Quality | None = None
    later_s: float = LONGEST_S
    ranks: int = 1
    impatient: bool = False

    def disturb(self, cable: Cable) -> None:
        """Change the quality, and back after its time."""
        if self.later is not None:
            cable.quality = self.later
            timer = threading.Timer(self.later_s, lambda: setattr(cable, "quality", self.first))
            timer.daemon = True
            timer.start()


CASES = {
    "plain": Case(),
    "ranks": Case(ranks=2),
    "slow": Case(first=SLOW),
    "partition": Case(later=CUT, later_s=PARTITION_S),
    "cut": Case(later=CUT, impatient=True),
}


def on_two_hosts(case: Case, folder: Path) -> dict[str, Any]:
    """Train on both hosts; what came of it."""
    folder.mkdir(parents=True)
    job, run, log = folder / "job.toml", folder / "run", folder / "train.log"
    job.write_text(job_text(two_hosts=True, impatient=case.impatient, ranks=case.ranks))
    with Cable((A, B)) as cable, services(folder, case.ranks):
        cable.quality = case.first
        start = time.monotonic()
        code = trained(A.on(), (str(job), "--run", str(run)), log, lambda: case.disturb(cable))
        found: dict[str, Any] = {"exit_code": code, "seconds": round(time.monotonic() - start, 1)}
    if code != 0:
        newest = latest_checkpoint(run / "checkpoints")
        found |= {"last_words": last_words(log), "saved": "" if newest is None else newest.name}
        with Cable((A, B)), services(folder):
            resumed = ("--resume", str(run))
            found["resumed_exit_code"] = trained(A.on(), resumed, folder / "resumed.log", lambda: None)
    return found | {"weights": digest_weights(run), "played_once": played_once(run)}


def holds(found: dict[str, dict[str, Any]]) -> dict[str, bool]:
    one, cut, ranks = found["one_host"], found.get("cut"), found.get("ranks")
    said = {
        f"{name}: it ends with the weights of one host, each rollout played once": case["exit_code"] == 0
        and case["weights"] == one["weights"]
        and case["played_once"]
        for name, case in found.items()
        if name not in ("one_host", "ranks", "cut")
    }
    said["the updates have changed the weights"] = one["weights"] != one["first_weights"]
    if ranks is not None:
        said["ranks: it ends, each rollout played once"] = ranks["exit_code"] == 0 and ranks["played_once"]
    if cut is not None:
        said["cut: it ends, and says who does not answer"] = (
            cut["exit_code"] > 0 and B.address in cut["last_words"]
        )
        said["cut: resumed, it ends with the weights of one host"] = (
            cut.get("resumed_exit_code") == 0 and cut["weights"] == one["weights"] and cut["played_once"]
        )
    return said


def main() -> int:
    options = kit.options(
        __doc__,
        ("--out", kit.ROOT / "runs" / "hosts", "a folder that is not there yet"),
        ("--only", [], f"one of {', '.join(CASES)}; may be repeated"),
        ("--results", kit.ROOT / "bench" / "results" / "hosts.json"),
    )
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: sudo -E make study-hosts")
    out = Path(options.out).resolve()
    (out / "one_host").mkdir(parents=True)
    job, run = out / "one_host" / "job.toml", out / "one_host" / "run"
    job.write_text(job_text(two_hosts=False))
    code = trained((), (str(job), "--run", str(run)), out / "one_host" / "train.log", lambda: None)
    one = {"exit_code": code, "weights": digest_weights(run), "first_weights": digest_weights(run, 0)}
    found: dict[str, Any] = {"one_host": one}
    for name in options.only or CASES:
        found[name] = on_two_hosts(CASES[name], out / name)
        found[name]["apart"] = apart(out / name / "run", run)
        print(name, found[name], flush=True)
        outcome = {"study": "hosts", "cases": found, "holds": holds(found)}
        kit.write_results(options.results, outcome)
    return 0 if all(holds(found).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
