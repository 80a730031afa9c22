"""A port for programs that must be told one before they start."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]


def free_port() -> int:
    """Return a port of the loopback address that nobody listens at.

    Below those that systems hand out by themselves: until the program has taken it, no other socket of this machine gets it by chance.
    """
    for port in random.SystemRandom().sample(range(15000, 32000), 100):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError("there is no free port")
