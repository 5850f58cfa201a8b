"""The answers of the admin socket as people read them: one function a command.

They take what came over the socket, so an older smgctl shows what it knows of a newer daemon.
"""

from __future__ import annotations

from typing import Any

from smgd.admin import tables

Answer = dict[str, Any]

_SHORT_ID = 8


def status(answer: Answer) -> str:
    """Return the daemon as a whole."""
    workers = f"{answer['ready_workers']}/{answer['workers']} ready"
    return tables.facts(
        [
            ("state", answer["state"]),
            ("not ready", answer.get("not_ready")),
            *(("missing", text) for text in answer.get("missing", [])),
            ("version", answer["version"]),
            ("pid", answer["pid"]),
            ("uptime", tables.duration(answer["uptime"])),
            ("workers", workers),
            ("requests", answer["requests"]),
            ("models", answer["models"] or "none"),
            ("listening", answer["listen"]),
            ("log level", answer["log_level"]),
        ]
    )


def workers(answer: list[Answer]) -> str:
    """Return the table of workers, and why some are not ready."""
    if not answer:
        return "no worker; add one: smgctl workers add ipc:///PATH"
    titles = ("ID", "URL", "MODEL", "STATE", ">FOR", ">ENGINES", ">REQUESTS", ">WAITING", ">KV")
    rows = [
        (
            worker["id"][:_SHORT_ID],
            worker["url"],
            worker["model"],
            worker["state"],
            tables.duration(worker["seconds"]),
            worker["engines"],
            worker["requests"],
            worker["waiting"],
            tables.percent(worker["kv_usage"]),
        )
        for worker in answer
    ]
    reasons = [
        f"{worker['url']} is {worker['state']}: {worker['reason']}"
        for worker in answer
        if worker.get("reason")
    ]
    text = tables.table(titles, rows)
    return "\n".join([text, "", *reasons]) if reasons else text


def worker(answer: Answer) -> str:
    """Return one worker; for one that waits, how to end the waiting."""
    state = f"{answer['state']} for {tables.duration(answer['seconds'])}"
    return tables.facts(
        [
            ("url", answer["url"]),
            ("id", answer["id"]),
            ("model", answer["model"]),
            ("state", state),
            ("reason", answer.get("reason")),
            ("handshake", answer["handshake"]),
            ("waiting for", answer.get("waiting_for")),
            ("seen so far", _seen(answer)),
            ("connect with", answer.get("connect")),
            ("engine process", _process(answer.get("engine_process"))),
            ("runtime", answer["runtime"]),
            ("engines", answer["engines"]),
            ("engine version", answer.get("engine_version")),
            ("max model len", answer.get("max_model_len")),
            ("requests", answer["requests"]),
            ("engines say", _load(answer)),
            *_ranks(answer),
            ("priority", answer["priority"]),
            ("cost", answer["cost"]),
            ("labels", answer.get("labels")),
        ]
    )


def _load(answer: Answer) -> str:
    cache = tables.percent(answer["kv_usage"])
    return f"{answer['running']} running, {answer['waiting']} waiting, KV cache {cache}"


def _process(process: Answer | None) -> str:
    """Say how the engine fares that smgd has started itself."""
    if not process:
        return ""
    pid = f" (pid {process['pid']})" if process.get("pid") else ""
    times = f"started {process['starts']} times, restarts: {process['restarts']}"
    last = f"; the last one {process['last_end']}" if process.get("last_end") else ""
    return f"{process['state']}{pid}, {times}{last}"


def _seen(answer: Answer) -> str:
    if not answer.get("waiting_for"):
        return ""
    return ", ".join(answer.get("seen", [])) or "nothing"


def _ranks(answer: Answer) -> list[tuple[str, str]]:
    ranks = answer.get("ranks", [])
    if len(ranks) < 2 or answer.get("waiting_for"):
        return []
    return [
        (
            f"engine {rank['rank']}",
            _load(rank),
        )
        for rank in ranks
    ]


def removed(answer: Answer) -> str:
    """Say that a worker is on its way out."""
    return f"{answer['url']} is {answer['state']}; requests that still run: {answer['requests']}"


def models(answer: list[Answer]) -> str:
    """Return the table of models, and what is missing."""
    if not answer:
        return "no model; give one with --model-path, [models.ID] or a worker's model_path"
    titles = ("MODEL", ">READY", ">WORKERS", ">CONTEXT", "ALIASES", "PATH")
    rows = [
        (
            model["id"],
            model["ready_workers"],
            model["workers"],
            model.get("max_model_len", "-"),
            ", ".join(model.get("aliases", [])) or "-",
            model["path"],
        )
        for model in answer
    ]
    missing = [model["missing"] for model in answer if model.get("missing")]
    text = tables.table(titles, rows)
    return "\n".join([text, "", *missing]) if missing else text


def requests(answer: list[Answer]) -> str:
    """Return the table of running requests."""
    if not answer:
        return "no request is running"
    titles = ("ID", ">AGE", "MODEL", "WORKER", ">PROMPT", ">TOKENS", "CLIENT", "REQUEST ID")
    rows = [
        (
            request["id"],
            tables.duration(request["seconds"]),
            request["model"],
            ", ".join(request["workers"]) or "-",
            request["prompt_tokens"],
            request["tokens"],
            request["client"] or "-",
            request["request_id"] if request["request_id"] != request["id"] else "-",
        )
        for request in answer
    ]
    return tables.table(titles, rows)


def aborted(answer: list[Answer]) -> str:
    """Say what was aborted."""
    return "\n".join(
        f"aborted {request['id']} after {request['tokens']} tokens" for request in answer
    )


def draining(answer: Answer) -> str:
    """Say what happens until the end."""
    return (
        f"draining: new requests are taken for {answer['drain_window']:g} s,"
        f" then the running ones ({answer['requests']} now) have {answer['shutdown_grace']:g} s"
    )


def reloaded(answer: Answer) -> str:
    """Say what a reload has not changed."""
    keys = answer["restart_needed"]
    if not keys:
        return "reloaded"
    return f"reloaded; these have changed and take effect at the next start: {', '.join(keys)}"


def level(answer: Answer) -> str:
    """Return the level of the log."""
    return str(answer["level"])


def config(answer: Answer) -> str:
    """Return the configuration as TOML."""
    return tables.config(answer).rstrip("\n")
