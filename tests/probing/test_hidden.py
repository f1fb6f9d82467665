"""The probe pass against hooks written here, on tiny models of four families."""

import json
import sys

import numpy as np
import pytest

from sigmerge.errors import MissingExtra, PoolError, SigmergeError
from sigmerge.method.conflict import representation_view
from sigmerge.probing.exemplars import read_prompts
from sigmerge.probing.hidden import probe

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

PROMPTS = [
    "the cat sat",
    "dogs ran far away from the mat and slept on it while a cat sat",
    "a",
    "while it slept the dogs sat on a mat",
    "far away",
]
WORDS = sorted({word for prompt in PROMPTS for word in prompt.split()})
TOLERANCE = {"rtol": 2e-5, "atol": 1e-5}

TINY = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def config_of(family):
    kinds = {
        "llama": lambda: transformers.LlamaConfig(**TINY),
        "gemma2": lambda: transformers.Gemma2Config(**TINY, head_dim=8, sliding_window=4),
        "qwen2": lambda: transformers.Qwen2Config(**TINY),
        "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=8),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=24, n_embd=16, n_layer=3, n_head=2, n_positions=64
        ),
    }
    return kinds[family]()


FAMILIES = ["llama", "gemma2", "qwen2", "qwen3", "gpt2"]


