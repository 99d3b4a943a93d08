"""Self-signed certificates for tests of TLS."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from programs import program


@dataclass(frozen=True, slots=True)
class Certificate:
    cert: Path
    key: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key))


def certificate(folder: Path, name: str = "localhost", *more: str) -> Certificate:
    """Make a certificate for 127.0.0.1 and localhost; `name` distinguishes its files from others."""
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "2", "-addext"]
    words += ["subjectAltName=IP:127.0.0.1,DNS:localhost", "-subj", f"/CN={name}", *(more or ("-noenc",))]
    files = ("-out", str(made.cert), "-keyout", str(made.key))
    subprocess.run([program("openssl"), *words, *files], check=True, capture_output=True)
    return made
