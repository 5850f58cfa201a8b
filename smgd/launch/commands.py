"""The command line that starts a headless engine: one row a backend.

A row is the command as an operator would type it, with a name in braces for whatever differs from
one engine to the next. The rest follows from it: a flag that stands in a row is the launcher's to
set, so it is dropped from the arguments of the user.

Sources: the launch commands of the ZMQ worker documentation (vLLM, TokenSpeed) and the headless
entry point of the SGLang servicer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Final

import msgspec
from msgspec import structs


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What distinguishes one engine from all others: the names that a command may have in braces.

    `worker_port` is the first of the ports that an engine may count its own from; `store_port` the
    first of those that its rendezvous store may take.
    """

    python: str
    model: str
    worker_url: str
    worker_port: int
    handshake_address: str
    handshake_port: int
    store_port: int


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """How engines of one kind are started.

    `runtime` is the dialect that they speak. `program` and `flags` are the command behind the
    interpreter; `defaults` are flags that the user's own win over; `also` are other flags that are
    the launcher's, with a word behind those that take a value: spellings of what `flags` has, and
    what would make an engine dial more than once.
    """

    runtime: str
    program: str
    flags: str
    defaults: str = ""
    also: str = ""
    uses_gpus: bool = True


class Command(msgspec.Struct, frozen=True):
    """A command line, and the user's arguments that did not become part of it."""

    argv: tuple[str, ...]
    dropped: tuple[str, ...] = ()


BACKENDS: Final[Mapping[str, Backend]] = {
    "vllm": Backend(
        runtime="vllm",
        program="-m vllm.entrypoints.cli.main serve {model}",
        flags="--headless --data-parallel-size 1 --data-parallel-size-local 1"
        " --data-parallel-address 127.0.0.1 --data-parallel-rpc-port {handshake_port}",
        also="--model M -dp N -dpl N -dpa A -dpp P",
    ),
    "tokenspeed": Backend(
        runtime="tokenspeed",
        program="-m tokenspeed.cli serve",
        flags="--headless --model {model} --port {worker_port}"
        " --dist-init-addr 127.0.0.1:{store_port} --data-parallel-address 127.0.0.1"
        " --data-parallel-rpc-port {handshake_port} --zmq-engine-index 0",
        defaults="--grammar-backend xgrammar --enable-output-logprobs",
        also="--model-path M --data-parallel-size N",
    ),
    "sglang": Backend(
        runtime="sglang",
        program="-m smg_grpc_servicer.sglang.headless",
        flags="--zmq-handshake-address {handshake_address} --zmq-engine-index 0"
        " --model-path {model} --port {worker_port}",
        also="--model M --dp-size N --dp N --data-parallel-size N",
    ),
    "sim": Backend(
        runtime="vllm",
        program="-m smgd.sim.cli",
        flags="--handshake {handshake_address} --model-path {model}",
        defaults="--log-level warning",
        also="--worker-url U --engine-index N --data-parallel-size N",
        uses_gpus=False,
    ),
}

# A shell's ${variable} is none, and JSON has more in its braces than a name.
_NAME: Final = re.compile(r"(?<!\$)\{([a-z_]+)\}")

# How engines spell the number of GPUs that one of them takes: that of tensor parallelism times that
# of pipeline stages times that of prefill context parallelism (vLLM's `world_size`).
_TENSOR_PARALLEL: Final = (
    "--tensor-parallel-size", "-tp", "--tp", "--tp-size", "--attn-tp-size"
)  # fmt: skip
_PIPELINE_PARALLEL: Final = ("--pipeline-parallel-size", "-pp", "--pp", "--pp-size")
_PREFILL_PARALLEL: Final = ("--prefill-context-parallel-size", "-pcp")
_SIZES: Final = (_TENSOR_PARALLEL, _PIPELINE_PARALLEL, _PREFILL_PARALLEL)


def build(backend: Backend, site: Site, args: Sequence[str]) -> Command:
    """Return the command of one engine; `args` are what the user adds."""
    kept, dropped = _without(args, _flags(f"{backend.flags} {backend.also}"))
    given = {_name(arg) for arg in kept}
    defaults = [
        word
        for flag in _grouped(backend.defaults.split())
        if given.isdisjoint((flag[0], flag[0].replace("--", "--no-", 1)))
        for word in flag
    ]
    words = f"{{python}} {backend.program} {backend.flags}".split()
    return Command((*fill(words, site), *defaults, *kept), dropped)


def fill(words: Iterable[str], site: Site) -> Iterator[str]:
    """Put an engine's own values in the place of the names in braces; other braces stay."""
    values = structs.asdict(site)
    for word in words:
        yield _NAME.sub(lambda name: str(values.get(name[1], name[0])), word)


def unknown_names(words: Iterable[str]) -> list[str]:
    """Return what looks like one of those names and is none."""
    named = (name for word in words for name in _NAME.findall(word))
    return [name for name in dict.fromkeys(named) if name not in Site.__struct_fields__]


def gpu_count(args: Sequence[str]) -> int:
    """Return how many GPUs one engine with these arguments takes."""
    return prod(_largest(args, flags) for flags in _SIZES)


def _largest(args: Sequence[str], flags: Sequence[str]) -> int:
    """Return the largest value that any of some flags is given, 1 without any."""
    values = [1]
    for number, arg in enumerate(args):
        if _name(arg) in flags:
            value = arg.partition("=")[2] if "=" in arg else "".join(args[number + 1 : number + 2])
            values += [int(value)] if value.isdecimal() else []
    return max(values)


def _flags(text: str) -> dict[str, bool]:
    """Return the flags of a command line, each with whether a value follows it."""
    return {flag: bool(value) for flag, *value in _grouped(text.split())}


def _grouped(words: Iterable[str]) -> list[list[str]]:
    """Return each flag with its value, if it has one."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-"):
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _without(args: Sequence[str], flags: Mapping[str, bool]) -> tuple[list[str], tuple[str, ...]]:
    """Return `args` without some flags and their values, and what was taken out."""
    kept: list[str] = []
    dropped: list[str] = []
    is_value = False
    for arg in args:
        if is_value and not arg.startswith("-"):
            dropped[-1] += f" {arg}"
            is_value = False
            continue
        is_value = False
        if _name(arg) in flags:
            dropped.append(arg)
            is_value = flags[_name(arg)] and "=" not in arg
        else:
            kept.append(arg)
    return kept, tuple(dropped)


def _name(arg: str) -> str:
    """Return the flag of an argument; engines read `--a_b` as `--a-b`."""
    name = arg.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name
