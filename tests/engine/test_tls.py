"""TLS on both ports, with real clients and a real engine."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import warnings
from contextlib import AsyncExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from certificates import Certificate, certificate
from chaos.conftest import settings
from chaos.raw import dial, until, until_async
from commands.process import NOBODY, ended, serving
from engine.conftest import wait_until
from patience import PATIENCE
from slotkeeper.app import Sidecar, running
from slotkeeper.bench.lab import ready
from slotkeeper.exchange.connections import Tls, TlsError

ASK = {"prompt": "The heron stood in the reeds.", "n_predict": 8}
WORDS = "The heron stood in the reeds and counted the frogs of the pond. " * 20_000


@pytest.fixture
def own(tmp_path: Path) -> Certificate:
    return certificate(tmp_path)


def trusting(own: Certificate) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(own.cert))


def shown_by(address: str) -> bytes:
    """Return the certificate of the server at this address."""
    host, _, port = address.rpartition(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)), timeout=PATIENCE))


def in_file(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def cut(sidecar: Sidecar, reason: str) -> float:
    name = "slotkeeper_connections_cut_total"
    return sidecar.metrics.registry.get_sample_value(name, {"reason": reason}) or 0


def tls_settings(engine: Any, own: Certificate, **more: Any) -> Any:
    return settings(engine.base, tls_cert=own.cert, tls_key=own.key, drain_timeout=1.0, **more)


async def test_both_ports_serve_tls_and_answers_equal_the_engines(engine, own):
    async with running(tls_settings(engine, own)) as sidecar:
        await ready(sidecar)
        data, admin = (f"https://{address}" for address in sidecar.addresses)
        async with httpx.AsyncClient(verify=trusting(own), timeout=PATIENCE) as client:
            answer = await client.post(f"{data}/completion", json=ASK)
            assert answer.status_code == 200
            assert "x-slotkeeper-slot" in answer.headers
            async with client.stream("POST", f"{data}/completion", json={**ASK, "stream": True}) as stream:
                assert b'"stop":true' in await stream.aread()
            large = {"content": WORDS, "with_pieces": True}  # 1.3 MB there, some ten back
            ours = await client.post(f"{data}/tokenize", json=large)
            assert ours.content == (await client.post(f"{engine.base}/tokenize", json=large)).content
            assert len(ours.content) > 2**22
            state = (await client.get(f"{admin}/api/state")).json()
            assert state["data_port"]["scheme"] == "https"
        async with httpx.AsyncClient(timeout=PATIENCE) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"{data}/health")
            with pytest.raises(httpx.TransportError):
                await stranger.get(data.replace("https", "http") + "/health")
        await until(lambda: cut(sidecar, "handshake") == 2, "both were counted")


def test_clients_with_tls_1_1_are_refused(own):
    with serving("--upstream", NOBODY, *own.flags, scheme="https") as (_, data, admin):
        for address in (data, admin):
            host, _, port = address.rpartition(":")
            for most, refused in ((ssl.TLSVersion.TLSv1_1, True), (ssl.TLSVersion.TLSv1_2, False)):
                context = trusting(own)
                context.set_ciphers("DEFAULT@SECLEVEL=0")  # else this client itself would not offer 1.1
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, most
                with socket.create_connection((host, int(port)), timeout=PATIENCE) as plug:
                    said = (  # the connection may end before the alert has passed
                        pytest.raises(ssl.SSLError, match=r"ALERT_PROTOCOL_VERSION|UNEXPECTED_EOF")
                        if refused
                        else nullcontext()
                    )
                    with said, context.wrap_socket(plug, server_hostname=host) as wrapped:
                        assert wrapped.version() == "TLSv1.2"


def test_an_engine_with_https_is_used_only_if_its_certificate_is_trusted(engine, own, tmp_path):
    """Another sidecar with TLS stands for the engine: not every build of llama-server has it."""
    other = certificate(tmp_path, "other")
    with serving("--upstream", engine.base, *own.flags, scheme="https") as (_, behind, _):
        words = ("--upstream", f"https://{behind}", "--engine-wait", "0")
        for trusted, used in ((own, True), (other, False)):
            with serving(*words, more={"SSL_CERT_FILE": str(trusted.cert)}) as (_, data, _):
                with httpx.Client(base_url=f"http://{data}", timeout=PATIENCE) as client:
                    if used:
                        wait_until(lambda: client.get("/health").is_success)
                    assert client.post("/completion", json=ASK).is_success == used


async def test_a_request_in_the_same_segment_as_the_end_of_the_handshake_is_answered(engine, own):
    """In one segment with it, so that it arrives before any code waits for it."""
    async with running(tls_settings(engine, own)) as sidecar:
        await ready(sidecar)
        coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = trusting(own).wrap_bio(coming, going, server_hostname="localhost")
        async with dial(sidecar.addresses[0]) as wire:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    await wire.send(going.read())
                    coming.write(await wire.reader.read(65536))
            tls.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await wire.send(going.read())
            said = b""
            while b"ok" not in said:
                try:
                    said += tls.read()
                except ssl.SSLWantReadError:
                    piece = await wire.reader.read(65536)
                    assert piece, "it hung up"
                    coming.write(piece)
        assert said.startswith(b"HTTP/1.1 200")


async def served(client: httpx.AsyncClient, url: str) -> bool:
    """Whether a request is answered; on a busy machine its handshake may be late, too."""
    with suppress(httpx.TransportError):
        return (await client.get(f"{url}/health")).status_code == 200
    return False


async def test_unfinished_handshakes_count_as_connections_and_have_a_deadline(engine, own):
    most = 6
    async with running(
        tls_settings(engine, own, max_connections=most, max_connections_per_address=most, head_timeout=1.0)
    ) as sidecar:
        await ready(sidecar)
        connections = sidecar._connections[0]
        async with (
            AsyncExitStack() as stack,
            httpx.AsyncClient(verify=trusting(own), timeout=PATIENCE) as client,
        ):
            wires = [await stack.enter_async_context(dial(sidecar.addresses[0])) for _ in range(most)]
            for wire in wires[: most // 2]:
                await wire.send(b"\x16\x03\x01")  # it begins as TLS does
            await until(lambda: len(connections) == most or cut(sidecar, "handshake"), "all are there")
            async with dial(sidecar.addresses[0]) as refused:
                if not cut(sidecar, "handshake"):
                    assert (await refused.rest())[0] == b""
            await until(lambda: cut(sidecar, "handshake") >= most, "they were cut off")
            await until(lambda: len(connections) == 0, "there is room again")
            await until_async(lambda: served(client, f"https://{sidecar.addresses[0]}"), "it is served")


async def test_shutdown_does_not_wait_for_handshakes(engine, own):
    async with running(tls_settings(engine, own)) as sidecar:
        await ready(sidecar)
        async with dial(sidecar.addresses[0]) as wire:
            await until(lambda: len(sidecar._connections[0]) == 1)
            await sidecar.close()
            assert (await wire.rest())[0] == b""
        assert len(sidecar._connections[0]._handshakes) == 0


def test_a_new_certificate_is_used_at_sighup_and_a_wrong_one_is_not(engine, own, tmp_path):
    """In its own process, on uvloop."""
    other = certificate(tmp_path, "other")
    words = ("--upstream", engine.base, *own.flags)
    with serving(*words, scheme="https") as (process, data, admin):
        kept = httpx.Limits(keepalive_expiry=PATIENCE)  # the client itself closes no connection meanwhile
        with httpx.Client(
            verify=trusting(own), base_url=f"https://{data}", timeout=PATIENCE, limits=kept
        ) as client:
            assert client.post("/completion", json=ASK).status_code == 200
            before = in_file(own.cert)
            assert [shown_by(data), shown_by(admin)] == [before] * 2
            shutil.copy(other.key, own.key)  # it does not fit the certificate
            process.send_signal(signal.SIGHUP)
            assert client.get("/health").status_code == 200
            assert shown_by(data) == before
            shutil.copy(other.cert, own.cert)
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: [shown_by(data), shown_by(admin)] == [in_file(other.cert)] * 2)
            assert client.get("/health").status_code == 200, "open connections stay open"
        assert process.poll() is None


def test_client_commands_work_with_an_admin_port_with_tls(own, tmp_path):
    words = ("--upstream", NOBODY, "--slot-dir", str(tmp_path / "slots"), *own.flags)
    with serving(*words, scheme="https") as (_, _, admin):
        named = ("--admin", f"https://{admin}", "--admin-ca", str(own.cert))
        ours = {"SLOTKEEPER_ADMIN_LISTEN": admin, "SLOTKEEPER_TLS_CERT": str(own.cert)}
        for command in (["health", "--live"], ["why"], ["top", "--once"], ["snapshots", "ls"]):
            done = ended(*command, *named)
            assert done.returncode == 0, (command, done.stderr)
        assert ended("why", env=ours).returncode == 0
        stranger = ended("why", "--admin", f"https://{admin}")
        assert stranger.returncode == 1
        assert "--admin-ca" in stranger.stderr
        wrong = certificate(tmp_path, "wrong")
        assert ended("why", "--admin", f"https://{admin}", "--admin-ca", str(wrong.cert)).returncode == 1
        assert ended("why", env=ours | {"SLOTKEEPER_TLS_CERT": str(wrong.cert)}).returncode == 1


# -- files that cannot be used -------------------------------------------------------------------------


def test_errors_of_certificate_files_name_the_cause(own, tmp_path):
    other, locked = certificate(tmp_path, "other"), certificate(tmp_path, "locked", "-passout", "pass:sesame")
    (empty := tmp_path / "empty.pem").write_text("")
    for cert, key, said in (
        (tmp_path / "none.pem", None, "none.pem: No such file"),
        (own.cert, tmp_path / "none.key", "none.key: No such file"),
        (own.cert, None, "its key"),
        (own.cert, other.key, "KEY_VALUES_MISMATCH"),
        (empty, own.key, "a certificate"),
        (locked.cert, locked.key, "without a password"),
    ):
        with pytest.raises(TlsError, match=said):
            Tls(cert, key)
        words = ("--tls-cert", str(cert), *(("--tls-key", str(key)) if key else ()))
    done = ended("serve", *words)
    assert done.returncode == 2
    assert "--tls-cert" in done.stderr
    assert ended("serve", "--tls-key", str(own.key)).returncode == 2


def test_a_key_may_follow_the_certificate_in_one_file(own, tmp_path):
    (both := tmp_path / "both.pem").write_text(own.cert.read_text() + own.key.read_text())
    assert Tls(both, None).context.minimum_version is ssl.TLSVersion.TLSv1_2
