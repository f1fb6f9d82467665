"""Adapters of many kinds: the stored model's logits beside those of PEFT in use.

Of every kind PEFT makes an adapter of a tiny model and fills it with random numbers. The truth is
what the model computes with the adapter loaded by PEFT, not what `merge_and_unload` makes of it.
Ours is what transformers loads of `merge_method: passthrough` over model+adapter.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import sigmerge
from benchmarks.meaning.page import put_section, reason
from benchmarks.measure import versions
from sigmerge.errors import SigmergeError

APART = 1e-5
"""Share of the largest logit by which two float32 computations may differ."""
PROMPT = torch.tensor([[3, 5, 9, 4, 7, 11]])
ENDS = {"pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}
TINY: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, **ENDS,
}  # fmt: skip
WIDE = {k: v for k, v in TINY.items() if k != "num_key_value_heads"}
GPT = {"vocab_size": 24, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64, **ENDS}
EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8}  # fmt: skip


def _llava() -> Any:
    text = hf.LlamaConfig(**TINY, tie_word_embeddings=True)
    return hf.LlavaConfig(text_config=text, vision_config=hf.CLIPVisionConfig(**EYES),
                          image_token_index=23, tie_word_embeddings=True)  # fmt: skip


def _gemma3() -> Any:
    text = hf.Gemma3TextConfig(**TINY, head_dim=8)
    return hf.Gemma3Config(text_config=text, vision_config=hf.SiglipVisionConfig(**EYES),
                           mm_tokens_per_image=4, image_token_index=23)  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: hf.LlamaConfig(**TINY),
    "Qwen2": lambda: hf.Qwen2Config(**TINY),
    "Mixtral": lambda: hf.MixtralConfig(**TINY, num_local_experts=4),
    "GPT-2, untied": lambda: hf.GPT2Config(**GPT, tie_word_embeddings=False),
    "Llama, tied": lambda: hf.LlamaConfig(**TINY, tie_word_embeddings=True),
    "GPT-2": lambda: hf.GPT2Config(**GPT),
    "GPT-NeoX, tied": lambda: hf.GPTNeoXConfig(**WIDE, tie_word_embeddings=True),
    "Gemma-2": lambda: hf.Gemma2Config(**TINY, head_dim=8),
    "Gemma-3 with eyes": _gemma3,
    "LLaVA, tied": _llava,
    "BERT, masked": lambda: hf.BertConfig(**WIDE),
    "T5": lambda: hf.T5Config(vocab_size=24, d_model=16, d_kv=8, d_ff=24, num_layers=3,
                              num_heads=2, decoder_start_token_id=2, **ENDS),
}  # fmt: skip
CLASSES = {
    "Gemma-3 with eyes": "Gemma3ForConditionalGeneration",
    "LLaVA, tied": "LlavaForConditionalGeneration",
    "BERT, masked": "BertForMaskedLM",
    "T5": "T5ForConditionalGeneration",
}
"""Classes of models that AutoModelForCausalLM does not build."""


@dataclass(frozen=True)
class Kind:
    """An adapter to make: of which model, and PEFT's settings of it.

    `copied`: the model's file stores the tied head too. `layers` is PEFT's
    `save_embedding_layers`. `half` stores the adapter in bfloat16. `rows` resizes the vocabulary.
    """

    model: str
    name: str
    settings: Mapping[str, Any]
    method: str = "Lora"
    copied: bool = False
    layers: Any = "auto"
    half: bool = False
    rows: int = 0

    @property
    def title(self) -> str:
        return f"{self.model}: {self.name}"


def _lora(model: str, name: str, targets: Any, **more: Any) -> Kind:
    own = {k: more.pop(k) for k in ("copied", "layers", "half", "rows") if k in more}
    return Kind(model, name, {"target_modules": targets, **more}, **own)


def _tied(model: str, embedding: str, layer: str) -> list[Kind]:
    """The ways in which an adapter meets a head that is the embedding."""
    both = [embedding, "lm_head"]
    return [
        _lora(model, "embedding", [layer, embedding]),
        _lora(model, "head", [layer, "lm_head"]),
        _lora(model, "embedding and head", [layer, *both]),
        _lora(model, "embedding, `ensure_weight_tying`", [layer, embedding],
              ensure_weight_tying=True),
        _lora(model, "embedding and head, `ensure_weight_tying`", [layer, *both],
              ensure_weight_tying=True),
        _lora(model, "embedding in `modules_to_save`", [layer], modules_to_save=[embedding]),
        _lora(model, "head in `modules_to_save`", [layer], modules_to_save=["lm_head"]),
        _lora(model, "both in `modules_to_save`", [layer], modules_to_save=both),
    ]  # fmt: skip


ATTENTION = ["q_proj", "v_proj"]
KINDS: tuple[Kind, ...] = (
    _lora("Llama", "attention", ATTENTION),
    _lora("Llama", "`all-linear`", "all-linear"),
    _lora("Llama", "a regular expression", r".*layers\.[01]\.mlp\.(up|down)_proj"),
    _lora("Llama", "in bfloat16", ATTENTION, half=True),
    _lora("Llama", "rsLoRA", ATTENTION, use_rslora=True),
    _lora("Llama", "DoRA", ATTENTION, use_dora=True),
    _lora("Llama", "DoRA, rsLoRA", "all-linear", use_dora=True, use_rslora=True),
    _lora("Llama", "patterns of ranks and α", "all-linear", rank_pattern={"q_proj": 2},
          alpha_pattern={r"layers\.1\.mlp\.down_proj": 9}),
    _lora("Llama", "`layers_to_transform`", ATTENTION, layers_to_transform=[0, 2]),
    _lora("Llama", "`exclude_modules`", ATTENTION, exclude_modules=r".*layers\.1\..*"),
    _lora("Llama", "`init_lora_weights: orthogonal`", ATTENTION, init_lora_weights="orthogonal"),
    _lora("Llama", "norms in `modules_to_save`", ATTENTION, modules_to_save=["norm"]),
    _lora("Llama", "embedding and head", [*ATTENTION, "embed_tokens", "lm_head"]),
    _lora("Llama", "embedding and head, DoRA", ["embed_tokens", "lm_head"], use_dora=True),
    _lora("Llama", "both in `modules_to_save`", ATTENTION,
          modules_to_save=["embed_tokens", "lm_head"]),
    _lora("Qwen2", "`bias: lora_only`", ATTENTION, bias="lora_only"),
    _lora("Qwen2", "`bias: all`", ["o_proj"], bias="all"),
    _lora("Mixtral", "attention", ATTENTION),
    _lora("GPT-2, untied", "`c_attn` and head", ["c_attn", "attn.c_proj", "lm_head"]),
    _lora("GPT-2, untied", "DoRA", ["c_attn", "c_fc"], use_dora=True),
    *_tied("Llama, tied", "embed_tokens", "q_proj"),
    _lora("Llama, tied", "embedding and head, DoRA", ["embed_tokens", "lm_head"], use_dora=True),
    _lora("Llama, tied", "head alone, no layer beside it", ["lm_head"]),
    _lora("Llama, tied", "head, `save_embedding_layers: false`", ["lm_head"], layers=False),
    _lora("Llama, tied", "both, `save_embedding_layers: false`", ["embed_tokens", "lm_head"],
          layers=False),
    _lora("Llama, tied", "head, `ensure_weight_tying`", ["lm_head"], ensure_weight_tying=True),
    _lora("Llama, tied", "both tied, another α for the head", ["embed_tokens", "lm_head"],
          ensure_weight_tying=True, alpha_pattern={"lm_head": 9}),
    _lora("Llama, tied", "both tied, DoRA", ["embed_tokens", "lm_head"],
          ensure_weight_tying=True, use_dora=True),
    _lora("Llama, tied", "both in `modules_to_save`, tied", ["q_proj"],
          modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True),
    _lora("Llama, tied", "embedding in `modules_to_save`, tied", ["q_proj"],
          modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    _lora("Llama, tied", "head adapted, embedding saved", ["lm_head"],
          modules_to_save=["embed_tokens"]),
    _lora("Llama, tied", "embedding adapted, head saved", ["embed_tokens"],
          modules_to_save=["lm_head"]),
    _lora("Llama, tied", "embedding; the file has a head", ["embed_tokens"], copied=True),
    _lora("Llama, tied", "head; the file has a head", ["lm_head"], copied=True),
    _lora("Llama, tied", "both; the file has a head", ["embed_tokens", "lm_head"], copied=True),
    _lora("Llama, tied", "layers alone, `save_embedding_layers`", ["q_proj"], layers=True),
    _lora("Llama, tied", "layers, two more tokens", ["q_proj"], rows=26),
    _lora("Llama, tied", "embedding in `modules_to_save`, two more tokens", ["q_proj"],
          modules_to_save=["embed_tokens"], rows=26),
    _lora("Llama, tied", "embedding, two more tokens", ["q_proj", "embed_tokens"], rows=26),
    _lora("Llama, tied", "head, two more tokens", ["q_proj", "lm_head"], rows=26),
    *_tied("GPT-2", "wte", "c_attn"),
    _lora("GPT-2", "embedding; the file has a head", ["wte"], copied=True),
    _lora("GPT-NeoX, tied", "embedding", ["embed_in"]),
    _lora("GPT-NeoX, tied", "embedding and head", ["embed_in", "lm_head"]),
    _lora("Gemma-2", "embedding", ["embed_tokens"]),
    _lora("Gemma-2", "embedding and head", ["embed_tokens", "lm_head"]),
    _lora("Gemma-3 with eyes", "embedding", ["q_proj", "embed_tokens"]),
    _lora("Gemma-3 with eyes", "head", ["q_proj", "lm_head"]),
    _lora("LLaVA, tied", "embedding and head", ["q_proj", "embed_tokens", "lm_head"]),
    _lora("BERT, masked", "attention", ["query", "value"]),
    _lora("BERT, masked", "embedding", ["word_embeddings"]),
    _lora("BERT, masked", "embedding in `modules_to_save`", ["query"],
          modules_to_save=["word_embeddings"]),
    _lora("T5", "attention", ["q", "v"]),
    _lora("T5", "head", ["lm_head"]),
    _lora("T5", "head in `modules_to_save`", ["q"], modules_to_save=["lm_head"]),
    _lora("Llama", "`lora_bias`", ["o_proj"], lora_bias=True),
    _lora("Llama", "`trainable_token_indices`", ["q_proj"], trainable_token_indices=[3, 5]),
    _lora("Llama", "`layer_replication`", ["q_proj"], layer_replication=[[0, 2], [1, 3]]),
    _lora("Llama", "`init_lora_weights: pissa`", ["q_proj"], init_lora_weights="pissa"),
    _lora("Llama", "`init_lora_weights: olora`", ["q_proj"], init_lora_weights="olora"),
    _lora("Mixtral", "`target_parameters`", ["q_proj"],
          target_parameters=["mlp.experts.gate_up_proj"]),
    Kind("Llama", "AdaLoRA", {"target_modules": ATTENTION, "total_step": 10}, "AdaLora"),
    Kind("Llama", "LoHa", {"target_modules": ATTENTION}, "LoHa"),
    Kind("Llama", "LoKr", {"target_modules": ATTENTION}, "LoKr"),
    Kind("Llama", "IA³", {"target_modules": ["k_proj", "down_proj"],
                          "feedforward_modules": ["down_proj"]}, "IA3"),
    Kind("Llama", "OFT", {"target_modules": ATTENTION, "oft_block_size": 4}, "OFT"),
    Kind("Llama", "VeRA", {"target_modules": ["q_proj"]}, "Vera"),
    Kind("Llama", "layer norms", {}, "LNTuning"),
    Kind("Llama", "prompt tuning", {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"},
         "PromptTuning"),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How far our logits are from PEFT's, as a share of the largest; or why there are none.

    `forgotten`: those of the model that was trained, where PEFT's are others after loading.
    """

    kind: Kind
    largest: float
    ours: float = 0.0
    apart: float = 0.0
    forgotten: float | None = None
    tied: bool = True
    refused: str = ""
    loaded: str = ""

    @property
    def equal(self) -> bool:
        return not self.refused and not self.loaded and self.apart <= APART

    @property
    def remembered(self) -> bool:
        """Whether ours is the model that was trained, where PEFT drops a part when it loads it."""
        return not self.loaded and self.forgotten is not None and self.forgotten <= APART


