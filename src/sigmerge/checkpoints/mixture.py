"""Dense models as the experts of a mixture: its tensors and its configuration, before one is read.

A mixture takes all but the feed-forward parts from its base. Those of the experts stand side by
side, under a router that has a row for each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.header import Tensor
from sigmerge.checkpoints.lazy import FormedTensor, TensorRun, Values
from sigmerge.checkpoints.pool import clash, listed
from sigmerge.core import Array
from sigmerge.core.philox import key_of, normal
from sigmerge.errors import PoolError

PARTS = ("gate_proj", "up_proj", "down_proj")
RESIDUAL = "down_proj"
"""The part that writes to the residual stream: what `residual_scale` multiplies."""
_ATTENTION = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
_PLAIN = frozenset({"input_layernorm.weight", "post_attention_layernorm.weight", *_ATTENTION})
_BIASES = tuple(f"self_attn.{part}_proj.bias" for part in "qkv")
_NORMED = frozenset({"self_attn.q_norm.weight", "self_attn.k_norm.weight"})
_COMPUTED = "self_attn.rotary_emb.inv_freq"

_USUAL: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32,
        "head_dim": 128, "attention_bias": False,
    },
}  # fmt: skip
"""What a dense model means where its configuration says nothing: a mixture's defaults differ."""


@dataclass(frozen=True)
class Family:
    """A kind of mixture: which dense models it is made of, and how it calls their tensors."""

    title: str
    model_type: str
    architecture: str
    sources: tuple[str, ...]
    module: str
    parts: Mapping[str, str]
    inside: frozenset[str]
    """A block's tensors beside the feed-forward part."""
    count: str
    """The key of the number of experts."""
    settings: Callable[[Mapping[str, Any], int], Mapping[str, Any]]
    """Further keys, of the base's configuration and the number of shared experts."""
    shared: str = ""
    """What the shared expert is called; "" where there is none."""
    needs_shared: bool = False
    shared_gate: str = ""
    biases: bool = False
    """Whether attention has biases: zeros where the base has none."""

    def expert(self, block: str, number: int, part: str) -> str:
        return f"{block}{self.module}.experts.{number}.{self.parts[part]}.weight"

    def router(self, block: str) -> str:
        return f"{block}{self.module}.gate.weight"


def _mixtral(base: Mapping[str, Any], shared: int) -> Mapping[str, Any]:
    return {"sliding_window": None}


def _deepseek(base: Mapping[str, Any], shared: int) -> Mapping[str, Any]:
    home = "deepseek-ai/deepseek-moe-16b-base--"
    return {
        "n_shared_experts": shared or None,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": True,
        "moe_intermediate_size": base["intermediate_size"],
        "auto_map": {
            "AutoConfig": f"{home}configuration_deepseek.DeepseekConfig",
            "AutoModel": f"{home}modeling_deepseek.DeepseekModel",
            "AutoModelForCausalLM": f"{home}modeling_deepseek.DeepseekForCausalLM",
        },
    }


def _qwen3(base: Mapping[str, Any], shared: int) -> Mapping[str, Any]:
    inner = base["intermediate_size"]
    return {"decoder_sparse_step": 1, "norm_topk_prob": True, "moe_intermediate_size": inner}


def _qwen2(base: Mapping[str, Any], shared: int) -> Mapping[str, Any]:
    alone = {"sliding_window": None, "use_sliding_window": False}
    inner = base["intermediate_size"]
    return {**_qwen3(base, shared), **alone, "shared_expert_intermediate_size": inner}


_SAME = {part: part for part in PARTS}
_LLAMAS = ("llama", "mistral")
MIXTURES = (
    Family(
        "Mixtral", "mixtral", "MixtralForCausalLM", _LLAMAS, "block_sparse_moe",
        {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}, _PLAIN,
        "num_local_experts", _mixtral,
    ),
    Family(
        "DeepSeek MoE", "deepseek", "DeepseekForCausalLM", _LLAMAS, "mlp", _SAME, _PLAIN,
        "n_routed_experts", _deepseek, shared="shared_experts",
    ),
    Family(
        "Qwen MoE", "qwen2_moe", "Qwen2MoeForCausalLM", (*_LLAMAS, "qwen2"), "mlp", _SAME,
        _PLAIN.union(_BIASES), "num_experts", _qwen2,
        shared="shared_expert", needs_shared=True, shared_gate="shared_expert_gate", biases=True,
    ),
    Family(
        "Qwen3 MoE", "qwen3_moe", "Qwen3MoeForCausalLM", ("qwen3",), "mlp", _SAME,
        _PLAIN | _NORMED, "num_experts", _qwen3,
    ),
)  # fmt: skip
"""In the order in which mergekit tries them."""


