"""TLS of the HTTP port: from two files to a context, or to the reason why they cannot be one.

Nothing is bound and no event loop is needed, so that a configuration can be judged with it. A
context that connections are accepted with can be given a new pair: those that are open keep theirs.
"""

from __future__ import annotations

import ssl

from smgd.errors import ConfigError


def server_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the context of a server, None without files. Raises `ConfigError`.

    HTTP/2 is offered first; TLS 1.2 is the oldest that is spoken.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("TLS needs both tls.cert_path and tls.key_path")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2", "http/1.1"])
    _load(context, certificate, key)
    return context


def renew(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Have a context take what the files hold now. Raises `ConfigError`; it keeps its pair then."""
    server_context(certificate, key)  # a key that does not fit leaves a context without any
    _load(context, certificate, key)


def _load(context: ssl.SSLContext, certificate: str, key: str) -> None:
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:  # ValueError: NUL in a path, or a key with a password
        raise ConfigError(f"cannot use the TLS files {certificate}, {key}: {error}") from error


def _no_password() -> str:
    """Be asked for the password of a key. Without this, OpenSSL would ask the terminal."""
    raise ValueError("the key is encrypted; smgd needs one without a password")