def _class(model: str) -> Any:
    return getattr(hf, CLASSES.get(model, "AutoModelForCausalLM"))


def make_model(folder: Path, name: str, copied: bool) -> None:
    """A model with random weights, large enough that its logits show every change."""
    config = MODELS[name]()
    torch.manual_seed(len(name))
    made = _class(name)
    model = made.from_config(config) if hasattr(made, "from_config") else made(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    if copied:
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = model.get_input_embeddings().weight.detach().clone()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _load(name: str, folder: Path, rows: int = 0) -> tuple[Any, Any]:
    model, info = _class(name).from_pretrained(folder, dtype="float32", output_loading_info=True)
    if rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model.eval(), info


def _logits(model: Any) -> torch.Tensor:
    more = {"decoder_input_ids": PROMPT} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=PROMPT, **more).logits
    return found


def make_adapter(folder: Path, base: Path, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """An adapter as PEFT saves it, with random numbers.

    The logits of the model that it was trained in, and of one that it is loaded into.
    """
    torch.manual_seed(1)
    settings = dict(kind.settings)
    if kind.method == "Lora":
        settings = {"r": 4, "lora_alpha": 6, **settings}
    config = getattr(peft, f"{kind.method}Config")(**settings)
    model = peft.get_peft_model(_load(kind.model, base, kind.rows)[0], config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder, save_embedding_layers=kind.layers)
    if kind.half:
        file = folder / "adapter_model.safetensors"
        weights = {n: w.to(torch.bfloat16) for n, w in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    fresh = _load(kind.model, base, kind.rows)[0]
    return _logits(model), _logits(peft.PeftModel.from_pretrained(fresh, str(folder)).eval())


def outcome(kind: Kind, folder: Path) -> Outcome:
    """Make the adapter in a folder, store its model by sigmerge, and compare."""
    base, adapter, out = (folder / part for part in ("model", "adapter", "out"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_model(base, kind.model, kind.copied)
        trained, wanted = make_adapter(adapter, base, kind)
        plain = _logits(_load(kind.model, base)[0])
    largest = float(wanted.abs().max())
    if wanted.shape == plain.shape and torch.allclose(wanted, plain, atol=1e-2):
        raise AssertionError(f"{kind.title}: the adapter changes nothing, so nothing is compared.")
    try:
        recipe = {"merge_method": "passthrough", "models": [{"model": f"{base}+{adapter}"}]}
        sigmerge.merge(recipe, out, threads=1)
    except SigmergeError as error:
        return Outcome(kind, largest, refused=reason(error))
    model, info = _load(kind.model, out)
    ours = _logits(model)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    found = [f"{what}: {sorted(names)[0]}" for what, names in info.items() if names]
    apart, other = (float((ours - one).abs().max()) / largest for one in (wanted, trained))
    forgotten = other if apart > APART and not kind.half else None
    return Outcome(
        kind, largest, float(ours.abs().max()), apart, forgotten, tied, loaded="; ".join(found)
    )


def outcomes(kinds: Iterable[Kind] = KINDS) -> list[Outcome]:
    found = []
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            found.append(outcome(kind, Path(folder)))
    return found


def lines(found: list[Outcome]) -> list[str]:
    counts = Counter("refused" if o.refused else "equal" if o.equal else "other" for o in found)
    return [
        f"`python -m benchmarks.meaning adapters`. {versions('peft', 'transformers', 'torch')}.",
        "",
        f"Of {len(found)} kinds of adapter {counts['equal']} give the logits that PEFT has in use, "
        f"{counts['refused']} are refused before a tensor is read, and {counts['other']} give "
        "others. PEFT makes the adapter of a tiny model with random weights and fills it with "
        "random numbers. *PEFT* is the largest logit of the model that the adapter is loaded "
        "into, *ours* that of what transformers loads of `merge_method: passthrough`, *apart* the "
        "largest difference as a share of it. *head*: whether the result's head is its embedding.",
        "",
        *_told(found),
        "| model | adapter | PEFT | ours | apart | head |",
        "|---|---|--:|--:|--:|---|",
        *map(_row, found),
    ]


def _told(found: list[Outcome]) -> list[str]:
    """What is to say of kinds of which PEFT loads less than it saved."""
    forgotten = [one.kind.title for one in found if one.remembered]
    if not forgotten:
        return []
    return [f"{'; '.join(forgotten)}: PEFT saves an update of the head, and loads the adapter "
            "again without it; ours is the model that was trained.", ""]  # fmt: skip


def _row(one: Outcome) -> str:
    start = f"| {one.kind.model} | {one.kind.name} | {one.largest:.3g} |"
    if one.refused:
        return f"{start} refused | | {one.refused} |"
    head = one.loaded or ("the embedding" if one.tied else "its own")
    if one.forgotten is not None:
        head += f"; apart from the model that was trained {one.forgotten:.0e}"
    return f"{start} {one.ours:.3g} | {one.apart:.0e} | {head} |"


def main() -> int:
    found = outcomes()
    text = lines(found)
    put_section("Adapters", text)
    print("\n".join(text))
    return int(any(not (one.equal or one.refused or one.remembered) for one in found))
