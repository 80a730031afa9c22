"""The edits that give a program our names: its import statements, and every use of what they bring."""

from __future__ import annotations

import re
from collections.abc import Collection

import libcst as cst
from libcst.helpers import get_full_name_for_node

from trainer.migrate import names
from trainer.migrate.names import Target
from trainer.migrate.source import Binding, Edit, Finding, Source, Use

__all__ = ["rewrite"]

_WIDTH = 100


def rewrite(source: Source, kept: Collection[str] = ()) -> tuple[list[Edit], list[Finding]]:
    """Return the edits and what could not be changed.

    Args:
        kept: names that other files of the project take from this one: they stay as they are.
    """
    work = _Rewrite(source, {*kept, *_exported(source)})
    return work.edits, work.findings


class _Rewrite:
    def __init__(self, source: Source, kept: set[str]) -> None:
        self.source, self.kept = source, kept
        self.edits: list[Edit] = []
        self.findings: list[Finding] = []
        objects = {b.local: names.find(b.path) for b in source.bindings.values() if not b.is_module}
        self.taken = source.other_names | {name for name, target in objects.items() if target is None or target.name != name}
        self.locals: dict[Target, str] = {}
        # A name that is also something else (None, where the import failed) keeps its name: the rest of the program goes on as it was.
        self.kept |= {use.parts[0] for use in source.uses if use.mixed and not any(b.is_module for b in use.bindings)}
        self.kept |= source.elsewhere
        for binding in source.bindings.values():
            if binding.is_module and source.reaches_out(binding):
                text = f"{binding.local} is used outside of the scope that imports it: import Lightning at the top, then run the tool again. Not changed."
                self.findings.append(Finding(source.start(binding.statement), text))
                binding.stays = True
        for use in source.uses:
            self._use(use)
        self.provided: dict[Target, int] = {}
        for statement in sorted(source.imports, key=source.start):
            self._provide(statement)
        for statement in sorted(source.imports, key=source.start):
            self._statement(statement)

    # -- uses --------------------------------------------------------------------------------------------------------------

    def _use(self, use: Use) -> None:
        first = use.bindings[0]
        if use.mixed and any(b.is_module for b in use.bindings):
            self._stays(use, f"{use.parts[0]} may be Lightning's or something else here; give it one meaning.")
        elif first.is_module and self.source.reaches_out(first):
            return  # told where it is imported
        elif not first.is_module:
            if (target := names.find(first.path)) is not None and (new := self._local(first, target)) != first.local:
                self._put(use, 1, new)
        else:
            self._through_module(use)

    def _through_module(self, use: Use) -> None:
        path = use.bindings[0].path_of(use.parts)
        target = None if names.is_module(path) else names.find(path)
        if target is None:
            whole = "is used as an object: write the names that you need of it." if names.is_module(path) else names.advice(path)
            self._stays(use, f"{'.'.join(use.parts)} {whole}" if names.is_module(path) else whole)
            return
        length = next(i for i in range(1, len(use.parts) + 1) if use.bindings[0].path_of(use.parts[:i]) == path)
        for binding in use.bindings:
            binding.needed.setdefault(target, use.start)
        self._put(use, length, self._name_for(target))

    def _stays(self, use: Use, text: str) -> None:
        self.findings.append(Finding(use.start, text))
        for binding in use.bindings:
            binding.stays = True

    def _put(self, use: Use, length: int, new: str) -> None:
        node = use.node
        for _ in range(len(use.parts) - length):
            node = node.value  # type: ignore[attr-defined]
        span = self.source.spans.get(node)
        size = span.length if span is not None else len(".".join(use.parts[:length]).encode())  # in a string: written without blanks
        self.edits.append(Edit(use.start, use.start + size, new))

    # -- names -------------------------------------------------------------------------------------------------------------

    def _name_for(self, target: Target) -> str:
        """What `target` is called in this file, where the program has no name of its own for it."""
        if target not in self.locals:
            name = target.name
            while name in self.taken and not self._imported(target, name):
                name = f"_{name}"
            self.taken.add(name)
            self.locals[target] = name
        return self.locals[target]

    def _imported(self, target: Target, name: str) -> bool:
        """True when the program imports the very name already, from where we would (typing.Any)."""
        return any(_brings(statement, target) == name and self.source.top_level(statement) for statement in self.source.imports)

    def _local(self, binding: Binding, target: Target) -> str:
        """The name under which an imported object goes on."""
        if binding.alias.asname is not None or binding.local in self.kept or binding.local == target.name:
            return binding.local
        same = self.locals.get(target)
        free = same == target.name or target.name not in self.taken or self._imported(target, target.name)
        return self._name_for(target) if free else binding.local

    # -- import statements -------------------------------------------------------------------------------------------------

    def _provide(self, statement: cst.Import | cst.ImportFrom) -> None:
        """Note what a statement of the module itself brings under the name that we would give it."""
        if not self.source.top_level(statement):
            return
        for target, name in self.locals.items():
            mine = [b for b in self._of(statement) if not b.is_module and names.find(b.path) == target and self._local(b, target) == name]
            if mine or _brings(statement, target) == name:
                self.provided.setdefault(target, self.source.start(statement))

    def _of(self, statement: cst.Import | cst.ImportFrom) -> list[Binding]:
        aliases = [] if isinstance(statement.names, cst.ImportStar) else statement.names
        return [self.source.bindings[id(alias)] for alias in aliases if id(alias) in self.source.bindings]

    def _statement(self, statement: cst.Import | cst.ImportFrom) -> None:
        start = self.source.start(statement)
        if isinstance(statement.names, cst.ImportStar):
            if not statement.relative and names.below_root(_dotted(statement)) is not None:
                self.findings.append(Finding(start, f"{self.source.code(statement)}: {names.advice(('*',))}"))
            return
        mine = self._of(statement)
        if not mine:
            return
        for binding in mine:
            if not binding.is_module and names.find(binding.path) is None:
                self.findings.append(Finding(start, names.advice(binding.path)))
                binding.stays = True
        if not self._in_place(statement, mine):
            self._anew(statement, mine)

    def _in_place(self, statement: cst.Import | cst.ImportFrom, mine: list[Binding]) -> bool:
        """Change the names inside the statement, when all in it comes from one module here: its comments and lines stay."""
        targets = [None if b.is_module else names.find(b.path) for b in mine]
        if not isinstance(statement, cst.ImportFrom) or None in targets or len({t.module for t in targets if t}) != 1:
            return False
        assert statement.module is not None
        locals_ = [self._local(b, t) for b, t in zip(mine, targets, strict=True) if t]
        if len(set(locals_)) < len(mine) or any(t and self._is_double(statement, t, name) for t, name in zip(targets, locals_, strict=True)):
            return False
        self._replace(statement.module, targets[0].module)  # type: ignore[union-attr]
        for binding, target, name in zip(mine, targets, locals_, strict=True):
            assert target is not None
            if binding.alias.evaluated_name != target.name:
                as_name = f" as {name}" if binding.alias.asname is None and name != target.name else ""
                self._replace(binding.alias.name, f"{target.name}{as_name}")
        return True

    def _is_double(self, statement: cst.ImportFrom, target: Target, name: str) -> bool:
        """True when an earlier statement of the module brings the very name (typing.Any)."""
        return any(
            _brings(other, target) == name and self.source.top_level(other) and self.source.start(other) < self.source.start(statement)
            for other in self.source.imports
        )

    def _anew(self, statement: cst.Import | cst.ImportFrom, mine: list[Binding]) -> None:
        """Write a statement for each module that its names come from."""
        wanted: dict[Target, list[str]] = {}
        stay: list[cst.ImportAlias] = []
        for alias in statement.names:  # type: ignore[union-attr]
            binding = self.source.bindings.get(id(alias))
            if binding is None or binding.stays:
                stay.append(alias)
            if binding is None:
                continue
            target = None if binding.is_module else names.find(binding.path)
            if target is not None:
                name = self._local(binding, target)
                if not (isinstance(statement, cst.ImportFrom) and self._is_double(statement, target, name)):
                    wanted.setdefault(target, []).append(name)
            for needed, first in binding.needed.items():
                if not self._is_provided(statement, needed, first):
                    wanted.setdefault(needed, []).append(self._name_for(needed))
        lines = _import_lines(wanted)
        if len(stay) == len(statement.names):  # type: ignore[arg-type]
            self._put_before(statement, lines)
            return
        if stay:
            parts = [self.source.code(alias).rstrip(", \n") for alias in stay]
            lines.insert(0, f"import {', '.join(parts)}" if isinstance(statement, cst.Import) else _from(_dotted(statement), parts))
        self._write(statement, lines)

    def _is_provided(self, statement: cst.Import | cst.ImportFrom, target: Target, first: int) -> bool:
        if not self.source.top_level(statement):
            return False
        at = self.provided.setdefault(target, self.source.start(statement))
        return at != self.source.start(statement) and at < first

    def _write(self, statement: cst.Import | cst.ImportFrom, lines: list[str]) -> None:
        """Put lines in the place of a statement; its comments go ahead of them."""
        source, line = self.source, self.source.parents[statement]
        start, end = source.start(statement), source.end(statement)
        if self._shares_its_line(statement):
            self.edits.append(Edit(start, end, self._joined(statement, lines) or "pass"))
            return
        comments = [text.strip() for text in source.code(statement).split("\n") if text.strip().startswith("#") or "  #" in text]
        lines = [text if text.startswith("#") else "#" + text.partition("#")[2] for text in comments] + lines
        rest = source.bytes[end:].split(b"\n", 1)
        if not lines and len(source.parents[line].body) > 1 and not rest[0].strip():  # type: ignore[attr-defined]
            begin = source.bytes.rfind(b"\n", 0, start) + 1
            self.edits.append(Edit(begin, end + len(rest[0]) + (len(rest) > 1), ""))
        else:
            self.edits.append(Edit(start, end, self._joined(statement, lines or ["pass"])))

    def _put_before(self, statement: cst.Import | cst.ImportFrom, lines: list[str]) -> None:
        """Put lines ahead of a statement that stays as it is."""
        if lines:
            start = self.source.start(statement)
            self.edits.append(Edit(start, start, self._joined(statement, [*lines, ""])))

    def _shares_its_line(self, statement: cst.Import | cst.ImportFrom) -> bool:
        line = self.source.parents[statement]
        return not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1

    def _joined(self, statement: cst.Import | cst.ImportFrom, lines: list[str]) -> str:
        """Statements as the text in the place of one: under its indentation, or between semicolons."""
        if self._shares_its_line(statement):
            return "; ".join(re.sub(r"\s*\n\s*", " ", line) for line in lines)
        source, start = self.source, self.source.start(statement)
        indent = source.bytes[source.bytes.rfind(b"\n", 0, start) + 1 : start].decode()
        newline = "\r\n" if b"\r\n" in source.bytes else "\n"
        return "\n".join(lines).replace("\n", f"{newline}{indent}")

    def _replace(self, node: cst.CSTNode, new: str) -> None:
        if self.source.code(node) != new:
            self.edits.append(Edit(self.source.start(node), self.source.end(node), new))


