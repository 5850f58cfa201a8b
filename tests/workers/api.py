"""A house with the worker API as clients use it, and further socket paths for workers to be added.

Every test ends with nothing left in the directory of the sockets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from tests.flows.client import Call, head, send
from tests.flows.house import House, Tally, captured_log, short_directory
from tests.support import PATIENCE

# The first belongs to the house's own worker, if it has one.
PATHS = 4


class ApiHouse:
    """A house, and calls of its worker API.

    `outlived` are the paths whose engine has outlived its worker, so that its record stays.
    """

    def __init__(self, house: House, directory: Path) -> None:
        self.house = house
        self.urls = [f"ipc://{directory}/e{number}" for number in range(PATHS)]
        self.house.paths[:] = [directory / f"e{number}" for number in range(PATHS)]
        self.outlived: set[int] = set()

    async def call(self, method: str, path: str, body: Any = None, kind: str = "json") -> Call:
        """Make a request; a body that is not bytes is sent as JSON."""
        data = b"" if body is None else body if isinstance(body, bytes) else encode(body)
        headers = [f"Content-Type: application/{kind}", f"Content-Length: {len(data)}"]
        call = await send(self.house.port, head(path, *headers, method=method) + data, method)
        async with call.stream:
            return await call.read()

    def in_the_way(self, number: int = 1) -> Path:
        """Make a directory where a worker's socket file would be; return it."""
        path = Path(self.urls[number].removeprefix("ipc://") + "-in.sock")
        path.mkdir()
        return path

    def record(self, number: int) -> Path:
        """Return the file that remembers the engines of one of the paths."""
        return Path(self.urls[number].removeprefix("ipc://") + ".engine.json")

    def remove_set_aside(self, number: int) -> None:
        """Remove the record that was set aside at one of the paths, which has to be there."""
        Path(f"{self.record(number)}.bad").unlink()

    async def add(self, number: int = 1, **fields: Any) -> str:
        """Add a worker at one of the paths; return its id."""
        answer = await self.call("POST", "/workers", {"url": self.urls[number], **fields})
        assert answer.status == 202, answer.body
        return str(answer.json["worker_id"])

    async def refused(self, **fields: Any) -> str:
        """Have a worker refused as wrong; return the text."""
        answer = await self.call("POST", "/workers", {"url": self.urls[1], **fields})
        assert (answer.status, answer.json["code"]) == (400, "BAD_REQUEST"), answer.body
        assert answer.json.keys() == {"error", "code"}
        return str(answer.json["error"])

    async def list(self) -> list[Any]:
        """Return all workers."""
        answer = await self.call("GET", "/workers")
        assert answer.status == 200
        assert answer.json["total"] == len(answer.json["workers"])
        return list(answer.json["workers"])

    async def status(self, worker_id: str) -> str:
        """Return where a worker is, `gone` if there is none."""
        answer = await self.call("GET", f"/workers/{worker_id}")
        return str(answer.json["status"]) if answer.status == 200 else "gone"

    async def until_status(self, worker_id: str, status: str) -> None:
        """Wait for a status."""
        with trio.fail_after(PATIENCE):
            while await self.status(worker_id) != status:  # noqa: ASYNC110 - asked over HTTP
                await trio.sleep(0.005)

    async def remove(self, worker_id: str) -> None:
        """Remove a worker, and wait until it is gone."""
        assert (await self.call("DELETE", f"/workers/{worker_id}")).status == 202
        await self.until_status(worker_id, "gone")

    async def until_ready(self, workers: int) -> None:
        """Wait until so many workers serve, and their models are there."""
        await self.house.ready(workers)


encode = msgspec.json.encode


@asynccontextmanager
async def api_house(
    nursery: trio.Nursery, workers: int = 0, *, start: bool = True, **options: Any
) -> AsyncIterator[ApiHouse]:
    """Give a house whose daemon runs, unless it is to be started later."""
    with (
        short_directory(PATHS) as directory,
        captured_log() as lines,
        (tally := Tally()).listening(),
    ):
        house = House(nursery, directory, lines, tally, workers=workers, **options)
        if start:
            await house.open()
        api = ApiHouse(house, directory)
        yield api
        for engine in house.engines:
            engine.terminate()
        await house.close()
        # What is known of engines outlives the daemon; it outlives their worker as they do.
        records = [record.addresses.record for record in house.daemon.fleet.records.values()]
        records += [api.record(number) for number in api.outlived]
        assert {*directory.iterdir()} - {*records} == {house.replies}
