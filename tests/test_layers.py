"""The layers of the house (docs/architecture.md), checked by walking every import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import smgd

ROOT = Path(smgd.__file__).parent

LAYERS = {
    "errors": 0, "config": 0, "log": 0, "output": 0, "metrics": 0, "samples": 0, "core": 0,
    "files": 0, "once": 0, "tasks": 0, "__init__": 0,
    "wire": 1, "parse": 1, "systemd": 1,
    "text": 2, "engine": 2, "rpc": 2,
    "workers": 3,
    "dispatch": 4, "migration": 4, "api": 4,
    "web": 5, "admin": 5, "launch": 5, "sim": 5,
    "daemon": 6, "reload": 6, "checks": 6, "cli": 6, "demo": 6,
}  # fmt: skip

# Each foreign package has one home, so that replacing it, or a trap in it, stays in one place.
HOMES = {
    "zmq": ("engine/zmqio", "sim"),
    "grpc": ("rpc",),
    "quart": ("web",),
    "quart_trio": ("web",),
    "hypercorn": ("web",),
    "httptools": ("web",),
    "h11": ("web",),
    "h2": ("web",),
    "tokenizers": ("text",),
    "jinja2": ("text",),
    "huggingface_hub": ("text",),
    "prometheus_client": ("metrics", "samples"),
}

# The sans-IO core: bytes or tokens in, events out.
PURE = (
    "core", "errors", "wire", "parse", "engine/roster", "engine/session", "engine/dialects",
    "engine/guard", "engine/ranks", "text/detok", "text/stops", "text/template", "text/pipeline",
    "text/cuts", "text/description", "text/segments", "text/words",
    "workers/lifecycle", "workers/policies", "web/admission", "web/auth", "web/cors",
)  # fmt: skip
IO_PACKAGES = {"trio", "zmq", "socket", "threading", "asyncio", "hypercorn", "quart"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).with_suffix("").as_posix(), ast.parse(path.read_text())


def imports(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def package(module: str) -> str:
    """Return the first part of a module's path below smgd: the unit that has a layer."""
    return module.split("/")[0]


def own_target(name: str) -> str | None:
    """Return the path below smgd of the module that an import of ours names."""
    parts = name.split(".")
    if parts[0] != "smgd":
        return None
    while len(parts) > 1:
        base = ROOT.joinpath(*parts[1:])
        if base.with_suffix(".py").exists() or base.joinpath("__init__.py").exists():
            return "/".join(parts[1:])
        parts.pop()
    return "__init__"


def test_every_module_has_a_layer() -> None:
    assert {package(name) for name, _ in modules()} <= LAYERS.keys()


def test_imports_point_downwards() -> None:
    wrong = [
        f"{name} -> {target}"
        for name, tree in modules()
        for target in map(own_target, imports(tree))
        if target and LAYERS[package(target)] > LAYERS[package(name)]
    ]
    assert wrong == []


def test_imports_have_no_cycles() -> None:
    graph = {
        name: {t for t in map(own_target, imports(tree)) if t and t != "__init__"} - {name}
        for name, tree in modules()
    }
    for name in list(graph):  # a package stands for its __init__
        graph[name] = {t if t in graph else f"{t}/__init__" for t in graph[name]} - {name}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)


def test_packages_have_no_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for name, tree in modules():
        targets = {package(t) for t in map(own_target, imports(tree)) if t and t != "__init__"}
        graph.setdefault(package(name), set()).update(targets - {package(name)})
    assert list(TopologicalSorter(graph).static_order())


def test_foreign_packages_stay_at_home() -> None:
    wrong = [
        f"{name} imports {foreign}"
        for name, tree in modules()
        for foreign in {i.split(".")[0] for i in imports(tree)} & HOMES.keys()
        if not name.startswith(HOMES[foreign])
    ]
    assert wrong == []


def test_the_core_does_no_io() -> None:
    wrong = [
        f"{name} imports {i}"
        for name, tree in modules()
        for i in imports(tree)
        if name.startswith(PURE) and i.split(".")[0] in IO_PACKAGES
    ]
    assert wrong == []
