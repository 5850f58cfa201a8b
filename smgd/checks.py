"""What is wrong with a configuration on this host, found without binding anything.

`judged` is what `check-config`, `run`, `launch`, `serve` and a reload all ask, so that none of them
takes what another refuses: the keys and what they say of each other (`smgd.config`), and what only
the host knows, such as whether files can be used and whether addresses can go together.

What cannot be known beforehand is left to who binds: whether an address is this host's and free
(while an upgrade is checked, the old daemon has all of them), and whether another process has a
worker's path. Models are not looked at: they are loaded in the background until it works.

Everything here answers at once and needs neither trio nor ZMQ.
"""

from __future__ import annotations

import grp
import os
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from smgd.config import AdminConfig, Config, TlsConfig
from smgd.config.findings import Findings
from smgd.config.load import read
from smgd.engine.claim import check_directory
from smgd.engine.paths import MAX_PATH, Addresses, check_handshake, collisions, derive
from smgd.errors import ConfigError, WorkerError
from smgd.launch import plan as engines
from smgd.launch.plan import Host
from smgd.web.tls import server_context


class Claim(msgspec.Struct, frozen=True):
    """The addresses of one worker, and the keys to blame for its files and for its port."""

    files: str
    port: str
    addresses: Addresses


def judged(file: Path | None, flags: Mapping[str, Any], found: Findings, *, binds: bool) -> Config:
    """Return what file and flags say, as far as it can be used; `found` gets what is wrong.

    `binds` tells whether our own listeners are going to be bound: those that are there already, or
    that systemd hands over, need neither names of hosts, which may take long to look up, nor a
    place. Raises ConfigError for a file of which nothing can be said.
    """
    config = read(file, flags, found)
    _judge_tls(config.tls, found)
    admin = _judge_admin(config.admin, found) if binds else config.admin.socket
    if binds:
        _judge_hosts(config, found)
    claims = [*_claims_of_workers(config, found), *_claims_of_engines(config, found)]
    for number, error in collisions([c.addresses for c in claims], config.own_addresses):
        found.wrong(claims[number].port, str(error))
    _judge_files(admin, claims, found)
    directories: dict[Path, str] = {}
    for claim in claims:
        directories.setdefault(claim.addresses.lock.parent, claim.files)
    for directory, key in directories.items():
        _judge_directory(directory, key, found)
    return config


# -------------------------------------------------------------------------------- listeners


def _judge_hosts(config: Config, found: Findings) -> None:
    hosts = {"server.host": config.server.host}
    if config.metrics.host:
        hosts["metrics.host"] = config.metrics.host
    for key, host in hosts.items():
        try:
            socket.getaddrinfo(host.encode("idna"), 0, type=socket.SOCK_STREAM)
        except OSError as error:
            text = f"{host!r} cannot be listened on: {error.strerror}"
            # To a check it may be a name server that does not answer just now.
            found.note(key, text) if found.outside else found.wrong(key, text)
        except ValueError as error:
            found.wrong(key, f"{host!r} cannot be listened on: {error}")


def _judge_tls(tls: TlsConfig, found: Findings) -> None:
    files = {"tls.cert_path": tls.cert_path, "tls.key_path": tls.key_path}
    usable = [path for key, path in files.items() if path and found.read(key, path) is not None]
    for key, path in files.items():
        if not path and any(files.values()):
            found.wrong(key, "must be given: TLS needs both tls.cert_path and tls.key_path")
    if len(usable) == 2:
        try:
            server_context(*usable)
        except ConfigError as error:
            found.wrong("tls.cert_path", str(error))


def _judge_admin(admin: AdminConfig, found: Findings) -> str:
    """Look at group and socket; return the socket's path, empty without one that can be."""
    if not admin.socket:
        return ""
    try:
        gid = grp.getgrnam(admin.group).gr_gid if admin.group else -1
    except (KeyError, ValueError):
        found.wrong("admin.group", f"there is no group {admin.group!r}")
        gid = -1
    if gid not in (-1, os.getegid(), *os.getgroups()) and os.geteuid() != 0:
        found.depends(admin.socket)
        found.wrong("admin.group", f"this user is not in the group {admin.group!r}")
    if reason := _no_socket(admin.socket, found):
        found.wrong("admin.socket", reason)
        return ""
    return admin.socket


