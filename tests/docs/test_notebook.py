"""docs/example.ipynb, run by a real kernel.

SIGMERGE_SCREENSHOTS names a folder that keeps a picture of the executed notebook.
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.pages.test_browser import Browser, browser  # noqa: F401  (a fixture)

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs/example.ipynb"
ALL, FEW = "LIMIT = None", "LIMIT = 5"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The cells as they stand, but for fewer items to score."""
    notebook = nbformat.read(FILE, as_version=4)
    [setup] = [cell for cell in notebook.cells if ALL in cell.source]
    setup.source = setup.source.replace(ALL, FEW)
    folder = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return notebook


def outputs(cell: Any, kind: str) -> list[str]:
    return [out["data"][kind] for out in cell["outputs"] if kind in out.get("data", {})]


def printed(cell: Any) -> list[str]:
    texts = [out["text"] for out in cell["outputs"] if out.get("name") == "stdout"]
    return "".join(texts).splitlines()


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(FILE, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") for cell in notebook.cells)


def test_the_notebook_runs(executed: Any) -> None:
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    pool, plan, _, methods, sweep, repaired, shares, own = code
    assert outputs(pool, "text/plain")[0].startswith("Pool of 2 experts (math, coding)")
    assert any("evaluation calls" in html for html in outputs(plan, "text/html"))
    assert [line.split()[0] for line in printed(methods)] == ["linear", "task_arithmetic", "ties"]
    assert [line.split()[0] for line in printed(sweep)] == ["0.3", "0.5", "0.7"]
    assert any("Conflict over depth" in html for html in outputs(repaired, "text/html"))
    assert [line.split()[0] for line in printed(shares)] == ["math", "coding"]
    assert "'math': " in outputs(own, "text/plain")[-1]
    errors = [
        out["text"]
        for cell in code
        for out in cell["outputs"]
        if out["output_type"] == "stream" and out["name"] == "stderr"
    ]  # transformers' tqdm misses ipywidgets, which nothing here needs
    assert [text for text in errors if "TqdmWarning" not in text] == []


def test_a_notebook_shows_progress(executed: Any) -> None:
    """One output with a bar for each stage, all of them full at the end."""
    repaired = [cell for cell in executed.cells if cell.cell_type == "code"][5]
    [bars] = [html for html in outputs(repaired, "text/html") if " repairing: " in html]
    assert " merging: " in bars
    for bar in bars.split("<progress ")[1:]:
        value, most = (part.split("'")[1] for part in bar.split(" style")[0].split(" "))
        assert value == most


def as_page(notebook: Any) -> str:
    """The notebook as plain HTML, for the picture."""
    parts = ["<!doctype html><meta charset='utf-8'><style>body{margin:28px auto;width:980px;",
             "font:15px/1.5 system-ui,sans-serif}pre{background:#f5f5f7;padding:12px 14px;",
             "border-radius:6px;font:13px/1.45 ui-monospace,monospace;overflow:hidden}",
             ".out{margin:0 0 18px}</style>"]  # fmt: skip
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            title, _, rest = cell.source.partition("\n")
            heading = title.startswith("# ")
            parts.append(f"<h1>{escape(title[2:])}</h1>" if heading else "")
            parts.append(f"<p>{escape(rest if heading else cell.source)}</p>")
            continue
        parts.append(f"<pre>{escape(cell.source)}</pre>")
        for out in cell["outputs"]:
            data = out.get("data", {})
            if out.get("name") == "stderr":
                continue
            if "text/html" in data:
                parts.append(f"<div class='out'>{data['text/html']}</div>")
            else:
                text = out.get("text") or data.get("text/plain", "")
                parts.append(f"<pre class='out'>{escape(text)}</pre>")
    return "".join(parts)


def test_the_executed_notebook_in_a_browser(
    executed: Any,
    browser: Browser,  # noqa: F811
    tmp_path: Path,
) -> None:
    page = tmp_path / "notebook.html"
    page.write_text(as_page(executed), encoding="utf-8")
    browser.open(page, width=1040)
    assert browser.js("return document.querySelectorAll('iframe').length") == 2
    assert not [entry for entry in browser.log("browser") if entry["level"] == "SEVERE"]
    wide = "return [...document.querySelectorAll('iframe')].every(f => f.clientWidth > 900)"
    assert browser.js(wide)
    height = browser.js("return document.documentElement.scrollHeight")
    whole = {"width": 1040, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", whole)
    kept = Path(os.environ.get("SIGMERGE_SCREENSHOTS", tmp_path))
    assert len(browser.screenshot(kept / "notebook.png")) > 50_000
