"""Operators of users: docs/write-an-operator.md run as it stands, and wrong ones."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sigmerge as package
from sigmerge.checkpoints.writer import Output
from sigmerge.errors import OutputError, RecipeError, SigmergeError
from sigmerge.operators import plugin
from sigmerge.operators.plugin import PLUGINS
from sigmerge.operators.table import names, operator
from sigmerge.recipe import load_recipe
from tests.command_line import sigmerge
from tests.pools import PoolOnDisk, Weights, make_pool, read_weights, weight_bytes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/write-an-operator.md").read_text(encoding="utf-8")
DEFINITION, USE, CLASS, CHECKED = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
[ENTRY_POINTS] = re.findall(r"^```toml\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """No test leaves an operator behind."""
    plugin._installed.cache_clear()
    yield
    PLUGINS.registered.clear()
    plugin._installed.cache_clear()
    for name in [name for name in sys.modules if name.startswith("my_package")]:
        del sys.modules[name]


def defined(tmp_path: Path, text: str = DEFINITION) -> None:
    """Run the page's definition from a file, as a script would."""
    file = tmp_path / "my_operator.py"
    file.write_text(text)
    exec(compile(text, str(file), "exec"), {"__name__": "my_operator"})


def test_the_pages_operators_keep_the_rules(tmp_path: Path) -> None:
    defined(tmp_path)
    scope = {"__name__": "my_operator", "sigmerge": package, "np": np}
    exec(CLASS, scope)
    exec(CHECKED, scope)
    long = {"w": np.float32([[3, 4], [0, 0]])}
    short = {"w": np.float32([[0, 0], [0, 1]])}
    merged = package.merge_state_dicts({"w": np.zeros((2, 2), np.float32)}, [long, short],
                                       "equal_norm")  # fmt: skip
    np.testing.assert_allclose(merged["w"], [[1.8, 2.4], [0, 3]], rtol=1e-6)


def test_the_page_says_thirty_lines() -> None:
    assert len(DEFINITION.splitlines()) <= 30


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PoolOnDisk:
    monkeypatch.chdir(tmp_path)
    return make_pool(tmp_path / "pool", experts=2, layers=3)


def expected(pool: PoolOnDisk, weights: tuple[float, ...], density: float) -> Weights:
    """The page's operator once more, in float64 and one coordinate at a time."""
    base = read_weights(pool.reference)
    experts = [read_weights(folder) for folder in pool.experts.values()]
    merged = {}
    for name, values in base.items():
        entries = []
        for i, reference in enumerate(values.ravel()):
            moved = [
                w * (e[name].flat[i] - reference) for w, e in zip(weights, experts, strict=True)
            ]
            entries.append(max(moved, key=abs))
        kept = sorted(range(len(entries)), key=lambda i: (-abs(entries[i]), i))
        for i in kept[round(density * len(kept)) :]:
            entries[i] = 0.0
        merged[name] = values + np.reshape(entries, values.shape)
    return merged


def test_the_page_merges(pool: PoolOnDisk, tmp_path: Path) -> None:
    defined(tmp_path)
    scope: dict[str, Any] = {"sigmerge": package}
    exec(USE, scope)
    plan, out = scope["merged"].plan, tmp_path / "strongest-out"
    assert plan.operator == "strongest" and plan.settings["density"] == 0.5
    found = read_weights(out)
    for name, values in expected(pool, (0.8, 1.0), 0.5).items():
        np.testing.assert_allclose(found[name], values, atol=1e-7)
    for threads in (1, 3):
        package.merge(scope["recipe"], tmp_path / f"again-{threads}", threads=threads)
        assert weight_bytes(tmp_path / f"again-{threads}") == weight_bytes(out)


def recipe(pool: PoolOnDisk, method: str = "strongest", **top: Any) -> dict[str, Any]:
    return pool.recipe(method, weight=(0.8, 1.0), **top)


def test_its_merge_is_repaired(pool: PoolOnDisk, tmp_path: Path) -> None:
    defined(tmp_path)
    scores = {
        "experts": {e: {d: 0.9 if d == e else 0.4 for d in pool.experts} for e in pool.experts},
        "anchor": {"math": 0.5, "coding": 0.8},
    }
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    package.merge(recipe(pool), tmp_path / "anchor")
    repairing = recipe(pool, repair={"scores": str(tmp_path / "scores.json")})
    at_once = package.merge(repairing, tmp_path / "at-once")
    package.repair(repairing, tmp_path / "later", anchor=tmp_path / "anchor")
    shards = [tmp_path / name / "model.safetensors" for name in ("at-once", "later", "anchor")]
    one, other, anchor = [file.read_bytes() for file in shards]
    assert one == other != anchor
    assert at_once.repair.deficit == pytest.approx({"math": 0.4, "coding": 0.1})


