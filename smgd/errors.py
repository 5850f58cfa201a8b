"""Every error that smgd raises on purpose, in one small tree.

Two questions shape it. *Who is to blame?* `ConfigError` blames the operator, `ApiError` carries the
HTTP status that blames the client (4xx) or us (5xx), `RemoteProtocolError` blames the engine and
`LocalProtocolError` blames our own code. *What can the reader do next?* Texts say so, with numbers.
"""

from __future__ import annotations

from typing import Final

import msgspec

# What decoders raise for bytes that mean nothing.
UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class SmgdError(Exception):
    """Base of all errors below; its text is fit to be shown to an operator."""


class ConfigError(SmgdError):
    """A flag or a key of the configuration file is wrong; the text names it."""


class ModelError(SmgdError):
    """A model's files (tokenizer, template, configuration) are missing or cannot be used."""


class TemplateError(SmgdError):
    """A chat template refused the conversation, or cannot be compiled; the text is its reason."""


class RemoteProtocolError(SmgdError):
    """An engine sent something that its wire does not allow."""


class LocalProtocolError(SmgdError):
    """We were about to break an engine's wire: a bug of ours, never the client's fault."""


class WorkerError(SmgdError):
    """A worker cannot be set up: the text is what the operator reads, the cause is chained."""


class WorkerExistsError(WorkerError):
    """There is a worker with this URL already."""


class WorkerNotFoundError(WorkerError):
    """There is no worker with this id."""


class EngineLostError(SmgdError):
    """The session that was running a request has ended; the request did not finish."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"engine of worker {worker} lost: {reason}")
        self.worker = worker
        self.reason = reason


class WorkerLeftError(EngineLostError):
    """The session has ended since somebody took its worker away; no engine has failed."""


class ApiError(SmgdError):
    """An error answer: HTTP `status`, a stable machine-readable `code`, and the field to blame.

    `retry_after` (seconds) becomes the `Retry-After` header.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        """OpenAI's coarse class of the error."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


def invalid_request(code: str, message: str, param: str | None = None) -> ApiError:
    """Return a 400 that blames `param`."""
    return ApiError(400, code, message, param=param)


def unsupported_parameter(param: str, hint: str = "") -> ApiError:
    """Return the 400 for a field that OpenAI or vLLM know and smgd does not honour."""
    text = f"Unsupported parameter: '{param}' is not supported by this endpoint."
    return invalid_request("unsupported_parameter", f"{text} {hint}".rstrip(), param)


def model_not_found(model: str) -> ApiError:
    """Return the 404 for a model that no worker serves."""
    text = f"No worker available for model '{model}'"
    return ApiError(404, "model_not_found", text, param="model")


def no_available_workers(model: str, reason: str = "") -> ApiError:
    """Return the 503 for a known model none of whose workers is ready at the moment."""
    text = f"No ready worker for model '{model}'"
    return ApiError(
        503, "no_available_workers", f"{text}: {reason}" if reason else text, retry_after=1
    )


def engine_lost(error: EngineLostError) -> ApiError:
    """Return the 503 for a request whose engine went away under it.

    Clients need not know what our workers are called; the log does.
    """
    text = f"The engine that ran this request was lost: {error.reason}"
    return ApiError(503, "engine_lost", text, retry_after=1)


def shutting_down() -> ApiError:
    """Return the 503 for a request that was still running when the daemon had to stop."""
    text = "The server is shutting down and could not wait for this request any longer"
    return ApiError(503, "shutting_down", text, retry_after=1)


def internal_error(message: str = "Internal error; the server's log has the details") -> ApiError:
    """Return the 500 that tells nothing of our insides."""
    return ApiError(500, "internal_error", message)
