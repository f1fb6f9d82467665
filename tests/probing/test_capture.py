"""The capture passes against hooks on a full forward pass, and against autograd, in one go."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.pytorch_utils import Conv1D  # noqa: E402

from sigmerge.checkpoints.folder import open_checkpoint  # noqa: E402
from sigmerge.checkpoints.header import read_header  # noqa: E402
from sigmerge.checkpoints.statistics import StatisticsFolders, write_block  # noqa: E402
from sigmerge.core.algebra import PROCESSOR  # noqa: E402
from sigmerge.errors import PoolError, RecipeError  # noqa: E402
from sigmerge.nano.files import read_lines  # noqa: E402
from sigmerge.probing.capture import capture_features  # noqa: E402
from sigmerge.probing.exemplars import (  # noqa: E402
    Tokens,
    check_same_vocabulary,
    read_exemplars,
    tokenize,
)
from sigmerge.probing.fisher import capture_fisher  # noqa: E402
from sigmerge.probing.skeleton import reader  # noqa: E402
from tests.oracles.oracle_mixtures import routed  # noqa: E402
from tests.probing import models  # noqa: E402

FAMILIES = list(models.CONFIGS)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def tokens_of(seed: int = 0, count: int = 6, most: int = 12) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 24, rng.integers(3, most)).tolist() for _ in range(count)]
    return [Tokens(tuple(row), len(row) // 2 + 1) for row in rows]


def features(folder: Path, tokens: list[Tokens], out: Path, **how: Any) -> StatisticsFolders:
    expert = open_checkpoint(folder)
    read = how.pop("read", reader(expert))
    capture_features(expert, read, tokens, out, **how)
    return StatisticsFolders({"e": out}, {})


def gram_of(found: StatisticsFolders, name: str) -> Any:
    return PROCESSOR.symmetric(found.triangle("e", name))


def in_one_go(folder: Path, tokens: list[Tokens]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gram of every linear input and x̂ energies by this test's own hooks, exemplar by exemplar."""
    model = models.load(folder)
    grams: dict[str, Any] = {}
    energies: dict[str, Any] = {}

    def linear(name: str) -> Any:
        def hook(_m: Any, args: Any, _k: Any, _out: Any) -> None:
            x = args[0].double().reshape(-1, args[0].shape[-1])
            grams[name] = grams.get(name, 0) + (x.T @ x).numpy()

        return hook

    def norm(name: str) -> Any:
        def hook(m: Any, args: Any, _k: Any, out: Any) -> None:
            multiplier = m.weight.double() + (1 if "Gemma" in type(m).__name__ else 0)
            shift = m.bias.double() if getattr(m, "bias", None) is not None else 0.0
            x = ((out.double() - shift) / multiplier).reshape(-1, out.shape[-1])
            energies[name] = energies.get(name, 0) + x.square().sum(0).numpy()

        return hook

    for name, module in model.named_modules():
        linear_layer = isinstance(module, torch.nn.Linear | Conv1D)
        if linear_layer and "lm_head" not in name and "embed" not in name:
            module.register_forward_hook(linear(f"{name}.weight"), with_kwargs=True)
        if "Norm" in type(module).__name__:
            module.register_forward_hook(norm(f"{name}.weight"), with_kwargs=True)
    with torch.no_grad():
        for row in tokens:
            model(input_ids=torch.tensor([row.ids]))
    return grams, energies


