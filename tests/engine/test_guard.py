"""Nothing that an HTTP request can say takes the engine away.

An engine core trusts its front end: what is out of range ends its main loop or one of its threads,
for every client, and some of that leaves its processes running as if nothing had happened. So after
every row the same processes must be there *and* answer. The rows: everything that was seen to kill,
to wedge or to mislead an engine, the values just outside of every range, and the extremes within,
which must be served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.engine.rig import EOS, MAX_MODEL_LEN, VOCAB_SIZE, Engine, Gateway, chat_body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HUGE = 2**70  # more than any wire has integers for
INT64_MAX, INT64_MIN = 2**63 - 1, -(2**63)


@pytest.fixture(autouse=True)
def unharmed(engine: Engine, gateway: Gateway) -> Iterator[None]:
    """After the test, the same engine processes are there and answer."""
    before = set(engine.family.members())
    yield
    body = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    response = gateway.post(TEXT, body)
    assert response.status_code == 200, f"{response.text}\n{engine.family.tail()}"
    assert response.json()["choices"][0]["text"] == " Paris"
    assert set(engine.family.members()) == before, engine.family.tail()


def named(rows: list[dict[str, Any]]) -> list[Any]:
    """Return the rows as parameters whose names show what is in them."""
    return [pytest.param(row, id=json.dumps(row, ensure_ascii=True)[:72]) for row in rows]


def error(response: httpx2.Response) -> dict[str, Any]:
    """Return the error of a 400."""
    assert response.status_code == 400, response.text
    found = response.json()["error"]
    assert found["type"] == "invalid_request_error"
    assert response.headers["x-smg-error-code"] == found["code"]
    return dict(found)


# ------------------------------------------------------------------------------- out of range

SAMPLING: list[dict[str, Any]] = [
    *({"temperature": v} for v in (3, 2.0000001, -0.0001, -1, 1e300)),
    *({"top_p": v} for v in (0, 0.0, -0.1, 1.0000001, 2, -1e300)),
    *({"top_k": v} for v in (-2, INT64_MIN, INT64_MAX + 1, HUGE)),
    *({"min_p": v} for v in (-0.0001, 1.0001, 1e300)),
    *({"presence_penalty": v} for v in (-2.001, 2.001, 1e300)),
    *({"frequency_penalty": v} for v in (-2.001, 2.001, 1e300)),
    *({"repetition_penalty": v} for v in (0, 0.0, -1)),
    *({"max_tokens": v} for v in (0, -1, MAX_MODEL_LEN + 1, 2**31, INT64_MAX, HUGE, INT64_MIN)),
    *({"min_tokens": v} for v in (-1, HUGE)),
    *({"min_tokens": v, "max_tokens": v - 1} for v in (2, 100, INT64_MAX)),
    *({"seed": v} for v in (INT64_MAX + 1, INT64_MIN - 1, HUGE)),
    *({"n": v} for v in (0, -1, 129, HUGE)),
    {"n": 2, "temperature": 0},
    *({"priority": v} for v in (INT64_MAX + 1, INT64_MIN - 1, HUGE)),
]
IDS: list[dict[str, Any]] = [
    *({"stop_token_ids": [v]} for v in (VOCAB_SIZE, -1, INT64_MAX, HUGE)),
    *({"stop_token_ids": [5, v], "min_tokens": 2} for v in (VOCAB_SIZE, -1, INT64_MAX)),
    *({"logit_bias": {str(v): 1}} for v in (VOCAB_SIZE, -1, INT64_MAX, HUGE)),
    *({"logit_bias": {"5": 1, str(VOCAB_SIZE): v}} for v in (0, -100)),
    *({"allowed_token_ids": [5, v]} for v in (VOCAB_SIZE, -1, INT64_MAX, HUGE)),
    {"allowed_token_ids": []},
]
OTHERS: list[dict[str, Any]] = [
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": ["x" * 100_000]},
    *({"cache_salt": v} for v in ("", "a/b", "tenant@b", "ключ\0", "x" * 129)),
    {"lora_path": "/adapters/one"},
    {"prompt_logprobs": 60_000},
    {"bad_words": [""]},
    {"structured_outputs": {"regex": "a", "json": {}}},
    {"response_format": {"type": "json_schema"}},
    {"vllm_xargs": {"a": "b"}, "kv_transfer_params": {"do_remote_decode": True}},
]
CHAT_ONLY: list[dict[str, Any]] = [
    *({"max_completion_tokens": v} for v in (0, -1, MAX_MODEL_LEN + 1, INT64_MAX, HUGE)),
    *({"logprobs": True, "top_logprobs": v} for v in (-1, 21, VOCAB_SIZE + 1, 60_000, HUGE)),
]
TEXT_ONLY: list[dict[str, Any]] = [
    *({"logprobs": v} for v in (-1, 21, VOCAB_SIZE + 1, 60_000, HUGE)),
]


@pytest.mark.parametrize("fields", named(SAMPLING + IDS + OTHERS + CHAT_ONLY))
def test_out_of_range_in_chat_is_a_400(fields: dict[str, Any], gateway: Gateway) -> None:
    body = {"max_tokens": 2, **chat_body(), **fields}
    found = error(gateway.post(CHAT, body))
    assert found["param"].split("[")[0].split(".")[0] in fields


@pytest.mark.parametrize("fields", named(SAMPLING + IDS + OTHERS + TEXT_ONLY))
def test_out_of_range_in_text_completions_is_a_400(
    fields: dict[str, Any], gateway: Gateway
) -> None:
    body = {"prompt": "Hello", "temperature": 0, "max_tokens": 2, **fields}
    found = error(gateway.post(TEXT, body))
    assert found["param"].split("[")[0].split(".")[0] in fields


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", named(SAMPLING[:1] + IDS[:1]))
def test_a_stream_is_refused_before_it_begins(
    fields: dict[str, Any], stream: bool, gateway: Gateway
) -> None:
    error(gateway.chat(stream=stream, **fields))


# What JSON has no numbers for, as programs write it all the same.
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"1"', "true", "[1]", "{}"]
FLOATS = [
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
]  # fmt: skip


@pytest.mark.parametrize("name", [*FLOATS, "top_k", "seed", "max_tokens", "min_tokens", "n"])
def test_no_numbers_are_a_400(name: str, gateway: Gateway) -> None:
    plain = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})[:-1]
    for number in NUMBERS:
        error(gateway.post(CHAT, f'{plain}, "{name}": {number}}}'.encode()))


@pytest.mark.parametrize("number", NUMBERS)
def test_no_numbers_as_a_bias_are_a_400(number: str, gateway: Gateway) -> None:
    plain = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})[:-1]
    error(gateway.post(CHAT, f'{plain}, "logit_bias": {{"5": {number}}}}}'.encode()))


# ------------------------------------------------------------------------------------ prompts


def test_a_chat_up_to_the_context_is_served_and_none_beyond(gateway: Gateway) -> None:
    """One " hi" is one token; the template's own tokens are counted by the gateway."""
    overhead = gateway.chat(" hi", max_tokens=1).json()["usage"]["prompt_tokens"] - 1
    longest = MAX_MODEL_LEN - 1 - overhead
    served = gateway.chat(" hi" * longest)
    assert served.json()["usage"]["total_tokens"] == MAX_MODEL_LEN
    for count in (longest + 1, longest + 2, longest + 1000, 20 * MAX_MODEL_LEN):
        found = error(gateway.chat(" hi" * count))
        assert found["code"] == "context_length_exceeded"
        assert str(MAX_MODEL_LEN) in found["message"]
        assert str(count + overhead) in found["message"]


