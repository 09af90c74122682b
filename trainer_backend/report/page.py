"""From sections to one HTML file. The template escapes everything that it is given."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trainer_backend.report.charts import Picture
from trainer_backend.report.filmstrip import Filmstrip
from trainer_backend.report.story import Story
from trainer_backend.report.summary import (
    evaluation_columns,
    evaluation_rows,
    failure_lines,
    figure_lines,
    job_lines,
)


@dataclass(frozen=True, slots=True)
class Section:
    """A chart with its title and what it shows; `missing` stands in its place when there is none."""

    title: str
    text: str
    picture: Picture | None
    missing: str


def page(story: Story, sections: Sequence[Section], film: Filmstrip | None) -> str:
    """The whole report as HTML, pictures inside: it needs no other file and no network."""
    return render(
        "page.html.jinja",
        title=f"{story.job.job.name}: report",
        name=story.job.job.name,
        figures=figure_lines(story),
        evaluation_columns=evaluation_columns(story),
        evaluations=evaluation_rows(story),
        sections=sections,
        film=film,
        failures=failure_lines(story),
        job=job_lines(story),
    )


def render(template: str, **values: Any) -> str:
    """A template of this folder, filled in; all that stands in `values` is escaped."""
    # Not select_autoescape: it goes by the file's ending, and .jinja is not one that it escapes.
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FileSystemLoader(Path(__file__).parent),
    )
    environment.filters["data_uri"] = _data_uri
    return environment.get_template(template).render(**values)


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
