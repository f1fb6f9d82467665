"""Kinds of layers that follow from a layer's index: what a configuration says of each of them.

Attention with a window or without, positions or none, one feed-forward part or many experts. A rule
reads the kinds of all layers from a configuration, and writes kinds into one. What it wrote is read
again: a configuration that cannot say it is found by that.

The rules are those of transformers, by model type; every model type there is held against them by
`python -m benchmarks.meaning stacks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import Any, NamedTuple

from sigmerge.errors import PoolError

Config = Mapping[str, Any]
Kinds = list[Any]
Derived = Callable[[Config, int], Kinds | None]

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
LAYER_TYPES, MLP_TYPES = "layer_types", "mlp_layer_types"


@dataclass(frozen=True)
class Rule:
    """`kinds` are those of a configuration of so many layers, None where it says nothing.

    `written` is a configuration that is to say other kinds; whether it does is up to the caller.
    """

    key: str
    kinds: Derived
    written: Callable[[Config, Kinds], Config] = lambda config, kinds: config


def _listed(key: str, derived: Derived, *superseded: str) -> Rule:
    """A list of one entry a layer, that goes before what the other keys say."""

    def kinds(config: Config, depth: int) -> Kinds | None:
        given = config.get(key)
        if isinstance(given, list) and len(given) >= depth:
            return given[:depth]
        return derived(config, depth)

    def written(config: Config, kinds: Kinds) -> Config:
        return {k: v for k, v in config.items() if k not in superseded} | {key: kinds}

    return Rule(key, kinds, written)


def _every(period: int | str, default: int = 0, *, at: int = -1, full: str = _FULL,
           other: str = _SLIDING) -> Derived:  # fmt: skip
    """`full` at every so many layers, at the last of them or at another place; else `other`."""

    def derived(config: Config, depth: int) -> Kinds | None:
        n = config.get(period, default) if isinstance(period, str) else period
        if not isinstance(n, int) or n < 1:
            return None
        return [full if i % n == at % n else other for i in range(depth)]

    return derived


def _unsaid(config: Config, depth: int) -> Kinds | None:
    return None


def _all(kind: str) -> Derived:
    return lambda config, depth: [kind] * depth


def _last_full(rule: Rule) -> Rule:
    """transformers sees to it that the last layer attends to everything, whatever is listed."""

    def last(config: Config, depth: int) -> Kinds | None:
        kinds = rule.kinds(config, depth)
        return kinds and [*kinds[:-1], _FULL]

    return replace(rule, kinds=last)


def _explicit(key: str) -> Rule:
    """A list that transformers makes by a rule of its own where there is none."""

    def written(config: Config, kinds: Kinds) -> Config:
        return {**config, key: kinds} if all(isinstance(kind, str) for kind in kinds) else config

    listed = _listed(key, lambda config, depth: list(range(depth)))
    return replace(listed, written=written)


def _window_from(config: Config, depth: int) -> Kinds:
    """The window of Qwen's models begins at a layer."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    return [_SLIDING if window is not None and i >= first else _FULL for i in range(depth)]


def _window_until(config: Config, depth: int) -> Kinds:
    until = config.get("max_window_layers", 28) if config.get("use_sliding_window") else 0
    return [_SLIDING if (i + 1) % 2 and i < until else _FULL for i in range(depth)]


def _windowed(derived: Derived) -> Derived:
    """Full attention everywhere where there is no window."""

    def kinds(config: Config, depth: int) -> Kinds | None:
        windowed = config.get("sliding_window", 4096) is not None
        return derived(config, depth) if windowed else [_FULL] * depth

    return kinds


def _no_rope(config: Config, depth: int) -> Kinds:
    n = config.get("no_rope_layer_interval", 4)
    given = config.get("no_rope_layers")
    return given[:depth] if given else [int((i + 1) % n != 0) for i in range(depth)]


def _chunked(config: Config, depth: int) -> Kinds:
    return ["chunked_attention" if rope else _FULL for rope in _no_rope(config, depth)]


def _window_without_rope(config: Config, depth: int) -> Kinds:
    sees_all = not config.get("use_sliding_window") or config.get("sliding_window") is None
    return [_FULL if sees_all or rope else _SLIDING for rope in _no_rope(config, depth)]


def _at_indices(key: str, here: str, elsewhere: str) -> Derived:
    def derived(config: Config, depth: int) -> Kinds | None:
        given = config.get(key)
        if not isinstance(given, list):
            return None
        return [here if i in given else elsewhere for i in range(depth)]

    return derived


