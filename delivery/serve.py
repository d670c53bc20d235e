"""A page for one model, on this machine: drop an image, see its labels and what spoke for the first."""

from __future__ import annotations

import base64
import html
import io
import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template
from typing import Any

from delivery.calibration import NONE_OF_THESE
from delivery.predict import Predictor, load_predictor, predictions_of
from training.base.errors import UserError

PAGE = Path(__file__).with_name("serve.html")
LARGEST_UPLOAD = 32 * 2**20  # bytes
SECONDS = 30.0  # that a connection may take to send what it has announced
LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
)


class Server(ThreadingHTTPServer):
    """Serves `GET /`, the page, and `POST /predict`, an image's bytes to JSON; nothing else of this machine.

    Attributes:
        predictor: the loaded model.
        names: what a request's Host may be, so that no page of another site reaches this one by a name of its own.
    """

    daemon_threads = True

    def __init__(self, predictor: Predictor, host: str, port: int) -> None:
        """Listen.

        Raises:
            UserError: if that is not possible.
        """
        self.predictor = predictor
        self.one_at_a_time = threading.Lock()
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"cannot listen on {host}:{port} ({error}): give another --host or --port.") from None
        self.names = {host, *(LOOPBACK if host in LOOPBACK else ())}

    @property
    def address(self) -> str:
        """Where the page is."""
        host, port = self.socket.getsockname()[:2]
        return f"http://{host}:{port}/"

    def page(self) -> bytes:
        """Return the page, with the names of the model and of its classes."""
        metadata = self.predictor.metadata
        names = ", ".join(metadata["class_names"][:20]) + (", ..." if len(metadata["class_names"]) > 20 else "")
        facts = {"model": metadata["description"]["model_type"], "classes": str(len(metadata["class_names"]))}
        values = {key: html.escape(value) for key, value in (facts | {"names": names}).items()}
        return Template(PAGE.read_text(encoding="utf-8")).substitute(values).encode()

    def answer(self, content: bytes) -> dict[str, Any]:
        """Return labels with probabilities and the picture of an image, or the reason why it cannot be read."""
        with self.one_at_a_time:
            (found,) = predictions_of(self.predictor, iter([("the image", content)]))
        if found.error:
            return {"error": found.error}
        pairs = zip(found.labels, found.probabilities, strict=True)
        top = [{"label": label, "probability": share} for label, share in pairs]
        return {
            "label": found.label or NONE_OF_THESE,
            "top": top,
            "note": found.note,
            "picture": _data_url(found.picture),
        }


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    timeout = SECONDS
    server_version, sys_version = "zerovision", ""

    def do_GET(self) -> None:
        """Send the page."""
        if not self._is_meant_for_this():
            return
        if self.path.partition("?")[0] != "/":
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "there is only / and /predict here"})
            return
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page())

    def do_POST(self) -> None:
        """Predict the image that is the request's body."""
        if not self._is_meant_for_this():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/predict":
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "there is only / and /predict here"})
        elif not length.isdecimal() or not 0 < int(length[:20]) <= LARGEST_UPLOAD:
            reason = f"an image of up to {LARGEST_UPLOAD >> 20} MB is expected, with its Content-Length"
            self._send_json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": reason})
        else:
            try:
                content = self.rfile.read(int(length))
            except TimeoutError:
                self.close_connection = True
                return
            found = self.server.answer(content)
            self._send_json(HTTPStatus.UNPROCESSABLE_ENTITY if "error" in found else HTTPStatus.OK, found)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""

    def _is_meant_for_this(self) -> bool:
        name = self.headers.get("Host", "").rpartition(":")[0].strip("[]") or self.headers.get("Host", "")
        if name in self.server.names or self.server.server_address[0] in ("0.0.0.0", "::"):
            return True
        self._send_json(HTTPStatus.FORBIDDEN, {"error": "this server has another name"})
        return False

    def _send_json(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Content-Security-Policy": POLICY}
        for name, value in (headers | {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}).items():
            self.send_header(name, value)
        if status != HTTPStatus.OK:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(content)


def make_server(model: str | Path, host: str, port: int, *, top_k: int = 5, device: str = "") -> Server:
    """Load a trained model and listen; `serve_forever` answers.

    Args:
        model: a run's name or folder, or a safetensors file.
        host: address to listen on.
        port: to listen on; 0 for a free one.
        top_k: labels for each image.
        device: as `delivery.predict.predict` takes it.

    Raises:
        UserError: for a mistake in the arguments, weights that cannot be used, a model of arrays, and an address that
            cannot be listened on.
    """
    return Server(load_predictor(model, top_k=top_k, batch_size=1, device=device, explain=True), host, port)


def _data_url(picture: Any) -> str:
    stream = io.BytesIO()
    picture.save(stream, format="png")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
