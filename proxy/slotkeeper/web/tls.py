"""TLS of both ports: a certificate that can be read again while connections are open."""

from __future__ import annotations

import ssl
from pathlib import Path

from slotkeeper.observe.log import get_logger

log = get_logger(__name__)


class TlsError(Exception):
    """The files cannot be used; the message says what to do."""


class Tls:
    """`context` is for servers, and stays the same: what is read again counts for new connections."""

    def __init__(self, cert: Path, key: Path | None) -> None:
        """Both are PEM; without a `key` it stands in the file of the certificate. Raises TlsError."""
        self._cert = cert
        self._key = key
        self.context = _context(cert, key)

    def reload(self) -> None:
        """Raises TlsError; then all is as it was."""
        _context(self._cert, self._key)  # two files that do not fit each other must not reach the other one
        _load(self.context, self._cert, self._key)
        log.info("certificate_read", file=str(self._cert))


def _context(cert: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, cert, key)
    return context


def _load(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # no prompt for a password
    except ssl.SSLError as error:
        raise TlsError(
            f"{cert}{f' and {key}' if key else ''}: {error.reason or error}; it takes a certificate, with "
            "those between it and the root behind it, and its key without a password, both as PEM"
        ) from None
    except OSError as error:
        raise TlsError(f"{_unread(cert, key)}: {error.strerror or error}") from None


def _unread(cert: Path, key: Path | None) -> Path:
    """Which of the two it was: ssl does not say."""
    try:
        cert.open("rb").close()
    except OSError:
        return cert
    return key or cert
