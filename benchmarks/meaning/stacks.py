"""Stacks, adapters, classifiers and ties of many kinds of models, loaded in transformers.

Models are tiny, with random weights. The truth of a stack is each source layer itself, called on
the hidden states of the layer before it as its own model calls it. That of a merge is the model
whose weights torch averages; that of an adapter is PEFT in use.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as hf

import sigmerge
from benchmarks.meaning.page import put_section, reason
from benchmarks.measure import versions
from sigmerge.checkpoints.kinds import LISTS
from sigmerge.errors import SigmergeError

APART = 2e-5
"""Share of the largest value by which two float32 computations may differ."""
DEPTH = 4
PLACES = (("one", 0), ("one", 1), ("one", 2), ("other", 1), ("other", 2), ("other", 3))
"""The layers of a stack; every kind of layer meets an index of another kind."""
PROMPT = torch.tensor([[3, 5, 9, 4, 7, 11, 6, 8, 10, 12]])
ENDS = {"pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1}
TINY: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": DEPTH,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, **ENDS,
}  # fmt: skip
WIDE = {k: v for k, v in TINY.items() if k != "num_key_value_heads"}
HEADS = {**TINY, "head_dim": 8}
WINDOW = {**HEADS, "sliding_window": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {**WIDE, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 8,
          "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, **EXPERTS, "n_routed_experts": 4,
          "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
GPT = {"vocab_size": 24, "n_embd": 16, "n_layer": DEPTH, "n_head": 2, "n_positions": 64, **ENDS}

CONFIGS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: hf.LlamaConfig(**TINY),
    "Mistral": lambda: hf.MistralConfig(**WINDOW),
    "Qwen2": lambda: hf.Qwen2Config(**TINY),
    "Qwen2, a window from a layer on": lambda: hf.Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=4, max_window_layers=2),
    "Qwen3": lambda: hf.Qwen3Config(**HEADS),
    "Gemma-2": lambda: hf.Gemma2Config(**WINDOW),
    "Gemma-3": lambda: hf.Gemma3TextConfig(**WINDOW, sliding_window_pattern=3),
    "gpt-oss": lambda: hf.GptOssConfig(**WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "SmolLM3": lambda: hf.SmolLM3Config(**TINY, no_rope_layer_interval=3),
    "Command R7B": lambda: hf.Cohere2Config(**WINDOW, sliding_window_pattern=3),
    "OLMo-3": lambda: hf.Olmo3Config(**{**TINY, "num_key_value_heads": 2}, sliding_window=4),
    "EXAONE-4": lambda: hf.Exaone4Config(**WINDOW, sliding_window_pattern=3),
    "Phi-3": lambda: hf.Phi3Config(**TINY),
    "Granite": lambda: hf.GraniteConfig(**TINY),
    "GPT-2": lambda: hf.GPT2Config(**GPT),
    "GPT-2, attention scaled by index": lambda: hf.GPT2Config(
        **GPT, scale_attn_by_inverse_layer_idx=True),
    "GPT-Neo": lambda: hf.GPTNeoConfig(
        vocab_size=24, hidden_size=16, num_layers=DEPTH, num_heads=2, window_size=4,
        max_position_embeddings=64, attention_types=[[["global", "local"], DEPTH // 2]], **ENDS),
    "GPT-NeoX": lambda: hf.GPTNeoXConfig(**WIDE),
    "ModernBERT decoder": lambda: hf.ModernBertDecoderConfig(
        **WIDE, local_attention=4, global_attn_every_n_layers=3),
    "LFM2": lambda: hf.Lfm2Config(**TINY, full_attn_idxs=[1], block_multiple_of=8),
    "Mixtral": lambda: hf.MixtralConfig(**TINY, num_local_experts=4),
    "Qwen2-MoE": lambda: hf.Qwen2MoeConfig(
        **TINY, **EXPERTS, num_experts=4, mlp_only_layers=[1], shared_expert_intermediate_size=12),
    "Qwen3-MoE": lambda: hf.Qwen3MoeConfig(
        **HEADS, **EXPERTS, num_experts=4, decoder_sparse_step=3),
    "ERNIE-4.5": lambda: hf.Ernie4_5_MoeConfig(
        **TINY, moe_intermediate_size=12, moe_num_experts=4, moe_k=2, moe_layer_start_index=1),
    "Llama-4": lambda: hf.Llama4TextConfig(
        **HEADS, intermediate_size_mlp=24, num_local_experts=2, no_rope_layer_interval=3,
        interleave_moe_layer_step=3, attention_chunk_size=4),
    "GLM-4-MoE": lambda: hf.Glm4MoeConfig(
        **HEADS, **EXPERTS, n_routed_experts=4, first_k_dense_replace=2, n_group=1, topk_group=1),
    "DeepSeek-V2": lambda: hf.DeepseekV2Config(**LATENT),
    "DeepSeek-V3": lambda: hf.DeepseekV3Config(**LATENT),
    "Jamba": lambda: hf.JambaConfig(
        **TINY, attn_layer_period=3, attn_layer_offset=1, num_experts=4, use_mamba_kernels=False,
        mamba_d_state=4, mamba_dt_rank=4),
    "MiniMax": lambda: hf.MiniMaxConfig(**HEADS, num_local_experts=4, block_size=4),
    "DiffLlama": lambda: hf.DiffLlamaConfig(**{**TINY, "num_key_value_heads": 2}),
    "BERT": lambda: hf.BertConfig(**WIDE),
    "RoBERTa": lambda: hf.RobertaConfig(**WIDE),
    "ModernBERT": lambda: hf.ModernBertConfig(
        **WIDE, local_attention=4, global_attn_every_n_layers=3),
    "T5": lambda: hf.T5Config(vocab_size=24, d_model=16, d_kv=8, d_ff=24, num_layers=DEPTH,
                              num_heads=2, decoder_start_token_id=2, **ENDS),
}  # fmt: skip
SHORTER = {"GPT-Neo": ("attention_layers",)}
"""What a configuration is stored without, so that an index decides, besides the common lists."""
TOLD = {
    ("Jamba", "adapter"): "transformers reads the weight of `dt_proj` past its adapter, so that "
    "PEFT in use leaves that update out; ours has it, as PEFT's own `merge_and_unload`. Without "
    "`dt_proj` both are the same.",
}
"""Why a cell differs, where that is known."""
COLUMNS = ("stack", "adapter", "classifier", "no head", "tie")


@dataclass(frozen=True)
class Outcome:
    """What became of a kind of model in a column: how far from the truth, or why it is not there.

    `apart` is a share of the largest value.
    """

    apart: float | None = None
    refused: str = ""
    wrong: str = ""

    @property
    def equal(self) -> bool:
        return self.apart is not None and self.apart <= APART and not self.wrong

    @property
    def cell(self) -> str:
        if self.apart is None:
            return "refused" if self.refused else "–"
        return f"{self.apart:.0e}{f' ({self.wrong})' if self.wrong else ''}"


def _class(config: Any, kind: str) -> Any:
    """The class of transformers that has this head, None if there is none."""
    mapping = getattr(hf, kind)._model_mapping
    found = mapping.get(type(config), None)
    return found[0] if isinstance(found, tuple | list) else found


def _with_head(config: Any) -> Any:
    kinds = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
    if config.model_type in ("bert", "roberta"):
        kinds = kinds[1:]
    return next(found for kind in kinds if (found := _class(config, kind)))


def make(folder: Path, made: Any, config: Any, seed: int) -> Any:
    """Store a model with random weights, its configuration as an older one would be stored."""
    torch.manual_seed(seed)
    model = made(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight + torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    return _load(made, folder)[0]


def without_lists(folder: Path, *more: str) -> None:
    """Take from a stored configuration what lists the kinds of its layers."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    kept = {k: v for k, v in config.items() if k not in (*LISTS, *more)}
    file.write_text(json.dumps(kept), encoding="utf-8")


