"""The client of a running sidecar's admin port, and the commands `health`, `drain` and `undrain`.

It reads the variables that name the port without `Settings`, whose import takes longer than the request.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from slotkeeper.environment import PREFIX, USUAL_ADMIN_LISTEN, check_names, some_variables
from slotkeeper.values import Address, UsageError, base_of

USUAL_ADMIN: Final = f"http://{USUAL_ADMIN_LISTEN}"
OWN: Final = ("admin_listen", "admin_host", "admin_token", "tls_cert")  # settings of the admin port
UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
END: Final = "-----END CERTIFICATE-----"
ANSWER_SECONDS: Final = 10.0  # for requests that the admin port answers at once


class AskedError(Exception):
    """A request to a sidecar failed; the message says why. Exit code 1."""


class AdminClient:
    """A connection to the admin port of a running sidecar. Each call raises AskedError if it fails."""

    def __init__(self, client: httpx.AsyncClient, advice: str) -> None:
        """`advice`: a sentence that says what to do when no sidecar answers."""
        self.client = client
        self._advice = advice

    async def get(self, path: str, **params: str | int) -> Any:
        """Return the document at `path`."""
        return await self.asked("GET", path, **params)

    async def asked(self, method: str, path: str, *, json: Any = None, **params: str | int) -> Any:
        """Send a request and return the document in its answer."""
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
        """Return the error for a request that got no answer."""
        base = str(self.client.base_url).rstrip("/")
        if UNTRUSTED in str(error):
            return AskedError(
                f"{base} cannot be trusted: {error}. Give the certificate that signed its own by --admin-ca."
            )
        if isinstance(error, httpx.ConnectError):
            return AskedError(f"no sidecar answers at {base}. {self._advice}")
        return AskedError(f"the connection to {base} broke off: {error or type(error).__name__}")


def refusal(answer: httpx.Response) -> AskedError:
    """Return the error that an answer describes. Our own admin port describes it in one sentence."""
    try:
        message = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        message = None
    if not isinstance(message, str):
        return strange(answer)
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        return AskedError(
            f"{message}. Give the sidecar's admin token by --admin-token or SLOTKEEPER_ADMIN_TOKEN."
        )
    return AskedError(message)


def strange(answer: httpx.Response) -> AskedError:
    """Return the error for an answer that no admin port gives.

    A data port gives such answers: it passes requests on to its engine.
    """
    return AskedError(
        f"{answer.url} is not on the admin port of a sidecar (it answers {answer.status_code}). "
        f"Give the address of --admin-listen by --admin, such as {USUAL_ADMIN}."
    )


def trusting(path: Path, *, itself: bool = False) -> ssl.SSLContext:
    """Return a TLS context that trusts certificates signed by those in a file.

    `itself`: it trusts the first certificate of the file itself, under any host name. Raises UsageError.
    """
    try:
        context = ssl.create_default_context()
        if itself:  # the sidecar's own certificate names the host as other machines do, not loopback
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
    advice: str = "Give its admin port by --admin.",
    *,
    ca: Path | None = None,
    probes: bool = False,
) -> AsyncIterator[AdminClient]:
    """Connect to an admin port. Values not given come from the sidecar's variables (SLOTKEEPER_ADMIN_*).

    `ca`: certificates that are trusted in addition to the system's. `probes`: only routes that need no token
    are asked, so none is sent. Raises UsageError.
    """
    cert = None
    if url is None:
        url, cert = _of_this_machine()
    else:
        try:
            url = base_of(url)
        except ValueError as error:
            raise UsageError(f"--admin: {error}") from None
    verify: ssl.SSLContext | bool = True
    if ca:
        verify = trusting(ca)
    elif cert:
        verify = trusting(cert, itself=True)
    if not token and not probes:
        token = from_environment("admin_token").get("admin_token")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=ANSWER_SECONDS, verify=verify
    ) as client:
        yield AdminClient(client, advice)


def from_environment(*names: str) -> dict[str, str]:
    """Return some settings as the environment has them. The other variables are not checked.

    Raises UsageError for a misspelt variable or an unreadable file.
    """
    try:
        check_names(names, OWN)
    except UsageError:  # but another setting may be meant that the variable resembles more
        from slotkeeper.settings import Settings  # noqa: PLC0415 - takes long, and is seldom needed

        check_names(names, Settings.model_fields)
    return some_variables(*names)


def _of_this_machine() -> tuple[str, Path | None]:
    """Return the URL of the admin port that the sidecar's variables set, and its certificate with TLS."""
    found = from_environment("admin_listen", "tls_cert")
    listen, cert = found.get("admin_listen", USUAL_ADMIN_LISTEN), found.get("tls_cert")
    try:
        address = Address.parse(listen).reached
    except ValueError as error:
        raise UsageError(f"{PREFIX}ADMIN_LISTEN: {error}") from None
    return f"{'https' if cert else 'http'}://{address}", Path(cert) if cert else None


