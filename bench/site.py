"""Hooks of mkdocs.yml: they add README, changelog, AGENTS.md and HTTP reference as pages, and change links.

The site has no repository to link to. A link to a file outside of docs/ therefore becomes the link's text and
the path. A link whose file is missing is kept, and the strict build refuses it.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from bench.http_reference import DOCUMENTS, write_reference

ROOT = Path(__file__).parents[1]
# Pages from outside of docs/, by their place in the site.
OUTSIDE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "agents.md": "AGENTS.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside, the pictures of bench/results, and the HTTP reference."""
    for name, source in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=rewrite_links(text, ROOT, ROOT / "docs")))
    for picture in sorted((ROOT / "bench/results").glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    for name, describe in DOCUMENTS.items():
        files.append(File.generated(config, f"reference-{name}.md", content=write_reference(describe())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page of docs/."""
    if page.file.generated_by is not None:
        return markdown
    folder = (ROOT / "docs" / page.file.src_uri).parent
    return rewrite_links(markdown, folder, folder)


def rewrite_links(text: str, source: Path, target: Path) -> str:
    """Return a text of the folder `source` with its links changed for the folder `target`; code is kept."""
    parts = re.split(r"(```.*?```)", text, flags=re.S)
    return "".join(
        part if index % 2 else _LINK.sub(lambda found: _rewrite(found, source, target), part)
        for index, part in enumerate(parts)
    )


def _rewrite(found: re.Match[str], source: Path, target: Path) -> str:
    picture, words, link, anchor = found.groups(default="")
    file = (source / link).resolve()
    inside = _place_in_site(file)
    if inside is not None:
        up = "../" * len(target.relative_to(ROOT / "docs").parts)
        return f"{picture}[{words}]({up}{inside}{anchor})"
    if not file.exists():
        return found[0]
    path = str(file.relative_to(ROOT))
    plain = words.strip("`")
    return f"`{path}`" if path.endswith(plain) else f"{words} (`{path}`)"


def _place_in_site(file: Path) -> str | None:
    """Return the path of this file in the site; None if the site does not have it."""
    for name, source in OUTSIDE.items():
        if file == ROOT / source:
            return name
    if file.suffix == ".png" and file.parent == ROOT / "bench/results":
        return f"results/{file.name}"
    if file.is_relative_to(ROOT / "docs") and file.exists():
        return file.relative_to(ROOT / "docs").as_posix()
    return None
