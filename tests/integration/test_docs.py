"""Every ```python block of the README and the pages of docs/ runs, those of a page one after the other in one namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]


def blocks(page: str) -> list[tuple[int, str]]:
    """Return (number of lines above, code) of every python block."""
    text = (ROOT / page).read_text()
    return [(text.count("\n", 0, found.start(1)), found[1]) for found in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M)]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore")
def test_the_code_of_a_page_runs(page: str) -> None:
    names: dict[str, Any] = {"__name__": "page"}  # no module of that name: the classes travel to ranks by value, as from a script
    for above, code in blocks(page):
        exec(compile("\n" * above + code, page, "exec"), names)  # the lines of a traceback are those of the page


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []
