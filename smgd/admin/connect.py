"""The command line of an engine that would connect to a worker, as an operator would type it.

`launch.commands` has the commands for engines that smgd starts itself: one a worker, by the
interpreter that has the engine installed. Here it is the engine's own program, and all the ranks.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Final

from smgd.engine.paths import dialled
from smgd.text.hub import BUILTIN_MODEL, is_path

_SIMULATED: Final = "smgd-sim --handshake {handshake} --data-parallel-size {engines}"
_COMMANDS: Final[Mapping[str, str]] = {
    "vllm": "vllm serve {model} --headless --data-parallel-size {engines}"
    " --data-parallel-size-local {engines} --data-parallel-address {host}"
    " --data-parallel-rpc-port {port}",
    "tokenspeed": "python -m tokenspeed.cli serve --headless --model {model}{group}"
    " --data-parallel-address {host} --data-parallel-rpc-port {port} --zmq-engine-index 0"
    " --grammar-backend xgrammar --enable-output-logprobs",
    "sglang": "python -m smg_grpc_servicer.sglang.headless --zmq-handshake-address {handshake}"
    " --zmq-engine-index 0 --model-path {model}{group}",
}
# What several engines behind one worker take in addition. TokenSpeed wants to be told where its
# rendezvous store goes; that must not be a port of a handshake (20000 to 29999).
_GROUPS: Final[Mapping[str, str]] = {
    "tokenspeed": " --data-parallel-size {engines} --dist-init-addr 127.0.0.1:31233",
    "sglang": " --dp-size {engines}",
}


def command(runtime: str, model: str, engines: int, handshake: str) -> str:
    """Return the command line; `model` is where the model is, `handshake` a tcp:// address.

    It holds in whatever directory it is typed, so a model's directory is given by its whole path.
    """
    if is_path(model):
        model = os.path.abspath(os.path.expanduser(model))  # noqa: PTH100, PTH111  (never raises)
    host, port = dialled(handshake)
    pattern = _SIMULATED if model == BUILTIN_MODEL else _COMMANDS[runtime]
    group = _GROUPS.get(runtime, "") if engines > 1 else ""
    return pattern.format(
        group=group.format(engines=engines),
        model=shlex.quote(model),
        engines=engines,
        host=host,
        port=port,
        handshake=f"tcp://{host}:{port}",
    )
