"""Checks before a sidecar listens, and what `serve` and `up` print for a person when they listen."""

from __future__ import annotations

import asyncio
import errno
import getpass
import shlex
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final, TextIO
from urllib.parse import urlsplit

from slotkeeper import system
from slotkeeper.addresses import UpstreamsError
from slotkeeper.engine.answers import SAID, Health
from slotkeeper.engine.client import EngineClient
from slotkeeper.engine.managers import recognise
from slotkeeper.engine.nearby import SEE, Nearby, NotChosenError, chosen, look
from slotkeeper.environment import USUAL_ADMIN_LISTEN
from slotkeeper.exchange.connections import Tls, TlsError
from slotkeeper.exchange.keys import KeyList, KeysError
from slotkeeper.observe.log import get_logger
from slotkeeper.settings import Settings
from slotkeeper.store.trouble import Trouble, trouble_in
from slotkeeper.values import Address, UsageError

log = get_logger(__name__)


def greeter(settings: Settings) -> Callable[[str, str], None]:
    """Return the function that gets HOST:PORT of both ports, as bound. It prints only to a terminal."""

    def greet(data: str, admin: str) -> None:
        if out := terminal():
            print(*greeting(data, admin, settings.scheme), sep="\n", file=out, flush=True)

    return greet


def patience_of(settings: Settings) -> Callable[[int], None]:
    """Return the function that says at the first Ctrl-C what a second one does. It prints to a terminal."""

    def say(answers: int) -> None:
        if out := terminal():
            print(ending(answers, settings.drain_timeout), file=out, flush=True)

    return say


def ending(answers: int, seconds: float) -> str:
    """Return the line for a person who pressed Ctrl-C while this many answers run."""
    many = "1 answer gets" if answers == 1 else f"{answers} answers get"
    waits = f"{many} up to {seconds:g} s to finish, then slots" if answers else "Slots"
    return f"Stopping: {waits} are saved. Press Ctrl-C again to stop now."


def terminal() -> TextIO | None:
    """Return standard output or error, whichever is a terminal; None if neither is."""
    return next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)


def greeting(data: str, admin: str, scheme: str = "http") -> list[str]:
    """Return the three lines that tell a person where the sidecar is."""
    agents = f"{scheme}://{Address.parse(data).reached}"
    watched = str(Address.parse(admin).reached)
    where = "" if (watched, scheme) == (USUAL_ADMIN_LISTEN, "http") else f" --admin {scheme}://{watched}"
    return [
        f"Agents:     {agents}/v1 or {agents}, as the client needs; llama-server's web UI is at {agents}/",
        f"Dashboard:  {scheme}://{watched}/",
        f"Next:       slotkeeper why{where}   (the last requests, and why each was computed)",
    ]


# -- checks before a sidecar listens ---------------------------------------------------------------------

FOLDERS: Final = ("slot_dir", "cold_dir", "record")
BELIEVED: Final = FOLDERS[:2]  # the engine gets files from these folders to load
LOOK_SECONDS: Final = 3.0  # an engine silent for longer counts as down, and may come up later
USUAL_PORTS: Final = {"http": 80, "https": 443}

Ip = IPv4Address | IPv6Address


class WrongUpstreamError(Exception):
    """The server at --upstream is not a llama-server. Exit code 1."""


# -- folders -------------------------------------------------------------------------------------------


def try_folders(settings: Settings) -> None:
    """Make missing folders, and write to each. Raises UsageError, with the command that fixes the problem."""
    for name in FOLDERS:
        folder = getattr(settings, name)
        if folder is None:
            continue
        wrong = trouble_with(folder)
        if not wrong and name in BELIEVED and not settings.shared_slot_dir:
            wrong = strangers_in(folder)
        if wrong:
            raise UsageError(f"--{name.replace('_', '-')}: {wrong}")


def try_files(settings: Settings) -> None:
    """Read the files that a sidecar needs. Raises UsageError that says how to fix the problem."""
    if settings.keys_file:
        try:
            KeyList.read(settings.keys_file)
        except KeysError as error:
            raise UsageError(f"--keys-file: {error}") from None
    if settings.upstreams_file:
        try:
            settings.engines()
        except UpstreamsError as error:
            raise UsageError(f"--upstreams-file: {error}") from None
    if settings.tls_key and not settings.tls_cert:
        raise UsageError("--tls-key: it needs its certificate; give that by --tls-cert")
    if settings.tls_cert:
        try:
            Tls(settings.tls_cert, settings.tls_key)
        except TlsError as error:
            raise UsageError(f"--tls-cert: {error}") from None


def strangers_in(folder: Path) -> str:
    """Return which other users could put files into a folder, and what to do; "" if none.

    Root does not count. If we are root, the folder's owner does not count either: it is the engine's user.
    """
    found, us, word = folder.stat(), system.user(), shlex.quote(str(folder))
    if us is None:  # Windows: the access list of the folder decides
        return ""
    unless = f"; or, if all who can reach {folder} may be trusted (a volume of one pod), --shared-slot-dir"
    if us != 0 and found.st_uid not in {0, us}:
        user = shlex.quote(_user())
        return f"{folder} belongs to another user. Fix it: sudo chown {user} {word}{unless}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "every user" if found.st_mode & stat.S_IWOTH else "its group"
        return f"{who} may write to {folder}. Fix it: chmod go-w {word}{unless}"
    return ""


