"""Tiny models of many architectures: merged, repaired, verified, loaded; the logits that they
generate by are those of a float32 oracle, built in memory from the same weights and the plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import sigmerge  # noqa: E402
from tests.oracles import oracle_occupancy  # noqa: E402
from tests.probing.models import WORDS, write_tokenizer  # noqa: E402

ENDS = {"pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}
TINY: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, **ENDS,
}  # fmt: skip
WIDE = {k: v for k, v in TINY.items() if k != "num_key_value_heads"}
EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip
STATES = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 3, "state_size": 4, **ENDS}
T5 = {"vocab_size": 24, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 4,
      "num_decoder_layers": 3, "num_heads": 2, "decoder_start_token_id": 2, **ENDS}  # fmt: skip
GPT = {"vocab_size": 24, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64, **ENDS}
DOMAINS = ("math", "coding")
SCORES = {
    "experts": {"math": {"math": 0.9, "coding": 0.4}, "coding": {"math": 0.3, "coding": 0.8}},
    "anchor": {"math": 0.5, "coding": 0.6},
}
LAMBDA = 0.6


def llava(**head: Any) -> Any:
    return hf.LlavaConfig(
        text_config=hf.LlamaConfig(**TINY, **head), vision_config=hf.CLIPVisionConfig(**EYES),
        image_token_index=23, **head,
    )  # fmt: skip


Architecture = tuple[str, Callable[[], Any]]
"""Where the decoder's blocks stand in the model, and its configuration."""
PLAIN: dict[str, Architecture] = {
    "qwen3, tied": ("model.layers",
                    lambda: hf.Qwen3Config(**TINY, head_dim=8, tie_word_embeddings=True)),
    "gemma3_text": ("model.layers", lambda: hf.Gemma3TextConfig(**TINY, head_dim=8)),
    "phi3": ("model.layers", lambda: hf.Phi3Config(**TINY)),
    "olmo2": ("model.layers", lambda: hf.Olmo2Config(**TINY)),
    "cohere": ("model.layers", lambda: hf.CohereConfig(**TINY)),
    "gpt2": ("transformer.h", lambda: hf.GPT2Config(**GPT)),
    "gpt_neox": ("gpt_neox.layers", lambda: hf.GPTNeoXConfig(**WIDE)),
    "opt": ("model.decoder.layers",
            lambda: hf.OPTConfig(**WIDE, ffn_dim=24, word_embed_proj_dim=16)),
    "bloom": ("transformer.h", lambda: hf.BloomConfig(**GPT, hidden_size=16)),
    "falcon": ("transformer.h", lambda: hf.FalconConfig(**WIDE)),
}  # fmt: skip
MIXTURES: dict[str, Architecture] = {
    "mixtral, joined": ("model.layers", lambda: hf.MixtralConfig(**TINY, num_local_experts=3)),
    "gpt_oss, stacked": ("model.layers", lambda: hf.GptOssConfig(
        **TINY, head_dim=8, num_local_experts=3, num_experts_per_tok=2)),
    "qwen3_moe": ("model.layers", lambda: hf.Qwen3MoeConfig(
        **TINY, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8)),
    "granitemoe": ("model.layers", lambda: hf.GraniteMoeConfig(
        **TINY, num_local_experts=3, num_experts_per_tok=2)),
    "deepseek_v3": ("model.layers", lambda: hf.DeepseekV3Config(
        **{**TINY, "num_key_value_heads": 2}, moe_intermediate_size=8, n_routed_experts=4,
        n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=8,
        q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4)),
}  # fmt: skip
STATE_SPACE: dict[str, Architecture] = {
    "mamba": ("backbone.layers", lambda: hf.MambaConfig(**STATES)),
    "mamba2": ("backbone.layers", lambda: hf.Mamba2Config(
        **STATES, num_heads=4, head_dim=8, n_groups=1, chunk_size=8)),
    "rwkv": ("rwkv.blocks", lambda: hf.RwkvConfig(
        vocab_size=24, hidden_size=16, num_hidden_layers=3, context_length=64, **ENDS)),
    "recurrent_gemma": ("model.layers", lambda: hf.RecurrentGemmaConfig(
        **TINY, lru_width=16, attention_window_size=8)),
    "jamba, mixed": ("model.layers", lambda: hf.JambaConfig(
        **TINY, attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, num_experts=2, mamba_d_state=4, use_mamba_kernels=False)),
}  # fmt: skip
ENCODER_DECODER: dict[str, Architecture] = {
    "t5, deeper encoder": ("decoder.block", lambda: hf.T5Config(**T5)),
    "mt5, untied": ("decoder.block", lambda: hf.MT5Config(**T5, tie_word_embeddings=False)),
    "bart": ("model.decoder.layers", lambda: hf.BartConfig(
        vocab_size=24, d_model=16, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=24,
        decoder_ffn_dim=24, encoder_attention_heads=2, decoder_attention_heads=2,
        max_position_embeddings=64, decoder_start_token_id=1, **ENDS)),
}  # fmt: skip
WITH_PICTURES: dict[str, Architecture] = {
    "llava": ("model.language_model.layers", llava),
    "qwen2_vl": ("model.language_model.layers", lambda: hf.Qwen2VLConfig(
        text_config={**TINY, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 16, "num_heads": 2,
                       "mlp_ratio": 2, "patch_size": 8},
        image_token_id=23, video_token_id=22, vision_start_token_id=21, vision_end_token_id=20)),
    "gemma3, nested": ("model.language_model.layers", lambda: hf.Gemma3Config(
        text_config={**TINY, "head_dim": 8}, vision_config=EYES, mm_tokens_per_image=4,
        image_token_index=23, boi_token_index=22, eoi_token_index=21)),
    "llama4": ("language_model.model.layers", lambda: hf.Llama4Config(
        text_config={**TINY, "head_dim": 8, "intermediate_size_mlp": 24, "num_local_experts": 2,
                     "attn_temperature_tuning": False},
        vision_config={**EYES, "intermediate_size": 64, "vision_output_dim": 16,
                       "projector_input_dim": 16, "projector_output_dim": 16},
        image_token_index=23)),
    "internvl": ("model.language_model.layers", lambda: hf.InternVLConfig(
        text_config=hf.Qwen2Config(**TINY), image_token_id=23,
        vision_config=hf.InternVLVisionConfig(
            **{**EYES, "image_size": [16, 16], "patch_size": [8, 8]}))),
}  # fmt: skip
ARCHITECTURES = {**PLAIN, **MIXTURES, **STATE_SPACE, **ENCODER_DECODER, **WITH_PICTURES}


