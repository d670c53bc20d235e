"""A page for one model, on this machine: drop an image, see its labels and what spoke for the first."""

from __future__ import annotations

import dataclasses
import io
import ipaddress
import json
import socket
import sys
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from zerovision.delivery import pages
from zerovision.delivery.activation_map import activation_maps
from zerovision.delivery.calibration import NONE_OF_THESE
from zerovision.delivery.predict import Predictor, load_predictor, predictions_of
from zerovision.delivery.settings import PredictSettings
from zerovision.extras.settings import ServeSettings
from zerovision.training.base.errors import UserError, one_line

PAGE = Path(__file__).with_name("serve.html")
LARGEST_UPLOAD = 32 * 2**20  # bytes
MOST_PASSED_OVER = 2**30  # bytes of a larger upload that are read: a browser reads no answer before it has sent all
MOST_CONNECTIONS = 16  # each has a thread, and memory for an upload; further ones wait
SECONDS = 30.0  # that a connection may be silent
LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
)


class Server(ThreadingHTTPServer):
    """Serves `GET /`, the page, and `POST /predict`, an image's bytes to JSON; nothing else of this machine.

    Attributes:
        predictor: the loaded model.
        is_local: whether this machine alone reaches it.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, predictor: Predictor, host: str, port: int) -> None:
        """Listen.

        Raises:
            UserError: if that is not possible.
        """
        self.predictor = predictor
        self.one_at_a_time = threading.Lock()
        self.free_connections = threading.Semaphore(MOST_CONNECTIONS)
        self.given = host
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.address_family, _, _, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
            super().__init__(where[:2], Handler)  # type: ignore[arg-type]  # IPv6 has two numbers more
        except (OSError, OverflowError, ValueError) as error:
            raise UserError(
                f"cannot listen on {_bracketed(host)}:{port} ({error}): give another --host or --port."
            ) from None
        ip = ipaddress.ip_address(str(self.server_address[0]))
        self.is_local = ip.is_loopback
        own = socket.gethostname().partition(".")[0]
        names = LOOPBACK if ip.is_loopback else (socket.gethostname(), own, f"{own}.local", self.server_name)
        self._names = {name.casefold() for name in (host, str(ip), *names, *(LOOPBACK if ip.is_unspecified else ()))}

    def server_bind(self) -> None:
        """Take `::` for all addresses, those of IPv4 included."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection; wait while there are `MOST_CONNECTIONS`."""
        self.free_connections.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free_connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that have gone."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{_bracketed(self.given)}:{self.server_address[1]}/"

    def is_named(self, host: str) -> bool:
        """Return whether a request's Host is this server, so that no other site's page reaches it by a name of its own.

        A name is known; an address leads nowhere else, also if it is that of a machine that forwards to this one.
        """
        with suppress(ValueError):
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            if name in self._names:
                return True
            return not self.is_local and bool(ipaddress.ip_address(name))
        return False

    def page(self) -> bytes:
        """Return the page, with the names of the model and of its classes."""
        metadata = self.predictor.metadata
        names = ", ".join(metadata["class_names"][:20]) + (", ..." if len(metadata["class_names"]) > 20 else "")
        facts = {"model": metadata["description"].model_type, "classes": len(metadata["class_names"])}
        page = pages.render(PAGE, PAGE.with_suffix(".js"), **facts, names=names, largest=LARGEST_UPLOAD)
        return page.encode("utf-8", "replace")

    def answer(self, content: bytes) -> dict[str, Any]:
        """Return labels with probabilities and the picture of an image, or the reason why it cannot be read."""
        try:
            with self.one_at_a_time:
                (found,) = predictions_of(self.predictor, iter([("the image", content)]))
        except Exception as error:  # whatever it is, such as a GPU without memory: the page says it
            return {"error": one_line(error)}
        if found.error:
            return {"error": found.error}
        pairs = zip(found.labels, found.probabilities, strict=True)
        top = [{"label": label, "probability": share} for label, share in pairs]
        return {
            "label": found.label or NONE_OF_THESE,
            "top": top,
            "note": found.note,
            "picture": found.picture and _data_url(found.picture),
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
            self._pass_over(min(int(length[:20]), MOST_PASSED_OVER) if length.isdecimal() else MOST_PASSED_OVER)
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
        if self.server.is_named(self.headers.get("Host", "")):
            return True
        self._send_json(HTTPStatus.FORBIDDEN, {"error": "this server has another name: start it with --host NAME"})
        return False

    def _pass_over(self, length: int) -> None:
        """Read what is still sent: to close before would reset the connection, and the answer would be lost."""
        with suppress(OSError):
            while length > 0 and (read := len(self.rfile.read1(min(length, 2**20)))):
                length -= read

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


def make_server(settings: ServeSettings) -> Server:
    """Load a trained model and listen; `serve_forever` answers.

    Raises:
        UserError: for weights that cannot be used, a model of arrays, and an address that cannot be listened on.
    """
    asked: dict[str, Any] = {name: getattr(settings, name) for name in ("model", "top_k", "device", "max_megapixels")}
    predictor = load_predictor(PredictSettings(**asked, images=(), batch_size=1))
    if predictor.is_of_arrays:
        raise UserError("the model was trained on arrays, which no page shows: use scripts/predict.py.")
    return Server(dataclasses.replace(predictor, explains=_can_explain(predictor)), settings.host, settings.port)


def run(settings: ServeSettings) -> int:
    """Answer until Ctrl-C."""
    with make_server(settings) as server:
        if not server.is_local:
            print("note: whoever reaches this address can use the page: there is no password", file=sys.stderr)
        print(f"page         {server.address}", flush=True)
        server.serve_forever()
    return 0


def _can_explain(predictor: Predictor) -> bool:
    """Return whether there are maps of what counted in an image."""
    preprocessing, parameter = predictor.metadata["preprocessing"], next(predictor.module.parameters())
    image = torch.zeros(1, preprocessing.channels, *preprocessing.sides, device=parameter.device)
    try:
        activation_maps(predictor.module, image, torch.zeros(1, dtype=torch.int64, device=parameter.device))
    except (UserError, RuntimeError):  # without a map of places, or one that autograd does not reach
        return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _data_url(picture: Any) -> str:
    stream = io.BytesIO()
    picture.save(stream, format="png")
    return pages.data_uri(stream.getvalue(), "png")
