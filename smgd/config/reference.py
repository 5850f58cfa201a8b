"""What is generated from the structs: docs/configuration.md and smgd.toml.example."""

from __future__ import annotations

import inspect
import textwrap
from typing import Final

import msgspec
from msgspec import UNSET

from smgd.config.keys import ARRAYS, MODEL, Key, header, keys_of, model_name, tables, toml

_DOCS: Final = """\
<!-- Generated from smgd/config/schema.py by `make docs`: change that, then run it. -->

# Configuration

smgd reads one TOML file, flags, or both: `smgd run --config FILE` the file alone,
`smgd launch [--config FILE] FLAGS` both. A flag is another way to write one key. What counts is
the flag, else the file, else the default.

`smgd check-config FILE` tells every mistake of a file: the key, what was found, what is allowed. It
also looks at the host, without binding anything: whether files of keys and of TLS can be used, the
group exists, names of hosts are known, sockets and ports can go together. All that starts smgd asks
the same, as does a reload, so what it calls OK is not refused later, unless another process has a
port or a path. It judges for the user who asks ([operations.md](operations.md#upgrading)).
[smgd.toml.example](../smgd.toml.example) has all keys with their defaults, commented out.

Durations are in seconds, with a fraction if need be, and `inf` for no limit; sizes are in bytes;
empty text (`""`) means not set.

The flags about a model change the only model of the file, or add one to a file that has none;
`--worker-urls` takes the place of the file's workers, and `--backend` is for all of them.

The flags of `[launch]` and `[[engines]]` are those of `smgd serve` ([serve.md](serve.md)); there,
`--backend` is that of the engine. They change the only engine of the file, or add one to a file
that has none.

smgd exits with 0 when it was stopped, 1 when it failed, and 2 when a flag or the file is wrong;
so does `check-config`.
"""

_EXAMPLE: Final = """\
# smgd.toml: every key with its default. Generated from smgd/config/schema.py by `make docs`.
# Check a copy of it with `smgd check-config FILE`, run it with `smgd run --config FILE`.
# Durations are in seconds (inf: no limit), sizes in bytes; "" means not set.
"""

_SEVERAL: Final = (MODEL, *ARRAYS)


def docs() -> str:
    """Return docs/configuration.md."""
    return "\n".join([_DOCS, *(_docs_table(*table) for table in tables())])


def example() -> str:
    """Return smgd.toml.example."""
    return "\n".join([_EXAMPLE, *(_example_table(*table) for table in tables())])


def _docs_table(table: str, struct: type[msgspec.Struct]) -> str:
    lines = [
        f"## `{header(table)}`",
        "",
        f"{inspect.getdoc(struct)}",
        "",
        "| key | default | allowed | flag | meaning |",
        "|---|---|---|---|---|",
        *map(_docs_row, _keys(table, struct)),
        "",
    ]
    return "\n".join(lines)


def _docs_row(key: Key) -> str:
    default = "must be given" if key.default is UNSET else f"`{toml(key.default)}`"
    flag = f"`{key.flag}`" if key.flag else ""
    return f"| `{key.name}` | {default} | {key.allowed} | {flag} | {key.description} |"


def _keys(table: str, struct: type[msgspec.Struct]) -> list[Key]:
    return ([model_name()] if table == MODEL else []) + keys_of(table, struct)


def _example_table(table: str, struct: type[msgspec.Struct]) -> str:
    """Tables of which there may be several are commented out with their keys: by default, none."""
    first = header(table).replace('"ID"', toml(model_name().sample))
    lines = [f"# {inspect.getdoc(struct)}", f"#{first}" if table in _SEVERAL else first]
    for key in keys_of(table, struct):
        allowed = "" if key.allowed == "text" else f" ({key.allowed})"
        lines += _wrapped(key.description + allowed)
        lines.append(f"#{key.name} = {toml(key.sample)}")
    return "\n".join([*lines, ""])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="# ")