def test_ids_up_to_the_context_are_served_and_none_beyond(gateway: Gateway) -> None:
    def post(count: int, **fields: Any) -> httpx2.Response:
        return gateway.post(TEXT, {"prompt": [504] * count, "temperature": 0, **fields})

    assert post(MAX_MODEL_LEN - 1).json()["usage"]["total_tokens"] == MAX_MODEL_LEN
    for count in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 20 * MAX_MODEL_LEN):
        for max_tokens in (None, 1, MAX_MODEL_LEN):
            found = error(post(count, max_tokens=max_tokens))
            assert (found["code"], found["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], ["Hello", ""], [[504], []]],
    ids=lambda prompt: json.dumps(prompt),
)
def test_an_empty_prompt_is_a_400(prompt: Any, gateway: Gateway) -> None:
    found = error(gateway.post(TEXT, {"prompt": prompt, "max_tokens": 1}))
    assert (found["code"], found["param"]) == ("prompt_empty", "prompt")


@pytest.mark.parametrize(
    "prompt",
    [
        *([504, v] for v in (VOCAB_SIZE, VOCAB_SIZE + 1000, -1, 2**31, INT64_MAX, HUGE)),
        [[504], [VOCAB_SIZE]],
        [504, 1.5],
        [504, "a"],
        [504, None],
        [True],
        [[[504]]],
        {"ids": [504]},
        504,
        None,
    ],
    ids=lambda prompt: json.dumps(prompt),
)
def test_ids_that_are_none_are_a_400(prompt: Any, gateway: Gateway) -> None:
    assert error(gateway.post(TEXT, {"prompt": prompt, "max_tokens": 1}))["param"] == "prompt"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": []}',
        b'{"messages": [{}]}',
        b'{"messages": [{"role": "user", "content": 5}]}',
        b'{"messages": [{"role": "robot", "content": "Hello"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    ],
    ids=lambda body: body[:60].decode("latin-1"),
)
def test_a_body_that_is_none_is_a_400(body: bytes, gateway: Gateway) -> None:
    error(gateway.post(CHAT, body))


