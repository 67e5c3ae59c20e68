"""The notebook runs from top to bottom, and its committed outputs are those of a whole run."""

import re

import nbclient
import nbformat
import pytest
from helpers.paths import ROOT

FILE = ROOT / "examples" / "tour.ipynb"


@pytest.fixture(scope="module")
def committed():
    return nbformat.read(FILE, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook):
    return [
        number
        for number, cell in enumerate(code(notebook))
        if any("image/png" in output.get("data", {}) for output in cell.outputs)
    ]


def printed(notebook):
    return "".join(
        output.text for cell in code(notebook) for output in cell.outputs if "text" in output
    )


def test_outputs_are_committed_in_order_and_name_no_machine(committed):
    nbformat.validate(committed)
    assert [cell.execution_count for cell in code(committed)] == [
        *range(1, len(code(committed)) + 1)
    ]
    assert len(pictures(committed)) == 3
    assert not re.search(r"/(home|root|work|tmp|usr)/", nbformat.writes(committed))
    assert FILE.stat().st_size < 300_000


def test_its_links_lead_somewhere(committed):
    text = nbformat.writes(committed)
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", text)
    assert len(links) > 3
    assert [link for link in links if not (FILE.parent / link).exists()] == []


def test_it_runs_from_top_to_bottom(committed, tmp_path):
    fresh = nbformat.from_dict(committed)
    for cell in code(fresh):
        cell.outputs, cell.execution_count = [], None
    nbclient.NotebookClient(
        fresh, timeout=300, resources={"metadata": {"path": tmp_path}}
    ).execute()
    assert pictures(fresh) == pictures(committed)
    sizes = r"[\d,]+ bytes a device over 8 workers"
    assert re.findall(sizes, printed(fresh)) == re.findall(sizes, printed(committed)) != []
