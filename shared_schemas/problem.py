"""The error body of both services: RFC 9457 problem+json."""

from shared_schemas.base import Body

PROBLEM_MEDIA_TYPE = "application/problem+json"


class Problem(Body):
    """An error for a person (`detail`, `hint`) and for a program (`code`).

    `where` names the place: a header, a body path such as `rollouts.3.start.seed`, an id.
    """

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    where: str | None = None
    hint: str | None = None
