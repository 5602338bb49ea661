"""A small Google Cloud Storage in this process, for TensorFlow's own gs:// file system in this and other processes.

TensorFlow sends its requests to `www.googleapis.com` by HTTPS, and its HTTP library asks HTTPS_PROXY and
CURL_CA_BUNDLE: the server is that proxy, and answers with a certificate that was made for the test. Nothing of
TensorFlow is replaced.
"""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOSTS = ("www.googleapis.com", "storage.googleapis.com")
_PAGE = 3
_OBJECT = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)")
_LIST = re.compile(r"/storage/v1/b/([^/]+)/o")
_BUCKET = re.compile(r"/storage/v1/b/([^/]+)")


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Makes a certificate for Google's hosts, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = ",".join(f"DNS:{host}" for host in HOSTS)
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=fake-gcs"]
    command += ["-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key


class FakeGcs:
    """The buckets; a context manager.

    Args:
        folder: for the certificate.

    Attributes:
        objects: what is stored, by `bucket/name`.
        requests: each request as `(method, kind, bucket/name)`; kinds are `object`, `list`, `bucket`, `upload`, `data`
            and `read`.
        fault: called with such a request before it is answered; returns a status to answer with, or `None`.
        environment: for the processes that are to use it.
    """

    def __init__(self, folder: Path) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.fault: Callable[[str, str, str], int | None] = lambda method, kind, name: None
        self.lock = threading.Lock()
        self.uploads: dict[str, tuple[str, bytearray]] = {}
        certificate, key = make_certificate(folder)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(certificate, key)
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.store = self
        self.environment = {
            "HTTPS_PROXY": f"http://127.0.0.1:{self._server.server_address[1]}",
            "CURL_CA_BUNDLE": str(certificate),
            "NO_GCE_CHECK": "true",
            "GOOGLE_APPLICATION_CREDENTIALS": "",
            "CLOUDSDK_CONFIG": str(folder),
            # TensorFlow doubles the pause after each failure, ten times.
            "GCS_RETRY_CONFIG_MAX_RETRIES": "1",
            "GCS_RETRY_CONFIG_INIT_DELAY_TIME_US": "1000",
            "GCS_RETRY_CONFIG_MAX_DELAY_TIME_US": "1000",
        }
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> FakeGcs:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)

    def names(self, prefix: str = "") -> list[str]:
        """What is stored below a prefix."""
        with self.lock:
            return sorted(name for name in self.objects if name.startswith(prefix))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    store: FakeGcs

    def handle_error(self, request: object, client_address: object) -> None:
        """A process that was killed leaves its connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.connection = self.server.store.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", buffering=0)
        self.close_connection = False

    def _answer(self, status: int, content: bytes | dict = b"", **headers: str) -> None:
        body = json.dumps(content).encode() if isinstance(content, dict) else content
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _serve(self) -> None:
        store = self.server.store
        body = self._body()
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        kind, name, answer = self._route(url.path, query, body)
        with store.lock:
            store.requests.append((self.command, kind, name))
        status = store.fault(self.command, kind, name)
        if status is not None:
            self._answer(status, {"error": {"code": status, "message": "made by the test"}})
            return
        answer()

    do_GET = do_POST = do_PUT = do_DELETE = _serve

    def _route(self, path: str, query: dict, body: bytes) -> tuple[str, str, Callable[[], None]]:
        unquote = urllib.parse.unquote
        if self.headers["Host"].startswith("storage."):
            name = unquote(path).lstrip("/")
            return "read", name, lambda: self._read(name)
        if path.startswith("/upload/"):
            if "session" in query:
                name = self.server.store.uploads[query["session"]][0]
                return "data", name, lambda: self._take(query["session"], body)
            match = _LIST.fullmatch(path.removeprefix("/upload"))
            name = f"{match[1]}/{query['name']}"
            return "upload", name, lambda: self._begin(name, query, body)
        if match := _OBJECT.fullmatch(path):
            name = f"{match[1]}/{unquote(match[2])}"
            return "object", name, lambda: self._object(name)
        if match := _LIST.fullmatch(path):
            name = f"{match[1]}/{query.get('prefix', '')}"
            return "list", name, lambda: self._list(match[1], query)
        if match := _BUCKET.fullmatch(path):
            return "bucket", match[1], lambda: self._answer(200, {"name": match[1]})
        raise ValueError(f"the test's server does not know {self.command} {path}")

    def _read(self, name: str) -> None:
        content = self.server.store.objects.get(name)
        if content is None:
            self._answer(404)
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if match is None:
            self._answer(200, content)
            return
        part = content[int(match[1]) : int(match[2]) + 1]
        self._answer(206 if part else 416, part)

    def _begin(self, name: str, query: dict, body: bytes) -> None:
        store = self.server.store
        if query["uploadType"] == "media":
            with store.lock:
                store.objects[name] = body
            self._answer(200, {"name": name})
            return
        with store.lock:
            session = str(len(store.uploads))
            store.uploads[session] = (name, bytearray())
        self._answer(200, Location=f"https://{HOSTS[0]}{self.path}&session={session}")

    def _take(self, session: str, body: bytes) -> None:
        """Takes bytes; the object is there once all have come, and not before."""
        store = self.server.store
        name, content = store.uploads[session]
        total = int((self.headers.get("Content-Range") or f"/{len(body)}").rpartition("/")[2])
        content += body
        if len(content) < total:
            self._answer(308, Range=f"bytes=0-{len(content) - 1}")
            return
        with store.lock:
            store.objects[name] = bytes(content)
        self._answer(200, {"name": name})

    def _object(self, name: str) -> None:
        store = self.server.store
        with store.lock:
            content = store.objects.get(name)
            if content is not None and self.command == "DELETE":
                del store.objects[name]
        if content is None:
            self._answer(404)
        elif self.command == "DELETE":
            self._answer(204)
        else:
            fields = {"size": str(len(content)), "generation": "1", "updated": "2026-01-01T00:00:00.000Z"}
            self._answer(200, fields)

    def _list(self, bucket: str, query: dict) -> None:
        """A page of few entries: whoever lists has to ask for the next ones."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        items, prefixes = [], []
        for name in self.server.store.names(f"{bucket}/{prefix}"):
            name = name.removeprefix(f"{bucket}/")
            head, found, _ = name.removeprefix(prefix).partition(delimiter) if delimiter else ("", "", "")
            if found:
                prefixes.append(f"{prefix}{head}{delimiter}")
            else:
                items.append(name)
        entries = [*dict.fromkeys(prefixes), *items]
        begin = int(query.get("pageToken", 0))
        page = entries[begin : begin + min(_PAGE, int(query.get("maxResults", _PAGE)))]
        answer = {"items": [{"name": name} for name in page if name in items]}
        if found := [name for name in page if name not in items]:
            answer["prefixes"] = found
        if begin + len(page) < len(entries):
            answer["nextPageToken"] = str(begin + len(page))
        self._answer(200, answer)
