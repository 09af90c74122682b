"""The error body of both services: RFC 9457 problem+json."""

from shared_schemas.base import Body

PROBLEM_MEDIA_TYPE = "application/problem+json"


class Problem(Body):
    """Body of an error reply: `detail` and `hint` are for people, `code` is for programs.

    `where` names the faulty part: a header, a path in the body such as `rollouts.3.start.seed`, or an id.
    """

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    where: str | None = None
    hint: str | None = None
