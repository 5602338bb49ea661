"""The part of Kubeflow Trainer's controller that hears of the progress, over HTTPS with a certificate of its own."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import trustme

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/train/status"

Answer = Callable[[BaseHTTPRequestHandler], None]


def accept(handler: BaseHTTPRequestHandler) -> None:
    reply(handler, 200, b"{}")


def reply(
    handler: BaseHTTPRequestHandler, code: int, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> None:
    handler.send_response(code)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


class Controller:
    """Listens on this machine until it is closed.

    Args:
        folder: gets the files of a pod: `ca.crt` and `token`.
        answer: what is said to each report.
        port: where to listen; 0: anywhere.
        name: for which the certificate is.

    Attributes:
        heard: headers and body of each report, in their order.
    """

    def __init__(self, folder: Path, answer: Answer = accept, port: int = 0, name: str = "localhost") -> None:
        self.heard: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.answer = answer
        self.ca_cert, self.token = folder / "ca.crt", folder / "token"
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca_cert))
        self.token.write_text("first.token\n")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(name).configure_cert(context)
        controller = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                controller.heard.append(({**self.headers, "path": self.path}, json.loads(body)))
                controller.answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, address: object) -> None:
                pass  # clients that hang up, as they should

        self._server = Server(("127.0.0.1", port), Handler)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        """What the controller sets in a pod."""
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{self.port}{PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self.ca_cert),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.token),
        }

    def wait_for(self, reports: int, deadline: float = 60.0) -> None:
        end = time.monotonic() + deadline
        while len(self.heard) < reports:
            assert time.monotonic() < end, f"{len(self.heard)} of {reports} reports after {deadline} s"
            time.sleep(0.01)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
