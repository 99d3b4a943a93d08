"""Asking a running sidecar on its admin port."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from slotkeeper.config import UsageError, load
from slotkeeper.units import Address, base_of

USUAL_ADMIN: Final = "http://127.0.0.1:9090"
UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
END: Final = "-----END CERTIFICATE-----"
ANSWER_SECONDS: Final = 10.0  # for what is answered at once


class AskedError(Exception):
    """It cannot be done, and the text says why. Exit code 1."""


class AdminClient:
    """The admin port of a running sidecar. Every call raises AskedError."""

    def __init__(self, client: httpx.AsyncClient, advice: str) -> None:
        """`advice`: what to do when no sidecar answers."""
        self.client = client
        self._advice = advice

    async def get(self, path: str, **params: str | int) -> Any:
        """The document at `path`."""
        return await self.asked("GET", path, **params)

    async def asked(self, method: str, path: str, *, json: Any = None, **params: str | int) -> Any:
        try:
            answer = await self.client.request(method, path, params=params, json=json)
        except httpx.HTTPError as error:
            raise self.unreached(error) from error
        if not answer.is_success:
            raise refusal(answer)
        try:
            return answer.json()
        except ValueError:
            raise strange(answer) from None

    def unreached(self, error: httpx.HTTPError) -> AskedError:
        base = str(self.client.base_url).rstrip("/")
        if UNTRUSTED in str(error):
            return AskedError(
                f"{base} cannot be trusted: {error}. Name the certificate that signed its own by --admin-ca."
            )
        if isinstance(error, httpx.ConnectError):
            return AskedError(f"no sidecar answers at {base}. {self._advice}")
        return AskedError(f"{base} broke off: {error or type(error).__name__}")


def refusal(answer: httpx.Response) -> AskedError:
    """Of our own admin port it is a sentence."""
    try:
        said = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        said = None
    if not isinstance(said, str):
        return strange(answer)
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        return AskedError(
            f"{said}. Give the sidecar's --admin-token, by that flag or SLOTKEEPER_ADMIN_TOKEN."
        )
    return AskedError(said)


def strange(answer: httpx.Response) -> AskedError:
    """No admin port answers like this; the data port does, for its engine."""
    return AskedError(
        f"{answer.url} is not on the admin port of a sidecar (it answers {answer.status_code}). "
        f"Name the address of --admin-listen by --admin, such as {USUAL_ADMIN}."
    )


def trusting(path: Path, *, itself: bool = False) -> ssl.SSLContext:
    """Certificates signed by those of this file; `itself`: the first one there, whatever it is called.

    Raises UsageError.
    """
    try:
        context = ssl.create_default_context()
        if itself:  # our own, of this machine: the name in it is the one that others use
            text = path.read_text("ascii")
            context = ssl.create_default_context(cadata=text[: text.index(END) + len(END)])
            context.check_hostname = False
        else:
            context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be used as a certificate: {error}") from None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


@asynccontextmanager
async def admin_port(
    url: str | None,
    token: str | None,
    advice: str = "Name its admin port by --admin.",
    *,
    ca: Path | None = None,
) -> AsyncIterator[AdminClient]:
    """Of what is not given, what the sidecar's own variables say (SLOTKEEPER_ADMIN_LISTEN and others).

    `ca`: certificates that are trusted beside those of the system.
    """
    settings = load({"admin_token": token} if token else {}).settings
    verify = trusting(ca) if ca else True
    if url is None:
        url = f"{settings.scheme}://{Address.parse(settings.admin_listen).reached}"
        if settings.tls_cert and not ca:
            verify = trusting(settings.tls_cert, itself=True)
    else:
        try:
            url = base_of(url)
        except ValueError as error:
            raise UsageError(f"--admin: {error}") from None
    key = settings.admin_token
    headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=ANSWER_SECONDS, verify=verify
    ) as client:
        yield AdminClient(client, advice)
