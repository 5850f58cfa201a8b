"""Whatever a client sends, it is the client's fault: never a 500, and never the engine's end."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smgd.api import chat, completions, tokenize
from smgd.api.fields import HARMLESS
from tests.flows.client import CHAT, HOST, Call, head, post
from tests.flows.conftest import Start
from tests.flows.house import House, until
from tests.support import PATIENCE

# Small enough that an answer without a limit takes no time.
CONTEXT = 128

EXTREMES = [-1, 0, 1, 2, 127, 4095, 4096, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30]
TEXTS = ["", "a", "the sea", "\x00", "\ud800", "😀", "<|im_start|>", "{{ x }}", "x" * 3000]

integers = st.sampled_from(EXTREMES) | st.integers(-5, 300)
floats = st.sampled_from([1e-7, 1e300, -1e300, 5e-324, 0.5, 1.5, 2.1]) | st.floats(-3, 3)
texts = st.sampled_from(TEXTS) | st.text(max_size=8)
scalars = st.none() | st.booleans() | integers | floats | texts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(texts | st.just("type"), inner, max_size=4)
    ),
    max_leaves=6,
)

contents = texts | st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}) | values, max_size=3
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "function"])},
        optional={"content": contents, "name": values, "tool_calls": values},
    ),
    min_size=1,
    max_size=4,
)

# What is mostly right goes deeper than what is wrong in every field.
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(-1, 40) | integers,
    "max_completion_tokens": st.integers(-1, 40) | integers,
    "min_tokens": st.integers(0, 40) | integers,
    "temperature": floats,
    "top_p": floats,
    "top_k": integers,
    "min_p": floats,
    "presence_penalty": floats,
    "frequency_penalty": floats,
    "repetition_penalty": floats,
    "seed": integers,
    "n": st.integers(-1, 4) | st.sampled_from([129, 2**63, 2**70]),
    "stop": texts | st.lists(texts, max_size=5),
    "stop_token_ids": st.lists(integers, max_size=4),
    "allowed_token_ids": st.lists(integers, max_size=4),
    "logit_bias": st.dictionaries(integers.map(str) | texts, floats, max_size=4),
    "priority": integers,
    "cache_salt": texts,
    "ignore_eos": st.booleans(),
    "logprobs": st.booleans() | st.integers(0, 5),
    "top_logprobs": integers,
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}) | values,
    "chat_template_kwargs": st.dictionaries(texts, values, max_size=3),
    "documents": st.lists(st.dictionaries(texts, values, max_size=2), max_size=2) | values,
    "model": st.sampled_from(["smgd-sim", "gpt-9", ""]),
    "add_special_tokens": st.booleans(),
    "return_token_strs": st.booleans(),
}
RULES = {
    "/v1/chat/completions": chat.RULES,
    "/v1/completions": completions.RULES,
    "/tokenize": tokenize.TOKENIZE_RULES,
    "/detokenize": tokenize.DETOKENIZE_RULES,
}
NAMES = sorted(
    {*HARMLESS, "unknown"}.union(*[{*rules.honoured, *rules.refused} for rules in RULES.values()])
    - {"messages", "prompt", "n"}
)

ids = st.lists(st.integers(0, 4095) | integers, max_size=5)
prompts = texts | st.lists(texts, max_size=3) | ids | st.lists(ids, max_size=3) | values
subjects: dict[str, st.SearchStrategy[Any]] = {
    "/v1/chat/completions": st.fixed_dictionaries({"messages": messages}),
    "/v1/completions": st.fixed_dictionaries({"prompt": st.just("the sea") | prompts}),
    "/tokenize": st.fixed_dictionaries({"prompt": texts})
    | st.fixed_dictionaries({"messages": messages}),
    "/detokenize": st.fixed_dictionaries({"tokens": ids}),
}


def bodies_of(path: str) -> st.SearchStrategy[bytes]:
    """Return bodies for a route: some right in most, some wild, some no JSON at all."""
    subject = subjects[path]
    possible = sorted(PLAUSIBLE.keys() - RULES[path].refused.keys())
    names = st.lists(st.sampled_from(possible), max_size=5, unique=True)
    fields = names.flatmap(lambda keys: st.fixed_dictionaries({k: PLAUSIBLE[k] for k in keys}))
    plausible = st.builds(lambda some, more: some | more, subject, fields)
    own = sorted(RULES[path].honoured & {"messages", "prompt", "tokens"})
    wild = st.builds(
        lambda some, more: some | more,
        subject | st.fixed_dictionaries(dict.fromkeys(own, values)),
        st.dictionaries(st.sampled_from(NAMES), values, max_size=4),
    )
    # json.dumps escapes: only so can a lone surrogate be sent. Its NaN is no JSON at all.
    right, bodies = (
        bodies.map(lambda body: json.dumps(body).encode())
        for bodies in (plausible, plausible | wild | values)
    )
    cut = bodies.flatmap(lambda body: st.integers(0, len(body)).map(lambda end: body[:end]))
    return right | bodies | cut | st.binary(max_size=40)


ALLOWED = {200, 400, 404, 503}


def check_bodies(house: House, path: str, examples: int) -> None:
    """Send generated bodies over one connection; the engine is well after each of them."""
    connection = http.client.HTTPConnection(HOST, house.port, timeout=PATIENCE)
    statuses: dict[int, int] = {}

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(bodies_of(path))
    def check(body: bytes) -> None:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        assert answer.status in ALLOWED, data
        if answer.status != 200:
            error = json.loads(data)["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["message"]
            assert answer.headers["x-smg-error-code"] == error["code"]
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert data.endswith(b"data: [DONE]\n\n")
            assert b'"error"' not in data
        else:
            assert "error" not in json.loads(data)
        assert house.daemon.registry.ready_count() == 1

    try:
        check()
    finally:
        connection.close()
    assert statuses[200] > examples / 40, "too few get through"
    assert statuses[400] > examples / 40


@pytest.mark.parametrize(
    ("path", "examples"),
    [(CHAT, 150), ("/v1/completions", 100), ("/tokenize", 50), ("/detokenize", 50)],
)
async def test_no_body_is_a_500_or_ends_the_engine(start: Start, path: str, examples: int) -> None:
    house = await start("--max-model-len", str(CONTEXT))
    await trio.to_thread.run_sync(check_bodies, house, path, examples)
    assert house.logged("engine session ended") == []
    assert (await house.ask("still well?", max_tokens=3)).status == 200


async def test_bodies_that_are_not_what_they_say(start: Start) -> None:
    house = await start("--max-model-len", str(CONTEXT), server={"max_payload_size": 1000})
    cases = [
        (post(b"{}", "Content-Type: text/plain"), 400, "json_parse_error"),
        (head(CHAT, "Content-Length: 2") + b"{}", 400, "json_parse_error"),
        (post(b""), 400, "invalid_json"),
        (post(b"{" * 900), 400, "invalid_json"),
        (post(b"[" * 900), 400, None),
        (post(b'{"messages":[{"role":"user","content":"\xff\xfe"}]}'), 400, "invalid_json"),
        (post(b'{"messages":[]}'), 400, "empty_array"),
        (post(b'{"messages":[]}', "Content-Encoding: identity"), 400, "empty_array"),
        (post(b"\x1f\x8b", "Content-Encoding: gzip"), 415, "unsupported_content_encoding"),
        (post(b"{}", "content-encoding: identity, BR"), 415, "unsupported_content_encoding"),
        (post(b"{}", "content-encoding: gzip,utf-8"), 415, "unsupported_content_encoding"),
        (post(b'{"messages":[]}', "Content-Encoding: UTF-8"), 400, "empty_array"),
        (post(b'{"messages":[]}', "Content-Encoding: identity, identity"), 400, "empty_array"),
        (post(b"x" * 1001), 413, "request_too_large"),
    ]
    for data, status, code in cases:
        stream = await house.dial()
        await stream.send_all(data.replace(b"Content-Type: application/json\r\n", b"")
                              if b"text/plain" in data else data)  # fmt: skip
        call = await Call(stream).read()
        assert (call.status, call.complete) == (status, True)
        if code is not None:
            assert call.error["code"] == code
    await house.quiet()
    assert house.tally.adds == []


@pytest.mark.parametrize("http_path", ["fast", "stock"])
async def test_no_route_takes_a_compressed_body(start: Start, http_path: str) -> None:
    house = await start(server={"http_path": http_path})
    for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize", "/workers"):
        stream = await house.dial()
        await stream.send_all(post(b"\x1f\x8b\x08", "Content-Encoding: gzip", path=path))
        call = await Call(stream).read()
        assert (call.status, call.error["code"]) == (415, "unsupported_content_encoding")
        message = call.error["message"]
        assert message.startswith("Content-Encoding 'gzip' is not supported")


async def test_a_chunked_body_is_a_body(start: Start) -> None:
    house = await start()
    body = b'{"messages":[{"role":"user","content":"the sea"}],"max_tokens":2}'
    stream = await house.dial()
    chunked = "Transfer-Encoding: chunked"
    await stream.send_all(head(CHAT, "Content-Type: application/json", chunked))
    for byte in body:
        await stream.send_all(b"1\r\n" + bytes([byte]) + b"\r\n")
    await stream.send_all(b"0\r\n\r\n")
    call = await Call(stream).read()
    assert call.json["usage"]["completion_tokens"] == 2
    await until(lambda: house.answering == 0)
