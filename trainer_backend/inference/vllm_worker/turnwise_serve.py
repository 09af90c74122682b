"""Start vLLM's server for the run that is its parent: `python -m turnwise_serve --model FOLDER ...`.

This file runs in vLLM's own environment and imports nothing of Turnwise. Standard input is a pipe that only
the parent holds, so the pipe closes however the parent ends. This process then kills the server and its
engine processes, which would otherwise keep the memory of a GPU.
"""

import os
import runpy
import signal
import threading


def end_with_parent() -> None:
    """Start a thread that kills this process and its child processes once standard input closes."""

    def watch() -> None:
        while os.read(0, 65_536):
            pass
        # The parent has started this process as the leader of a process group.
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":  # processes of the engine import this module too
    end_with_parent()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
