"""Where the browser is that runs in the sandbox."""

from __future__ import annotations

import os

from asyncrl.errors import ConfigError

#: Programs themselves, not the scripts that start them: those of Debian and Google. The first one starts in a quarter
#: of the time of the others.
BINARIES = ("/usr/lib/chromium/chromium-headless-shell", "/usr/lib/chromium/chromium", "/opt/google/chrome/chrome")
FONTS = ("/etc/fonts", "/usr/share/fonts")  # without any, no page can be laid out


def find_chromium() -> str:
    """Raises `sandbox.unavailable`."""
    for place in BINARIES:
        if os.access(place, os.X_OK):
            return place
    raise ConfigError(
        "sandbox.unavailable",
        f"there is no browser: none of {', '.join(BINARIES)}",
        remedy="apt-get install chromium-headless-shell",
    )