def _import_lines(wanted: dict[Target, list[str]]) -> list[str]:
    lines = []
    for module in sorted({target.module for target in wanted}):
        parts = [
            target.name if name == target.name else f"{target.name} as {name}"
            for target in sorted(wanted, key=lambda t: t.name)
            if target.module == module
            for name in dict.fromkeys(wanted[target])
        ]
        lines.append(_from(module, parts))
    return lines


def _from(module: str, parts: list[str]) -> str:
    line = f"from {module} import {', '.join(parts)}"
    return line if len(line) <= _WIDTH else f"from {module} import (\n    " + ",\n    ".join(parts) + ",\n)"


def _brings(statement: cst.Import | cst.ImportFrom, target: Target) -> str | None:
    """The name under which a statement that is not Lightning's brings `target`."""
    if not isinstance(statement, cst.ImportFrom) or isinstance(statement.names, cst.ImportStar) or statement.relative:
        return None
    if _dotted(statement) != target.module:
        return None
    return next((a.evaluated_alias or a.evaluated_name for a in statement.names if a.evaluated_name == target.name), None)


def _dotted(statement: cst.ImportFrom) -> str:
    return get_full_name_for_node(statement.module) or "" if statement.module is not None else ""


def _exported(source: Source) -> set[str]:
    """The strings in `__all__`."""
    found: set[str] = set()
    for string in source.strings:
        node: cst.CSTNode | None = string
        while node is not None and not isinstance(node, (cst.Assign, cst.AugAssign, cst.AnnAssign, cst.BaseCompoundStatement)):
            node = source.parents.get(node)
        if isinstance(node, (cst.Assign, cst.AugAssign, cst.AnnAssign)) and source.code(node).startswith("__all__"):
            found.add(str(string.evaluated_value))
    return found
