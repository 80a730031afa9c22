"""The file-system side of ModelCheckpoint: folders, names, links, removal. All functions act on one process only."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from callbacks.errors import CheckpointError, MisconfigurationException

PREEMPTED = "preempted.ckpt"
"""What a run saves when its machine is taken away, in the folder of the first ModelCheckpoint; the next save of the resumed run removes it."""

_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


def absolute(path: str | os.PathLike[str]) -> str:
    """Return `path` with "~" and links resolved, so that two spellings of one folder compare equal."""
    return os.path.realpath(os.path.expanduser(os.fspath(path)))


def why_unwritable(folder: str) -> str | None:
    """Return why no file can be made in `folder`, or None. Tries it in the nearest folder that exists and leaves nothing behind."""
    nearest = folder
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    if not os.path.isdir(nearest):
        return f"{nearest!r} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return f"{nearest!r}: {error.strerror or error}"


def check_name(template: str) -> None:
    """Refuse a file name with a field that no number can be written into, now rather than at the first save.

    Raises:
        MisconfigurationException: naming the field.
    """
    for name, spec in _FIELD.findall(template):
        try:
            format(0.0, spec)
        except ValueError as error:
            try:
                format(0, spec)
            except ValueError:
                raise MisconfigurationException(f"ModelCheckpoint(filename={template!r}): {{{name}:{spec}}} cannot be written: {error}.") from None


def fill_name(template: str, values: Mapping[str, Any], label: bool, equals: str, missing: Callable[[str], Any]) -> str:
    """Replace each "{metric:spec}" of `template`, with the metric's name in front where `label` is set.

    A "/" of a metric's name becomes "_": a metric must not be able to choose the folder.
    """

    def fill(match: re.Match[str]) -> str:
        name, spec = match[1], match[2] or ""
        value = values[name] if name in values else missing(name)
        text = format(value.item() if hasattr(value, "item") else value, spec)
        return f"{name.replace('/', '_')}{equals}{text}" if label else text

    return _FIELD.sub(fill, template)


def remove(path: str) -> None:
    """Delete a checkpoint, file or folder. One that is gone already is fine; one that cannot go is a warning, the new save stands."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            aside = _temporary(path)
            os.rename(path, aside)  # at no time is there half a folder of that name
            shutil.rmtree(aside)
        else:
            os.remove(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        warnings.warn(f"ModelCheckpoint: {path} could not be deleted: {error}", stacklevel=2)


def point(link: str, target: str) -> None:
    """Make `link` a relative symbolic link to `target`, in one step: at no time is there no `link`.

    Raises:
        CheckpointError: the file system has no symbolic links; the message names the path and what to do.
    """
    folder = os.path.dirname(link)
    temporary = _temporary(link)
    try:
        os.symlink(os.path.relpath(target, folder), temporary)
        if os.path.isdir(link) and not os.path.islink(link):  # a full copy that was saved as a folder
            shutil.rmtree(link)
        os.replace(temporary, link)
    except OSError as error:
        if os.path.lexists(temporary):
            os.remove(temporary)
        raise CheckpointError(
            f"{link}: cannot be made a symbolic link to {target} ({error}). Use save_last=True for a full copy."
        ) from error


def _temporary(path: str) -> str:
    """Return a hidden name beside `path`, with this process and machine in it; the trainer clears such names when their process is dead."""
    folder, name = os.path.split(path)
    machine = hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()
    return os.path.join(folder, f".{name[:200]}.{os.getpid()}.{machine}{uuid.uuid4().hex[:8]}.tmp")
