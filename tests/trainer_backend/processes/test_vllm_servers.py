"""vLLM servers that a run starts: their command line, devices, environment, and end."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.conftest import free_port
from tests.processes import until, wait_until
from tests.trainer_backend.inference.fake_vllm_environment import fake_environment
from trainer_backend.errors import JobError, NotPlaced
from trainer_backend.job.tables import InferenceTable
from trainer_backend.parts import Hardware
from trainer_backend.processes.launching import LOCAL, Launcher, Place, Process, Role
from trainer_backend.processes.vllm_servers import (
    VllmServer,
    VllmServers,
    arguments,
    check_environment,
    visible_devices,
)
from trainer_backend.rundir.layout import RunDirectory

SERVER = "vllm/entrypoints/openai/api_server.py"


def table(python: Path, **keys) -> InferenceTable:
    return InferenceTable(engine="vllm", vllm_python=python, max_model_len=64, **keys)


def test_a_table_is_a_command_line_in_the_way_of_vllm():
    words = {
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "enable-prefix-caching": False,
        "lora_modules": ["a=b", "c=d"],
        "hf_overrides": {"rope_theta": 1e6},
    }
    assert list(arguments(words)) == [
        "--tensor-parallel-size", "2", "--enforce-eager", "--no-enable-prefix-caching",
        "--lora-modules", "a=b", "c=d", "--hf-overrides", '{"rope_theta": 1000000.0}',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "servers", "each", "names"),
    [
        ("", 2, 1, [None, None]),
        ("0123", 2, 1, ["3", "2"]),
        ("0123", 2, 2, ["3,2", "1,0"]),  # the learner's is shared by the last
        ("0", 2, 1, ["0", "0"]),
        ("01", 1, 4, [None]),
    ],
)
def test_the_learner_s_accelerator_is_shared_last(devices, servers, each, names):
    assert visible_devices(list(devices), servers, each) == names


@pytest.mark.parametrize(("devices", "is_able"), [(("0",), True), ((), False)], ids=["gpu", "cpu"])
def test_servers_that_sleep_are_started_so_that_they_can_where_there_is_a_gpu(devices, is_able, tmp_path):
    run, hardware = RunDirectory(tmp_path, "run"), Hardware("bfloat16", devices)
    servers = VllmServers(table(tmp_path, sleep=True), hardware, run, print)
    assert ("--enable-sleep-mode" in servers._servers[0]._command(Place())) == is_able


async def test_an_environment_without_vllm_is_refused_before_anything_is_played(tmp_path):
    python = fake_environment(tmp_path / "vllm")
    assert "vLLM 0.32.0" in await check_environment(table(python))
    info = next((tmp_path / "vllm").glob("*.dist-info"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.20.1\n")
    with pytest.raises(JobError, match=r"runs vLLM 0\.20\.1; releases from 0\.32 to before 0\.34"):
        await check_environment(table(python))
    for file in info.iterdir():
        file.unlink()
    with pytest.raises(JobError, match="has no vLLM"):
        await check_environment(table(python))
    with pytest.raises(JobError, match="cannot be run: No such file"):
        await check_environment(table(tmp_path / "python3"))


# It gives one answer to everything that a server is asked before it is taken, with its command line in it.
ECHO = """
import http.server, json, sys

