"""The router class for all routes of the trainer's API."""

from functools import partial
from operator import attrgetter

from fastapi import APIRouter

from service_kit.problems import problem_responses

# Error statuses that OpenAPI lists for every route.
ERRORS = (400, 401, 403, 404, 408, 409, 413, 415, 422, 500, 503)
# Generated clients name their functions by the operation id.
Router = partial(
    APIRouter, responses=problem_responses(ERRORS), generate_unique_id_function=attrgetter("name")
)
