"""One POST to an inference server: its bounded answer, or the reason why another may be worth it."""

from collections.abc import Mapping

import aiohttp

from task_app.policies.replies import protocol_error, wait_told


class TryAgain(Exception):
    """Nothing answered, or the server said 'later', and perhaps when; the same request may be sent again."""

    def __init__(self, sentence: str, *, after_s: float | None = None) -> None:
        super().__init__(sentence)
        self.after_s = after_s


class Endpoint:
    """Where a policy asks, with what headers, how long it waits and how much it reads.

    Without a session each request has one of its own.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession | None,
        url: str,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        max_reply_bytes: int,
    ) -> None:
        self._session, self._url, self._headers = session, url, headers
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._timeout_s, self._max_reply_bytes = timeout_s, max_reply_bytes

    async def post(self, data: bytes) -> tuple[int, bytes, float | None]:
        """Status, body, and after how many seconds the server wants to be asked again, if it says so.

        Raises:
            TryAgain: no answer in time, or the connection failed.
            PolicyUnavailable: the answer is no HTTP, or too long.
        """
        try:
            if self._session is not None:
                return await self._posted(self._session, data)
            async with aiohttp.ClientSession() as session:
                return await self._posted(session, data)
        except TimeoutError as exc:
            raise TryAgain(f"no answer within {self._timeout_s:g} s") from exc
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as exc:
            raise TryAgain(f"{type(exc).__name__}: {exc}"[:200]) from exc
        except (aiohttp.ClientError, ValueError) as exc:
            raise protocol_error(type(exc).__name__) from exc

    async def _posted(self, session: aiohttp.ClientSession, data: bytes) -> tuple[int, bytes, float | None]:
        # No redirects: they would lead past the list of allowed hosts.
        async with session.post(
            self._url, data=data, headers=self._headers, timeout=self._timeout, allow_redirects=False
        ) as response:
            after_s = wait_told(response.headers.get("Retry-After"))
            return response.status, await self._bounded(response), after_s

    async def _bounded(self, response: aiohttp.ClientResponse) -> bytes:
        if (response.content_length or 0) <= self._max_reply_bytes:
            parts = bytearray()
            async for part in response.content.iter_any():
                parts += part
                if len(parts) > self._max_reply_bytes:
                    break
            else:
                return bytes(parts)
        raise protocol_error(f"a reply of more than {self._max_reply_bytes} bytes")
