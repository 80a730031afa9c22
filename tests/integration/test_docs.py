"""Every ```python block of the README and the pages of docs/ runs, those of a page one after the other in one namespace."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]


def blocks(page: str) -> list[tuple[int, str]]:
    """Return (number of lines above, code) of every python block."""
    text = (ROOT / page).read_text()
    return [(text.count("\n", 0, found.start(1)), found[1]) for found in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M)]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore")
def test_the_code_of_a_page_runs(page: str) -> None:
    torch.manual_seed(0)  # what a page draws without a seed of its own
    names: dict[str, Any] = {"__name__": "page"}  # no module of that name: the classes travel to ranks by value, as from a script
    for above, code in blocks(page):
        exec(compile("\n" * above + code, page, "exec", dont_inherit=True), names)  # the lines of a traceback are those of the page


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()] == []


def test_the_pages_are_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), str(tmp_path / "pages")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (tmp_path / "pages").glob("*.html")}
    assert pages >= {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert "ModelCheckpoint" in (tmp_path / "pages" / "reference.html").read_text()


def test_the_messages_of_the_troubleshooting_page_are_in_the_code():
    told = re.findall(r"^`(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    texts = []
    for path in [*(ROOT / "trainer").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):  # strings that stand one after the other are one constant here
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    assert len(told) > 20
    assert [message for message in told if not any(message in text for text in texts)] == []
