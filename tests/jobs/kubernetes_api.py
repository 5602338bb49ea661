"""A server that speaks the parts of the Kubernetes API that are used. It keeps objects; tests change their status."""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_PATH = re.compile(r"/(?:api/v1|apis/batch/v1)/namespaces/(\w+)/(\w+)(?:/([\w.-]+))?(/log)?")
_INDEX = "batch.kubernetes.io/job-completion-index"


class KubernetesApi:
    """Serves on loopback while it is entered.

    Attributes:
        objects: by kind, such as "jobs", and name.
        requests: method, path and query of each one.
        refusals: status and message for a method and a kind that are to be refused.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, dict[str, Any]]] = {}
        self.requests: list[tuple[str, str, dict[str, list[str]]]] = []
        self.refusals: dict[tuple[str, str], tuple[int, str]] = {}
        # What each pod prints, piece by piece; None: it goes on.
        self.output: dict[str, list[bytes | None]] = {}
        # Whether a follower is cut off, as by a proxy that finds it idle.
        self.drops_streams = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True

    def __enter__(self) -> KubernetesApi:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for pieces in self.output.values():
            pieces[:] = [piece for piece in pieces if piece is not None]
        self._server.shutdown()
        self._server.server_close()

    def configure(self, path: Path) -> None:
        """Writes a kubeconfig for this server."""
        port = self._server.server_address[1]
        context = {"name": "lab", "context": {"cluster": "lab", "user": "me", "namespace": "research"}}
        config = {
            **{"apiVersion": "v1", "kind": "Config", "current-context": "lab", "contexts": [context]},
            "clusters": [{"name": "lab", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "me", "user": {"token": "t"}}],
        }
        path.write_text(json.dumps(config))

    def add_pod(self, job: str, index: int, phase: str, output: list[bytes | None] | None = None, **status: Any) -> str:
        """A pod of a job, as its controller makes them."""
        name = f"{job}-{index}-{uuid.uuid4().hex[:5]}"
        pods = self.objects.setdefault("pods", {})
        pods[name] = {
            "metadata": {
                **{"name": name, "uid": uuid.uuid4().hex, "labels": {"app.kubernetes.io/instance": job}},
                **{"annotations": {_INDEX: str(index)}, "creationTimestamp": f"2026-11-22T10:00:{len(pods):02}Z"},
            },
            "status": {"phase": phase, **status},
        }
        self.output[name] = output or []
        return name


def _handler(api: KubernetesApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: object) -> None:
            pass

        def _act(self) -> None:
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            api.requests.append((self.command, url.path, query))
            match = _PATH.fullmatch(url.path)
            assert match is not None, url.path
            _, kind, name, log = match.groups()
            found = api.objects.setdefault(kind, {})
            if (self.command, kind) in api.refusals:
                code, message = api.refusals[self.command, kind]
                self._answer(code, {"kind": "Status", "message": message})
            elif self.command == "POST":
                made = dict(body)
                name = made["metadata"]["name"]
                if name in found:
                    self._answer(409, {"kind": "Status", "message": f'{kind} "{name}" already exists'})
                    return
                made["metadata"] = {**made["metadata"], "uid": uuid.uuid4().hex}
                found[name] = {**made, "status": {}}
                self._answer(201, found[name])
            elif name is not None and name not in found:
                self._answer(404, {"kind": "Status", "message": f'{kind} "{name}" not found'})
            elif log:
                self._stream(api.output[name], follow=query.get("follow") in (["True"], ["true"]))
            elif self.command == "DELETE":
                del found[name]
                self._answer(200, {"kind": "Status", "status": "Success"})
            elif name is None:
                wanted = query.get("labelSelector", ["="])[0].partition("=")[2]
                labels = (one["metadata"]["labels"].get("app.kubernetes.io/instance") for one in found.values())
                items = [one for one, label in zip(found.values(), labels, strict=True) if label == wanted]
                self._answer(200, {"kind": "PodList", "apiVersion": "v1", "items": items})
            else:
                self._answer(200, found[name])

        do_GET = do_POST = do_DELETE = _act

        def _answer(self, code: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, pieces: list[bytes | None], follow: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            sent = 0
            while sent < len(pieces):
                piece = pieces[sent]
                if piece is None:
                    if not follow or api.drops_streams:
                        break
                    time.sleep(0.02)
                    continue
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                self.wfile.flush()
                sent += 1
            self.wfile.write(b"0\r\n\r\n")

    return Handler