def _load(made: Any, folder: Path) -> tuple[Any, str]:
    """A model, and what transformers says is missing or has no place."""
    model, info = made.from_pretrained(
        folder, dtype="float32", output_loading_info=True, attn_implementation="eager"
    )
    found = [f"{what}: {sorted(names)[0]}" for what, names in info.items() if names]
    return model.eval(), "; ".join(found)


def _numbers(model: Any) -> torch.Tensor:
    more = {"decoder_input_ids": PROMPT} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        out = model(input_ids=PROMPT, use_cache=False, **more)
    found: torch.Tensor = out.logits if "logits" in out else out[0]
    return found


def _layers(model: Any) -> Any:
    """The stack of a model: the list of modules with the shortest name; T5's is its decoder's."""
    body = model.get_decoder() if model.config.is_encoder_decoder else model
    depth = max(len(m) for m in body.modules() if isinstance(m, torch.nn.ModuleList))
    stacks = [m for m in body.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth]
    return stacks[0]


@contextmanager
def _called(layers: Sequence[Any]) -> Any:
    """What every layer is called with, in this context."""
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def note(i: int, _: Any, args: Any, kwargs: Any) -> None:
        calls[i] = args, kwargs

    with ExitStack() as hooks:
        for i, layer in enumerate(layers):
            handle = layer.register_forward_pre_hook(partial(note, i), with_kwargs=True)
            hooks.callback(handle.remove)
        yield calls


