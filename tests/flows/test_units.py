"""The units as they are shipped, under a real systemd, with the simulated engine.

Boots a machine of its own (machine.py), so it runs only when asked for: SMGD_TEST_SYSTEMD=1, or
`make systemd-test`. The tests build on each other's machine, not on each other.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from smgd.wire.fnv import handshake_port
from tests.flows.machine import Machine

WANTED = "SMGD_TEST_SYSTEMD"
pytestmark = pytest.mark.skipif(
    not os.environ.get(WANTED), reason=f"boots a machine; to run it set {WANTED}=1"
)

README = Path(__file__).parents[2] / "systemd" / "README.md"
SOCKETS = "/run/smgd/engines"
FILE = "/etc/smgd/smgd.toml"
CONFIG = f"""\
server.drain_window = 0.2
server.shutdown_grace = 5
[models."smgd-sim"]
[[workers]]
url = "ipc://{SOCKETS}/0"
"""
ENGINE = """\
[Service]
ExecStart=
ExecStart=/opt/smgd/bin/smgd-sim --handshake tcp://127.0.0.1:${HANDSHAKE_PORT} $ENGINE_ARGS
"""
# Clients, each request on a connection of its own, for some seconds; prints how they ended.
CLIENTS = """
import collections, http.client, json, sys, threading, time
end, ends = time.monotonic() + float(sys.argv[1]), collections.Counter()
body = {"model": "smgd-sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
def ask():
    try:
        connection = http.client.HTTPConnection("127.0.0.1", 30000, timeout=30)
        head = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
        answer = connection.getresponse()
        text = answer.read().decode()
        return "200" if answer.status == 200 else f"{answer.status} {text}"
    except OSError as error:
        return repr(error)
def client():
    while time.monotonic() < end:
        ends[ask()] += 1
        time.sleep(0.01)
threads = [threading.Thread(target=client) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(ends))
"""


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)


class Service:
    """smgd on a machine, installed as systemd/README.md says."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.run = machine.run

    def install(self) -> None:
        """Run README's commands, save for those that install the package."""
        text = README.read_text()
        first = text.index("    install -m 644")
        commands = text[first : text.index("daemon-reload", first)] + "daemon-reload"
        self.run("bash", "-ec", "cd /opt && ln -sfn units systemd\n" + commands)
        self.machine.write("/etc/systemd/system/smgd-engine@.service.d/sim.conf", ENGINE)
        port = handshake_port(f"{SOCKETS}/0")
        self.machine.write("/etc/smgd/engines/0.env", f"MODEL=smgd-sim\nHANDSHAKE_PORT={port}\n")
        self.configure(CONFIG)
        self.run("systemctl", "daemon-reload")

    def configure(self, text: str) -> None:
        self.machine.write(FILE, text)
        self.run("chgrp", "smgd", FILE)
        self.run("chmod", "640", FILE)

    def shows(self, name: str, unit: str = "smgd.service") -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", name, unit).strip()

    def log(self, unit: str = "smgd.service", priority: str = "debug") -> str:
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit, "-p", priority)

    def smgctl(self, *arguments: str, user: str = "root") -> tuple[int, str]:
        """Return exit status and output of smgctl."""
        as_user = ("runuser", "-u", user, "--", "/opt/smgd/bin/smgctl")
        done = self.machine.call(*as_user, *arguments)
        return done.returncode, done.stdout

    def clients(self, seconds: float, meanwhile: Callable[[], object]) -> Counter[str]:
        """Return how the requests of some clients have ended."""
        self.machine.write("/tmp/clients.py", CLIENTS)
        command = f"/opt/python/bin/python3 /tmp/clients.py {seconds} >/tmp/ends 2>&1 &"
        self.run("sh", "-c", command)
        time.sleep(0.5)
        meanwhile()
        until(lambda: self.run("cat", "/tmp/ends"), seconds + 40)
        return Counter(msgspec.json.decode(self.run("cat", "/tmp/ends")))

    def serves(self, workers: str) -> bool:
        return self.shows("StatusText") == f"serving, {workers} workers ready"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    found = Machine.start(tmp_path_factory.mktemp("machine"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def installed(machine: Machine) -> Service:
    service = Service(machine)
    service.install()
    units = ("smgd.socket", "smgd.service", "smgd-engine@0.service")
    service.run("systemctl", "enable", "--now", *units)
    return service


@pytest.fixture
def service(installed: Service) -> Service:
    """The service in the state in which it was installed."""
    installed.configure(CONFIG)
    for verb in ("stop", "start"):  # not "restart", which lets the two jobs race
        installed.run("systemctl", verb, "smgd.socket", "smgd.service")
    until(lambda: installed.serves("1/1"))
    return installed


def test_it_starts_and_serves(service: Service) -> None:
    """`Type=notify` is reached only by READY=1; the engine's user reaches the sockets."""
    assert service.shows("ActiveState") == "active"
    assert service.shows("User") == "smgd"
    code, text = service.smgctl("status")
    assert code == 0
    assert "1/1 ready" in text
    health = service.run("curl", "-s", "http://127.0.0.1:30000/readiness")
    assert '"status":"ready"' in health


def test_a_restart_refuses_nobody_and_leaves_the_engine_alone(service: Service) -> None:
    engine, gateway = service.shows("MainPID", "smgd-engine@0"), service.shows("MainPID")
    ends = service.clients(6, lambda: service.run("systemctl", "restart", "smgd.service"))
    assert ends.keys() == {"200"}
    assert service.shows("MainPID", "smgd-engine@0") == engine
    assert service.shows("MainPID") != gateway
    assert '"event":"engine adopted"' in service.log()


def test_killed_it_comes_back_and_adopts_the_engine(service: Service) -> None:
    engine, gateway = service.shows("MainPID", "smgd-engine@0"), service.shows("MainPID")
    service.run("kill", "-9", gateway)
    until(lambda: service.shows("MainPID") not in ("0", gateway) and service.serves("1/1"))
    assert service.shows("MainPID", "smgd-engine@0") == engine


def test_reload(service: Service) -> None:
    added = f'[[workers]]\nurl = "ipc://{SOCKETS}/1"\n[log]\nlevel = "debug"\n'
    service.configure(f"server.keep_alive_timeout = 33\n{CONFIG}{added}")
    service.run("systemctl", "reload", "smgd.service")
    until(lambda: service.serves("1/2"))
    assert service.smgctl("loglevel") == (0, "debug\n")
    fixed = '"event":"cannot change while smgd runs: restart it","key":"server.keep_alive_timeout"'
    assert fixed in service.log()
    warnings = service.log(priority="warning")
    assert fixed in warnings
    assert "smgd listening" in service.log()
    assert "smgd listening" not in warnings


def test_a_reload_with_a_mistake_in_the_file_fails_and_changes_nothing(service: Service) -> None:
    gateway = service.shows("MainPID")
    service.configure(f"{CONFIG}[serverr]\n")
    done = service.machine.call("systemctl", "reload", "smgd.service")
    assert done.returncode != 0
    assert "serverr: there is no such key; did you mean server?" in service.log()
    assert service.shows("MainPID") == gateway
    assert service.serves("1/1")
    service.configure(CONFIG)
    service.run("systemctl", "reload", "smgd.service")
    assert service.serves("1/1")


def test_a_loop_that_hangs_is_ended_and_started_again(service: Service) -> None:
    drop_in = "/run/systemd/system/smgd.service.d/watchdog.conf"
    service.machine.write(drop_in, "[Service]\nWatchdogSec=1s\n")
    service.run("systemctl", "daemon-reload")
    service.run("systemctl", "restart", "smgd.service")
    gateway = service.shows("MainPID")
    time.sleep(2.5)
    assert service.shows("MainPID") == gateway  # the loop feeds it
    service.run("kill", "-STOP", gateway)
    until(lambda: service.shows("MainPID") not in ("0", gateway) and service.serves("1/1"))
    assert "Fatal Python error: Aborted" in service.log()
    service.run("rm", drop_in)
    service.run("systemctl", "daemon-reload")


def test_wrong_configuration_is_not_tried_for_ever(service: Service) -> None:
    service.configure(f"{CONFIG}[serverr]\n")
    assert service.machine.call("systemctl", "restart", "smgd.service").returncode != 0
    code, text = service.smgctl("status")
    assert code == 3, text
    until(lambda: service.shows("Result", "smgd.socket") == "trigger-limit-hit")
    assert service.log().rstrip().count("serverr: there is no such key; did you mean server?") < 20
    code, text = service.smgctl("status")
    assert (code, "there is no socket /run/smgd/smgd.sock: start smgd" in text) == (3, True)
    time.sleep(10)  # TriggerLimitIntervalSec=


def test_who_may_use_the_admin_socket(service: Service) -> None:
    service.run("sh", "-c", "id alice || useradd -M alice; id bob || useradd -M -G smgd bob")
    assert service.smgctl("status", user="bob")[0] == 0
    assert service.smgctl("status", user="smgd")[0] == 0
    for user in ("alice", "smgd-engine"):
        code, text = service.smgctl("status", user=user)
        assert (code, "become a member of smgd (usermod -aG smgd USER)" in text) == (3, True)
    service.run("chmod", "666", "/run/smgd/smgd.sock")
    code, text = service.smgctl("status", user="alice")
    assert (code, "members of the group smgd may use the admin socket" in text) == (3, True)
