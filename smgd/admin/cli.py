"""`smgctl`: what operators ask of a running smgd, over its admin socket.

One row of `COMMANDS` for each command: its arguments, what they become on the wire, and how the
answer is shown to people; `--json` shows it as it came.

Exit codes: 0 done, 1 smgd said no (or its answer cannot be written), 2 wrong usage, 3 no smgd was
reached. Whoever reads only the beginning of an answer (`| head`) has what was asked for: 0.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import msgspec

from smgd import __version__
from smgd.admin import show
from smgd.admin.client import ClientError, ask
from smgd.admin.protocol import DEFAULT_SOCKET

EXIT_NOT_WRITTEN: Final = 1
EXIT_USAGE: Final = 2
SOCKET_VARIABLE: Final = "SMGD_ADMIN_SOCKET"

Parser = argparse.ArgumentParser
Arguments = Callable[[Parser], None]
Build = Callable[[argparse.Namespace], dict[str, Any]]

_EPILOG: Final = f"""\
examples:
  smgctl status
  smgctl workers list --json
  smgctl workers show ipc:///run/smgd/engines/0     what it waits for, and the engine's command
  smgctl workers add ipc:///run/smgd/engines/1 --model-path Qwen/Qwen3-8B
  smgctl requests && smgctl abort chatcmpl-...

Options may stand before or behind the command. A WORKER is its URL, the path in it, its id, or the
beginning of its id.

The socket is --socket, else ${SOCKET_VARIABLE}, else {DEFAULT_SOCKET}.

exit codes: 0 done, 1 smgd said no, 2 wrong usage, 3 no smgd was reached
"""


class Command(msgspec.Struct, frozen=True):
    """One command of the command line; `name` is also its name on the wire."""

    name: str
    summary: str
    show: Callable[[Any], str]
    arguments: Arguments = lambda _: None
    build: Build = lambda _: {}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, or raises SystemExit for help and wrong usage."""
    args = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
    command: Command = args.command
    path = getattr(args, "socket", None) or os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET
    try:
        result = ask(path, command.name, command.build(args))
    except ClientError as error:
        print(f"smgctl: {error}", file=sys.stderr)
        return error.exit_code
    if getattr(args, "json", False):
        return _print(msgspec.json.format(msgspec.json.encode(result)).decode())
    return _print(command.show(result))


def _print(text: str) -> int:
    """Write to standard output; return the exit code."""
    try:
        print(text, flush=True)
    except OSError as error:
        # What is left in the buffer is not tried again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0
        print(f"smgctl: cannot write the answer: {error.strerror}", file=sys.stderr)
        return EXIT_NOT_WRITTEN
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="smgctl",
        description="Look at a running smgd, and change it.",
        epilog=_EPILOG,
        parents=[_options()],
    )
    parser.add_argument("--version", action="version", version=f"smgctl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    groups: dict[str, Any] = {}
    for command in COMMANDS:
        group, _, name = command.name.rpartition(" ")
        if group and group not in groups:
            groups[group] = _group(commands, group)
        parent = groups[group] if group else commands
        own = parent.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            parents=[_options()],
        )
        command.arguments(own)
        own.set_defaults(command=command)
    return parser


def _group(commands: Any, name: str) -> Any:
    mine = [c for c in COMMANDS if c.name.startswith(f"{name} ")]
    words = ", ".join(command.name.rpartition(" ")[2] for command in mine)
    parser = commands.add_parser(name, help=words, parents=[_options()])
    return parser.add_subparsers(metavar="COMMAND", required=True)


def _options() -> _Parser:
    """Return the options that may stand anywhere: each parser has them, and sets none by itself."""
    options = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    options.add_argument("--socket", metavar="PATH", help="admin socket of smgd")
    options.add_argument("--json", action="store_true", help="print the answer as JSON")
    return options


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, shows texts as they are, takes no abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **options, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def print_help(self, file: Any = None) -> None:
        if file is not None:
            super().print_help(file)
        elif code := _print(self.format_help().rstrip()):
            self.exit(code)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


