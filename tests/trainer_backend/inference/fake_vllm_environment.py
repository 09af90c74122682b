"""An environment in which the fake is what is installed as vLLM, for a run that starts its servers itself."""

import argparse
import asyncio
import json
import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer


def fake_environment(folder: Path) -> Path:
    """The Python of an environment in which vLLM is this fake; `folder / "deadly"` is its `deadly_file`."""
    module = folder / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(f"from {__name__} import main\nmain({str(folder)!r})\n")
    info = folder / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    (info / "top_level.txt").write_text("vllm\n")
    python = folder / "python"
    root = Path(__file__).parents[3]
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{folder}:{root}" exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return python


def main(environment: str) -> None:
    """Serve as `python -m vllm.entrypoints.openai.api_server` does; it knows what a run gives."""
    parser = argparse.ArgumentParser(prog="api_server.py")
    for name in ("model", "served-model-name", "host", "dtype", "logprobs-mode", "generation-config"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--worker-extension-cls", required=True)
    for name in ("port", "max-model-len", "max-logprobs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("enable-scale-out", "enable-prompt-tokens-details"):
        parser.add_argument(f"--{name}", action="store_true", required=True)
    parser.add_argument("--max-num-seqs", type=int)
    asyncio.run(_forward(parser.parse_args(), Path(environment)))
    os._exit(9)


async def _forward(flags: argparse.Namespace, environment: Path) -> None:
    """Hand all bytes to a fake of the test's own process, until that says to die."""
    orders, words = await asyncio.open_connection("127.0.0.1", int((environment / "host").read_text()))
    words.write(json.dumps([flags.model, flags.max_model_len]).encode() + b"\n")
    port = int(await orders.readline())

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError), closing(writer):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    async with await asyncio.start_server(serve, flags.host, flags.port):
        await orders.read()


@contextmanager
def hosted(environment: Path) -> Iterator[None]:
    """The fakes of an environment's servers, in this process, which has torch already."""
    from tests.trainer_backend.inference.fake_vllm import fake_vllm

    class Host(StreamRequestHandler):
        def handle(self) -> None:
            model, max_model_len = json.loads(self.rfile.readline())
            ended = threading.Event()
            with fake_vllm(Path(model), max_model_len=max_model_len) as (fake, url):
                fake.deadly_file = environment / "deadly"
                fake.die = lambda: (self.connection.shutdown(socket.SHUT_WR), ended.wait())
                self.wfile.write(url.rpartition(":")[2].encode() + b"\n")
                self.rfile.read()  # until the process has ended
                ended.set()

    with ThreadingTCPServer(("127.0.0.1", 0), Host) as server:
        (environment / "host").write_text(str(server.server_address[1]))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield
        server.shutdown()
        thread.join()
