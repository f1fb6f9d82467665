"""The settings of a configuration that change the computation but no shape of a weight.

Rotary base and scaling, heads, activation, epsilon of norms, window, soft caps, multipliers: a
result has one configuration, by which it uses the weights of all members. What some of them say
otherwise is named before they are merged (ruling 36).

Versions of transformers spell the same in several ways, and not every entry has an effect; neither
is a difference here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sigmerge.checkpoints.kinds import (
    ATTENTION_KEYS,
    EXPERT_KEYS,
    INDEX_LISTS,
    LAYER_TYPES,
    LISTS,
    RULES,
    Config,
    kinds_of,
)
from sigmerge.checkpoints.modules import DEPTH_KEYS
from sigmerge.errors import PoolError
from sigmerge.messages import few, shown

Settings = dict[str, Any]
"""What decides the computation, by key; that of a configuration inside another has its name too."""

_ROPE = (
    "rope_theta", "rotary_emb_base", "global_rope_theta", "rope_local_base_freq",
    "local_rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct",
)  # fmt: skip
_BY_INDEX = {*ATTENTION_KEYS, *EXPERT_KEYS, *INDEX_LISTS, *LISTS, "_sliding_window_pattern"}
"""Entries from which the kinds of layers follow, which are compared themselves."""
_LENGTH = "max_position_embeddings"
_BY_LENGTH = ("dynamic", "longrope", "yarn")
"""Scalings of rotary positions that read the length for which a model was made."""

_SHOWN_BY_SHAPES = re.compile(
    "(hidden|intermediate|vocab|embed(ding)?|ffn?|inner|patch|image|projector|state|conv\\w*)_"
    "(size|dim)s?$|_rank$|^(d|dim)_(?!model_base)|^(n_embd|n_inner|ffn_dim|dim|inner_dim|depths?|"
    "num_labels|n_positions|n_ctx|tie_\\w+|mamba_d_\\w+)$|(num|n)_(local_|routed_|shared_)?experts$|"
    f"(^|_)(num|n)_(\\w+_)?(layers?|blocks)$|(en|de)coder_layers$|^{_LENGTH}$"
)
_IDLE = re.compile(
    "^_|version$|(?<!_per)_token(_?ids?|_index)?$|dropout|_pdrop$|(^|_)drop(_|$)|layerdrop|loss|"
    "jitter|init(ializer)?_|_init(ializer|_value|$)|^(torch_)?dtype$|^return_dict|^use_cache|"
    "^output_(hidden_states|attentions|router_logits|past)$|kernels?$|attn_impl|implementation$|"
    "flash|^mask_(time|feature)_|spec_augment|checkpointing|unsloth|beam|_penalty$|^quantization|"
    "^cache_|(max|seq|context|model_max)_(seq_)?len(gth)?$|"
    "^(id2label|label2id|temperature|top_[kp]|do_sample|max_new_tokens|min_length|torchscript|"
    "\\w*no_repeat_ngram_size|architectures|auto_map|problem_type|finetuning_task|training|"
    "task_specific_params|prefix|tokenizer_class|pretraining_tp|chunk_size_feed_forward|name|"
    "bad_words_ids|license|languages?|tags|base_model\\w*|remove_invalid_values)$"
)
"""Keys without effect on the computation: origin, training, batching, generation."""
_DECIDES = re.compile(
    "rope|rotary|theta|alibi|heads?(_dim)?$|(^|_)act(ivation)?(_fn|_function)?$|window|softcap|"
    "(^|_)eps(ilon)?$|clip|scal(e|ing)|multiplier|bucket|top_?k|experts_per_tok|model_base|n_group|"
    "qk_norm|parallel|residual|causal|position_embedding|attention_chunk_size|_limit$| of layer "
)
"""Keys that change the computation even if other members omit them."""
UNUSED = object()
"""The value of an entry that no layer of a model reads."""
_USUAL: Settings = {"rope_theta": 10000.0, "position_embedding_type": "absolute"}
"""Default values of omitted entries, except those of 0, None and 1."""
_SAME_ACTIVATION = {
    "swish": "silu", "gelu_python": "gelu", "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
}  # fmt: skip


def settings(config: Config) -> Settings:
    """What a configuration says of the computation, and the configurations in it."""
    known, found = config.get("model_type") in RULES, _heads(config)
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            if not _IDLE.search(key):
                found |= {f"{key}.{inner}": each for inner, each in settings(value).items()}
        elif value is None or key in _ROPE or (known if key in _BY_INDEX else _is_idle(key)):
            continue
        else:
            found[key] = _SAME_ACTIVATION.get(value, value) if isinstance(value, str) else value
    if not _is_windowed(config):
        found["sliding_window"] = UNUSED
    return found | _rotary(config) | _labels(config)


def decides(key: str, value: Any) -> bool:
    """Whether an entry alone changes the computation."""
    return bool(_DECIDES.search(key)) and value is not UNUSED and not _is_usual("", value)


def disagreements(
    members: Mapping[str, Config], taken: str | None, *, kinds: bool = True
) -> list[str]:
    """One line for every setting that differs between members, with the values and whose is taken.

    Without `kinds` those of layers are not compared, nor other lists: a stack writes them out.
    """
    said, by_layer = {}, {}
    for name, config in members.items():
        try:
            said[name], by_layer[name] = settings(config), _kinds_of_parts(config)
        except PoolError as error:
            raise PoolError(f"{name}: {error}") from None
    if kinds:
        for key, values in _first_layers(by_layer):
            for name, value in values.items():
                said[name][key] = value
    else:
        for each in said.values():
            for key in [key for key, value in each.items() if _is_by_index(key, value)]:
                del each[key]
    keys = dict.fromkeys(key for each in said.values() for key in each)
    whose = "the reference's" if taken == "reference" else f"that of {taken}"
    ending = f"; the result takes {whose}" if taken else ""
    return [
        f"{key}: {told}{ending}"
        for key in keys
        if (told := _told(key, {name: each.get(key) for name, each in said.items()}))
    ]


def _told(key: str, values: Mapping[str, Any]) -> str:
    """Which members have which value, where it is not the same for all who use it."""
    values = {name: value for name, value in values.items() if value is not UNUSED}
    some_silent = any(value is None for value in values.values())
    if some_silent and not _DECIDES.search(key):
        return ""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        silent = some_silent and _is_usual(key, value)
        groups.setdefault("" if silent else repr(_plain(value)), []).append(name)
    if len(groups) < 2:
        return ""
    return ", ".join(f"{_spelled(values[names[0]])} in {few(names)}" for names in groups.values())


def _is_usual(key: str, value: Any) -> bool:
    """Whether a value is the default of its entry."""
    last = key.rpartition(".")[2]
    if last in _USUAL:
        return value in (None, _USUAL[last])
    return value is not True and value in (None, False, 0, 1, "", [], {})


def _plain(value: Any) -> Any:
    """A value as equal ones are written: 8 and 8.0, entries in any order."""
    if isinstance(value, dict):
        return sorted((key, _plain(each)) for key, each in value.items())
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _spelled(value: Any) -> str:
    return "not said" if value is None else value if isinstance(value, str) else shown(value)


def _is_idle(key: str) -> bool:
    return bool(_SHOWN_BY_SHAPES.search(key) or _IDLE.search(key))


def _is_by_index(key: str, value: Any) -> bool:
    return isinstance(value, list) or key.rpartition(".")[2] in _BY_INDEX


def _heads(config: Config) -> Settings:
    """The heads of attention, of which most configurations leave out what is usual."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    found = Settings()
    if isinstance(heads, int) and heads > 0:
        found["num_key_value_heads"] = heads
        if isinstance(width, int):
            found["head_dim"] = width // heads
    return found