def of_parts(models: Mapping[str, Any], places: Sequence[tuple[str, int]]) -> torch.Tensor:
    """What a stack computes: each layer on what the one before it gave, called as in its model."""
    calls = {}
    for name, model in models.items():
        with _called(_layers(model)) as found:
            _numbers(model)
        calls[name] = found
    first, last = models[places[0][0]], models[places[-1][0]]
    if first.get_output_embeddings().weight is first.get_input_embeddings().weight:
        last.get_output_embeddings().weight = first.get_input_embeddings().weight
    args, kwargs = calls[places[0][0]][0]
    state = args[0] if args else kwargs["hidden_states"]
    with torch.no_grad():
        for name, i in places:
            args, kwargs = calls[name][i]
            named = {**kwargs, "hidden_states": state} if not args else kwargs
            out = _layers(models[name])[i](*((state, *args[1:]) if args else ()), **named)
            state = out[0] if isinstance(out, tuple) else out
    replaced = _layers(last)[-1].register_forward_hook(
        lambda module, args, out: (state, *out[1:]) if isinstance(out, tuple) else state
    )
    try:
        return _numbers(last)
    finally:
        replaced.remove()


def _outcome(
    recipe: Mapping[str, Any], out: Path, made: Any, truth: Callable[[], torch.Tensor]
) -> Outcome:
    try:
        sigmerge.merge(recipe, out, threads=1)
    except SigmergeError as error:
        return Outcome(refused=reason(error))
    wanted = truth()
    model, wrong = _load(made, out)
    (report,) = sigmerge.verify(out)
    findings = [f"verify: {finding}" for finding in report.findings]
    found = _numbers(model)
    largest = float(wanted.abs().max())
    apart = float((found - wanted).abs().max()) / largest if found.shape == wanted.shape else 1.0
    return Outcome(apart, wrong="; ".join(filter(None, [wrong, *findings])))


def stack(name: str, folder: Path) -> Outcome:
    """Layers of two models, the configurations without lists of kinds where an index decides."""
    config = CONFIGS[name]()
    if config.is_encoder_decoder:  # of two stacks; tests/jobs/test_module_slices.py has them
        return Outcome()
    made, models = _with_head(config), {}
    for seed, member in enumerate(("one", "other")):
        make(folder / member, made, CONFIGS[name](), seed)
        without_lists(folder / member, *SHORTER.get(name, ()))
        models[member] = _load(made, folder / member)[0]
    runs = [("one", 0, 3), ("other", 1, 4)]
    slices = [{"sources": [{"model": str(folder / m), "layer_range": [a, b]}]} for m, a, b in runs]
    recipe = {"merge_method": "passthrough", "slices": slices}
    return _outcome(recipe, folder / "out", made, lambda: of_parts(models, PLACES))


def adapter(name: str, folder: Path) -> Outcome:
    """An update of every linear layer."""
    config = CONFIGS[name]()
    made = _with_head(config)
    plain = make(folder / "one", made, config, 0)
    torch.manual_seed(1)
    linear = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear")
    model = peft.get_peft_model(plain, linear).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder / "adapter")
    try:
        wanted = _numbers(model)
    except (AttributeError, RuntimeError, TypeError):  # PEFT does not run it: Llama-4's router
        return Outcome()
    recipe = {
        "merge_method": "passthrough",
        "models": [{"model": f"{folder / 'one'}+{folder / 'adapter'}"}],
    }
    return _outcome(recipe, folder / "out", made, lambda: wanted)


