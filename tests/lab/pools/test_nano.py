"""Training: the same bytes for a seed, HF folders, a log that can be believed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from sigmerge.errors import OutputError, PoolError, RecipeError
from sigmerge.files.locks import only_writer
from sigmerge.lab.pools.nano import SIZES, Schedule, Size, experts_with, train
from sigmerge.nano import files
from sigmerge.nano.facts import build_all
from tests.command_line import sigmerge
from tests.pools import few_scores


def contents(pool: Path) -> dict[str, bytes]:
    paths = (path for path in pool.rglob("*") if path.is_file())
    return {path.relative_to(pool).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A pool of a size of its own: a few steps of one layer."""
    size = Size(32, 1, 64, Schedule(8, 1e-2, 2), Schedule(4, 3e-3, 2), batch=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "smallest", size)
        yield train(tmp_path_factory.mktemp("smallest") / "pool", 0, "smallest", measure=few_scores)


@pytest.mark.campaign
def test_the_same_seed_gives_the_same_bytes(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a folder that is named from where the command runs."""
    heard: list[tuple[str, int, int]] = []
    monkeypatch.chdir(tmp_path)
    again = train("again", 0, "smallest", progress=lambda *e: heard.append(e), measure=few_scores)
    assert contents(again) == contents(smallest)
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    assert {member for member, _, _ in heard} == set(files.MEMBERS)
    assert heard[-1][1] == heard[-1][2]


def test_other_experts_of_the_same_reference(smallest: Path, tmp_path: Path) -> None:
    """Rate and replay change the experts alone, and the log says what they were made with."""
    unscored = {"measure": lambda *_: {}}
    harsher = train(tmp_path / "harsher", 0, "smallest", rate=5e-3, replay=0.0, **unscored)
    for member in files.MEMBERS:
        file = Path(member) / "model.safetensors"
        same = (harsher / file).read_bytes() == (smallest / file).read_bytes()
        assert same == (member == files.REFERENCE)
    recipe = files.read_lines(harsher / files.LOG)[0]["recipe"]
    assert (recipe["expert"]["rate"], recipe["replay"]) == (5e-3, 0.0)


@pytest.mark.parametrize("given", [{"rate": 0.0}, {"rate": float("inf")}, {"replay": 1.0},
                                   {"replay": -0.1}])  # fmt: skip
def test_settings_of_experts_out_of_range(given: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=f"{next(iter(given))}: "):
        experts_with(SIZES["mini"], **given)


def test_a_size_without_changes_is_itself() -> None:
    assert experts_with(SIZES["nano"]) == SIZES["nano"]
    assert experts_with(SIZES["nano"], replay=0.0).expert == SIZES["nano"].expert
    assert experts_with(SIZES["nano"], rate=1e-3).replay == SIZES["nano"].replay


def test_members_are_llama_folders_in_bf16(mini: Path) -> None:
    weights = {}
    for member in files.MEMBERS:
        model = AutoModelForCausalLM.from_pretrained(mini / member)
        assert isinstance(model, LlamaForCausalLM)
        assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
        weights[member] = model.state_dict()
        assert (mini / member / "generation_config.json").exists()
    reference = weights.pop(files.REFERENCE)
    for expert in weights.values():
        assert expert.keys() == reference.keys()
        assert any(not torch.equal(expert[name], reference[name]) for name in reference)


def test_training_teaches_the_domain(mini: Path) -> None:
    losses: dict[str, list[float]] = {}
    for record in files.read_lines(mini / files.LOG):
        if "loss" in record:
            losses.setdefault(record["member"], []).append(record["loss"])
    assert losses.keys() == set(files.MEMBERS)
    assert losses["reference"][-1] < 0.7 * losses["reference"][0]


def test_the_log_holds_the_scores(mini: Path) -> None:
    logged = next(r for r in files.read_lines(mini / files.LOG) if r.get("member") == "safety"
                  and r.get("split") == "calibration")  # fmt: skip
    assert few_scores(mini / "safety", "calibration", mini) == logged["scores"]


def test_the_files_are_the_facts(mini: Path) -> None:
    for name, domain in build_all(0).items():
        assert tuple(files.load_items("calibration", name, mini)) == domain.calibration
        assert tuple(files.load_items("evaluation", name, mini)) == domain.evaluation
        shown = files.read_lines(files.exemplar_file(name, mini))
        assert [r["prompt"] for r in shown] == [fact.prompt for fact in domain.exemplars]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda pool: (pool / "probe.jsonl").write_text("{}"), "probe.jsonl: changed"),
        (lambda pool: (pool / "log.jsonl").unlink(), "log.jsonl: missing"),
        (lambda pool: (pool / "stray").write_text(""), "stray: not in SHA256SUMS"),
        (lambda pool: (pool / "splits/.sigmerge").write_text(""), "sigmerge: not in SHA256SUMS"),
        (lambda pool: (pool / "SHA256SUMS").unlink(), "no SHA256SUMS in it"),
    ],
)
def test_verify_names_what_differs(tmp_path: Path, harm, said: str) -> None:  # type: ignore[no-untyped-def]
    files.write_data(build_all(0).values(), tmp_path)
    files.write_lines(tmp_path / files.LOG, [])
    files.write_sums(tmp_path)
    assert files.verify(tmp_path) == 17
    harm(tmp_path)
    with pytest.raises(PoolError, match=said):
        files.verify(tmp_path)


def test_what_a_merge_remembers_is_no_part_of_the_pool(tmp_path: Path) -> None:
    files.write_data(build_all(0).values(), tmp_path)
    files.write_sums(tmp_path)
    (tmp_path / ".sigmerge").mkdir()
    (tmp_path / ".sigmerge/gram.npy").write_text("")
    assert files.verify(tmp_path) == 16


def test_a_dry_run_says_what_is_written(mini: Path, tmp_path: Path) -> None:
    told = sigmerge("pool", "nano", tmp_path / "new", "--size", "mini", "--dry-run", "--json").json
    stored = sum(file.stat().st_size for file in mini.glob("*/*.safetensors"))
    assert told["bytes_to_write"] == pytest.approx(stored, rel=0.05)
    assert not (tmp_path / "new").exists()
    assert sigmerge("pool", "nano", mini, "--dry-run").code != 0


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="exists already"):
        train(tmp_path, size="mini", measure=few_scores)


def test_two_trainings_of_one_pool_at_once(tmp_path: Path) -> None:
    with (
        only_writer(tmp_path / ".pool.lock", "held by the first"),
        pytest.raises(OutputError, match="another run is writing it"),
    ):
        train(tmp_path / "pool", 0, "mini", measure=few_scores)
    assert not (tmp_path / ".pool.partial").exists()


def test_the_rate_rises_and_falls_to_zero() -> None:
    schedule = Schedule(100, 1e-3, warmup=10)
    factors = [schedule.factor(step) for step in range(101)]
    assert factors[:10] == sorted(factors[:10])
    assert factors[9] == factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0)
