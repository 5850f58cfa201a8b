"""HTTP clients for the flows: raw TCP for what no SDK would do, the official SDK for the contract.

Responses are parsed strictly, by h11, whatever is read of them.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import h11
import msgspec
import trio
from openai import OpenAI

from tests.support import PATIENCE

T = TypeVar("T")

HOST = "127.0.0.1"
CHAT = "/v1/chat/completions"
DONE = "data: [DONE]"
COMMENT = ": keep-alive"

_decode = msgspec.json.decode
_encode = msgspec.json.encode


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    """Return the head of a request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode()


def post(body: bytes, *headers: str, path: str = CHAT) -> bytes:
    """Return a POST of JSON."""
    length = f"Content-Length: {len(body)}"
    return head(path, "Content-Type: application/json", length, *headers) + body


def chat_body(content: str, **fields: Any) -> bytes:
    """Return the body of a chat with one user message."""
    return _encode({"messages": [{"role": "user", "content": content}], **fields})


class Call:
    """One request on a connection of its own, and as much of the answer as was read.

    `complete` is false while the answer has not come to its proper end; `cut` is true if the
    connection has ended before that.
    """

    def __init__(self, stream: trio.SocketStream, method: str = "POST") -> None:
        self.stream = stream
        self.status = 0
        self.headers: dict[str, str] = {}
        self._data = bytearray()
        self.complete = False
        self.cut = False
        self._parser = h11.Connection(h11.CLIENT)
        self._parser.send(h11.Request(method=method, target="/", headers=[("host", "test")]))
        self._parser.send(h11.EndOfMessage())

    # ------------------------------------------------------------------------------- reading

    async def read(self, mark: str | None = None) -> Call:
        """Read until `mark` is in the body, or to the end. Returns itself."""
        while not (self.complete or self.cut):
            if mark is not None and mark.encode() in self._data:
                break
            await self._read_some()
        return self

    async def _read_some(self) -> None:
        try:
            event = self._parser.next_event()
        except h11.RemoteProtocolError:  # it ended within a response
            self.cut = True
            return
        if event is h11.NEED_DATA:
            try:
                self._parser.receive_data(bytes(await self.stream.receive_some()))
            except trio.BrokenResourceError:
                self.cut = True
        elif isinstance(event, h11.Response):
            self.status = event.status_code
            self.headers = {name.decode(): value.decode() for name, value in event.headers}
        elif isinstance(event, h11.Data):
            self._data += event.data
        elif isinstance(event, h11.EndOfMessage):
            self.complete = True
        else:
            self.cut = True

    @property
    def body(self) -> bytes:
        """What has come of the body."""
        return bytes(self._data)

    @property
    def json(self) -> Any:
        """The body of an answer that is not streamed."""
        return _decode(self.body)

    @property
    def blocks(self) -> list[str]:
        """The events and comments of a stream."""
        return self.body.decode(errors="replace").split("\n\n")[:-1]

    @property
    def frames(self) -> list[Any]:
        """The JSON of a stream's events."""
        datas = [b.removeprefix("data: ") for b in self.blocks if b not in (DONE, COMMENT)]
        return [_decode(data) for data in datas]

    @property
    def done(self) -> bool:
        """Whether a stream said `[DONE]`, once and last."""
        return self.complete and self.blocks[-1] == DONE and self.blocks.count(DONE) == 1

    @property
    def error(self) -> Any:
        """The error of an answer, or of the last event of a stream; None without."""
        if "event-stream" in self.headers.get("content-type", ""):
            return self.frames[-1].get("error") if self.frames else None
        return self.json.get("error")

    def text(self, index: int = 0) -> str:
        """Return the text of one choice of a stream."""
        choices = [c for frame in self.frames for c in frame.get("choices", ())]
        return "".join(c["delta"].get("content", "") for c in choices if c["index"] == index)

    def finishes(self) -> list[str]:
        """Return all finish reasons of a stream."""
        choices = [c for frame in self.frames for c in frame.get("choices", ())]
        return [c["finish_reason"] for c in choices if c["finish_reason"] is not None]

    # ------------------------------------------------------------------------------- leaving

    async def close(self) -> None:
        """Close the connection properly."""
        await self.stream.aclose()

    def reset(self) -> None:
        """Close the connection with a reset."""
        linger = struct.pack("ii", 1, 0)
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.stream.socket.close()


async def dial(port: int, receive_buffer: int | None = None) -> trio.SocketStream:
    """Connect. Raises OSError if nobody listens."""
    sock = trio.socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    try:
        await sock.connect((HOST, port))
    except OSError:
        sock.close()
        raise
    return trio.SocketStream(sock)


async def send(port: int, data: bytes, method: str = "POST") -> Call:
    """Send a request on a new connection; nothing of the answer is read yet."""
    stream = await dial(port)
    await stream.send_all(data)
    return Call(stream, method)


async def fetch(port: int, path: str, method: str = "GET", *headers: str) -> Call:
    """Make a request without a body on a new connection, and read the whole answer."""
    call = await send(port, head(path, *headers, method=method), method)
    async with call.stream:
        return await call.read()


async def sdk(port: int, use: Callable[[OpenAI], T]) -> T:
    """Run `use` with the official client, in a thread."""

    def run() -> T:
        url = f"http://{HOST}:{port}/v1"
        with OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=PATIENCE) as client:
            return use(client)

    return await trio.to_thread.run_sync(run)
