"""The page of `serve.py`: its server against what it may not answer, and the page in a real browser."""

from __future__ import annotations

import http.client
import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from axe_playwright_python.sync_playwright import Axe
from browsing import start_chromium
from exports import save_new_run, save_run
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from tests.kit import new_model
from zerovision.delivery.predict import predict
from zerovision.extras import serve
from zerovision.extras.settings import ServeSettings
from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions, load_data


@pytest.fixture(scope="module")
def data():
    return load_data(DataOptions())


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    return save_new_run(tmp_path_factory.mktemp("runs") / "digits", data)


@pytest.fixture(scope="module")
def photo(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("photos") / "seven.png"
    Image.fromarray(data.val.source.read(0).permute(1, 2, 0).contiguous().numpy()).save(path)
    return path


@contextmanager
def serving(run, host: str) -> Iterator[serve.Server]:
    with serve.make_server(ServeSettings(model=str(run), host=host, port=0, top_k=3, device="cpu")) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(run):
    with serving(run, "127.0.0.1") as server:
        yield server


def ask(server, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_an_image_gets_the_labels_of_predict(server, run, photo):
    status, content = ask(server, "POST", "/predict", photo.read_bytes())
    answer = json.loads(content)
    (expected,) = predict(run, photo, top_k=3, device="cpu")
    assert status == 200
    assert [one["label"] for one in answer["top"]] == expected.labels
    assert [one["probability"] for one in answer["top"]] == expected.probabilities
    assert answer["picture"].startswith("data:image/png;base64,")


BOMB = io.BytesIO()
Image.new("1", (30000, 30000)).save(BOMB, "png")


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "words"),
    [
        ("GET", "/../../../etc/passwd", None, {}, 404, "only / and /predict"),
        ("GET", "/model.safetensors", None, {}, 404, "only / and /predict"),
        ("POST", "/", b"x", {}, 404, "only / and /predict"),
        ("GET", "/", None, {"Host": "evil.example:8000"}, 403, "a different name"),
        ("POST", "/predict", b"", {}, 413, "up to 32 MB"),
        ("POST", "/predict", None, {"Content-Length": str(10**12)}, 413, "up to 32 MB"),
        ("POST", "/predict", None, {"Content-Length": "-5"}, 413, "up to 32 MB"),
        ("POST", "/predict", b"no image at all", {}, 422, "error"),
        ("POST", "/predict", BOMB.getvalue(), {}, 422, "error"),
    ],
)
def test_what_it_does_not_answer(server, method, path, body, headers, status, words):
    found, content = ask(server, method, path, body, **headers)
    assert found == status
    assert words in content.decode()


@pytest.mark.parametrize("size", [serve.LARGEST_UPLOAD + 1, 5 * serve.LARGEST_UPLOAD])
def test_a_large_upload_is_answered_when_it_has_been_sent(server, size):
    status, content = ask(server, "POST", "/predict", bytes(size))
    assert (status, [*json.loads(content)]) == (413, ["error"])


MACHINE = socket.gethostname()


@pytest.mark.parametrize(
    ("host", "names", "others"),
    [
        (
            "127.0.0.1",
            ("localhost", "LocalHost.", "127.0.0.1", "::1"),
            (MACHINE, "192.0.2.7", "localhost.evil.example"),
        ),
        ("::1", ("localhost", "::1"), (MACHINE, "192.0.2.7")),
        ("localhost", ("localhost", "127.0.0.1"), ("evil.example", "")),
        ("0.0.0.0", ("localhost", MACHINE, MACHINE.upper(), "192.0.2.7", "2001:db8::7"), ("evil.example", "a b", "")),
        ("::", ("::1", MACHINE, "192.0.2.7"), ("evil.example", f"{MACHINE}.evil.example")),
    ],
)
def test_it_answers_by_its_own_names_alone(run, host, names, others):
    """By what people type: no page of another site reaches it by a name that it lets lead here (DNS rebinding)."""
    with serving(run, host) as server:
        shown = f"[{host}]" if ":" in host else host
        assert server.address == f"http://{shown}:{server.server_address[1]}/"
        assert server.is_local == (host in serve.LOOPBACK)
        for name in (*names, *others):
            typed = f"[{name}]" if ":" in name else name
            for header in (typed, f"{typed}:8000"):
                assert ask(server, "GET", "/", Host=header)[0] == (200 if name in names else 403), header


def test_a_name_of_the_machine_is_an_address_to_listen_on(run):
    with serving(run, MACHINE) as server:
        connection = http.client.HTTPConnection(MACHINE, server.server_address[1], timeout=60)
        connection.request("GET", "/")
        assert (connection.getresponse().status, server.address.split(":")[1]) == (200, f"//{MACHINE}")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.7", "", "a" * 70, "::g"])
def test_an_address_of_no_machine_is_one_line(run, host):
    with pytest.raises(UserError, match=r"^cannot listen on .* \([^\[]*\): use another --host or --port\.$"):
        serve.make_server(ServeSettings(model=str(run), host=host, port=0))


def test_a_network_without_a_map_has_labels(data, photo, tmp_path):
    built = new_model("timm:xcit_nano_12_p16_224", num_classes=10, image_size=32)
    with serving(save_run(tmp_path / "run", built, data), "127.0.0.1") as server:
        status, content = ask(server, "POST", "/predict", photo.read_bytes())
    answer = json.loads(content)
    assert (status, len(answer["top"]), answer["picture"]) == (200, 3, None)


def test_silent_connections_take_no_more_threads_than_there_are_for_all(server):
    before = threading.active_count()
    with ExitStack() as silent:
        for _ in range(3 * serve.MOST_CONNECTIONS):
            silent.enter_context(socket.create_connection(server.server_address[:2], timeout=60))
        assert threading.active_count() - before <= serve.MOST_CONNECTIONS
    assert ask(server, "GET", "/")[0] == 200, "they have gone"


def test_a_port_in_use_is_one_line(server, run):
    port = server.server_address[1]
    cure = "use another --port, or --port 0 for a free one"
    with pytest.raises(UserError, match=rf"^cannot listen on 127\.0\.0\.1:{port} \(the port is in use\): {cure}\.$"):
        serve.make_server(ServeSettings(model=str(run), port=port))


@pytest.mark.parametrize(("width", "theme"), [(360, "dark"), (1280, "light")])
def test_the_page_in_a_browser(server, run, photo, width, theme):
    (expected,) = predict(run, photo, top_k=3, device="cpu")
    with sync_playwright() as playwright:
        browser = start_chromium(playwright)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        faults = []
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(server.address)
        page.locator("#file").set_input_files(str(photo))
        expect(page.locator("#status")).to_contain_text(f"{expected.labels[0]}, {expected.probabilities[0]:.1%}"[:-1])
        assert page.locator("#labels tr").count() == 3
        assert page.locator("#map").evaluate("image => image.complete && image.naturalWidth") == 32
        assert page.evaluate("document.documentElement.scrollWidth") == width
        results = Axe().run(page)
        assert results.violations_count == 0, results.generate_report()
        page.locator("#file").set_input_files({"name": "no.png", "mimeType": "image/png", "buffer": b"no"})
        expect(page.locator("#status")).to_contain_text("No label: ")
        assert [fault for fault in faults if "422" not in fault] == []
        browser.close()
