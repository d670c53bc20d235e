"""The page of `serve.py`: its server against what it may not answer, and the page in a real browser."""

from __future__ import annotations

import http.client
import io
import json
import threading

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from browsing import start_chromium
from exports import save_run
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from delivery import serve
from delivery.predict import predict
from models.build import build_model
from training.base.errors import UserError
from training.data import DataOptions, load_data


@pytest.fixture(scope="module")
def data():
    return load_data(DataOptions())


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    torch.manual_seed(1)
    return save_run(
        tmp_path_factory.mktemp("runs") / "digits", build_model("basic_cnn", num_classes=10, image_size=32), data
    )


@pytest.fixture(scope="module")
def photo(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("photos") / "seven.png"
    Image.fromarray(data.val.source.read(0).permute(1, 2, 0).contiguous().numpy()).save(path)
    return path


@pytest.fixture(scope="module")
def server(run):
    with serve.make_server(run, "127.0.0.1", 0, top_k=3, device="cpu") as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


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
        ("GET", "/", None, {"Host": "evil.example:8000"}, 403, "another name"),
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


def test_a_port_in_use_is_one_line(server, run):
    with pytest.raises(UserError, match=r"cannot listen on 127.0.0.1:\d+ .*in use.*: give another --host or --port"):
        serve.make_server(run, "127.0.0.1", server.server_address[1])


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
