"""The part of pip's configuration that is needed to fetch pip itself, read the way pip reads it."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

DEFAULT_INDEX_URL = "https://pypi.org/simple"


@dataclass(frozen=True)
class PipSettings:
    """Where the package index is and how to reach it.

    Example:
        >>> PipSettings().project_url("pip")
        'https://pypi.org/simple/pip/'
    """

    index_url: str = DEFAULT_INDEX_URL
    cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()

    @property
    def public_index_url(self) -> str:
        """The index address without user name and password, fit for printing."""
        parts = urlsplit(self.index_url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    def project_url(self, project: str) -> str:
        """The address of the page that lists the files of `project`."""
        return f"{self.index_url.rstrip('/')}/{project}/"

    def trusts(self, host: str, port: int | None) -> bool:
        """Whether the user told pip to skip the certificate check for this host."""
        return host in self.trusted_hosts or f"{host}:{port}" in self.trusted_hosts


def config_files(env: Mapping[str, str], home: Path) -> list[Path]:
    """pip's configuration files; a later one overrides an earlier one.

    Args:
        env: The environment variables.
        home: The user's home folder.
    """
    chosen = env.get("PIP_CONFIG_FILE")
    if chosen == "/dev/null":
        return []
    system = [
        Path(folder) / "pip" / "pip.conf" for folder in env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if folder
    ]
    user = Path(env.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    files = [*system, Path("/etc/pip.conf"), home / ".pip" / "pip.conf", user]
    return [*files, Path(chosen)] if chosen else files


def read_settings(env: Mapping[str, str], home: Path) -> PipSettings:
    """Reads pip's settings: environment variables first, then its configuration files, then pip's defaults.

    Args:
        env: The environment variables.
        home: The user's home folder.

    Example:
        >>> env = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://index/simple"}
        >>> read_settings(env, Path.home()).index_url
        'http://index/simple'
    """
    # pip takes values literally: no interpolation of per cent signs, which addresses may well hold.
    parser = configparser.RawConfigParser(strict=False)
    parser.read(config_files(env, home))

    def value(name: str) -> str | None:
        text = env.get("PIP_" + name.upper().replace("-", "_"))
        # `[install]` is more specific than `[global]`, and fetching pip is an installation.
        for section in ("install", "global"):
            text = text or parser.get(section, name, fallback=None)
        return text

    return PipSettings(
        index_url=(value("index-url") or DEFAULT_INDEX_URL).strip(),
        cert=value("cert"),
        proxy=value("proxy"),
        trusted_hosts=tuple((value("trusted-host") or "").split()),
    )