def kind_of(name: str) -> Any:
    if name in WITH_PICTURES:
        return hf.AutoModelForImageTextToText
    return hf.AutoModelForSeq2SeqLM if name in ENCODER_DECODER else hf.AutoModelForCausalLM


def moved(model: Any, spread: float) -> Any:
    """The model with noise on everything that it stores, once for what stands in two places."""
    seen = set()
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point() and value.data_ptr() not in seen:
                seen.add(value.data_ptr())
                value.add_(spread * torch.randn_like(value))
    return model


def write_pool(root: Path, models: dict[str, Any]) -> dict[str, Any]:
    """The models on disk, and the recipe that merges and repairs them."""
    for name, model in models.items():
        model.save_pretrained(root / name)
        write_tokenizer(root / name)
    prompts = [" ".join(WORDS[i : i + 3 + i % 2]) for i in range(0, 12, 3)]
    lines = "\n".join(json.dumps({"prompt": prompt}) for prompt in prompts)
    (root / "probe.jsonl").write_text(lines)
    (root / "scores.json").write_text(json.dumps(SCORES))
    return {
        "merge_method": "linear",
        "base_model": str(root / "reference"),
        "models": [{"model": str(root / name), "name": name} for name in DOMAINS],
        "repair": {"scores": str(root / "scores.json"), "probe": str(root / "probe.jsonl"),
                   "scale": LAMBDA},
    }  # fmt: skip


