"""A real TensorBoard server on this machine, and how to ask it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Server", "serving"]


class Server:
    """Asks the server at an address for what the pages of the dashboard ask it."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **query: Any) -> Any:
        """Return the JSON, or else the bytes, at "/data/<path>?<query>"."""
        return self._ask(f"{path}?{urllib.parse.urlencode(query)}", None)

    def post(self, path: str, data: Any) -> Any:
        return self._ask(path, json.dumps(data).encode())

    def _ask(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(f"{self._address}/data/{path}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            content = answer.read()
            return json.loads(content) if "json" in answer.headers.get("Content-Type", "") else content

    def plugin(self, name: str, page: str, **query: Any) -> Any:
        return self.get(f"plugin/{name}/{page}", **query)

    def scalars(self, run: str, tag: str) -> list[tuple[int, float]]:
        """Return (step, value) of every point of a line."""
        return [(step, value) for _, step, value in self.plugin("scalars", "scalars", run=run, tag=tag)]


@contextmanager
def serving(folder: Path, loaded: Callable[[Server], bool]) -> Iterator[Server]:
    """Start a server for `folder` on a free port of 127.0.0.1 and wait, at most a minute, until `loaded` says that it has read the files."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0", "--reload_interval", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:  # until it tells its address; it says next to nothing afterwards
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise AssertionError(f"the server did not start:\n{''.join(said)}")
        server, deadline = Server(found[0]), time.monotonic() + 60
        while not loaded(server):
            assert time.monotonic() < deadline, "the server does not show the runs"
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()
