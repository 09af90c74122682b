"""What the engine raises for calls that come at the wrong time.

EngineError (RuntimeError)
├── NotReset       a game was played or looked at before reset()
└── EpisodeOver    a step after death or after the last allowed step
"""


class EngineError(RuntimeError):
    """The engine cannot do this in its present state; the message says what to call first."""


class NotReset(EngineError):
    """There is no world yet: reset() comes first."""


class EpisodeOver(EngineError):
    """The episode ended; only reset() goes on from here. (Stock crafter lets a dead player walk on.)"""
