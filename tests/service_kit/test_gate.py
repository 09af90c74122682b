"""The gate, its doors and keys, and what is counted of a request; apart from any service."""

import asyncio
import base64
from types import SimpleNamespace

import pytest
from pydantic import SecretStr
from starlette.requests import ClientDisconnect

from service_kit.errors import ServiceError
from service_kit.gate import (
    Gate,
    KeyDoor,
    Leaving,
    _says_json,
    asks_for_a_page,
    is_cross_site,
    while_connected,
    whole_body,
)
from service_kit.keys import Guesses, Keys, presented_keys
from service_kit.observed import LATENCY_EDGES_S, Histogram, RequestObserver, Requests
from service_kit.problems import BodyError


class Open:
    """A door that lets everybody in."""

    def error(self, scope):
        return None

    def page(self, scope, response):
        return response


class Unreadable(ServiceError, code="unreadable", status=422):
    pass


async def ask_gate(app, *messages, headers=(), unreadable=None):
    """What the gate around the app sends for a POST with this body, of which no more comes then."""
    sent, left = [], list(messages)

    async def receive():
        if left:
            return left.pop(0)
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    gate = Gate(app, door=Open(), max_body_bytes=10, max_body_s=0.01, unreadable=unreadable)
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": [*headers]}
    await gate(scope, receive, send)
    return sent


def part(body, more=True):
    return {"type": "http.request", "body": body, "more_body": more}


JSON = [(b"content-type", b"application/json")]
KEY, KEYS = "the-key-of-these-tests", Keys((), variable="KEY")


@pytest.mark.parametrize(
    ("messages", "status"), [([part(b"[1")], 408), ([part(b"[" * 11)], 413), ([part(b"[1", more=False)], 422)]
)
async def test_a_json_body_is_whole_small_and_readable_before_the_app_is_asked(messages, status):
    start, _ = await ask_gate(None, *messages, headers=JSON, unreadable=Unreadable)
    assert start["status"] == status


@pytest.mark.parametrize(("messages", "status"), [([part(b"[1")], 408), ([part(b"[" * 11)], 413)])
async def test_another_body_is_bounded_while_the_app_reads_it(messages, status):
    errors = []

    async def reads(scope, receive, send):
        with pytest.raises(BodyError) as refused:  # the kind that FastAPI lets through
            await receive(), await receive()
        errors.append(refused.value)

    await ask_gate(reads, *messages)
    assert [(error.status_code, error.error.status) for error in errors] == [(status, status)]


async def test_a_client_that_leaves_in_the_middle_of_a_body_gets_no_answer():
    gone = {"type": "http.disconnect"}
    assert await ask_gate(None, part(b"["), gone, headers=JSON, unreadable=Unreadable) == []

    async def reads(scope, receive, send):
        with pytest.raises(ClientDisconnect):
            await whole_body(receive)

    assert await ask_gate(reads, part(b"["), gone) == []


@pytest.mark.parametrize(("origin", "found"), [((), [b"k"]), (((b"origin", b"http://evil"),), [])])
def test_a_socket_that_a_page_opens_cannot_use_it_and_a_program_can(origin, found):
    headers = [(b"authorization", b"Basic " + base64.b64encode(b"me:k")), *origin]
    door = KeyDoor(KEYS, open_paths=())
    assert presented_keys(door.credentials({"type": "websocket", "headers": headers})) == found


def test_only_a_get_asks_for_a_page():
    html = [(b"accept", b"text/html")]
    asks = [asks_for_a_page({"type": "http", "method": one, "headers": html}) for one in ("GET", "POST")]
    assert asks == [True, False]


@pytest.mark.parametrize(
    ("value", "is_json"),
    [
        (b"application/json", True),
        (b" Application/JSON ; charset=utf-8", True),
        (b"\xa0application/json\xa0", True),
        (b"\x85application/problem+json\x85; charset=utf-8", True),
        (b"text/plain", False),
        (b"application/jsonl", False),
        (b"", False),
    ],
)
def test_a_content_type_is_read_without_the_blanks_that_fastapi_strips(value, is_json):
    scope = {"headers": [(b"content-type", value), (b"content-type", b"text/plain")]}
    assert _says_json(scope) is is_json
    assert not _says_json({"headers": []})


@pytest.mark.parametrize(
    ("method", "headers", "is_other"),
    [
        ("POST", {}, False),
        ("POST", {b"sec-fetch-site": b"same-origin", b"origin": b"http://other"}, False),
        ("POST", {b"sec-fetch-site": b"none"}, False),
        ("POST", {b"origin": b"http://localhost:8100", b"host": b"LOCALHOST:8100"}, False),
        ("GET", {b"sec-fetch-site": b"cross-site", b"sec-fetch-mode": b"navigate"}, False),
        ("GET", {b"sec-fetch-site": b"cross-site", b"sec-fetch-mode": b"no-cors"}, True),
        ("POST", {b"sec-fetch-site": b"cross-site", b"sec-fetch-mode": b"navigate"}, True),
        ("POST", {b"origin": b"http://localhost:8100.evil", b"host": b"localhost:8100"}, True),
        ("POST", {b"origin": b"http://[", b"host": b"localhost:8100"}, True),
    ],
)
def test_the_page_of_another_site_is_told_from_programs_own_pages_and_links(method, headers, is_other):
    assert is_cross_site(method, headers) is is_other


class Client:
    """A client that leaves when a test says so, and the work for it."""

    def __init__(self):
        self.left, self.began, self.ended = asyncio.Event(), asyncio.Event(), ""

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def work(self):
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


