"""The process of a library: `PYTHON children LIBRARY ARGUMENT CONFIG`, whose Python need not have Turnwise.

The module `LIBRARY_child` of this folder plays. Its `open_world(argument, config)` returns an object with
`tools` (name, description and parameters of each, or None), `reset(seed)` and `say(text)`, and where it has
tools `call(calls)`. Where only known arguments can be played, NAMES has them, and KIND says what they are.

Each line of stdin has one line as its answer: {"reset": seed} the opening {"system", "prompt"}, {"say": text}
and {"call": [{"name", "arguments"}, ...]} a list of what was shown, one for the text or for each call:
{"text", "reward", "terminated", "truncated", "refused", "data"}, where what is missing is empty. Each may be
{"error": sentence} instead. The first line is {"ready": tools}; where tools is null, {"offer": seed} asks for
them, which begins an episode. The process ends when stdin closes.
"""

import json
import os
import sys
from difflib import get_close_matches
from importlib import import_module


def main(library: str, argument: str, config: str) -> None:
    # What the library prints goes to stderr, so that it cannot break the exchange.
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
    except BaseException as exc:  # a SystemExit of the library too: the service must hear the cause
        # sys.exit(sentence) is how the modules of this folder refuse.
        message = str(exc) if isinstance(exc, SystemExit) else f"{type(exc).__name__}: {exc}"
        print(json.dumps({"error": message[:1_000]}), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
