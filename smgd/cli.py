"""The command line: `smgd launch|run|serve|check-config|demo`.

Flags and their help are made from `FLAGS` and the configuration's keys, so that a flag cannot mean,
default to or allow anything else than its key. Only `launch`, `run`, `serve` and `demo` import the
daemon, and only when they run: help, version and `check-config` answer at once and need no engine.

Exit codes: 0 stopped or fine, 1 failed, 2 wrong usage, which includes a configuration that cannot
be used: `check-config` says so with the code that `run` would end with.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
from msgspec import UNSET

from smgd import __version__
from smgd.checks import judged
from smgd.config import Config
from smgd.config.findings import Findings
from smgd.config.keys import FLAGS, SERVE_FLAGS, Key, all_keys, toml
from smgd.errors import ConfigError

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

BUILTIN_MODEL: Final = "smgd-sim"
# The environment of a process is seen by its user alone, its command line by everybody.
API_KEY: Final = "SMGD_API_KEY"
# Set by systemd, whose sockets are listened on then (sd_listen_fds(3)): server.host does not count.
_HANDED_OVER: Final = "LISTEN_FDS"

_MODEL_PATH: Final = FLAGS["--model-path"]

_EXAMPLES: Final = """\
examples:
  smgd demo
      start smgd with a simulated engine and stream an answer: no GPU, no download
  smgd launch --worker-urls ipc:///tmp/smg-zmq/engine-0 --backend vllm --model-path Qwen/Qwen3-8B
      serve one vLLM engine; the log says which address the engine has to dial
  smgd serve --model Qwen/Qwen3-8B --max-model-len 16384
      start a vLLM engine and the daemon in front of it
  smgd launch --config smgd.toml --port 8000
      the same from a file, with one key replaced
  smgd check-config smgd.toml && smgd run --config smgd.toml

exit codes: 0 stopped or fine, 1 failed, 2 wrong usage or configuration
"""

_LAUNCH: Final = """\
start the engine for ipc:///tmp/smg-zmq/engine-0 with:
  vllm serve MODEL --headless --data-parallel-size 1 --data-parallel-size-local 1 \\
      --data-parallel-address 127.0.0.1 --data-parallel-rpc-port 22670
(the port follows from the path; smgd logs it when it binds)

All keys, also those without a flag: docs/configuration.md.
"""

_SERVE: Final = """\
every other flag goes to the engine (--tensor-parallel-size 2), and so does all that stands behind
a lone --, such as a flag that has a meaning here, too:
  smgd serve --model Qwen/Qwen3-8B --max-model-len 16384 -- --served-model-name x