def _is_windowed(config: Config) -> bool:
    """Whether some layer attends to a window only."""
    if config.get("use_sliding_window") is False:
        return False
    kinds = _kinds(config).get(LAYER_TYPES)
    return kinds is None or any("sliding" in str(kind) for kind in kinds)


def _rotary(config: Config) -> Settings:
    """Base and scaling of rotary positions, for each kind of layer that has its own."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        return {"rope_scaling": given}
    base, local = (
        next((config[key] for key in keys if config.get(key) is not None), None)
        for keys in (_ROPE[:3], _ROPE[3:5])
    )
    parts = {key: value for key, value in given.items() if isinstance(value, dict)}
    if not parts and local is not None:
        parts = {"full_attention": given, "sliding_attention": {"rope_theta": local}}
    if not parts:
        return _positions(given, base, config)
    return {
        f"{key} of {kind}": value
        for kind, own in parts.items()
        for key, value in _positions(own, base, config).items()
    }


def _positions(given: Config, base: Any, config: Config) -> Settings:
    kind = given.get("rope_type", given.get("type"))
    kind = None if kind in ("default", "mrope") else kind
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    taken = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    rest = {key: value for key, value in given.items() if key not in taken and value is not None}
    if kind is not None:
        rest["rope_type"] = kind
    if kind in _BY_LENGTH and f"original_{_LENGTH}" not in rest:
        rest[_LENGTH] = config.get(f"original_{_LENGTH}", config.get(_LENGTH))
    return {
        "rope_theta": given.get("rope_theta", base),
        "rope_scaling": rest or None,
        "partial_rotary_factor": config.get("rotary_pct") if share is None else share,
    }


def _labels(config: Config) -> Settings:
    """The names of a classifier's outputs."""
    named = config.get("architectures") or [""]
    architecture = named if isinstance(named, str) else named[0]
    return {"id2label": config.get("id2label")} if "Classification" in architecture else {}


def _kinds(config: Config) -> Mapping[str, list[Any]]:
    depth = next((config[key] for key in DEPTH_KEYS if isinstance(config.get(key), int)), 0)
    return kinds_of(config, depth)


def _kinds_of_parts(config: Config) -> Mapping[str, list[Any]]:
    """The kinds of layers by their rule, of the configurations in this one too."""
    found = dict(_kinds(config))
    for part, own in config.items():
        if part.endswith("_config") and isinstance(own, dict):
            found |= {f"{part}.{rule}": kinds for rule, kinds in _kinds(own).items()}
    return found


def _first_layers(
    members: Mapping[str, Mapping[str, list[Any]]],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Of every rule the first layer whose kinds differ, and what they are."""
    for rule in dict.fromkeys(rule for kinds in members.values() for rule in kinds):
        lists = {name: kinds.get(rule, []) for name, kinds in members.items()}
        for layer in range(max(map(len, lists.values()))):
            values = {n: k[layer] if layer < len(k) else None for n, k in lists.items()}
            if len({repr(value) for value in values.values()}) > 1:
                yield f"{rule} of layer {layer}", values
                break