def trouble_with(folder: Path) -> str:
    """Return why a folder cannot be written to, and what to do; "" if it can.

    A full disk is no problem here.
    """
    word = shlex.quote(str(folder))
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
    except FileNotFoundError:
        highest = next((part for part in reversed(folder.absolute().parents) if not part.exists()), None)
        if highest is None:  # as in /proc
            return f"{folder} cannot be made there. Give another one."
        return f"{folder} does not exist, nor does {highest}. Make it: mkdir -p -m 700 {word}"
    except (FileExistsError, NotADirectoryError):
        way = [*reversed(folder.absolute().parents), folder]
        first = next((part for part in way if part.exists() and not part.is_dir()), folder)
        return f"{first} is not a folder. Give another one, or move that away."
    except PermissionError:
        user = shlex.quote(_user())
        return f"{_user()} cannot write to {folder}. Fix it: sudo install -d -m 700 -o {user} {word}"
    except OSError as error:
        if trouble_in(error) is Trouble.DISK_FULL:
            return ""  # work that needs room waits until there is some
        if error.errno == errno.EROFS:
            mend = f"sudo mount -o remount,rw $(df --output=target {word} | tail -1)"
            return f"{folder} is on a read-only file system. Give another one, or mount it writable: {mend}"
        return f"{folder} cannot be used: {error.strerror}"
    return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):  # a user in a container often has no name
        return str(system.user())


# -- engines -------------------------------------------------------------------------------------------


def check_loops(settings: Settings) -> None:
    """Raise UsageError if an engine's address is one of our own. May resolve host names."""
    ports = {"--listen": settings.listen, "--admin-listen": settings.admin_listen}
    for url in (one.base for one in settings.engines()):
        for flag, address in ports.items():
            if leads_to(url, Address.parse(address)):
                raise UsageError(
                    f"--upstream: at {url} Slotkeeper itself listens ({flag} {address}), so requests would "
                    "come back to it. Give the port of llama-server, such as http://127.0.0.1:8081."
                )


def leads_to(url: str, listen: Address) -> bool:
    """Whether a connection to this URL reaches the socket that listens at this address."""
    parts = urlsplit(url)
    port = parts.port or USUAL_PORTS.get(parts.scheme, 0)
    if port != listen.port:
        return False
    there = list(_addresses(listen.host))
    return any(_same(one, other) for one in _addresses(parts.hostname or "") for other in there)


def _same(asked: Ip, bound: Ip) -> bool:
    if bound.is_unspecified:
        return is_of_this_machine(asked)
    return asked == bound or (_is_near(asked) and _is_near(bound))


def _is_near(address: Ip) -> bool:
    """Whether an address is loopback or unspecified: a connection to 0.0.0.0 or :: also reaches loopback."""
    return address.is_loopback or address.is_unspecified


def is_of_this_machine(address: Ip) -> bool:
    """Whether an address belongs to this machine.

    The kernel then uses the address itself as the source of packets to it. Nothing is sent.
    """
    if _is_near(address):
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as plug:
            plug.connect((str(address), 9))
            return ip_address(plug.getsockname()[0]) == address
    except (OSError, ValueError):
        return False


def _addresses(host: str) -> Iterator[Ip]:
    """Yield the addresses of a host name; none if it cannot be resolved now.

    A later connection reports that.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for *_, place in found:
        address = ip_address(str(place[0]).partition("%")[0])
        yield getattr(address, "ipv4_mapped", None) or address


async def found(settings: Settings) -> Settings:
    """Return the settings with the engine of this machine, if `--upstream auto` asks for it; log the choice.

    Raises WrongUpstreamError if none can be used, or several.
    """
    if not settings.searches:
        return settings
    seen = await nearby(settings)
    for one in seen:
        log.info("engine_nearby", url=one.base, use=one.use.value, manager=one.manager and one.manager.name)
    try:
        base = chosen(seen).base
    except NotChosenError as error:
        raise WrongUpstreamError(str(error)) from None
    log.info("upstream_chosen", url=base, why="the only engine of this machine that can be used")
    return settings.found_at(base)


async def nearby(settings: Settings) -> list[Nearby]:
    """Return what `--upstream auto` finds, except at our own ports."""
    own = (Address.parse(settings.listen).port, Address.parse(settings.admin_listen).port)
    return await look(without=own)


async def moved(settings: Settings) -> str | None:
    """Return where the engine of this machine is now; None if there is none, or several."""
    try:
        return chosen(await nearby(settings)).base
    except NotChosenError:
        return None


async def check_engines(settings: Settings) -> None:
    """Raise WrongUpstreamError for a server that answers and is not a llama-server.

    Engines that are down are accepted: they may come up later.
    """
    key = settings.engine_api_key.get_secret_value() if settings.engine_api_key else None
    await asyncio.gather(*(_check_engine(one.base, key) for one in settings.engines()))


async def _check_engine(url: str, key: str | None) -> None:
    async with EngineClient(url, api_key=key) as client:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                health = await client.health()
        except TimeoutError:
            return
    if health.wrong:
        known = await recognise(url) if health is Health.FOREIGN else None
        if known:
            raise WrongUpstreamError(f"{known.sentence(url)} {SEE}")
        raise WrongUpstreamError(f"{url} {SAID[health]}. Give the port of llama-server by --upstream.")
