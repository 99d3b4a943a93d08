"""nginx as a yardstick: a small, widely used reverse proxy, with two kinds of connections to its upstream."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.raw import listening
from slotkeeper.engine.child.launch import free_port

MISSING: Final = "nginx is not installed, so it is left out (Debian, Ubuntu: apt-get install nginx-light)"

# The usual setup for token streams: no buffering. The first server makes a connection for each request, as
# nginx does by default and as the sidecar does; the second keeps connections.
CONFIG: Final = """\
daemon off;
master_process on;
worker_processes 1;
{user}
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_max_body_size 64m;
    client_body_buffer_size 4m;
    client_body_temp_path {folder}/client;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    proxy_buffering off;
    proxy_read_timeout 3600s;
    upstream engine {{ server {upstream}; keepalive 32; }}
    server {{
        listen 127.0.0.1:{plain};
        location / {{ proxy_pass http://{upstream}; }}
    }}
    server {{
        listen 127.0.0.1:{kept};
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
        }}
    }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nginx:
    plain: str  # URL of the server that makes a connection to the engine for each request
    kept: str  # URL of the server that keeps connections to the engine


def find() -> str | None:
    """Return the path of the program. Debian installs it where only root's PATH has it."""
    return shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin")))


@asynccontextmanager
async def nginx(program: str, upstream: str, folder: Path) -> AsyncIterator[Nginx]:
    """Run nginx in front of `upstream` (HOST:PORT), with all its files in `folder`."""
    plain, kept = free_port(), free_port()
    user = "user root;" if os.geteuid() == 0 else ""  # other users cannot read the folder
    config = folder / "nginx.conf"
    config.write_text(
        CONFIG.format(user=user, folder=folder, upstream=upstream, plain=plain, kept=kept), "utf-8"
    )
    process = await asyncio.create_subprocess_exec(program, "-p", str(folder), "-c", str(config))
    try:
        for port in (plain, kept):
            await listening(port)
        yield Nginx(plain=f"http://127.0.0.1:{plain}", kept=f"http://127.0.0.1:{kept}")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
