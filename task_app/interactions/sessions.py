"""An interaction that a client asks itself, as a session behind an id."""

from dataclasses import dataclass, field

from task_app.guards.locks import SessionLock
from task_app.interactions.live import LiveInteraction


@dataclass(slots=True, eq=False)
class InteractionSession:
    """`turn` counts its answers. No journal holds it, since nobody can tell what a class keeps."""

    live: LiveInteraction
    turn: int = 0
    lock: SessionLock = field(default_factory=SessionLock)
