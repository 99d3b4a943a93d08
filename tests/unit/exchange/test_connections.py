"""The client address of a connection, and the number of descriptors for clients."""

from __future__ import annotations

import resource
from ipaddress import ip_network

import pytest
from aiohttp.test_utils import make_mocked_request

from slotkeeper.exchange.connections import (
    DESCRIPTORS,
    LEAST,
    RESERVE,
    asker,
    room_for,
    site_of,
)
from slotkeeper.system import raise_descriptors


@pytest.mark.parametrize(
    ("peer", "site"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::"),
        ("", "?"),
        (None, "?"),
    ],
)
def test_an_ipv6_address_is_grouped_by_its_network(peer, site):
    assert site_of(peer) == site


@pytest.mark.parametrize(
    ("most", "descriptors", "room"),
    [(8192, 65536, 8192), (8192, 1024, 1024 - RESERVE), (8192, 64, LEAST), (4, 64, 4), (10, 65536, 10)],
)
def test_file_descriptors_are_reserved_for_uses_besides_clients(most, descriptors, room):
    assert room_for(most, descriptors) == room


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, DESCRIPTORS),
        (1024, 10**9, DESCRIPTORS),
        (4096, 4096, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_is_useful(monkeypatch, soft, hard, wanted):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert raise_descriptors(DESCRIPTORS) == (wanted or min(DESCRIPTORS, hard if hard > 0 else DESCRIPTORS))
    assert asked == ([(wanted, hard)] if wanted else [])


def test_the_old_limit_of_open_files_is_used_if_it_cannot_be_raised(monkeypatch):
    def refuse(*_):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_descriptors(DESCRIPTORS) == 256


@pytest.mark.parametrize(
    ("remote", "forwarded", "client"),
    [
        ("192.0.2.1", None, "192.0.2.1"),
        ("192.0.2.1", "198.51.100.1", "192.0.2.1"),  # not trusted: its header is ignored
        ("10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "203.0.113.9, 198.51.100.1, 10.0.0.2", "198.51.100.1"),  # earlier ones are only claimed
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "10.0.0.3", "10.0.0.3"),
        ("10.0.0.1", "no: address", "no: address"),
    ],
)
def test_the_client_address_is_taken_only_from_trusted_proxies(remote, forwarded, client):
    headers = {} if forwarded is None else {"X-Forwarded-For": forwarded}
    request = make_mocked_request("GET", "/", headers=headers).clone(remote=remote)
    assert asker(request, [ip_network("10.0.0.0/8")]) == client
