"""Any store of fsspec will do; this one is a memory."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

import sigmerge
from sigmerge.errors import MissingExtra
from sigmerge.files import objects
from tests.pools import make_pool
from tests.storage.conftest import files, weights


def test_a_merge_from_and_to_a_memory(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", layers=2)
    store = fsspec.filesystem("memory")
    for name, content in files(pool.root).items():
        store.pipe_file(f"/pool/{name}", content)
    recipe = pool.recipe("linear")
    sigmerge.merge(recipe, tmp_path / "out")
    recipe["base_model"] = "memory://pool/reference"
    for model in recipe["models"]:
        model["model"] = f"memory://pool/{Path(model['model']).name}"
    sigmerge.merge(recipe, "memory://out/merged")
    names = store.find("/out/merged")
    found = {name.removeprefix("/out/merged/"): store.cat_file(name) for name in names}
    assert weights(found) == weights(files(tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("s3://bucket/model/", "s3://bucket/model"),
        (Path("s3://bucket/model"), "s3://bucket/model"),
        ("hf://owner/name@main", "hf://owner/name@main"),
        ("/folder/s3:/x", None),
        ("owner/name", None),
        ("C:/folder", None),
        ("", None),
    ],
)
def test_what_is_an_address(name: str | Path, found: str | None) -> None:
    assert objects.url_of(name) == found


def test_without_fsspec_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(MissingExtra, match=r"sigmerge\[storage\]"):
        objects.RemoteFile("s3://bucket/x", 1, "").read(0, 1)
