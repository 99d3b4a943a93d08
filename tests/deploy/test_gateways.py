"""Each layout of a gateway in docs/scaling.md starts as it is written there, and passes requests on.

Only addresses, ports and folders are replaced by those of this machine. The sidecars are imitations that say
which one answered: tests/fleet puts real ones behind the same configurations.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import cast

import httpx
import pytest
import yaml

from containers import ROOT, Container, Here
from fleet.parts import NGINX_LISTEN, found, started
from pages import shown
from patience import PATIENCE
from slotkeeper.engine.child.launch import free_port

PAGE = "docs/scaling.md"
DOCUMENTED = ("10.0.0.10:8080", "10.0.0.11:8080")  # the sidecars in the examples
TALKS = 24
# For machines whose nginx has none: what all packages of nginx include.
PLAIN_MAIN = "events {}\nhttp { include /etc/nginx/conf.d/*.conf; }\n"


class Sidecar(BaseHTTPRequestHandler):
    """Answers everything with its own port."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = str(cast("HTTPServer", self.server).server_port).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def imitated() -> Iterator[str]:
    """Run an imitation of a sidecar; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Sidecar) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def sidecars() -> Iterator[tuple[str, ...]]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(imitated()) for _ in DOCUMENTED)


def listed(name: str, commands: str, sidecars: Sequence[str]) -> str:
    """Return the text of a file that a block of commands shows, with the addresses of this machine."""
    text = commands.partition(f"$ cat {name}\n")[2].partition("$ ")[0]
    for documented, here in zip(DOCUMENTED, sidecars, strict=True):
        assert documented in text
        text = text.replace(documented, here)
    return text


def checked(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Run the program's own check of its configuration: no error, no warning."""
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\[(?:warn|WARNING|ALERT)", done.stderr), done.stderr


def conversations_stay(url: str, sidecars: Sequence[str]) -> None:
    """A conversation keeps its sidecar, both sidecars get some, and a body passes."""
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:

        def home(talk: int) -> str:
            answer = client.post(
                "/v1/chat/completions", headers={"X-Session-Id": f"s{talk}"}, content=b"x" * 100_000
            )
            assert answer.status_code == 200, answer.text
            return answer.text

        homes = [home(talk) for talk in range(TALKS)]
        assert [home(talk) for talk in range(TALKS)] == homes
        assert set(homes) == {address.rpartition(":")[2] for address in sidecars}


def nginx_folder(etc: Path, scratch: Path) -> Path:
    """Make `etc` what a package installs as /etc/nginx, for a user without rights; return its main file."""
    packaged = Path("/etc/nginx/nginx.conf")
    main = packaged.read_text("utf-8") if packaged.is_file() else PLAIN_MAIN
    assert "include /etc/nginx/conf.d/*.conf;" in main
    of_the_machine = r"^\s*(?:user|pid|error_log|access_log|include /etc/nginx/(?:modules|sites)).*$"
    main = re.sub(of_the_machine, "", main, flags=re.MULTILINE).replace("/etc/nginx", str(etc))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {scratch}/{kind}; " for kind in kinds)
    user = "user root;\n" if os.geteuid() == 0 else ""
    (etc / "conf.d").mkdir(parents=True)
    (etc / "mime.types").write_text("types {}\n", "utf-8")
    (config := etc / "nginx.conf").write_text(
        f"{user}pid {scratch}/nginx.pid;\n{main.replace('http {', f'http {{ access_log off; {places}')}",
        "utf-8",
    )
    return config


def test_nginx_starts_in_the_documented_folder(sidecars, tmp_path):
    commands, port, etc = shown(PAGE, "nginx", "console")[0], free_port(), tmp_path / "nginx"
    config = nginx_folder(etc, tmp_path)
    source, target = re.search(r"^\$ cp (deploy/\S+) (/etc/nginx/\S+)$", commands, re.MULTILINE).groups()
    ours = (ROOT / source).read_text("utf-8")
    assert ours.count(NGINX_LISTEN) == 1
    moved = ours.replace(NGINX_LISTEN, f"listen 127.0.0.1:{port};")
    Path(target.replace("/etc/nginx", str(etc))).write_text(moved, "utf-8")
    assert "$ cp sidecars.conf /etc/nginx/conf.d/\n" in commands
    (etc / "conf.d" / "sidecars.conf").write_text(listed("sidecars.conf", commands, sidecars), "utf-8")

    words = [found("nginx"), "-e", str(tmp_path / "error.log"), "-c", str(config)]
    checked([*words, "-t"], os.environ)
    url = f"http://127.0.0.1:{port}"
    with started([*words, "-g", "daemon off;"], url, tmp_path / "out"):
        conversations_stay(url, sidecars)


def test_haproxy_starts_with_the_documented_command(sidecars, tmp_path):
    commands = shown(PAGE, "HAProxy", "console")[0]
    (tmp_path / "servers.cfg").write_text(listed("servers.cfg", commands, sidecars), "utf-8")
    variable, *words = re.search(r"^\$ (FLEET_BIND=.*)$", commands, re.MULTILINE)[1].split()
    bind = f"127.0.0.1:{free_port()}"
    env = {**os.environ, "FLEET_BIND": bind}
    assert variable == "FLEET_BIND=0.0.0.0:8000"
    config = str(ROOT / "deploy" / "fleet" / "haproxy.cfg")
    words = [word.replace("deploy/fleet/haproxy.cfg", config) for word in words]
    assert config in words
    words[0], words[-1] = found("haproxy"), str(tmp_path / words[-1])
    checked([*words, "-c"], env)
    with started([*words, "-db"], f"http://{bind}", tmp_path / "out", env=env) as url:
        conversations_stay(url, sidecars)


def test_the_gateway_of_compose_starts_with_the_example_of_its_servers(sidecars, tmp_path):
    file = yaml.safe_load((ROOT / "docker" / "compose.fleet.yaml").read_text("utf-8"))
    gateway = file["services"]["gateway"]
    example = (ROOT / "docker" / "servers.cfg.example").read_text("utf-8")
    for address, here in zip(re.findall(r"\d+\.\S+:8080", example), sidecars, strict=True):
        example = example.replace(address, here)
    (servers := tmp_path / "servers.cfg").write_text(example, "utf-8")
    paths = {}
    for volume in gateway["volumes"]:
        source, target, _ = volume.split(":")
        paths[target] = servers if source == "./servers.cfg" else (ROOT / "docker" / source).resolve()
    assert servers in paths.values()
    port = free_port()
    here = Here(paths=paths, programs={"haproxy": (found("haproxy"),)})
    container = Container(command=tuple(gateway["command"]), env=gateway["environment"])
    assert container.env == {"FLEET_BIND": "*:8080"}
    assert gateway["ports"] == ["${FLEET_BIND:-127.0.0.1}:${FLEET_PORT:-8000}:8080"]
    words, env = here.command(container.command), {**os.environ, "FLEET_BIND": f"*:{port}"}
    checked([*words, "-c"], env)
    with started(words, f"http://127.0.0.1:{port}", tmp_path / "out", env=env) as url:
        conversations_stay(url, sidecars)
