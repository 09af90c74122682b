"""Reward functions that behave as users' do; a file of an operator, imported by child processes."""

import asyncio
import faulthandler
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from task_app.reward_functions import EvaluateResult, StepOutput, reward_function


@reward_function
def fair(messages, ground_truth=None, **kwargs):
    """1 a word of the truth; each answer is worth its place."""
    turns = [message for message in messages if message.role == "assistant"]
    outputs = tuple(StepOutput(step_index=t, base_reward=t / 4) for t in range(len(turns)))
    return EvaluateResult(
        score=10 + kwargs["environment_outcome_reward"], step_outputs=outputs, reason="fair"
    )


@reward_function
def truth(messages, ground_truth=None, **kwargs):
    return {"score": ground_truth["answer"], "reason": str(os.getpid())}


@reward_function
def chatty(messages, ground_truth=None, **kwargs):
    """Prints in every way that there is, and reads what is not there."""
    if ground_truth == "flood":
        print(("x" * 1_000 + "\n") * 2_000)
        return EvaluateResult(score=1.0)
    print('{"results": [{"score": 5}]}')
    sys.stderr.write("to stderr\n")
    os.write(1, b"to the descriptor\n")
    subprocess.run(["echo", "from a child"], check=True)
    left = sys.stdin.read()
    return EvaluateResult(score=1.0 if left == "" else 0.0)


@reward_function
def hangs(messages, **kwargs):
    time.sleep(1_000)


@reward_function
def backtracks(messages, **kwargs):
    """Holds the interpreter lock for ever."""
    re.match(r"(a+)+$", "a" * 60 + "b")


@reward_function
def waits(messages, **kwargs):
    """Says where it is, and starts a process of its own; then hangs."""
    other = subprocess.Popen(["sleep", "1000"])
    Path(os.environ["HOME"], "waiting").write_text(f"{os.getpid()} {other.pid}")
    time.sleep(1_000)


@reward_function
def closes(messages, **kwargs):
    """Closes its end of the exchange, calls off its watchdog, and lives on."""
    faulthandler.cancel_dump_traceback_later()
    os.closerange(3, 1_000)
    time.sleep(1_000)


@reward_function
def no_reward(messages, ground_truth, **kwargs):
    """Does what its truth names."""
    if ground_truth == "raises":
        raise KeyError("answer")
    if ground_truth == "leaves":
        sys.exit(3)
    if ground_truth == "number":
        return 0.5
    if ground_truth == "nan":
        return EvaluateResult(score=float("nan"))
    if ground_truth == "scribbles":  # into whatever is open, the exchange among it
        for descriptor in range(3, 20):
            with suppress(OSError):
                os.write(descriptor, b"[]\n")
    return EvaluateResult(score=1.0, reason="x" * 3_000_000)


@reward_function
def misfit(messages, **kwargs):
    outputs = tuple(StepOutput(step_index=index, base_reward=1.0) for index in (0, 0, 9))
    return EvaluateResult(score=1.0, step_outputs=outputs)


@reward_function
def variables(messages, **kwargs):
    return EvaluateResult(score=1.0, reason=" ".join(sorted(os.environ)))


@reward_function(mode="batch")
async def together(rollouts_messages, ground_truth, rollout_id, **kwargs):
    """How many are judged at once; does not bear the one whose truth is "bad", and hangs on "hang"."""
    await asyncio.sleep(1_000 if "hang" in ground_truth else 0)
    if "bad" in ground_truth:
        raise ValueError("a bad one")
    return [EvaluateResult(score=len(rollouts_messages), reason=name) for name in rollout_id]


REWARD_FUNCTIONS = {name: function for name, function in list(globals().items()) if hasattr(function, "mode")}
