"""Serves a local page for one model: drop an image to see its labels, and what led to the first label."""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import json
import socket
import sys
import threading
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from werkzeug import Request, Response
from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

from zerovision.delivery import pages
from zerovision.delivery.activation_map import activation_maps
from zerovision.delivery.calibration import NONE_OF_THESE
from zerovision.delivery.predict import Predictor, load_predictor, predictions_of
from zerovision.delivery.settings import PredictSettings
from zerovision.extras.settings import ServeSettings
from zerovision.training.base.errors import UserError, one_line

PAGE = Path(__file__).with_name("serve.html")
LARGEST_UPLOAD = 32 * 2**20  # bytes
MOST_CONNECTIONS = 16  # each needs a thread and memory for an upload; further connections wait
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Handler(WSGIRequestHandler):
    """Handles one connection, without logging."""

    timeout = 30.0  # seconds that a connection may be silent
    server_version, sys_version = "zerovision", ""

    def log(self, type: str, message: str, *args: Any) -> None:
        """Print nothing."""


class Server(ThreadedWSGIServer):
    """Serves the page at `GET /` and the labels of an uploaded image, as JSON, at `POST /predict`; nothing else."""

    def __init__(self, predictor: Predictor, host: str, port: int) -> None:
        """Start listening for connections, or raise a UserError if the server cannot listen on this host and port."""
        self.predictor = predictor
        self.one_at_a_time = threading.Lock()
        self.free_connections = threading.Semaphore(MOST_CONNECTIONS)
        self.typed = f"[{host}]" if ":" in host else host
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, _, _, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
            # "::" also accepts IPv4 connections
            with socket.create_server(where[:2], family=family, dualstack_ipv6=where[0] == "::") as listening:
                respond = Request.application(self._respond)
                super().__init__(str(where[0]), port, respond, Handler, fd=listening.fileno())
        except (OSError, OverflowError, ValueError) as error:
            is_taken = getattr(error, "errno", 0) == errno.EADDRINUSE
            why = "the port is in use" if is_taken else getattr(error, "strerror", None) or error
            cure = "--port, or --port 0 for a free one" if is_taken else "--host or --port"
            raise UserError(f"cannot listen on {self.typed}:{port} ({why}): use another {cure}.") from None
        ip, machine = ipaddress.ip_address(str(where[0])), socket.gethostname()
        self.is_local, own = ip.is_loopback, machine.partition(".")[0]  # whether only this machine can reach it
        names = LOOPBACK if ip.is_loopback else (machine, own, f"{own}.local", socket.getfqdn(str(ip)))
        self._names = {name.casefold() for name in (host, str(ip), *names, *(LOOPBACK if ip.is_unspecified else ()))}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, waiting first while there are `MOST_CONNECTIONS` connections."""
        self.free_connections.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free_connections.release()

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{self.typed}:{self.port}/"

    def is_named(self, host: str) -> bool:
        """Return whether a Host header names this server, to keep other sites from reaching it under their own names.

        Unless the server is local, all IP addresses are accepted, because another machine may forward requests to it.
        """
        with suppress(ValueError):
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            return name in self._names or (not self.is_local and bool(ipaddress.ip_address(name)))
        return False

    def _respond(self, request: Request) -> Response:
        if not self.is_named(request.headers.get("Host", "")):
            return _json(HTTPStatus.FORBIDDEN, {"error": "this server has a different name: start it with --host NAME"})
        match request.method, request.path:
            case "GET", "/":
                return Response(self.page(), headers=HEADERS, mimetype="text/html")
            case "POST", "/predict" if 0 < (request.content_length or 0) <= LARGEST_UPLOAD:
                found = self.answer(request.get_data())
                return _json(HTTPStatus.UNPROCESSABLE_ENTITY if "error" in found else HTTPStatus.OK, found)
            case "POST", "/predict":
                reason = f"an image of up to {LARGEST_UPLOAD >> 20} MB is expected, with its Content-Length"
                return _json(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": reason})
        return _json(HTTPStatus.NOT_FOUND, {"error": "only / and /predict exist here"})

    def page(self) -> bytes:
        """Return the page, with the names of the model and of its classes."""
        metadata = self.predictor.metadata
        names = ", ".join(metadata["class_names"][:20]) + (", ..." if len(metadata["class_names"]) > 20 else "")
        facts = {"model": metadata["description"].model_type, "classes": len(metadata["class_names"])}
        page = pages.render(PAGE, PAGE.with_suffix(".js"), **facts, names=names, largest=LARGEST_UPLOAD)
        return page.encode("utf-8", "replace")

    def answer(self, content: bytes) -> dict[str, Any]:
        """Return an image's labels, probabilities and picture, or the reason why it cannot be read."""
        try:
            with self.one_at_a_time:
                (found,) = predictions_of(self.predictor, iter([("the image", content)]))
        except Exception as error:  # the page shows any error, such as running out of GPU memory
            return {"error": one_line(error)}
        if found.error:
            return {"error": found.error}
        pairs = zip(found.labels, found.probabilities, strict=True)
        top = [{"label": label, "probability": share} for label, share in pairs]
        picture = found.picture and pages.data_uri(found.picture, "png")
        return {"label": found.label or NONE_OF_THESE, "top": top, "note": found.note, "picture": picture}


def _json(status: HTTPStatus, value: dict[str, Any]) -> Response:
    return Response(json.dumps(value), status, HEADERS, mimetype="application/json")


def make_server(settings: ServeSettings) -> Server:
    """Load a trained model, and return a listening server; call its `serve_forever` to handle requests.

    A UserError is raised for weights that cannot be used, a model trained on arrays, or an address that cannot be used.
    """
    asked: dict[str, Any] = {name: getattr(settings, name) for name in ("model", "top_k", "device", "max_megapixels")}
    predictor = load_predictor(PredictSettings(**asked, images=(), batch_size=1))
    if predictor.metadata["preprocessing"].takes_numbers:
        raise UserError("the model was trained on arrays, which a page cannot show: use scripts/predict.py.")
    return Server(dataclasses.replace(predictor, explains=_can_explain(predictor)), settings.host, settings.port)


def run(settings: ServeSettings) -> int:
    """Handle requests until Ctrl-C is pressed."""
    with make_server(settings) as server:
        if not server.is_local:
            print("note: there is no password: anyone who reaches this address can use the page", file=sys.stderr)
        print(f"page         {server.address}", flush=True)
        server.serve_forever()
    return 0


def _can_explain(predictor: Predictor) -> bool:
    """Return whether activation maps can explain the model's labels."""
    preprocessing, parameter = predictor.metadata["preprocessing"], next(predictor.module.parameters())
    image = torch.zeros(1, preprocessing.channels, *preprocessing.sides, device=parameter.device)
    try:
        activation_maps(predictor.module, image, torch.zeros(1, dtype=torch.int64, device=parameter.device))
    except (UserError, RuntimeError):  # no spatial feature map, or no gradient for it
        return False
    return True
