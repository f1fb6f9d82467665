"""The bytes of every operator and variant on the embedded pool are those of the committed table.

`python -m tests.test_same_bytes` writes the table anew, with a prefix of names only those rows; do
that only with a reason for each row that changes. Rows under "torch" depend on forward passes and
rows under "lapack" on linear algebra, whose last bits differ between machines: they are in the
table for comparisons on one machine, and the test skips them elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import sigmerge
from sigmerge.jobs.options import Options
from sigmerge.method.controls import VARIANTS
from sigmerge.nano.files import POOL, RECIPES
from tests.devices import needs_gpu

TABLE = Path(__file__).with_name("same_bytes.json")
DOMAINS = ("math", "instruction", "coding", "multilingual", "safety")
EXPERTS = {e: {d: 0.98 if d == e else 0.55 for d in DOMAINS} for e in DOMAINS}
ANCHOR = dict(zip(DOMAINS, (0.74, 0.97, 0.80, 0.59, 0.87), strict=True))
PLAIN = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "cabs", "lines")
CAPTURING = ("fisher", "regmean", "cat", "lot")
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "della": (5, {"weight": 1, "density": 0.5}),
    "della_linear": (5, {"weight": 0.4, "density": 0.5}),
    "breadcrumbs": (5, {"weight": 0.4, "density": 0.9}),
    "breadcrumbs_ties": (5, {"weight": 0.4, "density": 0.9, "rescale": True}),
    "model_stock": (5, {}),
    "sce": (5, {"select_topk": 0.5}),
    "slerp": (1, {"t": [0.2, 0.8]}),
    "nuslerp": (2, {"weight": [1, 0.5]}),
    "multislerp": (5, {"weight": 1}),
    "karcher": (5, {}),
    "nearswap": (1, {"t": 0.001}),
    "ram": (5, {}),
    "ramplus_tl": (5, {}),
    "passthrough": (1, {"scale": 0.5}),
    "consensus": (5, {"lambda": 0.8}),
    "localize_stitch": (5, {"density": 0.1}),
    "blend": (5, {"on": ["ties", "dare_linear"], "share": 0.4, "ties.density": 0.2}),
}
SOLVED: dict[str, tuple[int, dict[str, Any]]] = {
    "iso_c": (5, {}),
    "iso_cts": (5, {}),
    "tsv": (5, {"weight": 1.5}),
    "boost": (5, {"lambda": 0.5}),
    "wudi": (5, {"steps": 30}),
    "knots": (5, {"lambda": 1.5}),
    "pcb": (5, {"lambda": 1.5}),
}
"""How many experts, and the parameters. arcee_fusion takes exponentials, whose last bits
differ between machines."""


def shipped(name: str, **changes: Any) -> dict[str, Any]:
    """A shipped recipe without its repair."""
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    recipe: dict[str, Any] = yaml.safe_load(text.replace("../pool/", f"{POOL}/"))
    del recipe["repair"]
    return {**recipe, **changes}


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def score(folder: Path) -> dict[str, float]:
    """Deterministic scores of any checkpoint: they follow its bytes."""
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).digest()
    return {d: 0.5 + digest[i] / 1024 for i, d in enumerate(DOMAINS)}


Row = tuple[str, Callable[[], str]]
"""The name of a row, and what makes its sum."""


def operator_rows(work: Path) -> Iterator[Row]:
    for name in (*PLAIN, *CAPTURING):
        group = "torch" if name in CAPTURING else "exact"
        for preset in ("mergekit", "paper"):
            recipe, out = shipped(name, preset=preset), work / f"{name}-{preset}"
            yield f"{group}: {name}, preset {preset}", partial(_merged, recipe, out)


def other_rows(
    work: Path, group: str, methods: Mapping[str, tuple[int, dict[str, Any]]]
) -> Iterator[Row]:
    for name, (experts, parameters) in methods.items():
        recipe = shipped("task_arithmetic", merge_method=name, parameters=parameters)
        recipe["models"] = [
            {k: v for k, v in model.items() if k != "parameters"}
            for model in recipe["models"][:experts]
        ]
        yield f"{group}: {name}", partial(_merged, recipe, work / name)


def repair_rows(work: Path) -> Iterator[Row]:
    anchor = work / "anchor"
    sigmerge.merge(shipped("task_arithmetic"), anchor)
    scores = work / "scores.json"
    scores.write_text(json.dumps({"experts": EXPERTS, "anchor": ANCHOR}))
    for name in VARIANTS:
        if name != "view_representation":
            section = {"scores": str(scores), "variant": name, "seed": 1}
            yield f"exact: {name}", partial(_repaired, work / name, anchor, section)
    for label, extra in {
        "replace": {"update": "replace"}, "scale 1.0": {"scale": 1.0},
        "admit 2": {"admit": 2}, "c 0 to 0.65": {"c_min": 0.0, "c_max": 0.65},
    }.items():  # fmt: skip
        section = {"scores": str(scores), **extra}
        yield f"exact: {label}", partial(_repaired, work / label, anchor, section)
    for label, extra in {
        "two rounds": {"rounds": 2},
        "calibrated": {"scale": "calibrated"},
    }.items():
        section = {"c_max": 0.3, "guard": "off", **extra}
        make = partial(_repaired, work / label, anchor, section, score=score)
        yield f"exact: {label}", make
    for name in ("default", "view_representation"):
        section = {"scores": str(scores), "variant": name, "probe": str(POOL / "probe.jsonl")}
        make = partial(_repaired, work / f"{name}-probe", anchor, section)
        yield f"torch: {name} with a probe", make


def _merged(recipe: dict[str, Any], out: Path) -> str:
    sigmerge.merge(recipe, out)
    return weights(out)


def _repaired(out: Path, anchor: Path, section: dict[str, Any], **how: Any) -> str:
    recipe = shipped("task_arithmetic", repair=section)
    sigmerge.repair(recipe, out, anchor=anchor, **how)
    return weights(out)


def makers(work: Path) -> dict[str, Callable[[], str]]:
    others = (*other_rows(work, "exact", OTHERS), *other_rows(work, "lapack", SOLVED))
    return {**dict(operator_rows(work)), **dict(repair_rows(work)), **dict(others)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], str]]:
    return makers(tmp_path_factory.mktemp("bytes"))


KNOWN = json.loads(TABLE.read_text()) if TABLE.exists() else {"machines": {}, "rows": {}}


@pytest.mark.parametrize("name", KNOWN["rows"])
def test_bytes_are_those_of_the_table(name: str, rows: dict[str, Callable[[], str]]) -> None:
    if KNOWN["machines"].get(name.partition(":")[0], machine()) != machine():
        pytest.skip("another machine's last bits differ")
    assert rows[name]() == KNOWN["rows"][name]


@pytest.fixture(scope="module")
def rows_again(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], str]]:
    return makers(tmp_path_factory.mktemp("again"))


@needs_gpu
@pytest.mark.parametrize("name", [name for name in KNOWN["rows"] if name.startswith("exact")])
def test_a_gpu_gives_the_bytes_of_the_table(
    name: str, rows_again: dict[str, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's tensors are short, and all of them go there."""
    from sigmerge.engine import gpu

    monkeypatch.setattr(gpu, "LEAST", 0)
    monkeypatch.setattr(Options, "open_gpu", property(lambda _: gpu.Gpu))
    assert rows_again[name]() == KNOWN["rows"][name]


def test_the_table_is_complete(rows: dict[str, Callable[[], str]]) -> None:
    assert list(rows) == list(KNOWN["rows"])


def machine() -> str:
    """What the last bits of a forward pass and of linear algebra depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return f"{platform.machine()} {model}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        prefix = sys.argv[1] if len(sys.argv) > 1 else ""
        every = makers(Path(folder))
        made = {name: make() for name, make in every.items() if name.startswith(prefix)}
    here = {g: machine() for g in ("torch", "lapack") if any(n.startswith(g) for n in made)}
    rows_now = {name: (KNOWN["rows"] | made)[name] for name in every}
    found = {"machines": KNOWN["machines"] | here, "rows": rows_now}
    TABLE.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(0)