async def test_work_for_a_client_that_stays_has_its_own_result_or_error():
    async def fail(error):
        raise error

    assert await while_connected(asyncio.sleep(0, "done"), Client().receive) == "done"
    for error in (TimeoutError("its own"), ValueError("x")):
        with pytest.raises(type(error), match=str(error)):
            await while_connected(fail(error), Client().receive)


class ToldClient(Client):
    """A client of a server that tells when it leaves."""

    def __init__(self):
        super().__init__()
        told = Leaving()
        self.left, self.receive = SimpleNamespace(set=told.tell), SimpleNamespace(leaving=told)


@pytest.mark.parametrize("kind", [Client, ToldClient])
@pytest.mark.parametrize(("end", "error"), [("leave", ClientDisconnect), ("cancel", asyncio.CancelledError)])
async def test_work_is_cancelled_when_its_client_leaves_or_others_cancel_the_request(kind, end, error):
    client = kind()
    request = asyncio.ensure_future(while_connected(client.work(), client.receive))
    await client.began.wait()
    client.left.set() if end == "leave" else request.cancel()
    with pytest.raises(error):
        await request
    assert client.ended == "cancelled"


async def test_work_for_a_client_that_has_left_before_is_cancelled_too():
    client = ToldClient()
    client.left.set()
    with pytest.raises(ClientDisconnect):
        await while_connected(client.work(), client.receive)
    assert client.ended == "cancelled"


def test_an_open_folder_opens_itself_and_what_lies_below():
    door = KeyDoor(Keys([SecretStr("k")], variable="KEY"), open_paths=(), open_below=["/open"])
    scope = {"type": "http", "method": "GET", "headers": []}
    paths = ("/open", "/open/er", "/opener", "/op")
    assert [path for path in paths if door.error({**scope, "path": path}) is None] == ["/open", "/open/er"]


@pytest.mark.parametrize("pieces", [[b"[1]"], [b"[", b"1", b"]"], [b""]])
async def test_a_body_is_whole_in_one_piece_and_in_several(pieces):
    messages = [part(piece, more=place < len(pieces) - 1) for place, piece in enumerate(pieces)]

    async def receive():
        return messages.pop(0)

    assert await whole_body(receive) == b"".join(pieces)


def test_a_key_is_right_in_any_header_that_may_hold_one():
    keys = Keys([SecretStr(KEY), SecretStr("another")], variable="KEY")
    right = [
        [(b"x-api-key", KEY.encode())],
        [(b"x-api-keys", b"no, another ,")],
        [(b"authorization", b"bearer  " + KEY.encode())],
        [(b"x-api-key", b"no"), (b"authorization", b"Bearer another")],
    ]
    wrong = [
        [],
        *([(b"x-api-key", key.encode())] for key in ("", KEY[:-1], KEY + "x", KEY.upper(), f"{KEY},another")),
        [(b"x-api-key", b"\xff\xfe")],
        [(b"x-api-keys", b",,")],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Basic " + KEY.encode())],
    ]
    assert [keys.match(headers) for headers in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)
    assert not Keys([], variable="KEY").match([(b"x-api-key", b"")])
    assert keys.opens(f" {KEY} ") and not keys.opens("")


def test_wrong_keys_are_forgotten_after_a_minute_and_counted_by_address():
    now_s = [0.0]
    guesses = Guesses(lambda: now_s[0])
    for second in range(10):
        assert guesses.wait_s("a") == 0.0
        now_s[0] = float(second)
        guesses.count("a")
    assert (guesses.wait_s("a"), guesses.wait_s("b")) == (51.0, 0.0)  # the first came at 0, now it is 9
    now_s[0] = 60.0
    assert guesses.wait_s("a") == 0.0


def test_a_latency_falls_below_the_first_edge_that_holds_it():
    histogram = Histogram()
    for took_s in (0.0005, 0.0006, 99.0):
        histogram.observe(took_s)
    found = dict(histogram.cumulative())
    assert (found["0.0005"], found["0.001"], found["30"], found["+Inf"]) == (1, 2, 2, 3)
    assert histogram.sum_s == 0.0005 + 0.0006 + 99.0
    assert list(LATENCY_EDGES_S) == sorted(LATENCY_EDGES_S)


def test_a_made_up_method_is_no_label_of_its_own():
    requests = Requests()
    for number in range(100):
        requests.count(f"METHOD{number}", "/", 405)
    assert dict(requests.replies) == {("other", "/", 405): 100}


class Route:
    path = "/jobs/{job_id}/events"


async def test_an_answer_has_an_id_and_is_counted_as_it_begins_and_a_stream_has_no_time():
    requests, sent, counted = Requests(), [], []

    async def answers(scope, receive, send):
        scope["route"] = Route
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        counted.append(requests.replies["GET", Route.path, 200])  # a stream may go on for hours

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-request-id", b"mine-1")]}
    observed = RequestObserver(answers, requests=requests, keys=KEYS, streams=[Route.path])
    await observed(scope, None, send)
    assert sent[0]["headers"] == [
        (b"a", b"b"), (b"x-request-id", b"mine-1"), (b"x-content-type-options", b"nosniff"),
    ]  # fmt: skip
    assert requests.latency == {}
    await RequestObserver(answers, requests=requests, keys=KEYS)(scope, None, send)
    assert (requests.latency.keys(), counted) == ({Route.path}, [1, 2])


async def test_a_client_that_leaves_before_the_answer_is_no_fault_of_the_service():
    requests = Requests()

    async def says_nothing(scope, receive, send):
        return

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    await RequestObserver(says_nothing, requests=requests, keys=KEYS)(scope, None, None)
    assert dict(requests.replies) == {("GET", "none", 499): 1}