@pytest.fixture(scope="module", params=FAMILIES)
def expert(request: Any, tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param) / "expert"
    models.write_expert(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama") / "expert"
    models.write_expert(folder)
    return folder


def test_features_equal_hooks_on_a_full_forward(expert: Path, tmp_path: Path) -> None:
    tokens = tokens_of()
    found = features(expert, tokens, tmp_path / "out")
    grams, energies = in_one_go(expert, tokens)
    assert len(grams) >= 12 and len(energies) >= 7
    rows = sum(len(row.ids) for row in tokens)
    for name, gram in grams.items():
        assert found.measured(name) == "gram", name
        np.testing.assert_allclose(gram_of(found, name), gram, **CLOSE)
        assert found.rows("e", name) == rows
    for name, energy in energies.items():
        assert found.measured(name) == "energy", name
        np.testing.assert_allclose(found.energy("e", name), energy, rtol=2e-3, atol=1e-3)


def test_four_distinct_inputs_a_block_are_stored_once(llama: Path, tmp_path: Path) -> None:

    features(llama, tokens_of(), tmp_path / "out")
    stored = read_header(tmp_path / "out/layer-00000.safetensors")
    assert sorted(t.shape for t in stored.values()) == [
        (16,),
        (16,),
        (136,),
        (136,),
        (136,),
        (300,),
    ]


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def test_threads_and_groups_do_not_change_a_bit(llama: Path, tmp_path: Path) -> None:
    tokens = tokens_of(count=9)
    features(llama, tokens, tmp_path / "one", threads=1)
    features(llama, tokens, tmp_path / "many", threads=4)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")


def test_grams_in_several_groups_and_panels(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sigmerge.probing import capture

    monkeypatch.setattr(capture, "TOKENS_HELD", 10)
    monkeypatch.setattr(capture, "PANEL", 5)
    tokens = tokens_of()
    found = features(llama, tokens, tmp_path / "out", threads=2)
    for name, gram in in_one_go(llama, tokens)[0].items():
        np.testing.assert_allclose(gram_of(found, name), gram, **CLOSE)


def test_a_resumed_capture_ends_in_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    tokens = tokens_of()
    features(llama, tokens, tmp_path / "whole")

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        features(llama, tokens, tmp_path / "parts", progress=stop)
    assert len(files_of(tmp_path / "parts")) == 2
    before = (tmp_path / "parts/layer-00001.safetensors").stat().st_mtime_ns
    features(llama, tokens, tmp_path / "parts")
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    assert (tmp_path / "parts/layer-00001.safetensors").stat().st_mtime_ns == before


def test_statistics_add_up_over_exemplars(llama: Path, tmp_path: Path) -> None:
    tokens = tokens_of()
    name = "model.layers.1.mlp.down_proj.weight"
    whole, left, right = (
        gram_of(features(llama, part, tmp_path / str(i)), name)
        for i, part in enumerate((tokens, tokens[:2], tokens[2:]))
    )
    np.testing.assert_allclose(left + right, whole, rtol=1e-12)


def test_skip_bos_leaves_out_the_first_token(llama: Path, tmp_path: Path) -> None:
    tokens = tokens_of()
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = features(llama, tokens, tmp_path / "whole")
    first = features(llama, [Tokens(row.ids[:1], 1) for row in tokens], tmp_path / "first")
    rest = features(llama, tokens, tmp_path / "rest", skip_bos=True)
    np.testing.assert_allclose(
        gram_of(rest, name), gram_of(whole, name) - gram_of(first, name), **CLOSE
    )
    assert rest.rows("e", name) == whole.rows("e", name) - len(tokens)
    assert rest.rows("e", "model.norm.weight") == whole.rows("e", "model.norm.weight") - len(tokens)


def test_scale_moves_the_network_between_reference_and_expert(llama: Path, tmp_path: Path) -> None:
    models.write_expert(tmp_path / "expert", near=llama, seed=3)
    expert, reference = open_checkpoint(tmp_path / "expert"), open_checkpoint(llama)
    tokens, name = tokens_of(), "model.layers.2.mlp.gate_proj.weight"
    grams = {
        scale: gram_of(features(tmp_path / "expert", tokens, tmp_path / str(scale),
                        read=reader(expert, reference, scale)), name)
        for scale in (0.0, 0.5, 1.0)
    }  # fmt: skip
    np.testing.assert_allclose(grams[0.0], gram_of(features(llama, tokens, tmp_path / "r"), name))
    plain = gram_of(features(tmp_path / "expert", tokens, tmp_path / "e"), name)
    assert np.array_equal(grams[1.0], plain)
    assert not np.allclose(grams[0.5], plain, rtol=1e-3)


def test_weights_are_loaded_block_by_block(llama: Path, tmp_path: Path) -> None:
    """At no time are two blocks' weights in memory."""
    from sigmerge.probing.skeleton import HEAD, Skeleton

    expert = open_checkpoint(llama)
    model = Skeleton(expert, reader(expert))

    def held() -> int:
        parts = [*model.blocks, model._parts[HEAD][0]]
        return sum(p.numel() for m in parts for p in m.parameters() if p.device.type != "meta")

    small = held()
    block = sum(p.numel() for p in model.blocks[0].parameters())
    states, calls = model.enter(tokens_of())
    assert held() <= small
    for i in range(3):
        with model.loaded(i) as module, torch.inference_mode():
            args, kwargs = calls[0][i]
            states[0] = module(states[0], *args, **kwargs)
            assert held() <= small + block
    assert held() == 0


def test_transposed_weights_are_marked(expert: Path, tmp_path: Path) -> None:
    found = features(expert, tokens_of(), tmp_path / "out")
    named = [n for n in open_checkpoint(expert).tensors if found.measured(n) == "gram"]
    assert {found.transposed(name) for name in named} == {"gpt2" in str(expert)}


@pytest.mark.parametrize("skip_bos", [False, True])
@pytest.mark.parametrize("family", list(models.MIXTURES))
def test_grams_of_a_mixture_s_experts(family: str, skip_bos: bool, tmp_path: Path) -> None:
    """Of the tokens that the router sends to each, under the names that are stored."""
    models.write_expert(tmp_path / "moe", family)
    tokens = tokens_of()
    found = features(tmp_path / "moe", tokens, tmp_path / "out", skip_bos=skip_bos, threads=2)
    wanted = routed(tmp_path / "moe", family, [row.ids for row in tokens], skip_bos=skip_bos)
    assert len(wanted) == {"gpt_oss": 18, "mixtral": 27, "qwen3_moe": 36}[family]
    for name, rows in wanted.items():
        np.testing.assert_allclose(gram_of(found, name), rows.T @ rows, rtol=1e-4, atol=1e-4)
        assert found.rows("e", name) == len(rows), name
        stored = name.partition("[")[0]
        assert found.measured(stored) == "gram"
        assert found.transposed(stored) == (family == "gpt_oss")


def test_experts_that_no_token_reaches_have_grams_of_zeros(tmp_path: Path) -> None:
    """One token, which two of three experts get. Such an expert is not measured."""
    models.write_expert(tmp_path / "moe", "mixtral")
    found = features(tmp_path / "moe", [Tokens((5,), 1)], tmp_path / "out")
    name = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight".format
    for layer in range(3):
        for part, width in (("w1", 16), ("w2", 24), ("w3", 16)):
            rows = {i: found.rows("e", name(layer, i, part)) for i in range(3)}
            assert sorted(rows.values()) == [0, 1, 1]
            [missed] = [i for i in rows if not rows[i]]
            assert not gram_of(found, name(layer, missed, part)).any()
            assert len(gram_of(found, name(layer, missed, part))) == width
            kinds = {found.measured(name(layer, i, part)) for i in rows if rows[i]}
            assert found.measured(name(layer, missed, part)) == "" and kinds == {"gram"}


def test_fisher_of_experts_that_are_joined_on_loading(tmp_path: Path) -> None:
    """Under the names that are stored: w1 and w3 are the halves of one parameter, w2 another."""
    models.write_expert(tmp_path / "mixtral", "mixtral")
    tokens = tokens_of()
    found = fisher(tmp_path / "mixtral", tokens, tmp_path / "out")
    wanted = by_autograd(tmp_path / "mixtral", tokens, "argmax")
    for layer, number in ((0, 0), (1, 2), (2, 1)):
        both = wanted[f"model.layers.{layer}.mlp.experts.gate_up_proj"][number]
        parts = {"w1": both[:24], "w3": both[24:],
                 "w2": wanted[f"model.layers.{layer}.mlp.experts.down_proj"][number]}  # fmt: skip
        for part, values in parts.items():
            name = f"model.layers.{layer}.block_sparse_moe.experts.{number}.{part}.weight"
            got = found.fisher("e", name, 0, values.size).reshape(values.shape)
            np.testing.assert_allclose(got, values, rtol=1e-3, atol=1e-6 * values.max() + 1e-12)


def test_fisher_of_a_model_with_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text model is stored under names that transformers turns around."""
    kind = transformers.AutoModelForImageTextToText
    eyes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=models.CONFIGS["llama"](), image_token_index=23,
        vision_config=transformers.CLIPVisionConfig(**eyes),
    )  # fmt: skip
    torch.manual_seed(0)
    model = kind.from_config(config)
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "eyes")
    monkeypatch.setattr(models, "load", lambda folder: kind.from_pretrained(folder).eval())
    tokens = tokens_of(count=2)
    found = fisher(tmp_path / "eyes", tokens, tmp_path / "out")
    wanted = by_autograd(tmp_path / "eyes", tokens, "argmax")
    turned = {"language_model.model.layers.1.mlp.up_proj.weight":
              "model.language_model.layers.1.mlp.up_proj.weight",
              "language_model.lm_head.weight": "lm_head.weight"}  # fmt: skip
    for stored, name in turned.items():
        got = found.fisher("e", stored, 0, wanted[name].size).reshape(wanted[name].shape)
        np.testing.assert_allclose(got, wanted[name], rtol=1e-3, atol=1e-6 * wanted[name].max())
    total = np.sqrt(sum(np.square(values).sum() for values in wanted.values()))
    assert found.fisher_norm("e") == pytest.approx(total, rel=1e-4)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    shape = {
        "vocab_size": 24,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
    }
    config = transformers.T5Config(**shape)
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(PoolError, match="is an encoder-decoder, of which no statistics"):
        features(tmp_path / "t5", tokens_of(count=1), tmp_path / "none")


def test_a_layer_that_only_some_texts_reach() -> None:
    """A mixture of plain linear layers: each has the Gram of the tokens that came to it."""
    from sigmerge.engine.workers import Workers
    from sigmerge.probing.capture import Seen, Sums

    rng = np.random.default_rng(0)
    inputs = {0: torch.tensor(rng.standard_normal((4, 3))), 1: torch.ones((2, 3))}
    sums = Sums(Workers(1))
    for text in ((0,), (0, 1), (1,)):
        seen = Seen(9, False)
        for one in text:
            rows = inputs[one].clone()
            for name in ("gate", "up"):
                seen.linear(f"{one}.{name}", rows, False)
        sums.add([seen])
    assert sums.shared == {f"{e}.{n}": (f"{e}.gate", False) for e in (0, 1) for n in ("gate", "up")}
    assert dict(sums.rows) == {"0.gate": 8, "1.gate": 4}
    wanted = np.triu(2 * (inputs[0].T @ inputs[0]).numpy())
    np.testing.assert_allclose(np.triu(sums.grams["0.gate"].numpy()), wanted)


# Fisher


def by_autograd(folder: Path, tokens: list[Tokens], labels: str) -> dict[str, Any]:
    """Mean over exemplars of squared gradients, one backward pass each; argmax and data labels."""
    model = models.load(folder)
    sums = {name: np.zeros(tuple(p.shape)) for name, p in model.named_parameters()}
    for row in tokens:
        model.zero_grad()
        logits = model(input_ids=torch.tensor([row.ids])).logits[0]
        if labels == "argmax":
            at = row.answer - 1
            loss = torch.nn.functional.cross_entropy(logits[at], logits[at].argmax())
        else:
            wanted = torch.tensor(row.ids[row.answer :])
            guess = logits[row.answer - 1 : len(row.ids) - 1]
            loss = torch.nn.functional.cross_entropy(guess, wanted, reduction="sum")
        loss.backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] += p.grad.double().numpy() ** 2 / len(tokens)
    return sums


def fisher(folder: Path, tokens: list[Tokens], out: Path, **how: Any) -> StatisticsFolders:
    expert = open_checkpoint(folder)
    norm = capture_fisher(expert, reader(expert), tokens, out, **how)
    return StatisticsFolders({"e": out}, {"e": norm})


@pytest.mark.parametrize("labels", ["argmax", "data"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox", "gpt_oss"])
def test_fisher_equals_a_loop_of_backward_passes(family: str, labels: str, tmp_path: Path) -> None:
    models.write_expert(tmp_path / "expert", family)
    tokens = tokens_of()
    before = (tmp_path / "expert/model.safetensors").read_bytes()
    found = fisher(tmp_path / "expert", tokens, tmp_path / "out", labels=labels, threads=2)
    assert (tmp_path / "expert/model.safetensors").read_bytes() == before
    wanted = by_autograd(tmp_path / "expert", tokens, labels)
    for name, values in wanted.items():
        name = {"lm_head.weight": "embed_out.weight"}.get(name, name) if "neox" in family else name
        assert found.measured(name) == "fisher"
        got = found.fisher("e", name, 0, values.size).reshape(values.shape)
        np.testing.assert_allclose(got, values, rtol=1e-3, atol=1e-6 * values.max())
        np.testing.assert_array_equal(found.fisher("e", name, 1, 2), got.ravel()[1:2])
    total = np.sqrt(sum(np.square(values).sum() for values in wanted.values()))
    assert found.fisher_norm("e") == pytest.approx(total, rel=1e-4)


def test_the_square_of_a_batch_gradient_would_be_another_thing(llama: Path, tmp_path: Path) -> None:
    row = tokens_of(count=1)[0]
    twice = fisher(llama, [row, row], tmp_path / "twice")
    once = fisher(llama, [row], tmp_path / "once")
    name = "model.norm.weight"
    np.testing.assert_allclose(
        twice.fisher("e", name, 0, 16), once.fisher("e", name, 0, 16), rtol=1e-6
    )


def test_sampled_labels_follow_the_seed_and_threads_change_nothing(
    llama: Path, tmp_path: Path
) -> None:
    tokens = tokens_of(count=5)
    for name, how in {
        "a": {"seed": 1, "threads": 1},
        "b": {"seed": 1, "threads": 3},
        "c": {"seed": 2, "threads": 1},
    }.items():
        fisher(llama, tokens, tmp_path / name, labels="sampled", **how)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert files_of(tmp_path / "a") != files_of(tmp_path / "c")


def test_a_resumed_fisher_ends_in_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    tokens = tokens_of()
    whole = fisher(llama, tokens, tmp_path / "whole")

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fisher(llama, tokens, tmp_path / "parts", progress=stop)
    assert sorted(files_of(tmp_path / "parts")) == [
        "layer-00001.safetensors",
        "layer-00002.safetensors",
    ]
    before = (tmp_path / "parts/layer-00002.safetensors").stat().st_mtime_ns
    again = fisher(llama, tokens, tmp_path / "parts")
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    assert (tmp_path / "parts/layer-00002.safetensors").stat().st_mtime_ns == before
    assert again.fisher_norm("e") == whole.fisher_norm("e")


def test_fisher_never_holds_two_blocks(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a tensor is read, no other block has weights; each is read on both ways."""
    from sigmerge.probing import fisher as module

    expert, made, reads = open_checkpoint(llama), [], []

    class Kept(module.Skeleton):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            made.append(self)

    def read(name: str) -> Any:
        for i, block in enumerate(made[0].blocks):
            matrices = [p for p in block.parameters() if p.ndim == 2 and p.device.type != "meta"]
            assert i == expert.stack.block_of(name) or not matrices
        reads.append(name)
        return reader(expert)(name)

    monkeypatch.setattr(module, "Skeleton", Kept)
    capture_fisher(expert, read, tokens_of(), tmp_path / "out")
    inside = [name for name in expert.tensors if expert.stack.block_of(name) is not None]
    assert all(reads.count(name) == 2 for name in inside) and len(inside) == 27


# Exemplars


def test_exemplars_are_read_and_cut(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "e.jsonl"
    file.write_text('{"prompt": "w1 w2"}\n\n{"prompt": "w3", "response": "w4 w5 w6"}\n')
    rows = tokenize(llama, read_exemplars(file), 3)
    assert rows == [Tokens((4, 5), 2), Tokens((6, 7, 8), 1)]
    assert len(read_exemplars(file, limit=1)) == 1
    with pytest.raises(RecipeError, match="line 3: has no response within 1 tokens"):
        tokenize(llama, read_exemplars(file)[1:], 1, answers=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no exemplars"),
        ("\n\n", "holds no exemplars"),
        ('{"prompt": "a"}\nnot json\n', "line 2: not valid JSON"),
        ('{"text": "a"}\n', "line 1: expected"),
        ('{"prompt": "a", "response": 3}\n', "line 1: expected"),
        ("[1]\n", "line 1: expected"),
    ],
)
def test_wrong_files_of_exemplars(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "e.jsonl").write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_exemplars(tmp_path / "e.jsonl")


def test_tokenizers_that_differ_are_named(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    models.write_tokenizer(tmp_path / "other", models.WORDS[::-1])
    check_same_vocabulary({"math": llama, "chat": llama})
    with pytest.raises(PoolError, match="coding: 20 tokens differ from those of math"):
        check_same_vocabulary({"math": llama, "coding": tmp_path / "other"})


def test_a_checkpoint_whose_names_the_model_does_not_have(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    models.write_expert(tmp_path / "odd")
    state = load_file(tmp_path / "odd/model.safetensors")
    renamed = {n.replace("q_proj", "query"): v for n, v in state.items()}
    save_file(renamed, tmp_path / "odd/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PoolError, match=r"the model needs model\.layers\.0\.self_attn\.q_proj"):
        features(tmp_path / "odd", tokens_of(), tmp_path / "out")


def test_statistics_that_are_not_finite_are_named(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="for b is not finite"):
        write_block(tmp_path / "new", {}, {"a": np.ones(2), "b": np.array([1, np.inf])})
    assert not (tmp_path / "new").exists()


def test_derived_matrices_survive_being_forgotten_while_others_wait(
    llama: Path, tmp_path: Path
) -> None:
    found = features(llama, tokens_of(), tmp_path / "out")
    name = "model.layers.0.self_attn.q_proj.weight"
    begun, go = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        go.wait(10)
        return "made"

    with ThreadPoolExecutor(2) as team:
        first = team.submit(found.once, name, "slow", slow)
        begun.wait(10)
        second = team.submit(found.once, name, "slow", slow)
        for key in range(5):
            assert found.once(name, key, lambda key=key: key) == key
        go.set()
        assert [first.result(), second.result()] == ["made", "made"]
    for key in range(5):
        assert found.once(name, key, lambda key=key: key) == key


def test_lines_end_at_line_feeds_and_may_begin_with_a_mark(tmp_path: Path) -> None:
    prompt = "one\u2028two\x85three"
    line = json.dumps({"prompt": prompt}, ensure_ascii=False)
    (tmp_path / "e.jsonl").write_text(f"\ufeff{line}\r\n{line}\n", encoding="utf-8", newline="")
    assert [e.prompt for e in read_exemplars(tmp_path / "e.jsonl")] == [prompt, prompt]
    assert read_lines(tmp_path / "e.jsonl") == [{"prompt": prompt}] * 2
