"""How a task reaches the ranks and how results and exceptions come back: plain files, written with cloudpickle.

Files, because a queue loses tensors with the process that made them, and torch's own pickler shares memory between the ranks.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import traceback
import types
from collections import ChainMap
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch.distributed

from trainer.errors import SIGTERMException, StallError
from trainer.launchers import bulk

__all__ = ["Report", "dumps", "loads", "pickle_error", "share_classes", "write_whole"]

_CODE = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """Keep the file name that newer cloudpickle blanks out, so that tracebacks of the ranks show source lines."""
    make, arguments, *rest = _CODE(code)
    named = tuple(code.co_filename if isinstance(a, str) and a == "<dynamic-code>" else a for a in arguments)
    return (make, named, *rest)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = ChainMap({types.CodeType: _reduce_code, **bulk.REDUCERS}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj in _SHARED:
            return obj.__qualname__
        return super().reducer_override(obj)


_SHARED: set[type] = set()


def share_classes() -> None:
    """In a copy of the launching process: send classes of the main script by name, as that process has them too.

    By value it would get other classes, and `except MyError` around `fit` would not catch the error of a rank.
    """
    found = vars(sys.modules["__main__"]).items()
    _SHARED.update(value for name, value in found if isinstance(value, type) and (value.__module__, value.__qualname__) == ("__main__", name))


def dumps(value: Any, apart: bulk.Apart | None = None) -> bytes:
    """Pickle `value`, also functions and classes made in the main script or inside a function, by value.

    With `apart` the memory of big tensors and arrays is left there, to be written beside the pickle (see `bulk`).
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=apart).dump(value)
    return file.getvalue()


loads = pickle.loads


def write_whole(path: str, data: bytes) -> None:
    """Write a file that appears under its name only when all of it is there; the writer may be killed at any moment."""
    with open(f"{path}.part", "wb") as file:
        file.write(data)
    os.replace(f"{path}.part", path)


@dataclass
class Report:
    """What a rank says about the exception that ended its task."""

    rank: int
    kind: str  # "fault"; "victim" of another rank's end; "stopped" by SIGTERM, agreed by all; "interrupted" by Ctrl-C
    summary: str
    text: str  # the traceback as the rank would have printed it
    error: bytes | None  # the pickled exception; None when it cannot be pickled

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Report:
        """Describe `error`, raised on `rank`."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        return cls(rank, _kind(error), summary, text, pickle_error(error))

    @property
    def line(self) -> str:
        """What to say of it beside another rank's error: that a connection broke is then no news."""
        told = f"{self.summary.partition(':')[0]}, since its connection to another rank broke" if self.kind == "victim" else self.summary
        return f"rank {self.rank}: {told}"

    def exception(self, others: list[str]) -> BaseException:
        """The exception to raise in the launching process: of the original type, with rank and traceback shown last.

        `others` says in a line each what the other ranks raised.
        """
        try:
            error = loads(self.error) if self.error is not None else None
        except Exception:  # its class cannot be imported here
            error = None
        if not isinstance(error, BaseException):
            error = RuntimeError(f"rank {self.rank} raised {self.summary}")
        note = "".join(f"\nAlso {line}" for line in others) + f"\nRank {self.rank} raised it at:\n\n{self.text}"
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10
            error.__cause__ = RuntimeError(note)
        return error


def pickle_error(error: BaseException) -> bytes | None:
    """Pickle an exception; None when what it holds cannot be pickled.

    Python unpickles an exception by calling its class with `args`, which fails for an `__init__` that takes others. Then it is
    rebuilt as it is, without its `__init__`.
    """
    for value in (error, _Remade(type(error), error.args, dict(error.__dict__))):
        try:
            data = dumps(value)
            if isinstance(loads(data), type(error)):
                return data
        except Exception:
            continue
    return None


class _Remade:
    """Stands for an exception in a pickle; unpickling gives the exception."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, self._parts


def _remake(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    builtin.__init__(error, *args)  # sets what lives outside `__dict__`, such as SystemExit.code
    error.__dict__.update(state)
    return error


def _kind(error: BaseException) -> str:
    if isinstance(error, SIGTERMException):
        return "stopped"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, StallError):
        return "fault"  # it has looked for the one to blame
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, torch.distributed.DistError) or "gloo/transport" in str(link):
            return "victim"
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return "fault"
