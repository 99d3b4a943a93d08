"""Asking a running sidecar on its admin port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx

from slotkeeper.address import Address, base_of
from slotkeeper.config import UsageError, load

USUAL_ADMIN: Final = "http://127.0.0.1:9090"
ANSWER_SECONDS: Final = 10.0  # for what is answered at once


class AskedError(Exception):
    """It cannot be done, and the text says why. Exit code 1."""


class AdminPort:
    """The admin port of a running sidecar. Every call raises AskedError."""

    def __init__(self, client: httpx.AsyncClient, advice: str) -> None:
        """`advice`: what to do when nobody answers."""
        self.client = client
        self._advice = advice

    async def get(self, path: str, **params: str | int) -> Any:
        """The document at `path`."""
        return await self.asked("GET", path, **params)

    async def asked(self, method: str, path: str, **params: str | int) -> Any:
        try:
            answer = await self.client.request(method, path, params=params)
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


@asynccontextmanager
async def admin_port(
    url: str | None, token: str | None, advice: str = "Name its admin port by --admin."
) -> AsyncIterator[AdminPort]:
    """Of what is not given, what the sidecar's own variables say (SLOTKEEPER_ADMIN_LISTEN, _TOKEN)."""
    settings = load({"admin_token": token} if token else {}).settings
    if url is None:
        url = f"http://{Address.parse(settings.admin_listen).reached}"
    else:
        try:
            url = base_of(url)
        except ValueError as error:
            raise UsageError(f"--admin: {error}") from None
    key = settings.admin_token
    headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_SECONDS) as client:
        yield AdminPort(client, advice)
