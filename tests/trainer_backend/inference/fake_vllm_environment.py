"""An environment in which the fake is what is installed as vLLM, for a run that starts its servers itself."""

import argparse
import shlex
import sys
import threading
from pathlib import Path

from service_kit.own_process import begin_imports, end_imports


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
    flags = parser.parse_args()
    begin_imports()
    # After the arguments: it imports torch.
    from tests.trainer_backend.inference.fake_vllm import fake_vllm

    end_imports()
    with fake_vllm(Path(flags.model), port=flags.port, max_model_len=flags.max_model_len) as (fake, _):
        fake.deadly_file = Path(environment) / "deadly"
        threading.Event().wait()
