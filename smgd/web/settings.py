"""What the HTTP server may be told; every limit with the reason for its default."""

from __future__ import annotations

from typing import Literal

import msgspec

KIB = 1024


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the HTTP server. Times are in seconds, sizes in bytes.

    http_path: "fast" parses HTTP/1.x with httptools and lets the engine's reader write to clients;
        "stock" leaves all of it to Hypercorn and h11. HTTP/2 is Hypercorn's on both.
    backlog: connections that the kernel completes while we are busy; a burst of more is refused.
    header_timeout: from the first byte of a request (or of a TLS handshake) to the end of its
        head. Slow heads cost a descriptor each and are the cheapest attack there is.
    body_timeout: for a whole request body; images over a phone's uplink are the slowest honest
        ones.
    keep_alive_timeout: how long an idle connection stays open. Longer than the 60 s that common
        load balancers keep theirs, so that it is they who close and no request is lost in between.
    write_timeout: how long a client may leave 64 KiB unread before it is cut and its request
        aborted.
    half_close_grace: how long a request goes on after its client has closed its sending side. A
        client that is gone looks the same as `nc -N` that waits for its answer, so this is both
        the longest answer such a probe gets and the delay of aborting for a gone client.
    linger_timeout: how long a body that we refused is still thrown away, so that the client reads
        the refusal and not a reset.
    shutdown_grace: how long running requests may go on after the server was told to stop.
    max_header_bytes: request line and headers together; 64 KiB has room for large cookies and
        tokens of single sign-on, as in Hypercorn's HTTP/2.
    """

    http_path: Literal["fast", "stock"] = "fast"
    backlog: int = 2048
    header_timeout: float = 30.0
    body_timeout: float = 120.0
    keep_alive_timeout: float = 90.0
    write_timeout: float = 30.0
    half_close_grace: float = 0.5
    linger_timeout: float = 5.0
    shutdown_grace: float = 30.0
    max_header_bytes: int = 64 * KIB