def write_tokenizer(folder, side="right", pad="<pad>"):
    vocabulary = {"<unk>": 0, "<eos>": 1, "<pad>": 2, **{w: i + 3 for i, w in enumerate(WORDS)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", padding_side=side
    )
    if pad is not None:
        tokenizer.pad_token = pad
    tokenizer.save_pretrained(folder)


def write_model(folder, family="llama", seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family))
    with torch.no_grad():
        for parameter in model.parameters():  # defaults are so small that blocks hardly act
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def expert(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder, request.param)
    write_tokenizer(folder)
    return folder, probe(folder, PROMPTS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-llama")
    write_model(folder)
    write_tokenizer(folder)
    return folder


def block_list(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def forward(model, **inputs):
    """Outputs of the blocks, caught by hooks of this test."""
    caught = []

    def catch(_module, _inputs, output):
        caught.append((output if torch.is_tensor(output) else output[0]).detach().clone())

    handles = [block.register_forward_hook(catch) for block in block_list(model)]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return caught


def grams_one_by_one(folder):
    """One unpadded forward pass per prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for prompt in PROMPTS:
        outputs = forward(model, input_ids=tokenizer(prompt, return_tensors="pt").input_ids)
        rows.append(np.stack([hidden[0].double().numpy().mean(axis=0) for hidden in outputs]))
    return np.stack([states @ states.T for states in np.stack(rows, axis=1)])


def grams_padded(folder, side):
    """One forward pass over all prompts, padded by the tokenizer on the given side."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
    encoded = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    mask = encoded.attention_mask
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    outputs = forward(
        model, input_ids=encoded.input_ids, attention_mask=mask, position_ids=positions
    )
    grams = []
    for hidden in outputs:
        states = np.stack(
            [
                row[keep.bool()].double().numpy().mean(axis=0)
                for row, keep in zip(hidden, mask, strict=True)
            ]
        )
        grams.append(states @ states.T)
    return np.stack(grams)


def test_equals_one_unpadded_forward_pass_per_prompt(expert):
    folder, grams = expert
    assert grams.shape == (3, len(PROMPTS), len(PROMPTS))
    assert grams.dtype == np.float64
    np.testing.assert_allclose(grams, grams_one_by_one(folder), **TOLERANCE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_equals_a_padded_batch_on_either_side(expert, side):
    folder, grams = expert
    np.testing.assert_allclose(grams, grams_padded(folder, side), **TOLERANCE)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_does_not_depend_on_the_batch_size(expert, batch_size):
    folder, grams = expert
    np.testing.assert_allclose(probe(folder, PROMPTS, batch_size=batch_size), grams, **TOLERANCE)


def test_the_last_block_is_read_before_the_final_norm(llama):
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    rows = []
    for prompt in PROMPTS:
        with torch.no_grad():
            output = model(
                tokenizer(prompt, return_tensors="pt").input_ids, output_hidden_states=True
            )
        rows.append([layer[0].double().mean(dim=0).numpy() for layer in output.hidden_states])
    entries = np.array(rows).transpose(1, 0, 2)[1:]
    grams = probe(llama, PROMPTS)
    np.testing.assert_allclose(grams[:-1], entries[:-1] @ entries[:-1].mT, **TOLERANCE)
    assert not np.allclose(grams[-1], entries[-1] @ entries[-1].T, rtol=0.01)


@pytest.mark.parametrize(("side", "pad"), [("left", "<pad>"), ("left", None), ("right", None)])
def test_the_tokenizers_padding_does_not_matter(llama, tmp_path, side, pad):
    write_model(tmp_path)
    write_tokenizer(tmp_path, side, pad)
    assert np.array_equal(probe(tmp_path, PROMPTS), probe(llama, PROMPTS))


def test_the_same_call_gives_the_same_bits(llama):
    assert np.array_equal(probe(llama, PROMPTS), probe(llama, PROMPTS))


def test_prompts_keep_their_order(llama):
    order = [3, 0, 4, 2, 1]
    grams = probe(llama, [PROMPTS[i] for i in order])
    np.testing.assert_allclose(grams, probe(llama, PROMPTS)[:, order][:, :, order], **TOLERANCE)


def test_long_prompts_are_cut_at_max_length(llama):
    cut = [" ".join(prompt.split()[:4]) for prompt in PROMPTS]
    np.testing.assert_allclose(probe(llama, PROMPTS, max_length=4), probe(llama, cut), **TOLERANCE)


def test_bfloat16_weights_are_computed_with_in_float32(tmp_path):
    half, full = tmp_path / "half", tmp_path / "full"
    write_model(half, dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    model.save_pretrained(full)
    for folder in (half, full):
        write_tokenizer(folder)
    assert np.array_equal(probe(half, PROMPTS), probe(full, PROMPTS))


def test_with_an_offload_folder_the_result_is_the_same(llama, tmp_path):
    pytest.importorskip("accelerate")
    grams = probe(llama, PROMPTS, offload_folder=tmp_path)
    np.testing.assert_allclose(grams, probe(llama, PROMPTS), **TOLERANCE)


def test_layers_that_wait_on_disk_give_the_same_result(llama, tmp_path, monkeypatch):
    """Room for a part of the model only, so that the rest is read from the offload folder."""
    pytest.importorskip("accelerate")
    expected = probe(llama, PROMPTS)
    load = transformers.AutoModelForCausalLM.from_pretrained

    def cramped(folder, **options):
        model = load(folder, max_memory={"cpu": 8_000}, **options)
        assert "disk" in model.hf_device_map.values()
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", cramped)
    grams = probe(llama, PROMPTS, offload_folder=tmp_path)
    np.testing.assert_allclose(grams, expected, **TOLERANCE)


def test_progress_hears_every_batch(llama):
    heard = []
    probe(llama, PROMPTS, batch_size=2, progress=lambda done, total: heard.append((done, total)))
    assert heard == [(2, 5), (4, 5), (5, 5)]


def test_experts_that_differ_disagree(tmp_path):
    grams = []
    for seed in (0, 1):
        write_model(tmp_path / str(seed), seed=seed)
        write_tokenizer(tmp_path / str(seed))
        grams.append(probe(tmp_path / str(seed), PROMPTS))
    assert (representation_view(np.stack(grams)) > 0.01).all()
    assert representation_view(np.stack([grams[0], grams[0]])) == pytest.approx(0.0, abs=1e-12)


def test_a_prompt_without_tokens_is_named(llama):
    with pytest.raises(SigmergeError, match="Prompt 2 is empty"):
        probe(llama, ["a", ""])


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(PoolError, match="cannot be loaded for the probe pass"):
        probe(tmp_path, PROMPTS)


def test_without_transformers_the_extra_is_named(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"representation view needs transformers.*\[models\]"):
        probe(llama, PROMPTS)


def test_read_prompts(tmp_path):
    path = tmp_path / "probe.jsonl"
    lines = [json.dumps({"prompt": text, "domain": "x"}) for text in ("one", "zwei ✓", "a\nb")]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    assert read_prompts(path) == ["one", "zwei ✓", "a\nb"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not valid JSON"),
        ('{"prompt": "a"}\n\n{"text": "b"}\n', "line 3: expected"),
        ('["a"]\n', "line 1: expected"),
        ('{"prompt": 3}\n', "line 1: expected"),
        ("\n \n", "no prompts"),
        ("", "no prompts"),
    ],
)
def test_wrong_probe_files(tmp_path, text, message):
    path = tmp_path / "probe.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SigmergeError, match=message):
        read_prompts(path)


def test_a_probe_file_in_another_encoding(tmp_path):
    path = tmp_path / "probe.jsonl"
    path.write_bytes('{"prompt": "größer"}'.encode("latin-1"))
    with pytest.raises(SigmergeError, match="line 1: not valid JSON"):
        read_prompts(path)


def test_a_missing_probe_file(tmp_path):
    with pytest.raises(SigmergeError, match=r"nowhere\.jsonl: no such file of prompts"):
        read_prompts(tmp_path / "nowhere.jsonl")
