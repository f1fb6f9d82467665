"""A model with another model's tokenizer, against mergekit-tokensurgeon and by what tokens mean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sigmerge
from sigmerge.checkpoints.companions import vocabulary
from sigmerge.checkpoints.token_pairs import paired
from sigmerge.errors import SigmergeError
from sigmerge.nano.files import POOL
from tests.command_line import sigmerge as command
from tests.jobs.test_vocabularies import EMBEDDING, HEAD, write_tokenizer
from tests.pools import Weights, draw, read_weights, shapes, write_member

WIDTH, DONORS = 16, 24
SHARED = [f"w{i}" for i in range(40)]
MODEL = ["<pad>", "<s>", "</s>", *SHARED, "only", "new", "words"]
DONOR = ["<unk>", "newwords", *SHARED[::-1], "</s>", "<s>", "<pad>", "integral", "lambda", "step"]


def named(folder: Path, words: list[str], width: int, seed: int, tied: bool) -> Path:
    """A checkpoint of our tests with a tokenizer of these words, and rows to spare."""
    rows = len(words) + 3
    wide = {n: (rows, width) if n in (EMBEDDING, HEAD) else s for n, s in shapes().items()}
    if tied:
        del wide[HEAD]
    made = write_member(folder, draw(wide, seed))
    config = json.loads((made / "config.json").read_text())
    config |= {"vocab_size": rows, "tie_word_embeddings": tied, "hidden_size": width}
    (made / "config.json").write_text(json.dumps(config))
    write_tokenizer(made, words, [word for word in ("<s>", "</s>", "<pad>") if word in words])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
                "eos_token": "</s>", "pad_token": "<pad>"}  # fmt: skip
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tokens")
    return named(root / "model", MODEL, WIDTH, 1, False), named(
        root / "donor", DONOR, DONORS, 2, False
    )


def theirs(model: Path, donor: Path, out: Path, *flags: str) -> Weights:
    """What mergekit-tokensurgeon writes."""
    from click.testing import CliRunner
    from mergekit.scripts.tokensurgeon import main

    done = CliRunner().invoke(main, [str(model), str(donor), str(out), *flags])
    assert done.exit_code == 0, (done.output, done.exception)
    return read_weights(out)


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "omp": ({"k": 5}, ["-a", "omp", "-k", "5"]),
    "knn": ({"method": "knn", "k": 4}, ["-a", "common_interpolation", "-k", "4"]),
    "knn by angle": (
        {"method": "knn", "k": 4, "metric": "cosine"},
        ["-a", "common_interpolation", "-k", "4", "--cosine-similarity"],
    ),
    "knn barycentric": (
        {"method": "knn", "k": 4, "weights": "barycentric"},
        ["-a", "common_interpolation", "-k", "4", "-w", "barycentric"],
    ),
    "knn by least squares": (
        {"method": "knn", "k": 4, "weights": "least_squares"},
        ["-a", "common_interpolation", "-k", "4", "-w", "least_squares"],
    ),
    "mean": ({"method": "mean"}, ["-a", "mean"]),
    "zero": ({"method": "zero"}, ["-a", "zero"]),
    "scaled": ({"k": 5, "scale": 0.5}, ["-a", "omp", "-k", "5", "-nvs", "0.5"]),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_mergekits(case: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    how, flags = CASES[case]
    sigmerge.tokens(*pair, tmp_path / "ours", **how)
    ours, other = read_weights(tmp_path / "ours"), theirs(*pair, tmp_path / "theirs", *flags)
    assert ours.keys() == other.keys()
    for name, wanted in other.items():
        assert np.allclose(ours[name], wanted, rtol=2e-5, atol=2e-6), name
    assert ours[EMBEDDING].shape == (len(DONOR), WIDTH)


def test_a_tied_model_moves_one_matrix(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = named(tmp_path / "tied", MODEL, WIDTH, 1, True)
    sigmerge.tokens(model, pair[1], tmp_path / "ours", k=5)
    sigmerge.tokens(*pair, tmp_path / "both", k=5)
    ours, both = read_weights(tmp_path / "ours"), read_weights(tmp_path / "both")
    assert HEAD not in ours and both[HEAD].shape == both[EMBEDDING].shape
    own = read_weights(model)[EMBEDDING]
    ids = vocabulary(pair[1]), vocabulary(model)
    assert isinstance(ids[0], dict) and isinstance(ids[1], dict)
    assert np.array_equal(ours[EMBEDDING][ids[0]["w7"]], own[ids[1]["w7"]])
    assert np.array_equal(ours[EMBEDDING][ids[0]["</s>"]], own[ids[1]["</s>"]])
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config["vocab_size"] == len(DONOR)


def test_rows_of_pieces(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    letters = {letter: i for i, letter in enumerate("abcd")}
    model, donor = (named(tmp_path / name, ["<s>"], WIDTH, 3, False) for name in ("m", "d"))
    for folder, more, merges in ((model, {}, []), (donor, {"ab": 4}, [("a", "b")])):
        Tokenizer(BPE({**letters, **more}, merges)).save(str(folder / "tokenizer.json"))
    own = read_weights(model)
    kinds = {
        "mean": (0.5, 0.5),
        "sum": (1, 1),
        "weighted_mean": (2 / 3, 1 / 3),
        "first_last": (0, 1),
    }
    for kind, (first, last) in kinds.items():
        out = tmp_path / kind
        sigmerge.tokens(model, donor, out, method="subword", subword=kind)  # type: ignore[arg-type]
        made = read_weights(out)
        for name, (x, y) in {EMBEDDING: (first, last), HEAD: (last, first)}.items():
            wanted = x * own[name][0] + y * own[name][1]
            assert np.allclose(made[name][4], wanted, atol=1e-6), (kind, name)


def test_drawn_rows_follow_from_the_seed_and_the_token(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    found = {}
    for name, seed in {"one": 1, "again": 1, "two": 2}.items():
        sigmerge.tokens(*pair, tmp_path / name, method="random", seed=seed)
        found[name] = read_weights(tmp_path / name)[EMBEDDING]
    assert np.array_equal(found["one"], found["again"])
    new = slice(len(DONOR) - 3, None)
    assert not np.allclose(found["one"][new], found["two"][new])
    old = read_weights(pair[0])[EMBEDDING]
    assert 0.5 < found["one"][new].std() / old.std() < 1.5


def test_pieces_and_threads_decide_no_byte(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sigmerge.tokens(*pair, tmp_path / "one", k=5, threads=1)
    monkeypatch.setattr("sigmerge.engine.stream.CHUNK", 64)
    monkeypatch.setattr("sigmerge.jobs.dense.CHUNK", 64)
    sigmerge.tokens(*pair, tmp_path / "many", k=5, threads=3)
    one, many = read_weights(tmp_path / "one"), read_weights(tmp_path / "many")
    assert all(np.array_equal(one[name], many[name]) for name in one)


def test_a_result_is_verified_by_computing_it_again(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    done = sigmerge.tokens(*pair, tmp_path / "out", k=5)
    read = {Path(one.file).parent for one in done.provenance.inputs}
    assert read == {*pair}
    assert any(one.file.endswith(".safetensors") and str(pair[1]) in one.file
               for one in done.provenance.inputs)  # fmt: skip
    assert all(one.ok for one in sigmerge.verify(tmp_path / "out", deep=True))


def test_refusals(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(SigmergeError, match=r"43 of its tokens .* k: 64"):
        sigmerge.tokens(*pair, tmp_path / "out")
    recipe = {"merge_method": "passthrough", "models": [{"model": str(pair[0])}],
              "tokenizer": {"source": "union", "missing": {}}}  # fmt: skip
    with pytest.raises(SigmergeError, match="goes with the source of a model"):
        sigmerge.merge(recipe, tmp_path / "out")


def test_tokens_are_matched_by_bytes_and_by_role(tmp_path: Path) -> None:
    """A byte-level vocabulary beside one of SentencePiece, with other names of what ends a text."""
    byte, piece = tmp_path / "byte", tmp_path / "piece"
    byte_words = {"Ġthe": 0, "the": 1, "Ã©": 2, "Ċ": 3, "<|end|>": 4, "ĠĠ": 5, "Ã": 6}
    piece_words = {"▁the": 0, "é": 1, "<0x0A>": 2, "</s>": 3, "<0xC3>": 4, "▁▁": 5, "<0x20>": 6}
    for folder, words, end, parts in (
        (byte, byte_words, "<|end|>", {"pre_tokenizer": {"type": "ByteLevel"}}),
        (piece, piece_words, "</s>", {"decoder": {"type": "Metaspace", "replacement": "▁"}}),
    ):
        folder.mkdir()
        added = [{"id": words[end], "content": end, "special": True}]
        content = {"model": {"vocab": words}, "added_tokens": added, **parts}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    assert paired(byte, byte_words, piece, piece_words) == {
        "Ġthe": 0, "Ã©": 1, "Ċ": 2, "<|end|>": 3, "Ã": 4, "ĠĠ": 5,
    }  # fmt: skip
    assert paired(piece, piece_words, byte, byte_words) == {
        "▁the": 0, "é": 2, "<0x0A>": 3, "</s>": 4, "<0xC3>": 6, "▁▁": 5,
    }  # fmt: skip


def test_a_text_is_read_before_and_after(tmp_path: Path) -> None:
    """With the same tokens under other ids a model says the same."""
    donor = Path(shutil.copytree(POOL / "reference", tmp_path / "donor"))
    content = json.loads((donor / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    named = sorted(words, key=words.get)
    content["model"]["vocab"] = {w: i for i, w in enumerate(named[:4] + named[4:][::-1])}
    (donor / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "text.txt").write_text(" ".join(named[10:40]) + "\n")
    done = sigmerge.tokens(POOL / "math", donor, tmp_path / "out", text=tmp_path / "text.txt")
    before, after = done.text["before"], done.text["after"]
    assert before.tokens == after.tokens == 29
    assert after.bits_per_byte == pytest.approx(before.bits_per_byte, rel=1e-4)
    assert after.perplexity == pytest.approx(before.perplexity, rel=1e-3)
    old, new = read_weights(POOL / "math"), read_weights(tmp_path / "out")
    assert not np.array_equal(old[EMBEDDING], new[EMBEDDING])
    missing = sigmerge.tokens.plan(POOL / "math", donor, tmp_path / "x", text=tmp_path / "text.txt")
    assert missing.steps
    with pytest.raises(SigmergeError, match="no line of two words"):
        (tmp_path / "text.txt").write_text("word\n")
        sigmerge.tokens(POOL / "math", donor, tmp_path / "x", text=tmp_path / "text.txt")


def test_mergekits_command(pair: tuple[Path, Path], tmp_path: Path) -> None:
    ran = command("mergekit", "tokensurgeon", *pair, tmp_path / "out", "-a", "common_interpolation",
                  "-k", "4", "-c", "--batch-size", "8", "-bm", "yes")  # fmt: skip
    assert ran.code == 0 and "byte-match is not needed" in ran.err, ran.err
    sigmerge.tokens(*pair, tmp_path / "ours", method="knn", k=4, metric="cosine")
    ours, made = read_weights(tmp_path / "ours"), read_weights(tmp_path / "out")
    assert all(np.array_equal(ours[name], made[name]) for name in ours)
    ran = command("mergekit", "tokensurgeon", *pair, tmp_path / "no", "-a", "stb", "--magikarp")
    assert ran.code == 2 and "--magikarp, --approximation-method stb: is not there" in ran.err