@dataclass(frozen=True)
class DenseExpert:
    """An expert: a member's feed-forward parts, with noise and a factor of what they write."""

    member: str
    checkpoint: Checkpoint
    noise: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class RouterRows(FormedTensor):
    """Rows that are computed, and stored nowhere; `rows` are None until they are."""

    rows: Array | None = None

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        return []

    def form(self, values: Values, start: int, out: Array) -> None:
        assert self.rows is not None
        out[:] = self.rows.reshape(-1)[start : start + out.size]


@dataclass(frozen=True)
class Zeros(FormedTensor):
    """A bias that a mixture has and its base does not."""

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        return []

    def form(self, values: Values, start: int, out: Array) -> None:
        out[:] = 0


@dataclass(frozen=True)
class NoisyTensor(FormedTensor):
    """A stored tensor with normal noise, drawn by its key and its place."""

    stored: Tensor
    deviation: float
    key: tuple[int, int]

    def made_of(self, start: int, stop: int) -> list[TensorRun]:
        return [(self.stored, start, stop)]

    def form(self, values: Values, start: int, out: Array) -> None:
        normal(self.key, start, out)
        out *= np.float32(self.deviation)
        out += values(self.stored, start, start + out.size)


@dataclass(frozen=True)
class Mixture:
    """The tensors of a mixture by the member that they come from, and what is to be known of them.

    `scales` are factors other than 1. `routers` are the tensors of each block's router, with the
    first row of the gates that they have.
    """

    layout: Checkpoint
    tensors: Mapping[str, dict[str, Tensor]]
    scales: Mapping[str, float]
    routers: Mapping[str, tuple[int, int]]
    """Of a router's tensor, the block and its first row in that block's gates."""


def fitting(
    base: Checkpoint, experts: Sequence[DenseExpert], shared: Sequence[DenseExpert], named: str
) -> Family:
    """The kind of mixture for these models; `named` is the beginning of a name, or ""."""
    kinds = {one.checkpoint.config.get("model_type") for one in (*experts, *shared)}
    kinds.add(base.config.get("model_type"))
    known = [one for one in MIXTURES if one.title.lower().startswith(named.lower())]
    if not known:
        told = ", ".join(family.title for family in MIXTURES)
        raise PoolError(f"architecture: {named} is no kind of mixture; there are {told}.")
    reasons = {family.title: _unfit(family, kinds, len(shared)) for family in known}
    fits = [family for family in known if not reasons[family.title]]
    if not fits:
        told_why = [f"{title}: {why}" for title, why in reasons.items()]
        raise PoolError("No kind of mixture is made of these models:", told_why)
    return fits[0]


def _unfit(family: Family, kinds: set[Any], shared: int) -> str:
    if len(kinds) > 1:
        return f"base and experts are of different kinds ({', '.join(sorted(map(str, kinds)))})"
    if not kinds <= set(family.sources):
        return f"is made of {', '.join(family.sources)} models, not of {next(iter(kinds))}"
    if shared and not family.shared:
        return "has no shared expert; leave shared_experts out, or name another architecture"
    if shared > 1:
        return f"has one shared expert, not {shared}"
    if family.needs_shared and not shared:
        return "has a shared expert; give one under shared_experts"
    return ""


def mixture(
    family: Family,
    base: tuple[str, Checkpoint],
    experts: Sequence[DenseExpert],
    shared: Sequence[DenseExpert],
    *,
    per_token: int,
    seed: int,
) -> Mixture:
    """The mixture of these models. All that does not fit is reported together."""
    member, checkpoint = base
    problems = list(_problems(family, checkpoint, (*experts, *shared)))
    if problems:
        raise PoolError(f"The models make no {family.title}:", listed("", problems))
    found: dict[str, dict[str, Tensor]] = {member: {}}
    scales: dict[str, float] = {}
    routers: dict[str, tuple[int, int]] = {}
    for name, tensor in checkpoint.tensors.items():
        own = _within(checkpoint, name)
        if own is None or own in family.inside:
            found[member][name] = tensor

    def put(name: str, expert: DenseExpert, stored: Tensor, part: str) -> None:
        if expert.noise:
            stored = _noisy(stored, expert.noise, key_of(seed, "noise", name))
        found.setdefault(expert.member, {})[name] = stored
        if part == RESIDUAL and expert.scale != 1:
            scales[name] = expert.scale

    for index in range(checkpoint.stack.depth):
        block = f"{checkpoint.stack.prefix}{index}."
        for part in PARTS:
            for number, expert in enumerate(experts):
                stored = _part(expert.checkpoint, index, part)
                put(family.expert(block, number, part), expert, stored, part)
            for expert in shared:
                name = f"{block}{family.module}.{family.shared}.{part}.weight"
                put(name, expert, _part(expert.checkpoint, index, part), part)
        home = _part(checkpoint, index, PARTS[0])
        rows = {family.router(block): (len(experts), 0)}
        if shared and family.shared_gate:
            rows[f"{block}{family.module}.{family.shared_gate}.weight"] = (1, len(experts))
        for name, (count, first) in rows.items():
            found[member][name] = RouterRows(name, "F32", (count, home.shape[1]), home.file, 0, 0)
            routers[name] = index, first
        if family.biases:
            found[member] |= _biases(checkpoint, index, block)
    layout = replace(
        checkpoint,
        tensors={name: tensor for own in found.values() for name, tensor in own.items()},
        config=_config(family, checkpoint.config, len(experts), len(shared), per_token),
    )
    return Mixture(layout, found, scales, routers)


