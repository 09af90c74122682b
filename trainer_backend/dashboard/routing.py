"""A route whose errors are pages: what the API answers as problem+json, a person reads as a sentence."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from trainer_backend.dashboard.errors import BadAddress
from trainer_backend.dashboard.rendering import page
from trainer_backend.dashboard.services import dashboard_of
from trainer_backend.errors import TrainerError


class PageRoute(APIRoute):
    """Every TrainerError of its function becomes a page, with the error's own status."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except TrainerError as error:
                return problem_page(request, error)
            except RequestValidationError as error:
                told = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
                return problem_page(request, BadAddress(told))

        return handled


def problem_page(request: Request, error: TrainerError) -> Response:
    """A page that says what is wrong."""
    return page(
        "problem",
        status=error.status,
        title=error.title,
        detail=error.detail if error.where is None else f"{error.where}: {error.detail}",
        hint=error.hint,
        **frame(request, ""),
    )


def frame(request: Request, here: str) -> dict[str, Any]:
    """What every page's frame is given; `here` says which part of the site it is."""
    return {"here": here, "can_submit": dashboard_of(request).jobs is not None}


def page_router() -> APIRouter:
    # Pages are for people: the OpenAPI document holds what programs are to use.
    return APIRouter(route_class=PageRoute, include_in_schema=False)
