"""What is counted of a request, and what its answer is given; apart from any service."""

from service_kit.keys import Keys
from service_kit.observed import LATENCY_EDGES_S, Histogram, RequestObserver, Requests

KEYS = Keys((), variable="KEY")


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
