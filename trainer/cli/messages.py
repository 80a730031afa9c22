"""What is wrong with a command line, in one line that names the nearest right word."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from pydoc import locate

from trainer.errors import nearest
from trainer.removed import REMOVED

__all__ = ["explain"]

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
_NO_ARGUMENT = re.compile(r"\s*Option '(.*?)' is not accepted")
_UNKNOWN_NAME = re.compile(r"\w+='([\w.]+)' is unknown\.(?! Did)")
_NO_ATTRIBUTE = re.compile(r"module '[\w.]+' has no attribute '(\w+)'")
_SEVERAL = re.compile(r"Multiple subclasses with name .*")
_NO_OPTION = re.compile(r"(?:Subcommand|Group) '(.*?)' does not accept option '(.*?)'")
_KEY = re.compile(r'Parser key "(.*?)":\s*')
_CLASS = re.compile(r"( *)- Problem with given class_path '(.*?)':\n((?:\1  .*(?:\n|$))+)")
_EXPECTED = re.compile(r"Expected (?!a path|a dot import)(?:an? )?(.+?)(?:\. Got value.*)?$", re.MULTILINE)
_VALUE = re.compile(r"(?:Given value|Got value): (.*)")
_SHORT_NAME = re.compile(r"Expected a dot import path string: (.*)")
_LONGEST = 400  # characters of a message


def explain(message: str, flags: Iterable[str], bases: Iterable[type] = ()) -> str:
    """Return jsonargparse's message in one line.

    Args:
        message: it, of any length.
        flags: the arguments that there are ("--trainer.max_epochs").
        bases: classes whose subclasses may be meant by a name.
    """
    flags = list(flags)
    if unknown := _UNKNOWN.search(message):
        return " ".join(_unknown(word.partition("=")[0], flags) for word in unknown[1].split() if word.startswith("-")) or message
    if option := _NO_OPTION.search(message):
        where, name = option.groups()
        return _unknown(f"--{name}" if f"--{where}" not in flags else f"--{where}.{name}", flags)
    key = _KEY.match(message)
    if key is None:  # perhaps of the trainer, which does not know which class could be meant
        return _one_line(_UNKNOWN_NAME.sub(lambda found: found[0] + nearest(found[1].rpartition(".")[2], _names(bases)), message))
    return f"--{key[1]}: {_problem(message[key.end() :], bases)}"


def _unknown(flag: str, flags: list[str]) -> str:
    name = flag.removeprefix("--trainer.")
    if name != flag and name in REMOVED:
        return f"Trainer has no argument {name!r} (earlier versions of Lightning had): use {REMOVED[name]}."
    short = flag.lstrip("-").rpartition(".")[2]
    same = [other for other in flags if other.rpartition(".")[2].lstrip("-") == short]  # the name alone, without "trainer."
    return f"{flag} is unknown.{nearest(flag, same or flags) or (f' Did you mean {same[0]!r}?' if same else '')}"


def _problem(text: str, bases: Iterable[type]) -> str:
    if inner := _CLASS.search(text):
        path, detail = inner[2], inner[3]
        if argument := _NO_ARGUMENT.match(detail):
            known = inspect.signature(cls).parameters if callable(cls := locate(path)) else ()
            return f"{path} has no argument {argument[1]!r}.{nearest(argument[1], known)}"
        if nested := _KEY.search(detail):
            detail = f"{nested[1]}: {_problem(detail[nested.end() :], bases)}"
        missing = _NO_ATTRIBUTE.search(detail)
        return f"{path}: {_one_line(detail)}{nearest(missing[1], _names(bases)) if missing else ''}"
    if several := _SEVERAL.search(text):
        return several[0]
    value = _VALUE.findall(text)
    types = list(dict.fromkeys(_type(found) for found in _EXPECTED.findall(text)))
    if (short := _SHORT_NAME.search(text)) and set(types) <= {"null"}:
        return f"{short[1]!r} is no class that is known here.{nearest(short[1], _names(bases))} Others are named in full: package.module.Class."
    if types and value:
        return f"expected {' or '.join(types)}, got {value[-1]!r}."
    return _one_line(text)


def _type(text: str) -> str:
    name = re.sub(r"<class '(.*?)'>", r"\1", text).rpartition(".")[2]
    return {"NoneType": "null"}.get(name, name)


def _names(bases: Iterable[type]) -> Iterator[str]:
    for base in bases:
        yield base.__name__
        yield from _names(base.__subclasses__())


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
