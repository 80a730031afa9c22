"""One file's text in, its new text and the findings out: programs, notebooks, and YAML files that name classes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import libcst as cst

from trainer.migrate import names
from trainer.migrate.advice import advise
from trainer.migrate.idioms import idioms
from trainer.migrate.rewrite import rewrite
from trainer.migrate.source import Edit, Finding, Source, apply

__all__ = ["Note", "config", "notebook", "program"]

_CLASS = re.compile(r"(?<![\w./-])(?:pytorch_lightning|lightning_fabric|lightning)(?:\.\w+)+")
_MAGIC = re.compile(r"^(\s*)(?:[%!?].*|[\w.]+\s*\?{1,2}\s*)$|^(\s*[\w, ]+=\s*)[%!].*$")
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")


@dataclass(frozen=True)
class Note:
    """A finding with its place as people read it."""

    place: str  # "12", or "cell 3, line 2"
    text: str
    by_hand: bool


def program(text: str, kept: Collection[str] = ()) -> tuple[str, list[Note]]:
    """Rewrite a program; one that does not parse stays as it is, and is reported."""
    edits, findings, problem = _work(text, kept)
    if problem is not None:
        return text, [Note(str(problem[0]), problem[1], True)]
    data = text.encode()
    return apply(data, edits).decode(), [Note(str(data.count(b"\n", 0, f.start) + 1), f.text, f.by_hand) for f in findings]


def notebook(text: str, kept: Collection[str] = ()) -> tuple[str, list[Note]]:
    """Rewrite the code cells of a notebook, which share their names; all else in the file stays to the byte."""
    try:
        table = json.loads(text)
        cells = [cell for cell in table["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError):
        return text, [Note("1", "is no notebook that can be read (nbformat 4): not changed.", True)]
    written = _how_written(text, table)
    whole = "".join(f"{source}\n" for source in sources)
    edits, findings, problem = _work("".join(f"{_masked(source)}\n" for source in sources), kept)
    if problem is not None:
        return text, [Note(_cell(sources, problem[0]), problem[1], True)]
    data = whole.encode()
    notes = [Note(_cell(sources, data.count(b"\n", 0, f.start) + 1), f.text, f.by_hand) for f in findings]
    if not edits:
        return text, notes
    if written is None:
        return text, [*notes, Note("1", "the JSON of this notebook is laid out in an unusual way: save it once with Jupyter. Not changed.", True)]
    start = 0
    for cell, source in zip(cells, sources, strict=True):
        end = start + len(source.encode())
        mine = [Edit(e.start - start, e.end - start, e.new) for e in edits if start <= e.start < end]
        new = apply(source.encode(), mine).decode()
        if new != source:
            cell["source"] = new.splitlines(keepends=True) if isinstance(cell["source"], list) else new
        start = end + 1
    return written(table), notes


def config(text: str) -> tuple[str, list[Note]]:
    """Rewrite the classes that a YAML file names (class_path: pytorch_lightning.callbacks.Timer); comments stay."""
    notes, lines = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        code, mark, comment = line.partition(" #") if not line.lstrip().startswith("#") else ("", "", line)
        for old in reversed(list(_CLASS.finditer(code))):
            path = names.below_root(old[0]) or ()
            inner = names.object_of(path)
            target = None if names.is_module(inner) else names.find(inner)
            if target is None:
                notes.append(Note(str(number), f"{old[0]}: {names.advice(inner)}", True))
            else:
                code = code[: old.start()] + ".".join((str(target), *path[len(inner) :])) + code[old.end() :]
        if "lightning_logs" in code:
            notes.append(Note(str(number), 'The default folder is "runs", not "lightning_logs".', True))
        lines.append(code + mark + comment)
    return "\n".join(lines), notes


def _work(text: str, kept: Collection[str]) -> tuple[list[Edit], list[Finding], tuple[int, str] | None]:
    """Return edits, findings, and (line, message) where the text does not parse."""
    try:
        source = Source(text)
    except (cst.ParserSyntaxError, RecursionError) as error:
        line = getattr(error, "raw_line", 1)
        return [], [], (line, f"is no Python that can be parsed ({type(error).__name__}): not changed.")
    edits, findings = rewrite(source, kept)
    for more in (idioms(source), ([], advise(source))):
        edits, findings = [*edits, *more[0]], [*findings, *more[1]]
    try:
        cst.parse_module(apply(source.bytes, edits).decode())
    except cst.ParserSyntaxError:
        return [], [], (1, "the change would not parse, which is a mistake of this tool: not changed.")
    return edits, sorted(set(findings), key=lambda f: (f.start, f.text)), None


def _masked(source: str) -> str:
    """The source of a cell as Python of the same length: IPython's own lines become expressions that do nothing."""
    if source.startswith("%%") and not source.startswith(_PYTHON_CELLS):
        return "\n".join("#" * len(line.encode()) for line in source.split("\n"))
    return "\n".join(_masked_line(line) for line in source.split("\n"))


def _masked_line(line: str) -> str:
    found = _MAGIC.match(line)
    if found is None:
        return line
    head = found[1] if found[1] is not None else found[2]
    size = len(line.encode()) - len(head.encode())
    return head + ("0#" + "#" * size)[:size]


def _cell(sources: list[str], line: int) -> str:
    for number, source in enumerate(sources, start=1):
        length = source.count("\n") + 1
        if line <= length:
            return f"code cell {number}, line {line}"
        line -= length
    return "the last cell"


def _how_written(text: str, table: object) -> Callable[[object], str] | None:
    """Return what writes the table as the file was written, or None where it was written in no usual way."""
    for indent in (1, 2, 4, None):
        for ascii_only in (False, True):
            for end in ("\n", ""):

                def write(value: object, indent: int | None = indent, ascii_only: bool = ascii_only, end: str = end) -> str:
                    return json.dumps(value, indent=indent, ensure_ascii=ascii_only) + end

                if write(table) == text:
                    return write
    return None
