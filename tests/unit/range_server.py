"""A file server on the loopback with byte ranges, that can be slow, broken off, corrupt, or gone for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class RangeServer:
    """Serves a folder from a thread; lists its folders as pages of links.

    Attributes:
        delay_s: Before each answer.
        change: Makes the body that is sent of a range's bytes, whose length the headers still promise.
        has_ranges: Whether it gives parts of files.
        has_marks: Whether it tells by an ETag that a file has changed.
        status: Of every answer, 0 for the right one.
        requests: Path and range of what was asked for, in order.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.delay_s, self.status, self.has_ranges, self.has_marks = root, 0.0, 0, True, True
        self.change: Callable[[bytes], bytes] = bytes
        self.requests: list[tuple[str, str]] = []
        self.port = 0
        self.start()

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self.port), partial(_Handler, self))
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def url(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self.port}/{path}".rstrip("/")


class _Server(ThreadingHTTPServer):
    daemon_threads, allow_reuse_address, request_queue_size = True, True, 64
    block_on_close = False


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, server: RangeServer, *arguments) -> None:
        self._of = server
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path, bounds = self._of.root / unquote(self.path).lstrip("/"), self.headers.get("Range", "")
        self._of.requests.append((self.path, bounds))
        threading.Event().wait(self._of.delay_s)  # tests replace time.sleep
        if self._of.status or not path.exists():
            self.send_error(self._of.status or HTTPStatus.NOT_FOUND)
            return
        if path.is_dir():
            names = (f"{inner.name}/" if inner.is_dir() else inner.name for inner in path.iterdir())
            page = "".join(f'<a href="{name}">{name}</a>' for name in ["../", *names, "https://elsewhere/x.tar"])
            self._send(200, page.encode(), {"Content-Type": "text/html"}, with_body=with_body)
            return
        status = path.stat()
        headers = {"Content-Type": "application/octet-stream"}
        headers |= {"ETag": f'"{status.st_size}-{status.st_mtime_ns}"'} if self._of.has_marks else {}
        if bounds and self._of.has_ranges:
            start, end = (int(number) for number in bounds.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {start}-{end}/{status.st_size}"
            with path.open("rb") as stream:
                stream.seek(start)
                self._send(206, stream.read(end + 1 - start), headers, with_body=with_body)
        else:
            self._send(200, path.read_bytes(), headers, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(self._of.change(body) if status == 206 else body)

    def log_message(self, *arguments) -> None:
        pass
