"""TensorBoard's event files, and the records that torch's SummaryWriter has no method for."""

from __future__ import annotations

import os
import re
import shutil
import struct
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["SESSION_END", "event_files", "forget", "forget_hparams", "in_order", "join", "scalars", "session_end", "session_start", "start_after", "text"]

_EVENTS = "events.out.tfevents"
SESSION_END = "_hparams_/session_end_info"
_SESSION_START = "_hparams_/session_start_info"


def event_files(folder: str) -> list[str]:
    """Return the paths of the event files in `folder`, in the order in which they were begun."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return in_order(os.path.join(folder, name) for name in names if name.startswith(_EVENTS))


def in_order(paths: Iterable[str]) -> list[str]:
    """Sort event files of a folder by when they were begun: their names hold seconds, host, process and, last, a count (10 comes after 9)."""
    return sorted(paths, key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", os.path.basename(path))])


def forget(path: str, step: float, tags: Iterable[str] = ()) -> int:
    """Take out of an event file what belongs to later steps than `step`, records named in `tags`, and half a record of a writer that was killed.

    Return the newest step that is left.

    Readers have means of their own to drop what a resumed run does again (`start_after`), but not all of them, and not for every kind of record.
    """
    from tensorboard.compat.proto.event_pb2 import Event

    tags, newest = set(tags), 0
    kept, temporary = 0, os.path.join(os.path.dirname(path), f"{uuid.uuid4().hex}.tmp")  # a name that nobody takes for an event file's
    try:
        with open(path, "rb") as file, open(temporary, "wb") as copy:
            for record in _records(file):
                event = Event.FromString(record[12:-4])
                if event.step <= step and not any(value.tag in tags for value in event.summary.value):
                    kept += copy.write(record)
                    newest = max(newest, event.step)
        if kept < os.path.getsize(path):
            os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    return newest


def forget_hparams(path: str) -> None:
    """Take the hyper-parameters out of an event file: of several records readers believe the first, and a run that goes on may have others."""
    forget(path, float("inf"), [_SESSION_START])


def join(first: str, later: list[str]) -> None:
    """Append the event files `later` to `first` and remove them: such a file is a sequence of records."""
    with open(first, "ab") as file:
        for path in later:
            with open(path, "rb") as part:
                shutil.copyfileobj(part, file)
    for path in later:
        os.remove(path)


def _records(file: Any) -> Iterator[bytes]:
    """Yield each whole record: the length of its data, a checksum, the data, and another checksum."""
    while len(head := file.read(12)) == 12:
        length = struct.unpack("<Q", head[:8])[0] + 4
        rest = file.read(length)
        if len(rest) < length:
            return
        yield head + rest


def start_after(step: int) -> Any:
    """An event by which readers drop everything that an earlier writer left for later steps than `step`."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))


def scalars(numbers: dict[str, Any]) -> Any:
    """One record with all numbers: a third of the time of add_scalar() for each."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=float(value)) for name, value in numbers.items()])


def text(name: str, content: str) -> Any:
    """A record of the Text tab. (SummaryWriter.add_text would put "/text_summary" behind the name.)"""
    from torch.utils.tensorboard import summary

    record = summary.text(name, content)
    record.value[0].tag = name
    return record


# The records of TensorBoard's HParams tab (tensorboard/plugins/hparams/plugin_data.proto). An "experiment" record is left out on purpose:
# TensorBoard takes the first that it finds as the table's columns for all runs, and without any it shows what the runs really have.


def session_start(flat: dict[str, bool | int | float | str]) -> Any:
    """The hyper-parameters of a run, and when it began."""
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    info = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in flat.items():
        kind = "bool_value" if isinstance(value, bool) else "string_value" if isinstance(value, str) else "number_value"
        setattr(info.hparams[name], kind, value)
    return _summary(metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=info))


def session_end(success: bool) -> Any:
    """How and when a run ended."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.Status.Value("STATUS_SUCCESS" if success else "STATUS_FAILURE")
    info = plugin_data_pb2.SessionEndInfo(end_time_secs=time.time(), status=status)
    return _summary(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=info))


def _summary(tag: str, data: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