def oracle(models: dict[str, Any], home: Any, stack: str, plan: dict[str, Any]) -> Any:
    """`home` with the mean of the experts, and what each claims of every block added to it."""
    states = {name: model.state_dict() for name, model in models.items()}
    target = home.state_dict()
    with torch.no_grad():
        for name, value in target.items():
            if value.is_floating_point():
                value.copy_((states["math"][name] + states["coding"][name]) / 2)
    for layer, quota in enumerate(plan["quota"]):
        names = [n for n, v in target.items()
                 if n.startswith(f"{stack}.{layer}.") and v.is_floating_point()]  # fmt: skip
        flat = {who: torch.cat([state[n].ravel() for n in names]).numpy()
                for who, state in states.items()}  # fmt: skip
        deltas = np.array([flat[domain] - flat["reference"] for domain in DOMAINS])
        order = [DOMAINS.index(domain) for domain in plan["order"]]
        owner = oracle_occupancy.claim(deltas, order, quota)
        anchor = torch.cat([target[n].ravel() for n in names]).numpy()
        whole = torch.tensor(oracle_occupancy.add(anchor, deltas, owner, LAMBDA)).float()
        with torch.no_grad():
            sizes = [target[n].numel() for n in names]
            for name, part in zip(names, whole.split(sizes), strict=True):
                target[name].copy_(part.view_as(target[name]))
    return home.eval()


def logits(model: Any) -> Any:
    """The logits that three tokens are generated by."""
    model.generation_config.eos_token_id = None
    made = model.generate(
        torch.tensor([[3, 7, 5, 11]]), max_new_tokens=3, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(made.logits)


def check(root: Path, models: dict[str, Any], home: Any, stack: str, kind: Any) -> None:
    made = sigmerge.merge(write_pool(root, models), root / "out")
    plan = made.as_json()["plan"]
    assert set(plan["views"]) == {"representation", "direction", "sign"}
    reads = re.compile(r"(encoder|vis)\S*\.1\.")  # a stack of two layers or more
    others = any(reads.search(name) for name in models["reference"].state_dict())
    assert others == any("layers of" in note for note in plan["warnings"])
    reports = sigmerge.verify(root / "out")
    assert reports.ok and "architecture" in reports[0].checked, reports
    wanted = oracle(models, home, stack, plan)
    found = kind.from_pretrained(root / "out", dtype=torch.float32).eval()
    loaded = found.state_dict()
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(loaded[name], value, msg=lambda why, n=name: f"{n}: {why}")
    torch.testing.assert_close(logits(found), logits(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_repaired_model_is_the_oracles(tmp_path: Path, name: str) -> None:
    stack, config = ARCHITECTURES[name]
    torch.manual_seed(0)
    reference = moved(kind_of(name).from_config(config()).float(), 0.1)
    models = {"reference": reference}
    models |= {domain: moved(deepcopy(reference), 0.02) for domain in DOMAINS}
    check(tmp_path, models, deepcopy(reference), stack, kind_of(name))


def test_an_encoder_decoder_answers_in_an_evaluation(tmp_path: Path) -> None:
    """Its answer does not repeat the prompt, so nothing of it is cut off."""
    from sigmerge.errors import ScoreError
    from sigmerge.probing.generate import HfModel, Sampling
    from sigmerge.probing.reading import read_texts

    torch.manual_seed(0)
    model = moved(hf.AutoModelForSeq2SeqLM.from_config(hf.T5Config(**T5)), 0.5)
    write_pool(tmp_path, {"t5": model})
    ends = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (tmp_path / "t5/tokenizer_config.json").write_text(json.dumps(ends))
    loaded = HfModel(tmp_path / "t5", "float32", None)
    (answers,), _ = loaded.generate(["w4 w7"], Sampling(max_new_tokens=4))
    ids = loaded.tokenizer(["w4 w7"], return_tensors="pt").input_ids
    wanted = model.eval().generate(ids, max_new_tokens=4, do_sample=False)[0, 1:].tolist()
    assert wanted and answers == [loaded.tokenizer.decode(loaded.until_end(wanted))]
    with pytest.raises(ScoreError, match="encoder-decoder; a likelihood benchmark"):
        read_texts(loaded, [("w4", "w7")], 9)


def test_a_tied_reference_and_untied_experts_inside_a_model_with_pictures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind, stack = hf.AutoModelForImageTextToText, "model.language_model.layers"
    reference = moved(kind.from_config(llava(tie_word_embeddings=True)).float(), 0.1)
    loose = kind.from_config(llava(tie_word_embeddings=False)).float()
    loose.load_state_dict(reference.state_dict())
    models = {"reference": reference}
    models |= {domain: moved(deepcopy(loose), 0.02) for domain in DOMAINS}
    check(tmp_path, models, loose, stack, kind)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert not config["tie_word_embeddings"] and not config["text_config"]["tie_word_embeddings"]
