"""The command line of `smgd-sim`.

Exit codes: 0 left in good order (a signal, or a reply that says `exit`), 1 failed (the engine died,
no INIT came, the model cannot be loaded), 2 wrong usage, which includes a bad replies file.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from smgd import __version__
from smgd.engine.paths import derive
from smgd.errors import ConfigError, SmgdError, WorkerError
from smgd.sim import replies
from smgd.sim.cache import BLOCK_SIZE
from smgd.sim.core import EngineCore
from smgd.sim.engine import EXIT_FAILED, Core, Engine, Life, run
from smgd.sim.flood import Control, FloodCore
from smgd.sim.model import Model
from smgd.sim.pace import Pace
from smgd.sim.poison import Limits
from smgd.sim.scheduler import NUM_GPU_BLOCKS, Options, Scheduler
from smgd.sim.wire import LAYOUTS, encode_registration
from smgd.text.hub import BUILTIN_MODEL, resolve
from smgd.text.model import ModelFiles
from smgd.text.tokenizer import Tokenizer

_LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_DEFAULT_LENGTH: Final = 8192

_EPILOG: Final = f"""\
examples:
  smgd-sim --worker-url ipc:///tmp/smg-zmq/engine-0 --ttft-ms 50 --itl-ms 10
      be the engine of `smgd launch --worker-urls ipc:///tmp/smg-zmq/engine-0 --model-path smgd-sim`
  smgd-sim --handshake tcp://127.0.0.1:22670 --replies answers.jsonl
      answer from a script

{replies.__doc__}
utility calls beside vLLM's: sim_counters (what happened since the start), sim_stats (the same, with
the ids of all ABORTs). One line on standard error for each message:
  sim add id=ID prompt=TOKENS max_tokens=N
  sim abort id=ID

signals: SIGTERM and SIGINT end running requests with finish reason "abort", then the engine, after
--exit-delay-ms; a second signal ends it at once.

exit codes: 0 left in good order, 1 failed, 2 wrong usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine; returns the exit code, or raises SystemExit for help and wrong usage."""
    parser = build_parser()
    args = parser.parse_args(argv)
    level = args.log_level or ("warning" if args.flood else "info")
    logging.basicConfig(level=level.upper(), format="%(message)s", stream=sys.stderr)
    try:
        engines = build_engines(args)
        gc.freeze()
        return trio.run(run, engines)
    except ConfigError as error:
        parser.error(str(error))
    except SmgdError as error:
        print(f"smgd-sim: {error}", file=sys.stderr)
        return EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; `--help` is the manual."""
    parser = argparse.ArgumentParser(
        prog="smgd-sim",
        description="An engine without a model: on the wire a headless vLLM, for tests, "
        "benchmarks and first steps.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--handshake", metavar="ADDRESS", type=address, help="where to dial: tcp://HOST:PORT"
    )
    where.add_argument(
        "--worker-url", metavar="URL", type=worker_url, dest="handshake",
        help="dial the handshake port that follows from a worker's URL, ipc:///PATH",
    )
    add("--model-path", default=BUILTIN_MODEL, metavar="DIR|NAME",
        help="whose tokenizer and config.json to use (default: the built-in model, %(default)s)")
    add("--engine-index", type=count, default=0, metavar="N",
        help="data-parallel rank of the (first) engine (default: 0)")
    add("--data-parallel-size", type=positive, default=1, metavar="N",
        help="engines in this process, as ranks of a dense model (default: 1)")
    add("--dialect", choices=["vllm"], default="vllm", help="the wire (default: vllm)")
    add("--engine-version", choices=sorted(LAYOUTS), default="0.32.0",
        help="the version whose wire it is (default: %(default)s)")
    add("--replies", type=Path, metavar="FILE", help="scripted answers, see below")
    add("--ttft-ms", type=milliseconds, default=0.0, metavar="MS",
        help="from a request's admission to its first token (default: 0)")
    add("--itl-ms", type=milliseconds, default=0.0, metavar="MS",
        help="between two steps (default: 0, as fast as possible)")
    add("--startup-ms", type=milliseconds, default=0.0, metavar="MS",
        help="from INIT to READY (default: 0)")
    add("--exit-delay-ms", type=milliseconds, default=4.0, metavar="MS",
        help="from the last word of a dying engine to the end of its connections (default: 4000)")
    add("--init-timeout-ms", type=milliseconds, default=300.0, metavar="MS",
        help="how long to wait for INIT (default: 300000)")
    add("--max-model-len", type=positive, metavar="N",
        help="tokens of prompt and output together (default: the model's, 8192 for the built-in)")
    add("--max-num-seqs", type=positive, default=256, metavar="N",
        help="requests that run at a time (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N",
        help="another number, another text for the same prompt (default: 0)")
    add("--disable-log-stats", action="store_true", help="send no statistics and no events")
    add("--flood", action="store_true",
        help="for benchmarks: outputs from pre-encoded pieces, no checks, no end before max_tokens;"
        " --replies, --ttft-ms and --max-num-seqs have no effect")
    add("--control", type=Path, metavar="FILE",
        help="with --flood: share counters and pace with a benchmark (see smgd/sim/flood.py)")
    add("--log-level", choices=_LOG_LEVELS, help="default: info, with --flood warning")
    add("--version", action="version", version=f"smgd-sim {__version__}")
    # fmt: on
    return parser