def _dense_first(default: int, key: str = "first_k_dense_replace") -> Derived:
    def derived(config: Config, depth: int) -> Kinds:
        first = config.get(key, default)
        step = config.get("moe_layer_freq") or 1
        every = step if isinstance(step, int) else 1
        return ["sparse" if i >= first and i % every == 0 else "dense" for i in range(depth)]

    return derived


def _experts(config: Config, depth: int) -> Kinds:
    """Where Qwen's mixtures have experts."""
    if config.get("num_experts") == 0:
        return [False] * depth
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    return [i not in dense and step > 0 and (i + 1) % step == 0 for i in range(depth)]


def _with_experts(config: Config, kinds: Kinds) -> Config:
    dense = [i for i, sparse in enumerate(kinds) if not sparse]
    return {**config, "decoder_sparse_step": 1, "mlp_only_layers": dense}


def _interleaved(config: Config, depth: int) -> Kinds:
    """Where Llama-4 has experts."""
    step = config.get("interleave_moe_layer_step", 1)
    given = config.get("moe_layers")
    return [(i + 1) % step == 0 if given is None else i in given for i in range(depth)]


def _between(config: Config, depth: int) -> Kinds:
    """Where ERNIE has experts."""
    step, first = config.get("moe_layer_interval", 1), config.get("moe_layer_start_index", 1)
    last = config.get("moe_layer_end_index", -1)
    end = depth - 1 if last in (-1, None) else last
    return [(i + 1) % step == 0 and first <= i <= end for i in range(depth)]


