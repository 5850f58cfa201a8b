"""One Config from defaults, file and flags; errors that say what to do; docs that cannot differ."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smgd import config as package
from smgd.config import Config, EngineConfig, ModelConfig, WorkerConfig, load
from smgd.config.findings import Findings
from smgd.config.keys import FLAGS, MODEL, all_keys, keys_of, tables
from smgd.config.load import contradictions, convert, override, parse
from smgd.config.reference import docs, example
from smgd.errors import ConfigError
from tests.support import PATIENCE

ROOT = Path(package.__file__).parents[2]
URL = "ipc:///tmp/smg-zmq/engine-0"
UNSUPPORTED = (
    "workers[0].runtime_type: ZMQ worker ipc:///a has unsupported runtime sglang: only vllm is"
    " supported over the ZMQ direct backend"
)

NO_ORIGIN = (
    "server.cors_allowed_origins: 'https://a/' is no origin, such as https://chat.example.org or"
    " http://localhost:3000, without a path"
)


def mistakes(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "smgd.toml")
    return str(caught.value).splitlines()


# ------------------------------------------------------------------------------- the keys


def test_every_key_is_described_and_has_words_for_its_values() -> None:
    for key in all_keys().values():
        assert key.description.endswith("."), key.path
        assert key.allowed, key.path
        assert key.sample is not msgspec.UNSET, key.path


def test_every_table_is_described() -> None:
    for name, struct in tables():
        assert (struct.__doc__ or "").strip(), name


def test_every_flag_is_one_key() -> None:
    assert set(FLAGS.values()) <= all_keys().keys()
    assert len(set(FLAGS.values())) == len(FLAGS)


def test_settings_cannot_be_changed_after_start() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        Config().server.port = 1  # type: ignore[misc]


# ------------------------------------------------------------------------------- the file


def test_an_empty_file_gives_the_defaults() -> None:
    assert parse("", "smgd.toml") == Config()


def test_a_whole_file() -> None:
    config = parse(
        f"""
        server = {{ port = 8000, keep_alive_timeout = 5, write_timeout = inf }}
        log.json = true
        [models."meta/llama"]
        aliases = ["llama"]
        [[workers]]
        url = "{URL}"
        [[workers]]
        url = "ipc:///tmp/smg-zmq/engine-1"
        engine_count = 2
        """,
        "smgd.toml",
    )
    assert config.server.port == 8000
    assert config.server.keep_alive_timeout == 5.0
    assert config.server.write_timeout == float("inf")
    assert config.log.json is True
    assert config.models == {"meta/llama": ModelConfig(aliases=("llama",))}
    assert config.workers[1] == WorkerConfig(url="ipc:///tmp/smg-zmq/engine-1", engine_count=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nprot = 1", "server.prot: there is no such key; did you mean port? There are: "),
        ("[sever]", "sever: there is no such key; did you mean server? There are: server, "),
        ("port = 1", "port: there is no such key; did you mean server.port or metrics.port? "),
        ("[log]\nzzz = 1", "log.zzz: there is no such key. There are: level, json"),
        ('[models."a.b"]\npth = ""', 'models."a.b".pth: there is no such key; did you mean path?'),
        ('[server]\nport = "x"', 'server.port: found "x", allowed is an integer from 0 to 65535'),
        ("[server]\nport = true", "server.port: found true, allowed is an integer from 0 to 65535"),
        ("[server]\nport = 65536", "server.port: found 65536, allowed is an integer from 0 to "),
        (
            "[[workers]]\nurl = 'ipc:///a'\nengine_count = 1025",
            "workers[0].engine_count: found 1025, allowed is an integer from 1 ",
        ),
        (
            "[[engines]]\nreplicas = 65536",
            "engines[0].replicas: found 65536, allowed is an integer",
        ),
        ("[server]\nbacklog = 0", "server.backlog: found 0, allowed is an integer from 1 up"),
        ("[timeouts]\nsend = 0", "timeouts.send: found 0, allowed is seconds, a number above 0"),
        ("[timeouts]\nsend = nan", "timeouts.send: found nan, allowed is seconds, a number above"),
        ("[server]\nhost = 1", "server.host: found 1, allowed is text"),
        ('[log]\njson = "yes"', 'log.json: found "yes", allowed is "auto" or true or false'),
        ('[routing]\npolicy = "x"', 'routing.policy: found "x", allowed is "least_load", "power'),
        ('[models.a]\naliases = "b"', 'models."a".aliases: found "b", allowed is a list of text'),
        ("[[workers]]", 'workers[0].url: must be given, such as "ipc:///tmp/smg-zmq/engine-0"'),
        (
            f'[workers]\nurl = "{URL}"',
            'workers: found {"url":"ipc:///tmp/smg-zmq/engine-0"}, allow',
        ),
        ("engines = [3]", "engines[0]: found 3, allowed is a table [[engines]]"),
        (
            "[[engines]]\nenv = { A = 1 }",
            'engines[0].env: found {"A":1}, allowed is a table of text',
        ),
        ("workers = [3]", "workers[0]: found 3, allowed is a table [[workers]]"),
        ("models = 3", 'models: found 3, allowed is a table [models."ID"]'),
        ("server = 2026-11-29", 'server: found "2026-11-29", allowed is a table [server]'),
        (f'[server]\nport = "{"9" * 99}"', f'server.port: found "{"9" * 59}..., allowed is an i'),
    ],
)
def test_a_mistake_names_file_key_value_and_what_is_allowed(text: str, said: str) -> None:
    (line,) = mistakes(text)
    assert line.startswith(f"smgd.toml: {said}")


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    assert len(mistakes('[server]\nport = "x"\nprot = 1\n[log]\nlevel = "loud"')) == 3


def every_mistake(text: str, file: Path) -> list[str]:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    return [line.removeprefix(f"{file}: ") for line in str(caught.value).splitlines()]


def test_a_mistake_of_one_kind_hides_none_of_another(tmp_path: Path) -> None:
    text = """
    [server]
    prot = 1
    cors_allowed_origins = ["a"]
    [auth]
    api_keys = ["sk 1"]
    api_key_files = ["/none/1", "/none/2"]
    [models.m]
    [[workers]]
    engine_count = 0
    [[workers]]
    url = "ipc:///a"
    model = "n"
    [[workers]]
    url = "ipc:///a"
    """
    found = every_mistake(text, tmp_path / "smgd.toml")
    assert [line.partition(": ")[0] for line in found] == [
        "server.prot",
        "workers[0].url",
        "workers[0].engine_count",
        "auth.api_key_files",
        "auth.api_key_files",
        "auth.api_keys",
        "server.cors_allowed_origins",
        "workers[1].model",
        "workers[2].url",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "[metrics]\nport = 30000\n[server]\nport = false",
        "[models.m]\n[[workers]]\n[[workers]]\nurl = 1",
        "[models.m]\n[[workers]]\nurl = 1",
        "workers = [1]\n[models.m]",
    ],
)
def test_nothing_is_said_of_what_would_follow_from_a_mistake(text: str, tmp_path: Path) -> None:
    found = every_mistake(text, tmp_path / "smgd.toml")
    assert all("allowed is" in line or "must be given" in line for line in found), found


@pytest.mark.parametrize("value", ["[" * 100_000, "1" * 100_000])
def test_a_file_that_is_more_than_a_parser_takes_is_not_toml(value: str) -> None:
    (line,) = mistakes(f"[server]\nport = {value}")
    assert line.startswith("smgd.toml: this is not TOML: ")


@pytest.mark.parametrize("name", ["a", "alias", "/models/tulip"])
def test_a_worker_names_its_model_by_id_alias_or_path(name: str) -> None:
    tables = '[models.a]\npath = "/models/tulip"\naliases = ["alias"]\n[models.b]\n'
    config = parse(f'{tables}[[workers]]\nurl = "ipc:///a"\nmodel = "{name}"', "smgd.toml")
    assert config.model_of(config.workers[0]) == "a"


def test_a_file_that_is_not_toml_is_told_with_the_place() -> None:
    (line,) = mistakes("[server]\nport 3")
    assert line.startswith("smgd.toml: this is not TOML: ")
    assert "line 2, column 6" in line


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "latin").write_bytes(b"# caf\xe9")
    with pytest.raises(ConfigError, match="latin: this is not TOML: not UTF-8 at byte 5"):
        load(tmp_path / "latin")


leaf = st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "a", "auto", URL])
value = leaf | st.lists(leaf, max_size=2)
names = st.sampled_from(["", "port", "url", "aliases", "json", "path", "send"])
table = st.dictionaries(names, value, max_size=3)
anything = value | table | st.lists(table, max_size=2) | st.dictionaries(names, table, max_size=2)


@given(st.dictionaries(st.sampled_from([*Config.__struct_fields__, "x"]), anything, max_size=4))
def test_any_tables_make_a_config_or_a_config_error(data: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(convert(data, "smgd.toml"), Config)


# ------------------------------------------------------------------------------- flags over it


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "smgd.toml"
    file.write_text('[server]\nport = 1\nhost = "::1"\n[metrics]\nport = 2')
    config = load(file, {"server.port": 3, "log.level": "debug"})
    assert (config.server.port, config.server.host) == (3, "::1")
    assert (config.metrics.port, config.log.level) == (2, "debug")
    assert config.timeouts == Config().timeouts


def test_flags_make_a_model_named_like_its_path() -> None:
    config = override(Config(), {f"{MODEL}.path": "/models/m", f"{MODEL}.chat_template": "t.jinja"})
    assert config.models == {"/models/m": ModelConfig(path="/models/m", chat_template="t.jinja")}


def test_served_names_are_name_and_aliases() -> None:
    config = override(Config(), {f"{MODEL}.path": "/models/m", MODEL: ["m", "default"]})
    assert config.models == {"m": ModelConfig(path="/models/m", aliases=("default",))}


def test_flags_change_the_only_model_of_the_file() -> None:
    file = parse('[models."org/m"]\naliases = ["x"]', "smgd.toml")
    assert override(file, {f"{MODEL}.tokenizer_path": "org/t"}).models == {
        "org/m": ModelConfig(path="", tokenizer_path="org/t", aliases=("x",))
    }
    assert override(file, {MODEL: ["m"]}).models == {"m": ModelConfig(path="org/m", aliases=("x",))}


def test_flags_about_no_model_or_one_of_many_are_refused() -> None:
    with pytest.raises(ConfigError, match="--model-path is missing"):
        override(Config(), {f"{MODEL}.tokenizer_path": "t"})
    several = parse("[models.a]\n[models.b]", "smgd.toml")
    with pytest.raises(ConfigError, match=r"the file has 2 \(a, b\)"):
        override(several, {f"{MODEL}.path": "c"})


def test_worker_urls_take_the_place_of_the_files_workers() -> None:
    file = parse('[models.m]\n[[workers]]\nurl = "ipc:///a"\nengine_count = 2', "smgd.toml")
    assert override(file, {"workers.url": ["ipc:///b"]}).workers == (WorkerConfig(url="ipc:///b"),)
    assert override(file, {"workers.runtime_type": "x"}).workers == (
        WorkerConfig(url="ipc:///a", engine_count=2, runtime_type="x"),
    )


# ------------------------------------------------------------------------------- keys of clients


def test_keys_come_from_the_file_from_files_and_from_flags(tmp_path: Path) -> None:
    more = tmp_path / "keys"
    more.write_text("# ours\nsk-1\n\n  sk-2  \n")
    file = tmp_path / "smgd.toml"
    file.write_text(f'[auth]\napi_keys = ["sk-0"]\napi_key_files = ["{more}"]')
    assert load(file).auth.api_keys == ("sk-0", "sk-1", "sk-2")
    assert load(file, {"auth.api_keys": ["sk-3", "sk-4"]}).auth.api_keys == (
        "sk-3", "sk-4", "sk-1", "sk-2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "keys cannot be read: No such file"),
        (b"", "there is no key in "),
        (b"# all of them\n\n", "there is no key in "),
        (b"sk-\xe9", "keys does not hold keys: byte 3 is not ASCII"),
        (b"sk-1 sk-2\n", "auth.api_keys: key 1 of 1 is empty, or has"),
    ],
)
def test_a_file_of_keys_that_has_none_is_refused(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load(None, {"auth.api_key_files": [str(tmp_path / "keys")]})
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        'auth = "sk-secret"',
        'auth = ["sk-secret"]',
        'auth.api_keys = "sk-secret"',
        'auth.api_keys = ["sk-secret", 3]',
        'auth.api_key = ["sk-secret"]',
    ],
)
def test_a_mistake_with_keys_does_not_show_them(text: str) -> None:
    (line,) = mistakes(text)
    assert line.startswith("smgd.toml: auth")
    assert "secret" not in line


@pytest.mark.parametrize("key", ["", " ", "sk 1", "sk-\u00e9", "sk-1\n"])
def test_a_key_that_no_client_can_send_is_refused(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"auth.api_keys": ["sk-0", key]})
    assert str(caught.value) == (
        "auth.api_keys: key 2 of 2 is empty, or has something other than visible ASCII characters"
        " in it"
    )


# ------------------------------------------------------------------------------- all together


def check(text: str) -> list[str]:
    found = Findings()
    contradictions(parse(text, "smgd.toml"), found)
    return found.mistakes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[metrics]\nport = 30000", "metrics.port: server.port is 30000, too"),
        (
            '[models.m]\n[[workers]]\nurl = "ipc:///a"\n[[workers]]\nurl = "ipc:///a"',
            "workers[1].url: workers[0] has the url ipc:///a, too",
        ),
        ('[models.a]\naliases = ["b"]\n[models.b]', "models.\"b\": 2 models have the name 'b'"),
        ('[models.a]\naliases = [""]', 'models."a": a model or an alias has no name'),
        (
            '[[workers]]\nurl = "ipc:///a"',
            (
                "workers[0].model: ZMQ worker ipc:///a has no model identity: give --model-path "
                "(smgd serve: --model) or [models.ID]"
            ),
        ),
        (
            '[models.a]\n[models.b]\n[[workers]]\nurl = "ipc:///a"',
            (
                "workers[0].model: ZMQ worker ipc:///a has no model identity: set its model to one"
                " of a, b"
            ),
        ),
        (
            '[models.a]\n[[workers]]\nurl = "ipc:///a"\nmodel = "b"',
            (
                "workers[0].model: worker ipc:///a serves model 'b', for which there is no"
                ' [models."b"]; there is: a'
            ),
        ),
        (
            (
                '[models.a]\npath = "/p"\n[models.b]\npath = "/p"\n[[workers]]\nurl = "ipc:///a"\n'
                'model = "/p"'
            ),
            (
                "workers[0].model: worker ipc:///a serves the model at '/p', but several are there:"
                " name one of a, b"
            ),
        ),
        (
            '[models.a]\n[[workers]]\nurl = "ipc:///a"\nruntime_type = "sglang"',
            UNSUPPORTED,
        ),
        (
            'server.cors_allowed_origins = ["*", "https://a"]',
            "server.cors_allowed_origins: * means all origins, so it stands alone",
        ),
        (
            'server.cors_allowed_origins = ["https://a/"]',
            NO_ORIGIN,
        ),
    ],
)
def test_settings_that_contradict_each_other(text: str, said: str) -> None:
    assert check(text) == [said]


@pytest.mark.parametrize(
    "text",
    [
        "server.port = 0\nmetrics.port = 0",
        '[server]\nhost = "127.0.0.1"\n[metrics]\nhost = "127.0.0.2"\nport = 30000',
        '[models.a]\n[models.b]\n[[workers]]\nurl = "ipc:///a"\nmodel = "b"',
        'server.cors_allowed_origins = ["https://a.b", "http://[::1]:80", "app://x"]',
        'server.cors_allowed_origins = ["*"]',
    ],
)
def test_settings_that_do_not(text: str) -> None:
    assert check(text) == []


def test_contradictions_are_told_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "smgd.toml"
    file.write_text("[metrics]\nport = 30000")
    with pytest.raises(ConfigError, match=r"smgd\.toml: metrics\.port: server\.port is"):
        load(file)
    assert load(file, {"metrics.port": 1}).metrics.port == 1


def test_what_is_empty_follows_from_the_rest() -> None:
    config = parse('server.host = "::1"\n[models."org/m"]\n[[workers]]\nurl = "ipc:///a"', "f")
    assert config.metrics_host == "::1"
    assert config.model_of(config.workers[0]) == "org/m"
    assert config.model_path("org/m") == config.tokenizer_path("org/m") == "org/m"

    config = parse('metrics.host = "::2"\n[models.m]\npath = "/m"\ntokenizer_path = "/t"', "f")
    assert config.metrics_host == "::2"
    assert (config.model_path("m"), config.tokenizer_path("m")) == ("/m", "/t")


# ------------------------------------------------------------------------------- what is generated


def test_the_example_loads_to_the_defaults() -> None:
    assert parse(example(), "smgd.toml.example") == Config()


def test_the_example_with_every_key_loads_to_the_defaults() -> None:
    text = re.sub(r"(?m)^#(?=[\[\w])", "", example())
    for name, struct in tables():
        for key in keys_of(name, struct):
            assert f"\n{key.name} = " in text
    assert parse(text, "smgd.toml") == Config(
        models={"meta-llama/Llama-3.1-8B-Instruct": ModelConfig()},
        workers=(WorkerConfig(url=URL),),
        engines=(EngineConfig(),),
    )


@pytest.mark.parametrize(
    ("file", "generate"), [("docs/configuration.md", docs), ("smgd.toml.example", example)]
)
def test_the_committed_file_is_the_generated_one(file: str, generate: Any) -> None:
    assert (ROOT / file).read_text(encoding="utf-8") == generate(), "run `make docs`"


def test_the_module_prints_what_is_generated() -> None:
    command = [sys.executable, "-m", "smgd.config", "example"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == example()