def build_engines(args: argparse.Namespace) -> list[Engine]:
    """Load the model and return the engines, not yet running. Raises `SmgdError`."""
    layout = LAYOUTS[args.engine_version]
    model, max_model_len = _load_model(args)
    life = Life(
        handshake=args.handshake,
        startup=args.startup_ms,
        exit_delay=args.exit_delay_ms,
        init_timeout=args.init_timeout_ms,
    )
    instance_id = str(secrets.randbits(62))
    register = functools.partial(
        encode_registration,
        layout,
        instance_id=instance_id,
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
        num_gpu_blocks=NUM_GPU_BLOCKS,
        block_size=BLOCK_SIZE,
    )
    scripted = replies.load_replies(args.replies, model.codec) if args.replies else []
    limits = Limits(max_model_len, model.vocab_size)
    control = Control(args.control) if args.control else None

    def core(index: int) -> Core:
        if args.flood:
            return FloodCore(layout, model, args.itl_ms, index, control)
        options = Options(
            engine_index=index,
            max_num_seqs=args.max_num_seqs,
            pace=Pace(args.ttft_ms, args.itl_ms),
            replies=scripted,
            with_stats=not args.disable_log_stats,
        )
        return EngineCore(layout, Scheduler(layout, model, limits, options), index)

    indices = range(args.engine_index, args.engine_index + args.data_parallel_size)
    return [Engine(core(i), life, i, register(engine_index=i)) for i in indices]


def _load_model(args: argparse.Namespace) -> tuple[Model, int]:
    directory = resolve(args.model_path)
    tokenizer = Tokenizer.from_directory(directory)
    files = ModelFiles.read(directory, tokenizer)
    model = Model(
        tokenizer,
        vocab_size=files.vocab_size,
        eos_token_id=files.eos_token_id,
        seed=args.seed,
    )
    return model, args.max_model_len or files.context_length or _DEFAULT_LENGTH


def milliseconds(text: str) -> float:
    """Read a time in milliseconds; return seconds."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return value / 1000


def count(text: str) -> int:
    """Read an integer from 0 up."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def positive(text: str) -> int:
    """Read an integer from 1 up."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def address(text: str) -> str:
    """Read an address to dial."""
    if not text.startswith(("tcp://", "ipc://")):
        raise argparse.ArgumentTypeError(f"{text} is no tcp:// or ipc:// address")
    return text


def worker_url(text: str) -> str:
    """Read a worker's URL; return the handshake address that follows from it."""
    try:
        return derive(text).handshake
    except WorkerError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