def _written_between(config: Config, kinds: Kinds) -> Config:
    sparse = [i for i, kind in enumerate(kinds) if kind] or [len(kinds)]
    ends = {"moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1]}
    return {**config, "moe_layer_interval": 1, **ends}


def _expanded(config: Config, depth: int) -> Kinds | None:
    """GPT-Neo's kinds of attention, as runs that are repeated."""
    runs = config.get("attention_types") or [[["global", "local"], depth // 2]]
    kinds = [kind for run, times in runs for _ in range(times) for kind in run]
    return kinds if len(kinds) == depth else None


def _cycled(config: Config, depth: int) -> Kinds:
    cycle = config.get("block_types") or ["recurrent", "recurrent", "attention"]
    return [cycle[i % len(cycle)] for i in range(depth)]


def _counted(key: str, last: bool = False) -> Rule:
    """A number of layers at the start, or at the end, that differ from the others."""

    def kinds(config: Config, depth: int) -> Kinds | None:
        n = config.get(key)
        if not isinstance(n, int):
            return None
        return [i >= depth - n if last else i < n for i in range(depth)]

    def written(config: Config, kinds: Kinds) -> Config:
        differs = kinds[::-1] if last else kinds
        return {**config, key: next((i for i, kind in enumerate(differs) if not kind), len(kinds))}

    return Rule(key, kinds, written)


def _indices(key: str) -> Rule:
    """A list of the layers that differ from the others."""
    return Rule(
        key,
        _at_indices(key, "in", "not in"),
        lambda config, kinds: {**config, key: [i for i, kind in enumerate(kinds) if kind == "in"]},
    )


def _numbered(key: str) -> Rule:
    """What differs for some layers, under their numbers."""

    def kinds(config: Config, depth: int) -> Kinds | None:
        given = config.get(key)
        if not isinstance(given, dict):
            return None
        return [given.get(str(i), given.get(i, {})) for i in range(depth)]

    return Rule(
        key,
        kinds,
        lambda config, kinds: {**config, key: {str(i): k for i, k in enumerate(kinds) if k}},
    )


def _referring(key: str) -> Rule:
    """A list of one entry a layer, each the index of a layer before it or of itself."""

    def kinds(config: Config, depth: int) -> Kinds | None:
        given = config.get(key)
        return [i - at for i, at in enumerate(given[:depth])] if isinstance(given, list) else None

    return Rule(key, kinds, lambda c, kinds: {**c, key: [i - back for i, back in enumerate(kinds)]})


def _lettered(key: str) -> Rule:
    """A letter a layer."""

    def kinds(config: Config, depth: int) -> Kinds | None:
        given = config.get(key)
        return list(given) if isinstance(given, str) and len(given) == depth else None

    return Rule(key, kinds, lambda config, kinds: {**config, key: "".join(kinds)})


def _periodic(key: str, period: str, offset: str, defaults: tuple[int, int]) -> Rule:
    """Layers at every so many; no other pattern can be said."""

    def kinds(config: Config, depth: int) -> Kinds | None:
        n, at = config.get(period, defaults[0]), config.get(offset, defaults[1])
        return [i % n == at for i in range(depth)]

    return Rule(key, kinds)


def _bound(key: str, when: Callable[[Config], bool] = lambda config: True) -> Rule:
    """What a layer computes follows from its index itself."""
    return Rule(key, lambda config, depth: list(range(depth)) if when(config) else None)


def _whole(key: str) -> Rule:
    """Layers that cannot be taken out of their model."""
    return Rule(key, lambda config, depth: [(i, depth) for i in range(depth)])


def _first_alone(key: str) -> Rule:
    """The first layer has a part that the others lack, and lend from it."""
    return Rule(key, lambda config, depth: [i == 0 for i in range(depth)])


def _decaying(config: Config, depth: int) -> Kinds | None:
    """Linear attention that forgets the faster the deeper its layer lies."""
    kinds = config.get(LAYER_TYPES) or _every(2, at=0, other=_LINEAR)(config, depth) or []
    return [(i, depth) if kind == _LINEAR else _FULL for i, kind in enumerate(kinds[:depth])]


def _by_depth(key: str, default: float) -> Rule:
    """Layers that add the less to the hidden states the more of them there are."""

    def kinds(config: Config, depth: int) -> Kinds:
        return [config.get(key, default) / depth**0.5] * depth

    def written(config: Config, kinds: Kinds) -> Config:
        return {**config, key: kinds[0] * len(kinds) ** 0.5}

    return Rule(key, kinds, written)


def _sparsity(config: Config, depth: int) -> Kinds:
    sparse = 10 if depth > 10 else 0
    return [0.95] * sparse + [0.0] * (depth - sparse)


def _attention(derived: Derived, *superseded: str) -> tuple[Rule, ...]:
    return (_listed(LAYER_TYPES, derived, *superseded),)


_NO_ROPE = _listed("no_rope_layers", _no_rope)
_EXPERTS = Rule("mlp_only_layers, decoder_sparse_step", _experts, _with_experts)
_DENSE_FIRST = _counted("first_k_dense_replace")
_PATTERN = "sliding_window_pattern"
_QWEN = _attention(_window_from)
_HYBRID = _attention(_every("full_attention_interval", 4, other=_LINEAR), "full_attention_interval")
_RELATIVE = (_first_alone("relative_attention_bias"),)

RULES: Mapping[str, tuple[Rule, ...]] = {
    "afmoe": (
        *_attention(_every("global_attn_every_n_layers", 4)),
        _counted("num_dense_layers"),
    ),
    "bamba": (_indices("attn_layer_indices"),),
    "beam": (
        _explicit(LAYER_TYPES), _explicit(MLP_TYPES), _bound("the scale of what a layer adds"),
    ),
    "cohere2": _attention(_every(_PATTERN, 4), _PATTERN),
    "cwm": _attention(_every(4, at=0)),
    "deepseek_v2": (_DENSE_FIRST,),
    "deepseek_v3": (_DENSE_FIRST,),
    "deepseek_v32": (_listed(MLP_TYPES, _dense_first(3), "first_k_dense_replace"),),
    "deepseek_v4": (_explicit(LAYER_TYPES), _explicit(MLP_TYPES)),
    "diffllama": (_bound("lambda_init"),),
    "dots1": (_DENSE_FIRST, *_QWEN),
    "ernie4_5_moe": (Rule("moe_layer_interval", _between, _written_between),),
    "exaone4": _attention(_windowed(_every(_PATTERN, 4))),
    "flint": (_explicit(LAYER_TYPES), _EXPERTS),
    "gemma2": _attention(_every(2)),
    "gemma3_text": _attention(_every(_PATTERN, 6), _PATTERN, "_sliding_window_pattern"),
    "gemma3n_text": (
        *_attention(_every(5)),
        _listed("activation_sparsity_pattern", _sparsity),
        _counted("num_kv_shared_layers", last=True),
    ),
    "gemma4_text": (
        _last_full(_listed(LAYER_TYPES, _every(6))),
        _counted("num_kv_shared_layers", last=True),
    ),
    "glm4_moe": (_DENSE_FIRST,),
    "glm4_moe_lite": (_listed(MLP_TYPES, _dense_first(1), "first_k_dense_replace"),),
    "glm_moe_dsa": (_listed(MLP_TYPES, _dense_first(3), "first_k_dense_replace"),),
    "gpt_neo": (
        Rule("attention_types", _expanded, lambda c, kinds: {**c, "attention_types": [[kinds, 1]]}),
    ),
    "gpt2": (
        _bound("scale_attn_by_inverse_layer_idx",
               lambda c: bool(c.get("scale_attn_by_inverse_layer_idx"))),
    ),
    "gpt_oss": _attention(_every(2)),
    "granite_swa": _attention(_every(4, at=0)),
    "granitemoe_swa": _attention(_every(4, at=0)),
    "granitemoehybrid": _attention(_all(_LINEAR)),
    "hrm_text": (_whole("the layers of its two parts"),),
    "hy_v4": (_explicit(MLP_TYPES), _explicit("indexer_types")),
    "inkling_text": (_explicit(LAYER_TYPES), _explicit(MLP_TYPES)),
    "jamba": (
        _periodic("attn_layer_period", "attn_layer_period", "attn_layer_offset", (8, 4)),
        _periodic("expert_layer_period", "expert_layer_period", "expert_layer_offset", (2, 1)),
    ),
    "kimi_linear": (_explicit(LAYER_TYPES), _explicit(MLP_TYPES)),
    "kolibri1": _attention(_every(5)),
    "lfm2": _attention(_at_indices("full_attn_idxs", _FULL, "conv")),
    "lfm2_moe": (
        *_attention(_at_indices("full_attn_idxs", _FULL, "conv")),
        _counted("num_dense_layers"),
    ),
    "llama4_text": (
        _NO_ROPE,
        *_attention(_chunked),
        Rule("moe_layers", _interleaved,
             lambda c, kinds: {**c, "moe_layers": [i for i, sparse in enumerate(kinds) if sparse]}),
    ),
    "longt5": _RELATIVE,
    "mimo_v2_flash": (_explicit(LAYER_TYPES), _explicit(MLP_TYPES)),
    "minicpm3": (_by_depth("scale_depth", 1.4),),
    "minimax": (
        *_attention(_every(2, at=0, other=_LINEAR)),
        Rule("the decay of its linear attention", _decaying),
    ),
    "modernbert": _attention(_every("global_attn_every_n_layers", 3, at=0)),
    "modernbert-decoder": _attention(_every("global_attn_every_n_layers", 3, at=0)),
    "mt5": _RELATIVE,
    "olmo3": _attention(_every(4)),
    "olmo_hybrid": _attention(_every(4, other=_LINEAR)),
    "qwen2": _QWEN,
    "qwen2_5_vl_text": _QWEN,
    "qwen2_moe": (*_attention(_window_until), _EXPERTS),
    "qwen2_vl_text": _QWEN,
    "qwen3": _QWEN,
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_moe": (_EXPERTS,),
    "qwen3_next": (*_HYBRID, _EXPERTS),
    "qwen3_vl_moe_text": (_EXPERTS,),
    "recurrent_gemma": (
        Rule("block_types", _cycled, lambda config, kinds: {**config, "block_types": kinds}),
    ),
    "rwkv": (_first_alone("pre_ln"),),
    "smollm3": (_NO_ROPE, *_attention(_window_without_rope)),
    "t5": _RELATIVE,
    "t5gemma": _attention(_every(2)),
    "vaultgemma": _attention(_every(2)),
    "xlstm": (_whole("num_blocks"),),
}  # fmt: skip
"""By model type, as transformers derives the kinds where a configuration does not list them."""

INDEX_LISTS = (
    "attn_layer_indices", "cross_attention_layers", "full_attention_layers", "full_attn_idxs",
    "fullatt_block_indexes", "global_attention_layers", "global_attn_indexes", "hybrid_layer_ids",
    "mlp_only_layers", "moe_layers", "rope_scaling_layers", "window_block_indexes",
    "window_block_indices",
)  # fmt: skip
"""Lists of the layers that differ from the others, in configurations of any type."""
LISTS = (LAYER_TYPES, MLP_TYPES, "layers_block_type", "no_rope_layers", "indexer_types")
LETTERED = ("hybrid_override_pattern",)
NUMBERED = ("per_layer_config",)
REFERRING = ("kv_source_layers",)
OTHER_LISTS = ("architectures", *INDEX_LISTS, *REFERRING)
"""Lists that are none of one entry a layer, however long they are; nor are those of token ids."""

ATTENTION_KEYS = (
    "attention_types", "attn_layer_period", "block_types", "full_attention_interval",
    "global_attn_every_n_layers", "layer_group_size", "linear_attn_config", "max_window_layers",
    "no_rope_layer_interval", _PATTERN,
)  # fmt: skip
"""Keys by which some configurations say which layers attend otherwise."""
EXPERT_KEYS = (
    "decoder_sparse_step", "expert_layer_period", "first_k_dense_replace",
    "interleave_moe_layer_step", "moe_layer_freq", "moe_layer_frequency", "moe_layer_interval",
    "moe_layers_enum", "num_dense_layers", "num_hash_layers",
)  # fmt: skip
"""The same of which layers have experts."""


def rules_of(config: Config) -> tuple[Rule, ...]:
    """The rules of a configuration's model type, and those of lists that any type may have.

    Of a type that is not known, keys that may decide a kind bind a layer to its index.
    """
    known = RULES.get(str(config.get("model_type")))
    own = known or ()
    named = {word for rule in own for word in rule.key.split(", ")}
    lists = [_indices(key) for key in INDEX_LISTS if key not in named and config.get(key)]
    lists += [_listed(key, _unsaid) for key in LISTS if key not in named and config.get(key)]
    lists += [_numbered(key) for key in NUMBERED if config.get(key)]
    lists += [_referring(key) for key in REFERRING if config.get(key)]
    letters = [_lettered(key) for key in LETTERED if key not in named and config.get(key)]
    bound = [_bound(key) for key in _undecided(config)] if known is None else []
    return (*own, *lists, *letters, *bound)


def kinds_of(config: Config, depth: int) -> dict[str, Kinds]:
    """Of every rule, the kinds of the layers; nothing of rules that bind them to their places."""
    found = {rule.key: _read(rule, config, depth) for rule in rules_of(config)}
    bound = ([None] * depth, list(range(depth)))
    return {key: kinds for key, kinds in found.items() if kinds not in bound}


def _undecided(config: Config) -> Iterator[str]:
    for listed, keys in ((LAYER_TYPES, ATTENTION_KEYS), (MLP_TYPES, EXPERT_KEYS)):
        if isinstance(config.get(listed), list):
            continue
        for key in keys:
            idle = key == "max_window_layers" and not config.get("use_sliding_window")
            if config.get(key) not in (None, 0, 1, [], {}, "") and not idle:
                yield key


def is_by_layer(key: str, value: Any, depth: int) -> bool:
    """Whether an entry of a configuration has an entry of its own for every layer."""
    other = key in OTHER_LISTS or key.endswith(("_token_id", "_token_ids"))
    return isinstance(value, list) and len(value) == depth and not other


def with_kinds(config: Config, sources: Sequence[LayerSource]) -> tuple[Config, list[str]]:
    """A configuration that gives each layer the kind that it had in its source; and problems."""
    wanted: dict[Rule, Kinds] = {}
    depth = len(sources)
    for rule in _rules([config, *(source.config for source in sources)]):
        wanted[rule] = kinds = [_kind(rule, source) for source in sources]
        if _read(rule, config, depth) != kinds or any(kind != kinds[0] for kind in kinds):
            config = rule.written(config, kinds)
    return config, [p for rule, kinds in wanted.items() if (p := _differing(rule, config, kinds))]


class LayerSource(NamedTuple):
    """Where a layer comes from: a configuration of so many layers, and its place there."""

    config: Config
    depth: int
    place: int


def _rules(configs: Sequence[Config]) -> list[Rule]:
    found: dict[str, Rule] = {}
    for config in {id(config): config for config in configs}.values():
        for rule in rules_of(config):
            found.setdefault(rule.key, rule)
    return list(found.values())


def _kind(rule: Rule, source: LayerSource) -> Any:
    kinds = _read(rule, source.config, source.depth)
    return kinds[source.place] if source.place < len(kinds) else None


def _read(rule: Rule, config: Config, depth: int) -> Kinds:
    try:
        return rule.kinds(config, depth) or [None] * depth
    except (TypeError, ValueError, ArithmeticError, IndexError):
        raise PoolError(f"config.json: what it says of {rule.key} cannot be right.") from None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


def _differing(rule: Rule, config: Config, kinds: Kinds) -> str:
    """What a configuration cannot say, if there is such a thing."""
    if None in kinds and any(kind is not None for kind in kinds):
        return f"{rule.key}: one of the configurations says of each layer what another leaves out"
    now = _read(rule, config, len(kinds))
    layer = next((i for i, kind in enumerate(kinds) if not _same(now[i], kind)), None)
    if layer is None:
        return ""
    return (
        f"layer {layer} of the result would be of another kind than the layer that it is made of: "
        f"{rule.key} of the configuration decides that by a layer's index, and cannot say it "
        "otherwise"
    )
