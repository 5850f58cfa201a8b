"""Run a program confined as systemd confines the service: `confine.py UNIT COMMAND...`.

Only what can be had without systemd as the first process, and what could break a program that runs
well otherwise: the system call filter and the address families, by libseccomp, and
MemoryDenyWriteExecute=. Sets of system calls are spelled out by systemd-analyze. The rest is seen
in test_units.py.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_ALLOW = 0x7FFF0000
_EPERM = 0x00050000 | 1
_PR_SET_NO_NEW_PRIVS, _PR_SET_MDWE = 38, 65
_EQUAL = 4  # SCMP_CMP_EQ


class _Comparison(ctypes.Structure):
    """scmp_arg_cmp: of an argument of a system call, by its number, with a value."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("how", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


def settings(unit: str, name: str) -> Iterator[str]:
    """Give the values of a setting, in order."""
    for line in Path(unit).read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and key == name:
            yield value


def calls(name: str) -> set[str]:
    """Return the system calls that a name stands for."""
    if not name.startswith("@"):
        return {name}
    command = ["systemd-analyze", "syscall-filter", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    words = (line.strip() for line in done.stdout.splitlines()[1:])
    return {call for word in words if word and word[0] != "#" for call in calls(word)}


def allowed(unit: str) -> set[str]:
    """Return the system calls that a unit allows: its first line says what is the rule."""
    found: set[str] = set()
    for value in settings(unit, "SystemCallFilter"):
        named = {call for name in value.lstrip("~").split() for call in calls(name)}
        found = found - named if value.startswith("~") else found | named
    return found


def families(unit: str) -> set[int]:
    """Return the address families of the sockets that a unit allows."""
    [names] = settings(unit, "RestrictAddressFamilies")
    return {getattr(socket, name) for name in names.split()}


def confine(unit: str) -> None:
    """Confine this process, and what it becomes."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    libc = ctypes.CDLL(None)
    context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(_EPERM)))
    for call in allowed(unit) - {"socket"}:
        number = seccomp.seccomp_syscall_resolve_name(call.encode())
        if number != -1:
            seccomp.seccomp_rule_add(context, ctypes.c_uint32(_ALLOW), number, 0)
    number = seccomp.seccomp_syscall_resolve_name(b"socket")
    for family in families(unit):
        equal = _Comparison(0, _EQUAL, family, 0)
        seccomp.seccomp_rule_add_array(
            context, ctypes.c_uint32(_ALLOW), number, 1, ctypes.byref(equal)
        )
    if "yes" in settings(unit, "MemoryDenyWriteExecute"):
        libc.prctl(_PR_SET_MDWE, 1, 0, 0, 0)  # not before Linux 6.3
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if seccomp.seccomp_load(context) != 0:
        raise OSError("the system call filter cannot be loaded")


if __name__ == "__main__":
    confine(sys.argv[1])
    os.execv(sys.argv[2], sys.argv[2:])