# ------------------------------------------------------------------- what must be served instead

SERVED: list[dict[str, Any]] = [
    *({"temperature": v} for v in (0, 2, 1e-300, 1e-6, 0.00999, 2.0)),
    *({"top_p": v} for v in (1, 1.0, 1e-9, 1e-300)),
    *({"top_k": v} for v in (-1, 0, 1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, INT64_MAX)),
    *({"min_p": v} for v in (0, 1, 1e-300)),
    *({"presence_penalty": v} for v in (-2, 2)),
    *({"frequency_penalty": v} for v in (-2, 2)),
    *({"repetition_penalty": v} for v in (1e-300, 1e-9, 1e9, 1e300)),
    *({"seed": v} for v in (0, -1, -2, 2**32, INT64_MAX, INT64_MIN)),
    *(
        {"max_tokens": v, "stop_token_ids": [PERIOD]}
        for PERIOD in (30,)
        for v in (1, MAX_MODEL_LEN)
    ),
    {"min_tokens": 2, "max_tokens": 2},
    {"min_tokens": 2, "max_tokens": 2, "stop_token_ids": [0, VOCAB_SIZE - 1]},
    {"stop_token_ids": list(range(1000))},
    {"stop_token_ids": [5, 5, 5], "min_tokens": 1},
    {"logit_bias": {str(i): -1 for i in range(400)}},
    *({"logit_bias": {"5": v}} for v in (100, -100, 101, 1e308, -1e308, 0)),
    *({"allowed_token_ids": v} for v in ([0], [VOCAB_SIZE - 1], [5, 5], list(range(VOCAB_SIZE)))),
    # Every token that is allowed is banned until `min_tokens`: nothing is left to choose from.
    {"allowed_token_ids": [EOS], "min_tokens": 2},
    {"allowed_token_ids": [5], "logit_bias": {"5": -100}},
    {"stop": [f"stop {i}" for i in range(500)]},
    {"stop": ["\0", "\U0010ffff", "é" * 1000]},
    *({"priority": v} for v in (0, -5, INT64_MAX, INT64_MIN)),
    *({"cache_salt": v} for v in ("a", "tenant a", "ключ" * 32)),
    {"n": 20},
    {"n": 2, "seed": INT64_MAX},
    {"stream_options": {"include_usage": True}, "stream": True},
    {"user": "me", "metadata": {"a": 1}, "store": True, "no_such_field": [1, 2, {"a": None}]},
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("fields", named(SERVED))
def test_the_ends_of_every_range_are_served(
    fields: dict[str, Any], path: str, gateway: Gateway
) -> None:
    prompt = chat_body() if path == CHAT else {"prompt": "Hello"}
    body = {**prompt, "max_tokens": 2, "temperature": 1, **fields}
    response = gateway.post(path, body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_null_is_absent(path: str, gateway: Gateway) -> None:
    names = [
        "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "seed", "n", "stop", "stop_token_ids",
        "ignore_eos", "min_tokens", "logit_bias", "allowed_token_ids", "skip_special_tokens",
        "priority", "cache_salt", "stream", "stream_options", "include_stop_str_in_output",
        "logprobs", "prompt_logprobs", "bad_words", "structured_outputs", "response_format",
        "lora_path", "tools", "tool_choice", "echo", "best_of", "suffix", "truncate_prompt_tokens",
    ]  # fmt: skip
    prompt: dict[str, Any] = {"prompt": "Hello"}  # its default is 16 tokens
    if path == CHAT:
        prompt = chat_body() | {"max_completion_tokens": 2}
    response = gateway.post(path, {**prompt, **dict.fromkeys(names)})
    assert response.status_code == 200, response.text


def test_a_refused_choice_takes_its_siblings_back(gateway: Gateway) -> None:
    """The second prompt is none, and the first alone could be run."""
    error(gateway.post(TEXT, {"prompt": [[5], [VOCAB_SIZE]], "ignore_eos": True}))
    assert gateway.gauge("smg_worker_requests_active") == 0
    assert gateway.gauge("smg_engine_running_requests") == 0
