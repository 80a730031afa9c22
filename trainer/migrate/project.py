"""The files of a project: which are looked at, how they are read, and how they are written back."""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import libcst as cst

from trainer.migrate import names, texts
from trainer.migrate.source import Source
from trainer.migrate.texts import Note

__all__ = ["Changed", "migrate", "write"]

_SKIPPED = {"site-packages", "__pycache__", "node_modules", "lightning_logs"}
_OURS = ("trainer", "callbacks")
_REQUIRES = re.compile(r"""\bpytorch[-_]lightning\b|^\s*["'-]?\s*lightning\s*(?:[=<>~!\[;"']|$)""", re.MULTILINE)
_LISTS = re.compile(r"(requirements.*\.txt|setup\.(py|cfg)|pyproject\.toml|environment\.ya?ml)$")


@dataclass
class Changed:
    """A file that was looked at: its text before and after, and what to tell about it."""

    path: Path
    before: str = ""
    after: str = ""
    notes: list[Note] = field(default_factory=list)
    encoding: str = "utf-8"


def migrate(root: Path) -> list[Changed]:
    """Look at a file, or at all programs, notebooks and YAML files below a folder; nothing is written.

    Links, hidden folders, virtual environments, installed packages and Lightning's own output are passed over.
    """
    files = [root] if root.is_file() else list(_walk(root))
    read = {path: _read(path) for path in files if path.suffix in (".py", ".ipynb", ".yaml", ".yml")}
    programs = {path: one for path, one in read.items() if path.suffix == ".py" and re.search("lightning", one.before, re.IGNORECASE)}
    kept, modules = _between_files(programs)
    for path, one in read.items():
        if path.suffix == ".py":
            one.notes += _taken_over(one.before, modules)
        if one.notes or not re.search("lightning", one.before, re.IGNORECASE):
            continue
        work = {".py": partial(texts.program, kept=kept), ".ipynb": partial(texts.notebook, kept=kept)}.get(path.suffix, texts.config)
        one.after, one.notes = work(one.before)
    found = [one for one in read.values() if one.after != one.before or one.notes]
    return [*_hiding(files), *_requiring(files), *found] if found else []


def write(changed: Changed) -> None:
    """Put the new text into the place of the file, whole or not at all; its mode stays."""
    data, path = changed.after.encode(changed.encoding), changed.path.resolve()  # a link that was named stays one
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _walk(root: Path) -> Iterator[Path]:
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if not _passed_over(Path(folder, name)))
        yield from (path for name in sorted(files) if (path := Path(folder, name)).is_file() and not path.is_symlink())  # no pipes


def _passed_over(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in _SKIPPED or folder.is_symlink() or (folder / "pyvenv.cfg").exists()


def _read(path: Path) -> Changed:
    """Read a file, without changing how its lines end."""
    data, encoding = path.read_bytes(), "utf-8"
    try:
        if path.suffix == ".py":
            encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        notes = [Note("1", f"cannot be read ({error}): not changed.", True)] if b"ightning" in data else []
        return Changed(path, notes=notes)
    return Changed(path, text, text, encoding=encoding)


def _between_files(programs: dict[Path, Changed]) -> tuple[set[str], dict[str, str]]:
    """Return the renamed names that a file takes from another, and name -> file for those that stand for Lightning's modules."""
    kept: set[str] = set()
    modules: dict[str, str] = {}
    for path, one in programs.items():
        try:
            source = Source(one.before)
        except (cst.ParserSyntaxError, RecursionError):
            continue
        for statement in source.imports:
            if not isinstance(statement.names, cst.ImportStar):
                kept |= {a.evaluated_name for a in statement.names if id(a) not in source.bindings}
            else:
                kept |= source.other_names
        kept |= {node.attr.value for node in source.attributes if source.lightning(node) is None}
        file = path.parent.name if path.name == "__init__.py" else path.stem
        modules |= {b.local: file for b in source.bindings.values() if b.is_module and source.top_level(b.statement)}
    return kept & set(names.RENAMED), modules


def _taken_over(text: str, modules: dict[str, str]) -> Iterator[Note]:
    """Names of Lightning's modules that a file takes from another file (`from .common import pl`)."""
    for found in re.finditer(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+([^\n#]+)", text, re.MULTILINE):
        for name, file in modules.items():
            everything = found[2].strip() == "*" and re.search(rf"\b{name}\.\w", text)
            if found[1].rpartition(".")[2] in (file, "") and (everything or re.search(rf"\b{name}\b", found[2])):
                line = text.count("\n", 0, found.start()) + 1
                yield Note(str(line), f"{name} comes from another file of yours: import Lightning here, then run the tool again. Not changed.", True)


def _requiring(files: list[Path]) -> Iterator[Changed]:
    """Lists of what the project needs that name Lightning."""
    for path in files:
        if _LISTS.match(path.name):
            text = path.read_text(errors="replace")
            for found in _REQUIRES.finditer(text):
                line = text.count("\n", 0, found.end()) + 1
                yield Changed(path, notes=[Note(str(line), "asks for Lightning: the changed programs need torch-trainer-kit.", False)])


def _hiding(files: list[Path]) -> Iterator[Changed]:
    """Modules of the project that have the name of one of our packages, and are found in its place."""
    for folder in sorted({path.parent for path in files} | {path.parent.parent for path in files if path.name == "__init__.py"}):
        for name in _OURS:
            if (folder / "__init__.py").exists():
                continue
            for path in (folder / f"{name}.py", folder / name):
                if path.is_file() or (path.is_dir() and any(path.glob("*.py"))):
                    yield Changed(path, notes=[Note("1", f"hides the package {name!r} that the changed programs import: give it another name.", True)])
