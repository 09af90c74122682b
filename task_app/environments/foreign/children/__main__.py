"""Plays the environments of one library in a process: `PYTHON children LIBRARY ARGUMENT CONFIG`.

PYTHON needs the library, but not Turnwise. ARGUMENT names an environment of the library; CONFIG is JSON.

The module `LIBRARY_child` of this folder plays the environment. Its `open_world(argument, config)` returns an
object with the attribute `tools`, a list of tools with name, description and parameters, and the methods
`reset(seed)` and `say(text)`. An object with tools also has `call(calls)`. If `tools` is None, the tools are
known only after an episode has begun; the method `offer(seed)` then begins an episode and returns the tools.
A module that accepts only certain arguments lists these in NAMES; KIND is a word for them, used in errors.

The process answers each line of stdin with one line on stdout:

    {"reset": seed}                                 {"system", "prompt", "tools"}, the opening
    {"say": text}                                   a list with one outcome
    {"call": [{"name", "arguments"}, ...]}          a list with an outcome for each call
    {"offer": seed}                                 the tools; this begins an episode

An outcome is {"text", "reward", "terminated", "truncated", "refused", "data"}; a missing key counts as empty.
Any answer may be {"error": sentence} instead. Before the first answer, the process writes {"ready": tools};
tools may be null. The process ends when stdin closes.
"""

import json
import os
import sys
from difflib import get_close_matches
from importlib import import_module


def main(library: str, argument: str, config: str) -> None:
    # The library's output goes to stderr, so that it cannot disturb the protocol.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        module = import_module(f"{library}_child")
        if argument not in (known := getattr(module, "NAMES", (argument,))):
            close = " or ".join(map(repr, get_close_matches(argument[:100], known)))
            guess = f". Did you mean {close}?" if close else ""
            sys.exit(f"{argument[:100]!r} is none of the {len(known)} {module.KIND}{guess}")
        world = module.open_world(argument, json.loads(config))
        print(json.dumps({"ready": world.tools}), file=replies, flush=True)
        for line in sys.stdin:
            ((name, value),) = json.loads(line).items()
            print(json.dumps(getattr(world, name)(value)), file=replies, flush=True)
    except BaseException as exc:  # also a SystemExit of the library: the task app must get the cause
        # The modules of this folder report an error by sys.exit(sentence).
        message = str(exc) if isinstance(exc, SystemExit) else f"{type(exc).__name__}: {exc}"
        print(json.dumps({"error": message[:1_000]}), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