--router-FLAG means --FLAG, as in command lines of smg. The engine has to be installed where
--engine-python says. Several kinds of engines: [[engines]] in a file. More: docs/serve.md.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, or raises SystemExit for help and wrong usage."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except ConfigError as exc:
        _complain(exc)
        return EXIT_USAGE


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line: `command` is to be run, flags that were given are under their keys."""
    parser = build_parser()
    own, for_engine = _split(argv)
    args, unknown = parser.parse_known_args(own)
    for_engines = args.command is _serve_engines
    if refused := _not_for_engines(unknown) if for_engines else unknown:
        args.parser.error(_unknown(refused[0], args.parser.format_usage()))
    if for_engines:
        _take_engine_arguments(args, (*unknown, *for_engine))
    return args


def _not_for_engines(unknown: Sequence[str]) -> list[str]:
    """Return what no engine takes: flags of smg's router, and a word that belongs to no flag."""
    words = [word for word in unknown[:1] if not word.startswith("-")]
    return [word for word in unknown if word.startswith("--router-")] + words


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the arguments of `serve` before and behind `--`, which is no more than a mark."""
    if "--" not in argv or argv[0] != "serve":
        return argv, ()
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


def _take_engine_arguments(args: argparse.Namespace, engine: tuple[str, ...]) -> None:
    """Add to the flags of `serve` what they say about an engine without naming a key."""
    values = vars(args)
    if engine or args.config is None:  # without a file there is one engine, whatever is said of it
        values["engines.args"] = engine
    if values.get("engines.backend") == "sim" and args.config is None and _MODEL_PATH not in values:
        values.setdefault("engines.model_path", BUILTIN_MODEL)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="smgd",
        description="OpenAI-compatible HTTP in front of headless LLM engines, over ZMQ.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"smgd {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    launch = _command(commands, "launch", _serve, "run the daemon as flags say", _LAUNCH)
    launch.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    _add_flags(launch, FLAGS)

    serve = _command(commands, "serve", _serve_engines, "start engines, and the daemon", _SERVE)
    serve.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    serve.add_argument("--connection-mode", choices=["zmq"], help="how engines are spoken to")
    _add_flags(serve, SERVE_FLAGS)
    _add_spellings(serve)

    run = _command(commands, "run", _serve, "run the daemon as a configuration file says")
    run.add_argument("--config", type=Path, metavar="FILE", required=True, help="TOML file")

    check = _command(commands, "check-config", _check_config, "tell every mistake of a file")
    check.add_argument("config", type=Path, metavar="FILE", help="TOML file")

    demo = _command(commands, "demo", _demo, "stream an answer from a simulated engine")
    demo.add_argument("--once", action="store_true", help="stop after one answer")
    return parser


# ------------------------------------------------------------------------------- the commands


def configuration(args: argparse.Namespace, *, starts: bool = True) -> Config:
    """Return what the file and the flags of a command line say; ConfigError with every mistake.

    `starts` tells whether something is to be bound then, and not only to be read again.
    """
    found = Findings()
    config = judged(
        args.config, _flags(args), found, binds=starts and _HANDED_OVER not in os.environ
    )
    found.check()
    return config


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    keys = all_keys()
    flags = {name: value for name, value in vars(args).items() if name in keys}
    if API_KEY in os.environ:
        flags.setdefault("auth.api_keys", (os.environ[API_KEY],))
    return flags


def _serve(args: argparse.Namespace) -> int:
    config = configuration(args)
    from smgd.daemon import main_run

    return main_run(config, _reread(args))


def _reread(args: argparse.Namespace) -> Callable[[], Config] | None:
    """Return what reads the configuration again; None without a file, since flags do not change."""
    return partial(configuration, args, starts=False) if args.config else None


def _serve_engines(args: argparse.Namespace) -> int:
    config = configuration(args)
    if not config.engines:
        raise ConfigError(f"{args.config}: there is no [[engines]], so there is nothing to start")
    from smgd.daemon import main_run

    return main_run(config, _reread(args))


def _check_config(args: argparse.Namespace) -> int:
    found = Findings(outside=True)
    judged(args.config, _flags(args), found, binds=True)
    for note in found.notes:
        print(f"smgd: note: {note}", file=sys.stderr)
    found.check()
    print(f"{args.config}: OK")
    return EXIT_OK


def _demo(args: argparse.Namespace) -> int:
    from smgd.demo import main as demo

    return demo(once=args.once)


def _complain(error: ConfigError) -> None:
    for line in str(error).splitlines():
        print(f"smgd: {line}", file=sys.stderr)


# ------------------------------------------------------------------------------------- argparse


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, shows texts as they are, takes no abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **options, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _command(
    commands: Any,
    name: str,
    function: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=epilog
    )
    parser.set_defaults(command=function, parser=parser)
    return parser


_CONFIG_HELP: Final = "TOML file to start from; flags replace keys of it"

# Flags that are not simply one flag and one value.
_SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "--worker-urls": {"nargs": "+", "action": "extend"},
    "--served-model-name": {"nargs": "+"},
    "--api-key": {"nargs": "+", "action": "extend"},
    "--cors-allowed-origins": {"nargs": "+", "action": "extend"},
    "--log-json": {"nargs": "?", "const": True},
    "--keep-engines": {"nargs": "?", "const": True},
    "--disable-health-check": {"nargs": "?", "const": True},
    "--remove-unhealthy-workers": {"nargs": "?", "const": True},
}


def _add_flags(parser: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    """Add flags, each with its key; only those given are in the namespace, under the key's path."""
    keys = all_keys()
    groups: dict[str, Any] = {}
    for flag, path in flags.items():
        key, table = keys[path], path.partition(".")[0]
        if table not in groups:
            groups[table] = parser.add_argument_group(f"[{table}]")
        groups[table].add_argument(
            flag,
            dest=path,
            metavar=flag.rpartition("-")[2].upper(),
            type=partial(_value, key),
            default=argparse.SUPPRESS,
            help=flag_help(key),
            **_SHAPES.get(flag, {}),
        )


def _add_spellings(parser: argparse.ArgumentParser) -> None:
    """Add, unseen, what command lines of smg call the flags of `serve`."""
    keys = all_keys()
    spellings = {f"--router-{flag[2:]}": flag for flag in SERVE_FLAGS if flag in FLAGS}
    spellings["--dp-size"] = "--data-parallel-size"
    for spelling, flag in spellings.items():
        parser.add_argument(
            spelling,
            dest=SERVE_FLAGS[flag],
            type=partial(_value, keys[SERVE_FLAGS[flag]]),
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
            **_SHAPES.get(flag, {}),
        )


def flag_help(key: Key) -> str:
    """Return the text of a flag: what its key says, then the key, its values and default."""
    facts = [key.path]
    if key.allowed != "text":
        facts.append(key.allowed)
    if key.default not in (UNSET, ""):
        facts.append(f"default {toml(key.default)}")
    return f"{key.description} [{'; '.join(facts)}]".replace("%", "%%")


def _value(key: Key, text: str) -> Any:
    try:
        if isinstance(key.default, tuple):  # a flag with several values: this is one of them
            return msgspec.convert([text], key.type)[0]
        return msgspec.convert(text, key.type, strict=False)
    except msgspec.ValidationError as exc:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed is {key.allowed}") from exc


def _unknown(argument: str, usage: str) -> str:
    if not argument.startswith("-"):
        return f"there is nothing to do with {argument!r}"
    flags = re.findall(r"--[a-z-]+", usage)
    near = difflib.get_close_matches(argument.partition("=")[0], flags, n=1)
    return f"there is no flag {argument}" + (f"; did you mean {near[0]}?" if near else "")


if __name__ == "__main__":
    sys.exit(main())
