"""Certificates from files: what cannot be used is refused in words, what was renewed is taken."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
import trustme

from smgd.config.load import convert
from smgd.daemon import Daemon
from smgd.errors import ConfigError
from smgd.web.exchange import Exchange, Routes
from smgd.web.tls import renew, server_context
from tests.flows.house import captured_log, tables_of
from tests.web.servers import read_answer, request, running_server


class Pair:
    """A certificate and its key in two files, by an authority that can issue another."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        self.certificate = str(directory / "chain.pem")
        self.key = str(directory / "key.pem")
        self.issue()

    def issue(self, *, key: bool = True) -> None:
        """Write a new certificate into the files, or only into the first."""
        issued = self.authority.issue_cert("127.0.0.1")
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        Path(self.certificate).write_bytes(chain)
        if key:
            issued.private_key_pem.write_to_path(self.key)

    def context(self) -> ssl.SSLContext:
        context = server_context(self.certificate, self.key)
        assert context is not None
        return context

    @asynccontextmanager
    async def connected(self, port: int) -> AsyncIterator[trio.SSLStream[trio.SocketStream]]:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        tcp = await trio.open_tcp_stream("127.0.0.1", port)
        stream = trio.SSLStream(tcp, context, server_hostname="127.0.0.1")
        try:
            await stream.do_handshake()
            yield stream
        finally:
            await trio.aclose_forcefully(stream)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def number(stream: trio.SSLStream[trio.SocketStream]) -> str:
    """Return the serial number of the server's certificate."""
    certificate = stream.getpeercert()
    assert certificate is not None
    return str(certificate["serialNumber"])


async def ask(stream: trio.SSLStream[trio.SocketStream]) -> bytes:
    await stream.send_all(request("/", body=b"x"))
    return (await read_answer(stream)).body


async def hello(exchange: Exchange) -> None:
    await exchange.read_body(100)
    await exchange.respond(200, [], b"hello")


async def nobody(scope: object, receive: object, send: object) -> None:
    raise AssertionError("only one route is asked for here")


APP = Routes({("POST", "/"): hello}, nobody)


async def test_a_renewed_certificate_is_for_new_connections(pair: Pair) -> None:
    context = pair.context()
    async with (
        running_server(APP, http_path="fast", tls=context) as server,
        pair.connected(server.port) as before,
    ):
        pair.issue()
        async with pair.connected(server.port) as same:
            assert number(same) == number(before)
        renew(context, pair.certificate, pair.key)
        async with pair.connected(server.port) as after:
            assert number(after) != number(before)
            assert await ask(before) == await ask(after) == b"hello"


def damage_key(pair: Pair) -> None:
    Path(pair.key).write_text("no key")


def take_key_away(pair: Pair) -> None:
    Path(pair.key).unlink()


def issue_without_key(pair: Pair) -> None:
    pair.issue(key=False)


def encrypt_key(pair: Pair) -> None:
    encrypted = pair.key + ".encrypted"
    command = ["openssl", "pkey", "-in", pair.key, "-aes256", "-passout", "pass:x"]
    subprocess.run([*command, "-out", encrypted], check=True)
    Path(encrypted).rename(pair.key)


async def test_a_reload_takes_a_renewed_pair_and_no_bad_one(
    pair: Pair, nursery: trio.Nursery
) -> None:
    tls = {"tls": {"cert_path": pair.certificate, "key_path": pair.key}}
    config = convert(tables_of([], "smgd-sim", tls), "test")
    daemon = Daemon(config, reread=lambda: config)
    numbers: list[str] = []

    async def look() -> None:
        async with pair.connected(ports.http) as stream:
            numbers.append(number(stream))

    with captured_log() as lines:
        ports = await nursery.start(daemon.run)
        await look()
        pair.issue()
        daemon.reload()
        await look()
        pair.issue(key=False)
        with pytest.raises(ConfigError, match="cannot use the TLS files"):
            daemon.reload()
        await look()
        await daemon.drain()
    assert numbers[0] != numbers[1] == numbers[2]
    reloaded = [line for line in lines if line["event"] == "certificate reloaded"]
    assert [line["path"] for line in reloaded] == [pair.certificate]


DAMAGES = [damage_key, take_key_away, issue_without_key, encrypt_key]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_bad_pair_leaves_the_old_one(pair: Pair, damage: Callable[[Pair], None]) -> None:
    context = pair.context()
    damage(pair)
    with pytest.raises(ConfigError, match=r"cannot use the TLS files .*chain\.pem, .*key\.pem"):
        renew(context, pair.certificate, pair.key)
    async with (
        running_server(APP, http_path="fast", tls=context) as server,
        pair.connected(server.port) as client,
    ):
        assert await ask(client) == b"hello"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_pair_is_refused(pair: Pair, damage: Callable[[Pair], None]) -> None:
    damage(pair)
    with pytest.raises(ConfigError, match=r"cannot use the TLS files .*chain\.pem, .*key\.pem"):
        server_context(pair.certificate, pair.key)


def test_nobody_is_asked_for_a_password(pair: Pair) -> None:
    encrypt_key(pair)
    with pytest.raises(ConfigError, match="the key is encrypted"):
        server_context(pair.certificate, pair.key)


def test_both_files_or_none(pair: Pair) -> None:
    assert server_context(None, None) is None
    for half in ((pair.certificate, None), (None, pair.key)):
        with pytest.raises(ConfigError, match="needs both"):
            server_context(*half)


async def test_who_does_not_speak_tls_is_found_in_the_log(pair: Pair) -> None:
    tls = pair.context()
    with captured_log() as lines:
        async with running_server(APP, http_path="fast", tls=tls, header_timeout=0.3) as server:
            for data in (request("/", body=b"x"), b""):
                async with await trio.open_tcp_stream("127.0.0.1", server.port) as plain:
                    if data:
                        await plain.send_all(data)
                    with trio.fail_after(5), suppress(trio.BrokenResourceError):
                        while await plain.receive_some():
                            pass
    failed = [line for line in lines if line["event"] == "TLS handshake failed"]
    assert [line["log_level"] for line in failed] == ["debug"] * 2
    assert "http request" in failed[0]["reason"].lower().replace("_", " ")
    assert failed[1]["reason"] == "it took longer than 0.3 s"
