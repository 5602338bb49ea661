"""A client for the simple repository API of Python package indexes, JSON (PEP 691) and HTML (PEP 503)."""

from __future__ import annotations

import base64
import json
import re
import ssl
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from pip_settings import PipSettings

ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
TIMEOUT = 60.0


@dataclass(frozen=True)
class Wheel:
    """One pure-Python wheel that an index offers."""

    filename: str
    url: str
    sha256: str
    requires_python: str

    @property
    def release(self) -> tuple[int, ...] | None:
        """The version as numbers; None for pre-releases and whatever else is no final release."""
        version = self.filename.split("-")[1]
        return numbers(version) if re.fullmatch(r"\d+(\.\d+)*", version) else None


class PackageIndex:
    """A package index, reached in the way that `settings` say.

    Example:
        >>> wheels = PackageIndex(PipSettings()).wheels("pip")  # doctest: +SKIP
    """

    def __init__(self, settings: PipSettings) -> None:
        self._settings = settings

    def wheels(self, project: str) -> list[Wheel]:
        """The pure-Python wheels of `project` that come with a sha256.

        Raises:
            OSError: The index cannot be reached or does not know the project.
            ValueError: The answer is not a page of the simple repository API.
        """
        url = self._settings.project_url(project)
        if url.startswith("file:"):
            url += "index.html"
        content_type, final_url, body = self._get(url)
        text = body.decode()
        return parse_json(text, final_url) if content_type.endswith("json") else parse_html(text, final_url)

    def download(self, wheel: Wheel) -> bytes:
        """The content of `wheel`.

        Raises:
            OSError: The file cannot be fetched.
        """
        return self._get(wheel.url)[2]

    def _get(self, url: str) -> tuple[str, str, bytes]:
        plain_url, headers = split_credentials(url, self._settings.index_url)
        request = urllib.request.Request(plain_url, headers={"Accept": ACCEPT, **headers})
        with self._opener(plain_url).open(request, timeout=TIMEOUT) as answer:
            return answer.headers.get_content_type(), answer.geturl(), answer.read()

    def _opener(self, url: str) -> urllib.request.OpenerDirector:
        parts = urlsplit(url)
        context = ssl.create_default_context(cafile=self._settings.cert)
        if self._settings.trusts(parts.hostname or "", parts.port):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
        if self._settings.proxy:
            handlers.append(urllib.request.ProxyHandler({"http": self._settings.proxy, "https": self._settings.proxy}))
        return urllib.request.build_opener(*handlers)


def parse_json(text: str, base_url: str) -> list[Wheel]:
    """The wheels of a PEP 691 page.

    Args:
        text: The page.
        base_url: Its address, which relative links start from.

    Raises:
        ValueError: The text is not JSON of that form.
    """
    try:
        files = json.loads(text)["files"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{base_url} is not a page of a package index: it has no list of files") from error
    found = (
        _wheel(urljoin(base_url, file["url"]), file["hashes"].get("sha256"), file.get("requires-python"))
        for file in files
        if not file.get("yanked")
    )
    return [wheel for wheel in found if wheel is not None]


def parse_html(text: str, base_url: str) -> list[Wheel]:
    """The wheels of a PEP 503 page.

    Args:
        text: The page.
        base_url: Its address, which relative links start from.
    """
    parser = _Links()
    parser.feed(text)
    wheels = []
    for link in parser.links:
        url, fragment = urldefrag(urljoin(base_url, link.get("href") or ""))
        name, _, digest = fragment.partition("=")
        wheel = _wheel(url, digest if name == "sha256" else None, link.get("data-requires-python"))
        if wheel is not None and "data-yanked" not in link:
            wheels.append(wheel)
    return wheels


def newest_wheel(wheels: Iterable[Wheel], python: tuple[int, int]) -> Wheel | None:
    """The wheel of the newest final release that supports `python`; None when there is none.

    Example:
        >>> newest_wheel([], (3, 11)) is None
        True
    """
    usable = [wheel for wheel in wheels if wheel.release is not None and supports(wheel.requires_python, python)]
    return max(usable, key=lambda wheel: wheel.release or (), default=None)


def supports(requires_python: str, python: tuple[int, int]) -> bool:
    """Whether a Requires-Python clause admits a minor version of Python.

    Example:
        >>> supports(">=3.10, !=3.12.*", (3, 11)), supports(">=3.10, !=3.12.*", (3, 12))
        (True, False)
    """
    return all(_admits(clause.strip(), python) for clause in requires_python.split(",") if clause.strip())


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a dotted version; a trailing `.*` is left out.

    Example:
        >>> numbers("26.3")
        (26, 3)
    """
    return tuple(int(part) for part in re.findall(r"\d+", version))


def split_credentials(url: str, index_url: str) -> tuple[str, dict[str, str]]:
    """Moves user name and password out of an address into the header that HTTP has for them.

    A link to the index's own host gets the index's credentials, as private indexes serve their files from there.
    """
    parts, index = urlsplit(url), urlsplit(index_url)
    host = parts.netloc.rpartition("@")[2]
    owner = parts if "@" in parts.netloc else index
    if "@" not in owner.netloc or owner.netloc.rpartition("@")[2] != host:
        return url, {}
    token = base64.b64encode(f"{unquote(owner.username or '')}:{unquote(owner.password or '')}".encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {token}"}


class _Links(HTMLParser):
    """Collects the attributes of every link of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links.append(dict(attrs))


def _wheel(url: str, sha256: str | None, requires_python: str | None) -> Wheel | None:
    filename = unquote(urlsplit(url).path.rpartition("/")[2])
    if sha256 is None or not re.fullmatch(r"[^-]+-[^-]+(-\d[^-]*)?-(py2\.)?py3-none-any\.whl", filename):
        return None
    return Wheel(filename, url, sha256, requires_python or "")


def _admits(clause: str, python: tuple[int, int]) -> bool:
    match = re.fullmatch(r"(~=|===?|!=|<=|>=|<|>)\s*(.+)", clause)
    if match is None:
        return False
    operator, bound = match.group(1), numbers(match.group(2))
    # Bounds on the micro version are of no interest here: pip itself checks its Python when it installs.
    shared = min(len(bound), 2)
    here, there = python[:shared], bound[:shared]
    if operator == "~=":
        return here >= there and python[: len(bound) - 1] == bound[:-1]
    if operator in ("==", "==="):
        return here == there
    if operator == "!=":
        return here != there or len(bound) > 2
    if operator == "<":
        return here < there or (here == there and len(bound) > 2 and bound[2] > 0)
    return {">=": here >= there, "<=": here <= there, ">": here > there or len(bound) > 2}[operator]