# -- `health` --------------------------------------------------------------------------------------------

EXAMINE: Final = "`slotkeeper doctor --upstream URL` examines an engine."


async def health(*, admin: str | None, live: bool, ca: Path | None = None) -> int:
    """Return 0 if the sidecar is ready; else print why not on standard error and return 1.

    `live`: only ask whether its process is alive. Probes need no token.
    """
    async with admin_port(admin, None, ca=ca, probes=True) as port:
        try:
            answer = await port.client.get("/livez" if live else "/readyz")
        except httpx.HTTPError as error:
            return _failed("health", str(port.unreached(error)))
    if not answer.headers.get("Content-Type", "").startswith("text/plain"):
        return _failed("health", str(strange(answer)))
    if answer.is_success:
        return 0
    reason = answer.text.strip()
    return _failed("health", f"{reason}. {EXAMINE}" if reason.startswith("no engine") else reason)


# -- `drain` and `undrain`: take an engine out of use, and back ------------------------------------------

LOOK_SECONDS: Final = 0.5  # between two requests for the state of an engine that is being drained


async def drain(name: str, *, admin: str | None, token: str | None, ca: Path | None, wait: bool) -> int:
    """Drain an engine; with `wait`, wait until nothing runs there any more. Returns the exit code."""
    try:
        async with admin_port(admin, token, ca=ca) as port:
            engine = await port.asked("POST", "/api/drain", json={"engine": name})
            if not engine["drained"] and wait:
                print(f"{engine['engine']} is draining: it gets no new requests; running answers end.")  # noqa: T201
                engine = await _drained(port, engine["engine"])
    except AskedError as error:
        return _failed("drain", error)
    print(_drain_state(engine))  # noqa: T201
    return 0


async def undrain(name: str, *, admin: str | None, token: str | None, ca: Path | None) -> int:
    """Use a drained engine again. Returns the exit code."""
    try:
        async with admin_port(admin, token, ca=ca) as port:
            engine = await port.asked("POST", "/api/undrain", json={"engine": name})
    except AskedError as error:
        return _failed("undrain", error)
    print(f"{engine['engine']} is in use again.")  # noqa: T201
    return 0


async def _drained(port: AdminClient, name: str) -> dict[str, Any]:
    """Wait until an engine is drained, and return its state.

    Raises AskedError if it is undrained or removed meanwhile.
    """
    while True:
        engines = (await port.get("/api/state"))["engines"]
        engine: dict[str, Any] | None = next((one for one in engines if one["engine"] == name), None)
        if engine is None or not engine["draining"]:
            raise AskedError(f"{name} is not being drained any more.")
        if engine["drained"]:
            return engine
        await asyncio.sleep(LOOK_SECONDS)


def _drain_state(engine: dict[str, Any]) -> str:
    name = engine["engine"]
    if not engine["drained"]:
        return f"{name} is draining; `slotkeeper top` shows when it is drained."
    return f"{name} is drained: nothing runs there, and with snapshots, what its slots held is saved."


def _failed(command: str, why: str | AskedError) -> int:
    from slotkeeper.observe.standard_error import complain  # noqa: PLC0415 - its counter takes long to load

    complain(command, why)
    return 1