def _mean(made: Any, config: Callable[[], Any], folder: Path) -> Outcome:
    models = [make(folder / f"{seed}", made, config(), seed) for seed in range(2)]
    halves = [{"model": str(folder / f"{i}"), "parameters": {"weight": 0.5}} for i in range(2)]

    def truth() -> torch.Tensor:
        one, other = models
        with torch.no_grad():
            for weight, more in zip(one.parameters(), other.parameters(), strict=True):
                weight.copy_((weight + more) / 2)
        return _numbers(one)

    return _outcome({"merge_method": "linear", "models": halves}, folder / "out", made, truth)


def classifier(name: str, folder: Path) -> Outcome:
    """The mean of two classifiers of texts, or of tokens where there is no other."""
    config = CONFIGS[name]()
    kinds = ("AutoModelForSequenceClassification", "AutoModelForTokenClassification")
    made = next((found for kind in kinds if (found := _class(config, kind))), None)
    if made is None or config.is_encoder_decoder:
        return Outcome()
    return _mean(made, CONFIGS[name], folder)


def no_head(name: str, folder: Path) -> Outcome:
    """The mean of two models that end in hidden states."""
    return _mean(_class(CONFIGS[name](), "AutoModel"), CONFIGS[name], folder)


def tie(name: str, folder: Path) -> Outcome:
    """The mean of two models whose head is the embedding."""

    def tied() -> Any:
        config = CONFIGS[name]()
        config.tie_word_embeddings = True
        return config

    return _mean(_with_head(tied()), tied, folder)


MAKERS = dict(zip(COLUMNS, (stack, adapter, classifier, no_head, tie), strict=True))


def outcome(name: str, column: str) -> Outcome:
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MAKERS[column](name, Path(folder))


def lines(found: Mapping[str, Sequence[Outcome]]) -> list[str]:
    cells = [one for row in found.values() for one in row]
    tried = [one for one in cells if one.apart is not None or one.refused]
    refused = [f"{name}, {column}: {one.refused}" for name, row in found.items()
               for column, one in zip(COLUMNS, row, strict=True) if one.refused]  # fmt: skip
    return [
        f"`python -m benchmarks.meaning stacks`. {versions('peft', 'transformers', 'torch')}.",
        "",
        f"Of {len(tried)} results of {len(found)} kinds of models {sum(o.equal for o in cells)} "
        f"compute what their parts compute, {len(refused)} are refused before a tensor is read, "
        f"and {sum(not (o.equal or o.refused) for o in tried)} compute something else. A cell is "
        "the largest difference of the model that transformers loads, without a missing or "
        "unexpected tensor and with nothing to object from `sigmerge verify`, as a share of the "
        "largest value. *stack*: three layers of one model and three of another, beside each "
        "layer itself, called as its own model calls it; the configurations lie there without "
        "lists of kinds where an index decides. *adapter*: an update of every linear layer, "
        "beside PEFT in use. *classifier*, *no head* and *tie*: the mean of two models with a "
        "classifier, without a head, and with the embedding as head, beside the mean that torch "
        "makes. –: there is no such model, or PEFT does not run its own adapter (Llama-4).",
        "",
        *[f"* {name}, {column}: {why}" for (name, column), why in TOLD.items()],
        *[f"* {one}" for one in refused],
        "",
        f"| model | {' | '.join(COLUMNS)} |",
        f"|---|{'--:|' * len(COLUMNS)}",
        *(f"| {name} | {' | '.join(one.cell for one in row)} |" for name, row in found.items()),
    ]


def main() -> int:
    found = {name: [outcome(name, column) for column in COLUMNS] for name in CONFIGS}
    text = lines(found)
    put_section("Kinds of models", text)
    print("\n".join(text))
    cells = {(name, at): one for name, row in found.items()
             for at, one in zip(COLUMNS, row, strict=True)}  # fmt: skip
    return int(
        any(o.apart is not None and not o.equal for at, o in cells.items() if at not in TOLD)
    )
