"""A rendezvous for processes of one machine: a store on the loopback address, ready at once.

torchelastic's own stores listen on every interface of the machine, and its dynamic rendezvous takes rounds of messages to find
out what is known here beforehand: there is one agent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

__all__ = ["BACKEND", "checks", "loopback_store"]

BACKEND = "trainer-loopback"
ADDRESS = "127.0.0.1"
checks: dict[str, Callable[[], None]] = {}
"""The number of a launch -> what is called, in the launching thread, as long as its ranks run; what it raises ends them."""


def loopback_store() -> tuple[TCPStore, int]:
    """Return a store that only this machine reaches, and its port. The port is held from the start, so none can take it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((ADDRESS, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        descriptor = os.dup(listener.fileno())  # the store closes the descriptor it is given
    store = TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    return store, port


class _Loopback(RendezvousHandler):
    """One agent, rank 0 of 1; the ranks use its store (`use_agent_store`), so rank 0 opens no port either."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store, self._port = loopback_store()

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(ADDRESS, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        """None, ever; but the agent asks whenever it has looked after its processes, which is the moment for a check of ours."""
        if check := checks.get(self._run_id):
            check()
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return _Loopback(parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _create)