def _no_socket(path: str, found: Findings) -> str:
    """Return why there cannot be a socket at a path, empty if there can."""
    length = len(os.fsencode(path))
    if length > MAX_PATH or "\0" in path:
        return f"the path has {length} bytes; Linux allows {MAX_PATH}, and no NUL"
    directory = Path(path).absolute().parent
    if not os.path.lexists(directory) and _comes_with_the_service(directory, found):
        found.note("admin.socket", f"there is no directory {directory} yet")
        return ""
    if not os.access(directory, os.W_OK | os.X_OK):
        if os.access(directory, os.F_OK):
            found.depends(directory)
        return f"there is no directory {directory}, or this user may not write to it"
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        return f"{path} is there, and is not a socket"
    return ""


# ---------------------------------------------------------------------------------- workers


def _claims_of_workers(config: Config, found: Findings) -> Iterator[Claim]:
    """Give the addresses of all `[[workers]]`, save for those that cannot have any."""
    for number, worker in enumerate(config.workers):
        files, port = f"workers[{number}].url", f"workers[{number}].zmq_handshake_address"
        own = worker.zmq_handshake_address
        right = not own or _stands(found, port, partial(check_handshake, own))
        if _stands(found, files, partial(derive, worker.url)) and right:
            yield Claim(files, port if own else files, derive(worker.url, own or None))


def _claims_of_engines(config: Config, found: Findings) -> Iterator[Claim]:
    """Give the addresses of all `[[engines]]`, if they can be started."""
    host = Host.here()
    if config.engines and config.launch.keep_engines:
        found.note("launch.keep_engines", "not possible in a systemd service, which is not judged")
    mistakes = list(engines.mistakes(config, host))
    for key, error in mistakes:
        found.wrong(key, str(error))
    if not mistakes:
        planned = engines.plan(config, host)
        for warning in planned.warnings:
            found.note("engines", warning)
        for worker in planned.workers:
            yield Claim("engines", "launch.worker_base_port", derive(worker.url))


def _stands(found: Findings, key: str, judge: Callable[[], object]) -> bool:
    try:
        judge()
    except WorkerError as error:
        found.wrong(key, str(error))
        return False
    return True


def _judge_files(admin: str, claims: Sequence[Claim], found: Findings) -> None:
    """Find files that are one, though their paths are written in two ways."""
    owners = {_real(Path(admin)): "admin.socket"} if admin else {}
    for claim in claims:
        url = claim.addresses.url
        for file in map(_real, claim.addresses.sockets):
            if owners.setdefault(file, url) != url:
                found.wrong(claim.files, f"{file} belongs to {owners[file]}, too")
                break


def _comes_with_the_service(directory: Path, found: Findings) -> bool:
    """Tell whether a directory that is not there may be by then: see `RuntimeDirectory=`."""
    return found.outside and directory.is_relative_to("/run")


def _real(path: Path) -> str:
    """Return where a path leads, as far as this user may see."""
    try:
        return os.path.realpath(path)
    except OSError:
        return os.fspath(path)


def _judge_directory(directory: Path, key: str, found: Findings) -> None:
    """Find out whether sockets may lie in a directory, or whether it can be made."""
    try:
        check_directory(directory)
    except FileNotFoundError:
        nearest = next(parent for parent in directory.parents if parent.exists())
        if not os.access(nearest, os.W_OK | os.X_OK):
            text = f"{directory} cannot be made: this user may not write to {nearest}"
            if _comes_with_the_service(directory, found):
                found.note(key, text)
                return
            found.depends(nearest)
            found.wrong(key, text)
    except WorkerError as error:
        if directory.is_dir() and not directory.is_symlink():  # so it is another user's
            found.depends(directory)
            if found.outside and os.geteuid() == 0:
                return
        found.wrong(key, str(error))
    except OSError as error:
        found.depends(directory)
        found.wrong(key, f"{directory} cannot be used: {error.strerror}")