def interrupted(pool: PoolOnDisk, out: Path, wanted: dict[str, Any] | None = None) -> None:
    """Stop a merge after its second block."""
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        finish = Output.finish

        def stop(self: Output, block: str, *rest: Any) -> None:
            finish(self, block, *rest)
            done.append(block)
            if len(done) == 2:
                raise KeyboardInterrupt

        patch.setattr(Output, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            package.merge(wanted or recipe(pool), out)
    assert not out.exists()


def test_its_merge_is_resumed(pool: PoolOnDisk, tmp_path: Path) -> None:
    defined(tmp_path)
    package.merge(recipe(pool), tmp_path / "whole")
    interrupted(pool, tmp_path / "out")
    again = package.merge(recipe(pool), tmp_path / "out")
    assert len(again.provenance.blocks_resumed) == 2
    assert weight_bytes(tmp_path / "out") == weight_bytes(tmp_path / "whole")


def test_a_changed_function_does_not_continue_an_old_merge(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    defined(tmp_path)
    interrupted(pool, tmp_path / "out")
    defined(tmp_path, DEFINITION.replace("argmax", "argmin"))
    changed = package.merge(recipe(pool), tmp_path / "out")
    assert changed.provenance.blocks_resumed == ()
    revision = operator("strongest").revision
    assert revision and changed.plan.revision == revision


def test_what_a_function_uses_may_change_after_it_was_registered(
    pool: PoolOnDisk, tmp_path: Path
) -> None:
    """As in a notebook, where another cell sets it."""
    scope = {"__name__": "my_notebook", "sigmerge": package, "SHARE": 1.0}
    text = "def shared(tile, site):\n    tile.out[:] = SHARE * tile.experts.mean(axis=0)\n"
    exec(f"@sigmerge.operator('shared')\n{text}", scope)
    wanted = {"merge_method": "shared", "base_model": str(pool.reference),
              "models": [{"model": str(path)} for path in pool.experts.values()]}  # fmt: skip
    before = operator("shared").revision
    interrupted(pool, tmp_path / "out", wanted)
    scope["SHARE"] = 0.5
    assert operator("shared").revision != before
    assert package.merge(wanted, tmp_path / "out").provenance.blocks_resumed == ()


def test_a_changed_file_of_a_package_makes_another_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python takes bytecode of a file that has the same second and size for that of the new one.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    installed(tmp_path, monkeypatch, DEFINITION, ENTRY_POINTS)
    before = operator("strongest").revision
    (tmp_path / "my_package/operators.py").write_text(DEFINITION.replace("argmax", "argmin"))
    del sys.modules["my_package.operators"]
    PLUGINS.registered.clear()
    assert before != operator("strongest").revision


def test_an_anchor_of_a_changed_function_is_made_again(pool: PoolOnDisk, tmp_path: Path) -> None:
    from sigmerge.jobs.anchor import is_current
    from sigmerge.jobs.options import Options

    defined(tmp_path)
    package.merge(recipe(pool), tmp_path / "anchor")
    assert is_current(load_recipe(recipe(pool)), tmp_path / "anchor", Options())
    defined(tmp_path, DEFINITION.replace("argmax", "argmin"))
    assert not is_current(load_recipe(recipe(pool)), tmp_path / "anchor", Options())


def test_lines_scales_it(pool: PoolOnDisk, tmp_path: Path) -> None:
    defined(tmp_path)
    on = {"on": "strongest", "alpha": 0.5, "beta": 0.0}
    package.merge(recipe(pool, "lines", parameters=on), tmp_path / "half")
    base, found = read_weights(pool.reference), read_weights(tmp_path / "half")
    for name, values in expected(pool, (0.8, 1.0), 1.0).items():
        half = base[name] + (values - base[name]) / 2
        np.testing.assert_allclose(found[name], half, atol=1e-7)


def test_values_by_tiles(pool: PoolOnDisk, tmp_path: Path) -> None:
    """vectors=False: the rows are the experts' own values, and no reference is needed."""
    choice = package.parameter("which", "low", "which value", choices=("low", "high"))

    @package.operator("edge", vectors=False, parameters=[choice])
    def edge(tile: Any, site: Any) -> None:
        pick = np.minimum if site.settings["which"] == "low" else np.maximum
        tile.out[:] = pick(tile.experts[0], tile.experts[1])

    models = [{"model": str(folder)} for folder in pool.experts.values()]
    content = {"merge_method": "edge", "models": models, "parameters": {"which": "high"}}
    package.merge(content, tmp_path / "out")
    one, other = (read_weights(folder) for folder in pool.experts.values())
    found = read_weights(tmp_path / "out")
    assert all(np.array_equal(found[name], np.maximum(one[name], other[name])) for name in one)
    with pytest.raises(RecipeError, match="which: must be one of low, high, not 'middle'"):
        load_recipe(content | {"parameters": {"which": "middle"}})


def test_parameters_are_checked(pool: PoolOnDisk, tmp_path: Path) -> None:
    defined(tmp_path)
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe(pool, parameters={"density": 2, "densty": 1}))
    assert "density: must lie between 0 and 1, not 2" in str(error.value)
    assert "did you mean 'density'?" in str(error.value)
    with pytest.raises(TypeError, match="needs choices"):
        package.parameter("mode", "fast", "how")


def bad(name: str, body: str) -> None:
    scope: dict[str, Any] = {"np": np}
    exec(f"def function(tile, site):\n    {body}\n", scope)
    weight = package.parameter("weight", 1.0, "of the expert", per_model=True)
    package.operator(name, parameters=[weight])(scope["function"])


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("tile.out[:] = 1 / 0", SigmergeError, "tensor .*: the function raised ZeroDivisionError"),
        ("raise SystemExit", SigmergeError, "the function raised SystemExit"),
        ("tile.out = np.zeros(3)", SigmergeError, "replaced tile.out; write into it"),
        ("tile.out[1:] = 0", SigmergeError, "did not fill tile.out at flat index 0"),
        ("tile.out[:] = np.inf", OutputError, "at flat index 0 is not finite"),
    ],
)
def test_a_wrong_function_is_one_error(
    pool: PoolOnDisk, tmp_path: Path, body: str, error: type[SigmergeError], message: str
) -> None:
    bad("wrong", body)
    with pytest.raises(error, match=message):
        package.merge(recipe(pool, "wrong"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_that_are_taken(tmp_path: Path) -> None:
    for name in ("ties", "slerp", "checkpoint", "two words"):
        with pytest.raises(RecipeError, match="cannot name an operator"):
            package.operator(name)
    defined(tmp_path)
    defined(tmp_path)  # as a notebook's cell that is run again
    with pytest.raises(RecipeError, match=r"registered already, by my_operator\.strongest"):
        bad("strongest", "pass")
    assert names().count("strongest") == 1
    with pytest.raises(RecipeError, match=r"did you mean 'strongest'\?"):
        operator("stronges")


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, points: str) -> None:
    """A package with a distribution's metadata, as pip installs them."""
    package_folder, info = tmp_path / "my_package", tmp_path / "my_package-1.0.dist-info"
    package_folder.mkdir()
    info.mkdir()
    (package_folder / "__init__.py").write_text("")
    (package_folder / "operators.py").write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    lines = points.replace('"', "").replace("project.entry-points.", "")
    (info / "entry_points.txt").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    plugin._installed.cache_clear()


def test_an_installed_operator(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, DEFINITION, ENTRY_POINTS)
    assert "my_package.operators" not in sys.modules
    rows = sigmerge("operators", "--json").json["operators"]
    assert rows[-1]["name"] == "strongest" and len(rows) == len(names())
    assert "strongest  Strongest entry" in sigmerge("operators", "strongest").out
    ran = sigmerge("merge", pool.write(recipe(pool)), tmp_path / "out")
    assert ran.code == 0, ran
    found = read_weights(tmp_path / "out")
    for name, values in expected(pool, (0.8, 1.0), 1.0).items():
        np.testing.assert_allclose(found[name], values, atol=1e-7)
    with pytest.raises(RecipeError, match="the package my-package installs an operator strongest"):
        bad("strongest", "pass")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_library", "cannot be imported (ModuleNotFoundError"),
        ("raise SystemExit", "cannot be imported (SystemExit"),
        ("", "cannot be imported (AttributeError"),
        ("strongest = 3", "is no operator of that name"),
    ],
)
def test_a_package_that_does_not_work(
    pool: PoolOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    installed(tmp_path, monkeypatch, text, ENTRY_POINTS)
    ran = sigmerge("merge", pool.write(recipe(pool)), tmp_path / "out")
    assert ran.code == 2 and "the package my-package" in ran.err and message in ran.err
    assert "Traceback" not in ran.err
    assert sigmerge("merge", pool.write(recipe(pool, "linear")), tmp_path / "out").code == 0


def test_a_package_with_a_name_of_sigmerge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = ENTRY_POINTS.replace("strongest =", "ties =")
    installed(tmp_path, monkeypatch, DEFINITION, points)
    ran = sigmerge("operators")
    assert ran.code == 2 and "has an operator ties, a name of sigmerge's own" in ran.err
    assert operator("ties").title == "TIES"
