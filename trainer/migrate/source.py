"""A program's text, parsed: which of its names stand for something of Lightning, and where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    ByteSpanPositionProvider,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    Scope,
    ScopeProvider,
)

from trainer.migrate import names

__all__ = ["Binding", "Edit", "Finding", "Source", "Use", "apply"]


@dataclass(frozen=True)
class Edit:
    """Bytes `start` to `end` of a text (in UTF-8) become `new`."""

    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Finding:
    """Something to tell about a place: by hand is what the tool could not do; the rest is good to know."""

    start: int
    text: str
    by_hand: bool = True


@dataclass
class Binding:
    """A name that an import statement makes, and what it stands for."""

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias
    local: str
    dotted: str  # "pytorch_lightning.callbacks.Timer"
    needed: dict[names.Target, int] = field(default_factory=dict)  # found through this name (a module's) -> offset of the first use
    stays: bool = False  # a use of it could not be changed

    @property
    def path(self) -> tuple[str, ...]:
        """The path below Lightning's root."""
        return names.below_root(self.dotted) or ()

    @property
    def is_module(self) -> bool:
        """True for a module of Lightning; False for something in one."""
        return names.is_module(self.path)

    @property
    def meaning(self) -> object:
        """What tells two bindings apart: a name may be imported from one of two places, and mean the same."""
        return self.path if self.is_module else names.find(self.path) or self.path

    def path_of(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """The path of an expression that begins with this name: of the object in it, or of a module where that is all."""
        return names.object_of(self.whole_path_of(parts)) if self.is_module else self.path

    def whole_path_of(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """The same, with the attributes of the object."""
        return names.below_root(".".join((self.dotted, *parts[1:]))) or ()


@dataclass(frozen=True)
class Use:
    """An expression (a name, or a chain of attributes) that begins with a name of Lightning."""

    start: int
    parts: tuple[str, ...]  # as written
    bindings: tuple[Binding, ...]
    mixed: bool  # the name may also be something else
    node: cst.BaseExpression


class Source:
    """A parsed program.

    Raises:
        cst.ParserSyntaxError: when it is none.
    """

    def __init__(self, text: str) -> None:
        wrapper = MetadataWrapper(cst.parse_module(_without_form_feeds(text)), unsafe_skip_copy=True)
        self.text, self.bytes, self.module = text, text.encode(), wrapper.module
        self.spans = wrapper.resolve(ByteSpanPositionProvider)
        self.scopes = wrapper.resolve(ScopeProvider)
        self.parents = wrapper.resolve(ParentNodeProvider)
        found = _Walk()
        self.module.visit(found)
        self.imports, self.calls, self.classes, self.strings = found.imports, found.calls, found.classes, found.strings
        self.attributes, self.docstrings, self.elsewhere = found.attributes, found.docstrings, found.elsewhere
        self.bindings = {id(b.alias): b for statement in found.imports for b in _bindings(statement)}
        self.uses: list[Use] = []
        self.other_names: set[str] = set(found.bound)
        for node in found.chains:
            self._note(node, self.start(node), self.scopes.get(node))
        self.annotations = set(found.annotations)
        for node in found.annotations:
            self._read_annotation(node)

    def start(self, node: cst.CSTNode) -> int:
        """The offset in bytes at which a node begins."""
        return self.spans[node].start

    def end(self, node: cst.CSTNode) -> int:
        """The offset in bytes at which a node ends."""
        return self.spans[node].start + self.spans[node].length

    def code(self, node: cst.CSTNode) -> str:
        """The text of a node."""
        return self.bytes[self.start(node) : self.end(node)].decode()

    def lightning(self, node: cst.BaseExpression) -> tuple[str, ...] | None:
        """Return the path below Lightning's root of the class, function or module that an expression is; None for anything else."""
        parts = _chain(node)
        scope = self.scopes.get(node)
        bindings, mixed = self._origins(parts[0], scope) if parts and scope is not None else ((), False)
        if mixed or not bindings:
            return None
        path = bindings[0].path_of(parts)
        return path if path == bindings[0].whole_path_of(parts) else None

    def top_level(self, statement: cst.CSTNode) -> bool:
        """True for a statement of the module itself, under no `if` or `try`."""
        line = self.parents[statement]
        return isinstance(line, cst.SimpleStatementLine) and self.parents[line] is self.module

    def reaches_out(self, binding: Binding) -> bool:
        """True where a name is made in one scope for others: an attribute of a class, or declared global."""
        up = self.parents[binding.statement]
        while isinstance(up, (cst.SimpleStatementLine, cst.IndentedBlock)):
            up = self.parents[up]
        return isinstance(up, cst.ClassDef) or binding.local in self.elsewhere

    def _origins(self, name: str, scope: Scope) -> tuple[tuple[Binding, ...], bool]:
        bindings, other = [], False
        for assignment in scope[name]:
            node = assignment.node if isinstance(assignment, ImportAssignment) else None
            mine = [b for b in self.bindings.values() if b.statement is node and b.local == name]
            bindings += mine
            other |= not mine
        bindings.sort(key=lambda b: self.start(b.statement))
        return tuple(bindings), bool(bindings) and (other or len({b.meaning for b in bindings}) > 1)

    def _note(self, node: cst.BaseExpression, start: int, scope: Scope | None, in_string: bool = False) -> None:
        parts = _chain(node)
        bindings, mixed = self._origins(parts[0], scope) if scope is not None else ((), False)
        if bindings and not (in_string and names.is_module(bindings[0].path_of(parts))):
            self.uses.append(Use(start, parts, bindings, mixed, node))
        else:
            self.other_names.add(parts[0])

    def _read_annotation(self, string: cst.SimpleString) -> None:
        value, scope = string.evaluated_value, self.scopes.get(string)
        skip = len(string.prefix) + len(string.quote)
        if not isinstance(value, str) or scope is None or string.value[skip : skip + len(value)] != value:
            return
        try:
            wrapper = MetadataWrapper(cst.parse_module(value), unsafe_skip_copy=True)
        except cst.ParserSyntaxError:
            return
        spans, inner = wrapper.resolve(ByteSpanPositionProvider), _Walk()
        wrapper.module.visit(inner)
        for node in inner.chains:
            self._note(node, self.start(string) + skip + spans[node].start, scope, in_string=True)


class _Walk(cst.CSTVisitor):
    """Collects what the tool looks at. Names that are no expressions (attributes, keywords, definitions) are passed over."""

    def __init__(self) -> None:
        self.imports: list[Any] = []
        self.calls: list[cst.Call] = []
        self.classes: list[cst.ClassDef] = []
        self.strings: list[cst.SimpleString] = []
        self.annotations: list[cst.SimpleString] = []
        self.attributes: list[cst.Attribute] = []
        self.docstrings: set[cst.CSTNode] = set()
        self.chains: list[cst.BaseExpression] = []
        self.bound: set[str] = set()
        self.elsewhere: set[str] = set()  # declared global or nonlocal
        self._in_annotation = 0

    def visit_Import(self, node: cst.Import) -> bool:
        self.imports.append(node)
        self.bound |= {_local(alias) for alias in node.names if names.below_root(alias.evaluated_name) is None}
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        self.imports.append(node)
        if not isinstance(node.names, cst.ImportStar) and (node.relative or names.below_root(_module(node)) is None):
            self.bound |= {_local(alias) for alias in node.names}
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.chains.append(node)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        if not _chain(node):
            self.attributes.append(node)
            node.value.visit(self)
            return False
        self.chains.append(node)
        inner: cst.BaseExpression = node
        while isinstance(inner, cst.Attribute):
            self.attributes.append(inner)
            inner = inner.value
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Param(self, node: cst.Param) -> bool:
        self.bound.add(node.name.value)
        for child in (node.annotation, node.default):
            if child is not None:
                child.visit(self)
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.bound.add(node.name.value)
        self._docstring(node.body)

    def visit_FunctionDef_name(self, node: cst.FunctionDef) -> None:
        self._mark = len(self.chains)

    def leave_FunctionDef_name(self, node: cst.FunctionDef) -> None:
        del self.chains[self._mark :]

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.bound.add(node.name.value)
        self.classes.append(node)
        self._docstring(node.body)

    visit_ClassDef_name = visit_FunctionDef_name
    leave_ClassDef_name = leave_FunctionDef_name

    def visit_Module(self, node: cst.Module) -> None:
        self._docstring(node)

    def visit_NameItem(self, node: cst.NameItem) -> bool:
        self.elsewhere.add(node.name.value)
        return False

    def visit_Call(self, node: cst.Call) -> None:
        self.calls.append(node)
        named = get_full_name_for_node(node.func) or ""
        if node.args and named.rpartition(".")[2] == "cast" and isinstance(node.args[0].value, cst.SimpleString):
            self.annotations.append(node.args[0].value)
        self.annotations += [a.value for a in node.args if a.keyword and a.keyword.value == "bound" and isinstance(a.value, cst.SimpleString)]

    def visit_Index(self, node: cst.Index) -> None:
        if isinstance(node.value, cst.SimpleString) and "." in node.value.value:  # Optional["pl.Trainer"], also where it is no annotation
            self.annotations.append(node.value)

    def visit_Annotation(self, node: cst.Annotation) -> None:
        self._in_annotation += 1

    def leave_Annotation(self, original_node: cst.Annotation) -> None:
        self._in_annotation -= 1

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        self.strings.append(node)
        if self._in_annotation:
            self.annotations.append(node)

    def _docstring(self, body: Any) -> None:
        first = body.body[0] if body.body else None
        if isinstance(first, cst.SimpleStatementLine) and isinstance(first.body[0], cst.Expr):
            self.docstrings.add(first.body[0].value)


def apply(text: bytes, edits: list[Edit]) -> bytes:
    """Return the text with the edits made; they do not overlap."""
    done, at = [], 0
    for edit in sorted(set(edits), key=lambda e: (e.start, e.end)):
        done += [text[at : edit.start], edit.new.encode()]
        at = edit.end
    return b"".join([*done, text[at:]])


def _chain(node: cst.BaseExpression) -> tuple[str, ...]:
    """Return ("a", "b", "c") for the expression a.b.c; () for what is no such chain."""
    if isinstance(node, cst.Name):
        return (node.value,)
    if isinstance(node, cst.Attribute):
        before = _chain(node.value)
        return (*before, node.attr.value) if before else ()
    return ()


def _without_form_feeds(text: str) -> str:
    """The same program in the same number of bytes: libcst forgets form feeds, and its positions are wrong behind one."""
    return re.sub(r"(?m)^([ \t]*)\f", "\\1\n", text).replace("\f", " ") if "\f" in text else text  # one ahead of code begins a line anew


def _local(alias: cst.ImportAlias) -> str:
    return alias.evaluated_alias or alias.evaluated_name.partition(".")[0]


def _module(statement: cst.ImportFrom) -> str:
    return get_full_name_for_node(statement.module) or "" if statement.module is not None else ""


def _bindings(statement: cst.Import | cst.ImportFrom) -> Iterator[Binding]:
    if isinstance(statement.names, cst.ImportStar) or (isinstance(statement, cst.ImportFrom) and statement.relative):
        return
    for alias in statement.names:
        name = alias.evaluated_name
        if isinstance(statement, cst.ImportFrom):
            dotted = f"{_module(statement)}.{name}"
        else:
            dotted = name if alias.asname else name.partition(".")[0]
        if names.below_root(dotted) is not None:
            yield Binding(statement, alias, _local(alias), dotted)
