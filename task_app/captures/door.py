"""Stores the open captures of a service by id, and checks the keys of requests to captures."""

import hmac
from collections.abc import Collection

from starlette.types import Scope

from service_kit.errors import ServiceError
from service_kit.gate import KeyDoor, no_key
from service_kit.keys import Keys, presented_keys
from shared_schemas.trajectory import StopReason
from task_app.captures.session import Capture, CaptureSpec
from task_app.errors import InvalidRequest
from task_app.held import Held
from task_app.sessions.registry import Sessions

PATH = "/captures/"
# Paths of model calls are /captures/{capture_id} followed by this prefix. Model calls always need a key.
V1 = "/v1/"


class Captures:
    """Opens, finds and removes a service's captures; `held` counts the bytes of captures and rollouts."""

    def __init__(self, *, capacity: int, idle_s: float, held: Held, rejects_form: bool = False) -> None:
        self.held, self._rejects_form = held, rejects_form
        self.sessions = Sessions[Capture](
            "capture",
            capacity=capacity,
            idle_s=idle_s,
            end_path="/captures/{capture_id}/end",
            on_remove=self._release,
        )
        # Host and port to which the last rollout was posted. Agents on this machine use them as well.
        self.address: tuple[str, int | None] | None = None

    def open(self, spec: CaptureSpec, *, size: int = 0) -> Capture:
        """Open a capture.

        `size` is the number of bytes of the request. For a rollout it is 0, because the rollout service has
        counted the request already.

        Raises:
            CapacityReached: too many captures are open, or too many bytes are held. Bytes are not checked for
                the capture of a rollout, because the rollout has been accepted already.
        """
        if spec.max_bytes is not None:
            self.held.check_room()
        capture = Capture(spec, self.held, rejects_form=self._rejects_form)
        capture.capture_id = self.sessions.add(capture)
        capture.hold(size)
        return capture

    def _release(self, _: str, capture: Capture) -> None:
        # After `end`, a call that is still waiting for the policy is refused, so it adds no more bytes.
        capture.end(StopReason.ENVIRONMENT_DONE)
        capture.hold(-capture.held_bytes)

    def find_url(self, capture: Capture) -> str:
        """Return the URL, without /v1, at which processes on this machine reach the capture."""
        if self.address is None or self.address[1] is None:
            raise InvalidRequest("agents reach this service over TCP, and it was asked over another socket")
        host, port = self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}{capture.capture_id}"

    def opens(self, scope: Scope) -> bool:
        """Return whether the request contains the key of the capture that the request's path names."""
        capture = self.sessions.find(scope["path"].removeprefix(PATH).partition("/")[0])
        ours = capture.key.encode() if capture is not None else b""
        keys = presented_keys(scope["headers"])
        return capture is not None and any([hmac.compare_digest(key, ours) for key in keys])


class CaptureDoor(KeyDoor):
    """Checks API keys like its base class, and accepts a capture's own key for the paths of that capture.

    Model calls need a key even if the service is configured without keys, so that an agent with a wrong key
    gets an error.
    """

    def __init__(
        self,
        keys: Keys,
        captures: Captures,
        *,
        open_paths: Collection[str],
        open_below: Collection[str],
        basic_posts: str,
    ) -> None:
        super().__init__(keys, open_paths=open_paths, open_below=open_below, basic_posts=basic_posts)
        self._captures = captures

    def error(self, scope: Scope) -> ServiceError | None:
        path: str = scope["path"]
        if not path.startswith(PATH) or scope["type"] != "http":
            return super().error(scope)
        if self._captures.opens(scope):
            return None
        error = super().error(scope)
        if error is None and not self._keys.configured and f"/{path.split('/', 3)[-1]}".startswith(V1):
            return no_key(self._keys, scope["headers"])
        return error
