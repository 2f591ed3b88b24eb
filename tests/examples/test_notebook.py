"""examples/results.ipynb: runs from top to bottom over two small runs, in a kernel of its own."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.training import train

NOTEBOOK = ROOT / "examples" / "results.ipynb"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that it is about: a small one, and the same again for the other."""
    folder = tmp_path_factory.mktemp("notebook")
    first, other = re.findall(r"--run-dir (runs/\w+)", NOTEBOOK.read_text(encoding="utf-8"))
    train("stop.iterations=1", "monitor.screen=off", run_dir=folder / first)
    shutil.copytree(folder / first, folder / other)
    return folder


def test_it_runs_and_shows_what_it_says(runs: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(runs)}}).execute()
    shown = [_html(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "frozen_lake-v1" in shown[0] and "StarPO" not in shown[0]
    assert "collect/success" in shown[1] and "success_low" in shown[2]
    assert "only_first" in shown[3] and "p_value" in shown[3]
    assert "<th>seed</th>" in shown[4] and "<th>observation</th>" in shown[5]
    assert "data:image/png;base64," in shown[6] and "frozen_lake-v1, seed" in shown[6]
    assert "reward=" in shown[7]


def test_it_is_kept_without_output() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r'"execution_count": \d', text) and '"output_type"' not in text


def _html(cell: Any) -> str:
    return "".join(str(output.get("data", {}).get("text/html", "")) for output in cell.outputs)
