"""On one machine nothing of a run listens beyond the loopback address."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.modules import Net, loader, quiet

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and 127.0.0.1 as an IPv6 address, as /proc/net writes them."""


def descendants(pid):
    children = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    return [pid, *(one for child in children for one in descendants(child))]


def listening(pids):
    """Return {(protocol, address, port)} of the sockets on which these processes take connections."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
            except OSError:  # closed meanwhile
                pass
    found = set()
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == ("0A" if protocol.startswith("tcp") else "07") and fields[9] in inodes:
                found.add((protocol, *fields[1].split(":")))
    return found


class Looking(Net):
    def __init__(self):
        super().__init__()
        self.found, self.processes = [], 0

    def look(self):
        everyone = descendants(os.getppid())  # the caller, its ranks and their workers
        self.found += sorted(listening(everyone))
        self.processes = max(self.processes, len(everyone))

    def setup(self, stage):
        self.look()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.look()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))
        self.look()


def test_nothing_listens_beyond_loopback_during_a_run_of_two_ranks():
    module = Looking()
    trainer = quiet(strategy="ddp", devices=2, max_epochs=1, timeout=60, accelerator="cpu")
    trainer.fit(module, loader(Net.rows(8), 2, num_workers=1), loader(Net.rows(4), 2))
    assert module.processes >= 4
    assert module.found, "the store of the launcher at least"
    assert [one for one in module.found if one[1] not in LOOPBACK] == []


def test_the_look_finds_a_socket_that_is_open_to_all():
    import socket

    with socket.socket() as one, socket.socket(socket.AF_INET6) as other:
        one.bind(("0.0.0.0", 0))
        one.listen()
        other.bind(("::", 0))
        other.listen()
        found = {(protocol, address) for protocol, address, _ in listening([os.getpid()])}
    assert {("tcp", "0" * 8), ("tcp6", "0" * 32)} <= found