class Echo(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        asked = json.loads(self.rfile.read(length) or "{}")
        logprob = -asked.get("sampling_params", {}).get("temperature", 1.0)
        entry = {"token_id": 1, "logprob": logprob}
        content = [{**entry, "top_logprobs": [entry]}]
        answer = {
            "version": "0.32.0",
            "command": " ".join(sys.argv),
            "data": [{"id": "actor", "max_model_len": 64}],
            "choices": [{"token_ids": [1], "logprobs": {"content": content}}],
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_GET = do_POST

host, port = (sys.argv[sys.argv.index(word) + 1] for word in ("--host", "--port"))
http.server.HTTPServer((host, int(port)), Echo).serve_forever()
"""


@asynccontextmanager
async def started(
    folder: Path, lines: list[str], launcher: Launcher = LOCAL, **keys: Any
) -> AsyncIterator[tuple[VllmServers, str]]:
    """A server of the run that echoes its command line, and its address; `lines` is what it tells."""
    python = fake_environment(folder)
    (folder / SERVER).write_text(ECHO)
    version = folder / "version_0"
    version.mkdir()
    (version / "config.json").write_text("{}")
    run = RunDirectory(folder, "run")
    servers = VllmServers(table(python, **keys), Hardware("float32"), run, lines.append, launcher=launcher)
    try:
        await servers.start(version)
        yield servers, servers.urls[0]
    finally:
        await servers.stop()


async def test_a_server_that_dies_or_is_renewed_is_restarted_from_a_copy_that_stays(tmp_path):
    lines: list[str] = []
    async with started(tmp_path, lines, vllm={"seed": 3}) as (servers, url):
        (tmp_path / "version_0" / "config.json").unlink()
        start = RunDirectory(tmp_path, "run").weights / "start"
        assert (start / "config.json").read_text() == "{}"
        words = await command(url)
        assert f"--model {start} " in words and words.endswith(" --seed 3")
        assert "--max-model-len 64 --dtype float32 " in words
        process = process_at(url)
        os.kill(process, signal.SIGKILL)
        await until(lambda: process_at(url) not in (None, process))
        assert await command(url) == words
        again = process_at(url)
        servers.renew(url)
        await until(lambda: process_at(url) not in (None, again))
    wait_until(lambda: process_at(url) is None, within_s=5)  # the kernel ends it when its guard has ended
    assert lines[1:] == [
        f"replica {url}: vLLM 0.32.0, context 64",
        f"vLLM server {url} ended with SIGKILL (often the system, short of memory); it is restarted",
        f"vLLM server {url} does not come back, and is killed",
        f"vLLM server {url} ended with SIGKILL (often the system, short of memory); it is restarted",
    ]


class Elsewhere:
    """A launcher that has another port for each start, and whose second start fails."""

    def __init__(self, error: Exception) -> None:
        self.starts, self.error = 0, error

    async def start(self, role: Role) -> Process:
        self.starts += 1
        if self.starts == 2:
            raise self.error
        place = Place("127.0.0.1", port=free_port())
        return await LOCAL.start(replace(role, command=lambda _: role.command(place)))

    def key(self, variable: str) -> str:
        return LOCAL.key(variable)


@pytest.mark.parametrize("error", [NotPlaced("no node has room"), OSError("no room in memory")])
async def test_a_server_that_cannot_be_started_for_a_while_is_tried_again_and_tells_where_it_is_next(
    error, tmp_path, monkeypatch
):
    monkeypatch.setattr(VllmServer, "pauses_s", (0.01, 60.0))
    lines: list[str] = []
    moves: list[tuple[str, str]] = []

    async def moved(url: str, new_url: str) -> None:
        moves.append((url, new_url))

    async with started(tmp_path, lines, Elsewhere(error)) as (servers, url):
        servers.on_move(moved)
        assert f"--port {url.rpartition(':')[2]} " in await command(url)
        servers.renew(url)
        await until(lambda: lines[-1].endswith(f"cannot be started, and is tried again: {error}"))
        servers.renew(url)  # there may be none to kill
        await until(lambda: moves)
        assert moves == [(url, *servers.urls)] and url not in servers.urls
        assert await command(servers.urls[0])


async def test_the_python_that_is_asked_for_its_vllm_hears_no_ctrl_c_of_the_terminal(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\nread pid name state parent group session rest < /proc/$$/stat\n"
        "if [ $session = $$ ]; then echo 0.32.0; fi\n"
    )
    python.chmod(0o755)
    assert "vLLM 0.32.0" in await check_environment(table(python))


async def command(url: str) -> str:
    """The command line of a server, once it answers."""
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as response:
                    return str(json.loads(await response.read())["command"])
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)


async def test_a_server_that_does_not_start_is_told_with_its_last_line(tmp_path):
    wrong = table(fake_environment(tmp_path / "vllm"), vllm={"no_such_argument": 1})
    (tmp_path / "version_0").mkdir()
    servers = VllmServers(wrong, Hardware("float32"), RunDirectory(tmp_path, "run"), lambda line: None)
    with pytest.raises(JobError, match=r"exit code 2 before it was ready: .*arguments: --no-such-argument 1"):
        await servers.start(tmp_path / "version_0")
    await servers.stop()


def process_at(url: str) -> int | None:
    """The process that was started for a port, by its command line; not its guard."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_text().split("\0")
        except OSError:
            continue
        if words[1:3] == ["-m", "turnwise_serve"] and url.rpartition(":")[2] in words:
            return int(file.parent.name)
    return None


STUB = """
import subprocess, sys
subprocess.Popen(["sleep", "600"])
print("up", flush=True)
sys.stdin = None
import threading; threading.Event().wait()
"""


def test_a_server_and_its_engine_end_with_the_run_that_started_them(tmp_path):
    python = fake_environment(tmp_path)
    (tmp_path / SERVER).write_text(STUB)
    worker = Path(__file__).parents[3] / "trainer_backend/inference/vllm_worker"
    with subprocess.Popen(
        [python, "-m", "turnwise_serve"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(worker)},
    ) as process:  # fmt: skip
        assert process.stdout.readline() == b"up\n"
        process.stdin.close()
        assert process.wait(timeout=60) == -signal.SIGKILL
        assert process.stdout.read() == b""  # the engine held it open too, and is gone