# ------------------------------------------------------------------------------- the commands


def _worker(parser: Parser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="URL, path, id, or beginning of an id")


def _build_worker(args: argparse.Namespace) -> dict[str, Any]:
    return {"worker": args.worker}


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed is NAME=VALUE")
    return name, value


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed is a number, 0 or more")
    return value


def _changeable(parser: Parser) -> None:
    """Add what can be said of a worker at any time."""
    parser.add_argument("--priority", type=int, metavar="N", help="kept and shown")
    parser.add_argument("--cost", type=_amount, metavar="X", help="kept and shown")
    parser.add_argument(
        "--label",
        type=_label,
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a label; may be repeated",
    )
    parser.add_argument(
        "--drain-settle-secs",
        type=_amount,
        metavar="SECONDS",
        help="how long running requests may take when the worker is removed",
    )


def _build_changeable(args: argparse.Namespace) -> dict[str, Any]:
    health = {"drain_settle_secs": args.drain_settle_secs}
    given = {"priority": args.priority, "cost": args.cost, "labels": dict(args.label)}
    given["health"] = {name: value for name, value in health.items() if value is not None}
    return {name: value for name, value in given.items() if value not in (None, {})}


def _add(parser: Parser) -> None:
    parser.add_argument("url", metavar="URL", help="ipc://PATH")
    parser.add_argument("--model", metavar="NAME", help="the model it serves; none: the only one")
    parser.add_argument(
        "--model-path", metavar="DIR|ID", help="where a model is that smgd does not know yet"
    )
    parser.add_argument("--runtime-type", metavar="NAME", help="the engine behind it; none: vllm")
    parser.add_argument("--dp-size", type=int, metavar="N", help="engines that dial in; none: 1")
    parser.add_argument(
        "--zmq-handshake-address",
        metavar="ADDRESS",
        help="tcp://HOST:PORT that engines dial; none: a port that follows from the URL",
    )
    _changeable(parser)


def _build_add(args: argparse.Namespace) -> dict[str, Any]:
    names = ("url", "runtime_type", "dp_size", "zmq_handshake_address")
    spec = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    spec |= _build_changeable(args)
    labels = {"model": args.model, "model_path": args.model_path}
    found = {name: value for name, value in labels.items() if value is not None}
    return spec | {"labels": spec.get("labels", {}) | found}


def _patch(parser: Parser) -> None:
    _worker(parser)
    _changeable(parser)


def _build_patch(args: argparse.Namespace) -> dict[str, Any]:
    return {"worker": args.worker, "patch": _build_changeable(args)}


def _abort(parser: Parser) -> None:
    parser.add_argument("id", metavar="ID", help="of the response, or the client's own request id")


def _loglevel(parser: Parser) -> None:
    parser.add_argument(
        "level", metavar="LEVEL", nargs="?", help="debug, info, warn, error; none: only show it"
    )


COMMANDS: Final = (
    Command("status", "how smgd is, and what it waits for", show.status),
    Command("workers list", "all workers", show.workers),
    Command("workers show", "one worker, and how an engine connects to it", show.worker,
            _worker, _build_worker),
    Command("workers add", "add a worker", show.worker, _add, _build_add),
    Command("workers patch", "change a worker that stays connected", show.worker,
            _patch, _build_patch),
    Command("workers drain", "give a worker no new requests, until it is removed", show.worker,
            _worker, _build_worker),
    Command("workers remove", "drain a worker, then forget it", show.removed,
            _worker, _build_worker),
    Command("models", "all models", show.models),
    Command("requests", "the requests that run", show.requests),
    Command("abort", "end a request; its client gets an error", show.aborted,
            _abort, lambda args: {"id": args.id}),
    Command("drain", "stop smgd in order, as SIGTERM does", show.draining),
    Command("reload", "read the configuration again, as SIGHUP does", show.reloaded),
    Command("loglevel", "show or set the level of the log", show.level,
            _loglevel, lambda args: {"level": args.level}),
    Command("config show", "the configuration in force, secrets hidden", show.config),
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