def with_rows(result: Mixture, member: str, gates: Array) -> Mixture:
    """The mixture with the rows of its routers, from (blocks, experts, width)."""
    own = dict(result.tensors[member])
    for name, (block, first) in result.routers.items():
        tensor = own[name]
        assert isinstance(tensor, RouterRows)
        rows = np.ascontiguousarray(gates[block, first : first + tensor.shape[0]], np.float32)
        own[name] = replace(tensor, rows=rows)
    layout = replace(result.layout, tensors={**result.layout.tensors, **own})
    return replace(result, tensors={**result.tensors, member: own}, layout=layout)


def stored_type(checkpoint: Checkpoint) -> str:
    """The type that most of a checkpoint's numbers are stored in."""
    counts: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        if tensor.floating:
            counts[tensor.dtype] += tensor.size
    return counts.most_common(1)[0][0]


def _within(checkpoint: Checkpoint, name: str) -> str | None:
    """A tensor's name inside its block; None outside the blocks."""
    block = checkpoint.stack.block_of(name)
    return None if block is None else name.removeprefix(f"{checkpoint.stack.prefix}{block}.")


def _part(checkpoint: Checkpoint, block: int, part: str) -> Tensor:
    return checkpoint.tensors[f"{checkpoint.stack.prefix}{block}.mlp.{part}.weight"]


def _noisy(stored: Tensor, deviation: float, key: tuple[int, int]) -> NoisyTensor:
    plain = (stored.name, stored.dtype, stored.shape, stored.file, stored.begin, stored.end)
    return NoisyTensor(*plain, stored=stored, deviation=deviation, key=key)


def _biases(checkpoint: Checkpoint, index: int, block: str) -> dict[str, Tensor]:
    """Zeros for the biases of attention that a block has not."""
    found: dict[str, Tensor] = {}
    for bias in _BIASES:
        if block + bias not in checkpoint.tensors:
            weight = checkpoint.tensors[block + bias.replace(".bias", ".weight")]
            found[block + bias] = Zeros(block + bias, "F32", weight.shape[:1], weight.file, 0, 0)
    return found


def _problems(family: Family, base: Checkpoint, experts: Sequence[DenseExpert]) -> Iterator[str]:
    depth = base.stack.depth
    if not depth or "intermediate_size" not in base.config:
        yield "the base has no layers with feed-forward parts, or config.json no intermediate_size"
        return
    feed = {f"mlp.{part}.weight" for part in PARTS}
    for name in sorted(base.tensors):
        own = _within(base, name)
        if own is not None and own not in family.inside | feed | {_COMPUTED}:
            yield f"the base's {name} has no place in it"
    for expert in {id(one.checkpoint): one for one in experts}.values():
        other = expert.checkpoint
        if other.stack.depth != depth:
            yield f"{expert.member}: has {other.stack.depth} layers, the base has {depth}"
            continue
        for index in range(depth):
            block = f"{base.stack.prefix}{index}."
            for part in sorted(feed):
                ours, theirs = (one.tensors.get(block + part) for one in (base, other))
                if ours is None or theirs is None:
                    yield f"{expert.member if ours else 'the base'}: has no {block}{part}"
                elif why := clash(ours, theirs):
                    yield f"{expert.member}: {block}{part}: {why}"
        for name in sorted(other.tensors):
            own = _within(other, name)
            if own is not None and own.startswith("mlp.") and own not in feed:
                yield f"{expert.member}: {name} has no place in an expert"


def _config(
    family: Family, base: Mapping[str, Any], experts: int, shared: int, per_token: int
) -> dict[str, Any]:
    """The configuration: what the base says or means, and the mixture's own keys."""
    kind = str(base["model_type"])
    usual = {"num_key_value_heads": base.get("num_attention_heads"), "hidden_act": "silu"}
    usual |= {"tie_word_embeddings": False, **_USUAL[kind]}
    if "rope_parameters" not in base:
        usual["rope_theta"] = 10000.0
    left = {"mlp_bias", "auto_map", "_name_or_path", "architectures", "model_type"}
    kept = {key: value for key, value in base.items() if key not in left}
    own = {"architectures": [family.architecture], "model_type": family.model_type}
    counts = {family.count: experts, "num_experts_per_tok": per_token}
    return {**own, **usual, **kept, **counts, **family.settings(base, shared)}
