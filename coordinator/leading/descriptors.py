"""File descriptors: as many as this process may have, and never all of them for whoever connects to it.

Every connection takes one before it is known who is there, and a process without any can open no file of its own.
"""

from __future__ import annotations

import resource

MOST = 2**20
"""Beyond it nobody gains; where there is no limit at all, this is one."""
HANDSHAKE_S = 10.0
"""A connection on which the TLS handshake is not over after so long is closed."""


def raise_limit() -> int:
    """Raise what this process and those that it starts may open to what the system lets it; the limit that is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY:
        return most
    while most > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (ValueError, OSError):  # some kernels have a lower limit than they say
            most //= 2
        else:
            return most
    return soft


def connection_options() -> list[tuple[str, int]]:
    """Options of a gRPC server: connections get half of the descriptors, and have to say who is there."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)
    return [
        ("grpc.max_allowed_incoming_connections", max(1, most // 2)),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ]
