"""A certificate for localhost, made as docs/trackers.md says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

KIND = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "365")
NAMES = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")


class Certificate(NamedTuple):
    """What clients trust, and the file of the server, which holds the private key too."""

    trusted: Path
    pem: Path


def make_certificate(folder: Path) -> Certificate:
    """Skips the test if there is no openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl on the PATH")
    made = Certificate(folder / "cert.pem", folder / "metrics.pem")
    words = [openssl, *KIND, *NAMES, "-keyout", str(made.pem), "-out", str(made.trusted)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    with made.pem.open("a") as file:
        file.write(made.trusted.read_text())
    made.pem.chmod(0o600)
    return made
