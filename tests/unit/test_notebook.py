"""The notebook of the examples, cell by cell, on made photographs."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from PIL import Image

from tests.unit.made_data import make_photos

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "photos.ipynb"


def run_cell(source: str, names: dict) -> object:
    """Run a cell as a notebook does; return the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(last, "cell", "eval"), names)


def test_the_notebook_runs_whole(tmp_path, monkeypatch, capsys):
    photos = make_photos(tmp_path / "photos")
    (photos / next(photos.iterdir()).name / "broken.jpg").write_bytes(b"\xff\xd8 no photograph")
    monkeypatch.setenv("PHOTOS", str(photos))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zerovision.training.base.run_folder.CHECKOUT", None)  # logs/ of this folder
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    names: dict = {}
    values = [run_cell("".join(cell["source"]), names) for cell in cells]
    assert (tmp_path / "logs" / "runs" / "photos" / "report.html").is_file()
    shown = [value._repr_html_() for value in values if hasattr(value, "_repr_html_")]
    assert len(shown) == 3
    assert "broken.jpg" in shown[2]
    assert any(isinstance(value, Image.Image) for value in values)
    assert names["most_doubtful"].labels[0] in values
    assert "Did you mean 'epochs'?" in capsys.readouterr().out
