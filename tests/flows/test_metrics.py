"""What a scrape tells while requests run: real values of a daemon with simulated engines."""

from __future__ import annotations

import secrets

import trio

from smgd.sim.cache import BLOCK_SIZE
from tests.flows.client import CHAT, chat_body, fetch, head, post, send
from tests.flows.conftest import Start
from tests.flows.house import House, sample, until

PROMPT = "The same long question, word for word, so that there are some blocks to be found. " * 4


async def long_stream(house: House) -> None:
    """Begin a stream that has not ended when the test does."""
    call = await house.call("a long one", stream=True)
    await call.read("content")


async def page(house: House) -> str:
    return (await fetch(house.metrics_port, "/metrics")).body.decode()


async def test_connections_are_active_until_they_are_closed(start: Start) -> None:
    house = await start("--itl-ms", "5", replies=[{"contains": "long", "token_ids": [300] * 5000}])
    assert await house.metric("smg_http_connections_active") == 0
    idle = await house.dial()
    call = await house.call("a long one", stream=True)
    await call.read("content")
    assert await house.metric("smg_http_connections_active") == 2
    assert await house.metric("smg_http_inflight_requests") == 1
    await call.close()
    await house.quiet()
    assert await house.metric("smg_http_connections_active") == 1
    await idle.aclose()
    render = house.daemon.metrics.render
    await until(lambda: sample(render().decode(), "smg_http_connections_active") == 0)


async def test_requests_in_flight_have_an_age(start: Start) -> None:
    house = await start("--itl-ms", "5", replies=[{"contains": "long", "token_ids": [300] * 5000}])
    await long_stream(house)
    await long_stream(house)
    name = "smg_http_inflight_request_age_count"
    assert await house.metric(name, gt="0", le="30") == 2
    first, _ = house.daemon.service.gate.answering
    first.started -= 700  # what nobody wants to wait for
    assert await house.metric(name, gt="0", le="30") == 1
    assert await house.metric(name, gt="600", le="1200") == 1
    assert await house.metric(name, gt="86400", le="+Inf") == 0


async def test_a_prompt_that_comes_again_is_found_in_the_cache(start: Start) -> None:
    house = await start()
    labels = {"worker": f"ipc://{house.paths[0]}", "model": "smgd-sim", "dp_rank": "0"}
    assert "smg_engine_cache_hit_rate{" not in await page(house)
    first = await house.ask(PROMPT, max_tokens=2)
    length = first.json["usage"]["prompt_tokens"]
    assert await house.metric("smg_engine_prefix_cache_queries_total", **labels) == length
    assert await house.metric("smg_engine_cache_hit_rate", **labels) == 0
    again = await house.ask(PROMPT, max_tokens=2)
    cached = again.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (length - 1) // BLOCK_SIZE * BLOCK_SIZE > 0
    assert await house.metric("smg_engine_prefix_cache_queries_total", **labels) == 2 * length
    assert await house.metric("smg_engine_prefix_cache_hits_total", **labels) == cached
    assert await house.metric("smg_engine_cache_hit_rate", **labels) == cached / (2 * length)


async def test_an_engine_without_statistics_has_no_hit_rate(start: Start) -> None:
    house = await start("--disable-log-stats")
    for _ in range(2):
        assert (await house.ask(PROMPT, max_tokens=2)).status == 200
    assert "smg_engine_cache_hit_rate{" not in await page(house)
    assert await house.metric("smg_engine_generated_tokens_total") == 4


async def test_tokens_count_while_they_are_generated(start: Start) -> None:
    replies = [
        {"contains": "long", "token_ids": [300] * 5000, "chunks": [3]},
        {"contains": "short", "token_ids": [300] * 8, "chunks": [4]},
    ]
    house = await start("--itl-ms", "5", replies=replies)
    name = "smg_engine_generated_tokens_total"
    short = await house.ask("a short one")
    ended = short.json["usage"]["completion_tokens"]
    assert await house.metric(name) == ended > 8
    await page(house)  # the first look
    since = trio.current_time()
    call = await house.call("a long one", stream=True)
    await call.read("content")
    await trio.sleep(0.6)
    generated = await house.metric(name) - ended
    assert generated >= 3
    throughput = await house.metric("smg_engine_gen_throughput", dp_rank="0")
    assert throughput >= generated / (trio.current_time() - since) * 0.5
    await call.close()
    await house.quiet()
    [worker] = house.daemon.registry.samples()
    assert worker.ranks[0].work.generated >= ended + generated


async def test_requests_are_counted_by_worker(start: Start) -> None:
    house = await start(workers=2, routing={"policy": "round_robin"})
    for _ in range(3):
        assert (await house.ask("hello", max_tokens=2)).status == 200
    counts = [
        await house.metric("smg_worker_requests_total", worker=f"ipc://{path}", model="smgd-sim")
        for path in house.paths
    ]
    assert sorted(counts) == [1, 2]


async def test_what_was_tokenized_before_is_a_hit(start: Start) -> None:
    house = await start()
    name, model = "smg_tokenizer_cache_lookups_total", "smgd-sim"

    async def lookups() -> tuple[float, float]:
        hits = await house.metric(name, model=model, result="hit")
        return hits, await house.metric(name, model=model, result="miss")

    assert await lookups() == (0, 0)
    await house.ask("something new", max_tokens=1)
    hits, misses = await lookups()
    assert misses > 0
    await house.ask("something new", max_tokens=1)
    assert await lookups() == (2 * hits + misses, misses)


async def test_clients_cannot_add_series(start: Start) -> None:
    house = await start()

    def random_requests() -> list[bytes]:
        name = secrets.token_hex(8)
        return [
            post(chat_body("hello", model=name)),
            post(chat_body("hello", model=name), path="/v1/completions"),
            post(chat_body("hello", max_tokens=1, **{name: 1})),
            post(b"{", path=CHAT),
            post(b"{}", path=f"/v1/{name}"),
            head(f"/v1/models/{name}", method="GET"),
            head(f"/workers/{name}", method="GET"),
            head(f"/{name}?{name}={name}", f"x-request-id: {name}", method="GET"),
            head("/health", method=name.upper()),
        ]

    async def ask_all() -> set[str]:
        for request in random_requests():
            call = await send(house.port, request)
            async with call.stream:
                assert (await call.read()).complete
        lines = (await page(house)).splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

    series = await ask_all()
    assert await ask_all() == series
    errors = {"endpoint": "chat", "error_type": "validation_error", "connection_mode": "zmq"}
    assert await house.metric("smg_router_request_errors_total", **errors, model="other") == 2
    assert await house.metric("smg_router_request_errors_total", **errors, model="unknown") == 2
