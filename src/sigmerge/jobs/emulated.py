"""mergekit 0.1.5's arithmetic on one tensor, in the type in which mergekit computes.

The operations and their order are mergekit's, since every one of them rounds. Draws are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CHOSEN_BY = {
    "ties": "size", "breadcrumbs": "middle", "breadcrumbs_ties": "middle", "dare_linear": "odds",
    "dare_ties": "odds", "della": "ranks", "della_linear": "ranks",
}  # fmt: skip
"""By what a method chooses the entries of a task vector that stay."""
DRAWN = tuple(method for method, how in CHOSEN_BY.items() if how in ("odds", "ranks"))
ELECTING = ("ties", "breadcrumbs_ties", "dare_ties", "della")


@dataclass(frozen=True)
class Emulated:
    """One tensor's inputs in the type of the arithmetic, and what the recipe says of it.

    `stable` keeps the first of entries of equal size, as we do; mergekit's sort leaves that open.
    """

    method: str
    base: Tensor | None
    experts: Sequence[Tensor]
    settings: Mapping[str, Any]
    stable: bool = False

    def merged(self) -> Tensor:
        """The result, in the type of the arithmetic."""
        if self.method in _BY_NAME:
            return _BY_NAME[self.method](self)
        return _of_task_vectors(self)

    @property
    def start(self) -> Tensor:
        assert self.base is not None
        return self.base

    def vectors(self) -> Tensor:
        import torch

        return torch.stack([one - self.start for one in self.experts])

    def each(self, name: str, default: float = 1.0) -> list[float]:
        """A parameter that every model has of its own."""
        given = self.settings.get(name, default)
        return [given] * len(self.experts) if not isinstance(given, tuple) else list(given)


def _of_task_vectors(one: Emulated) -> Tensor:
    """Task arithmetic and what drops entries or elects signs before it."""
    import torch

    vectors = one.vectors()
    if one.method in CHOSEN_BY:
        for number in range(len(vectors)):
            vectors[number] = _kept(one, vectors[number], number)
    weights = torch.tensor(one.each("weight"), dtype=vectors.dtype)
    weights = weights.reshape(-1, *[1] * (vectors.dim() - 1))
    vectors = vectors * weights
    if one.method in ELECTING:
        agreeing = _agreeing(vectors)
        total, divisor = (vectors * agreeing).sum(dim=0), (weights * agreeing).sum(dim=0)
        divisor = torch.where(divisor == 0, 1, divisor)
    else:
        total, divisor = vectors.sum(dim=0), weights.sum(dim=0)
        divisor = torch.where(divisor.abs() < 1e-8, 1, divisor)
    if one.settings.get("normalize"):
        total = total / divisor
    if (scale := one.settings.get("lambda", 1.0)) != 1:
        total = total * scale
    return (one.start + total).to(one.start.dtype)


def _agreeing(vectors: Tensor) -> Tensor:
    """Where an entry has the sign of the sum, as numbers; a sum of zero is positive."""
    majority = (vectors.sum(dim=0) >= 0).to(vectors.dtype) * 2 - 1
    return (vectors.sign() == majority).to(vectors.dtype)


def _kept(one: Emulated, vector: Tensor, number: int) -> Tensor:
    """A task vector without the entries that its method drops."""
    import torch

    how, density, count = CHOSEN_BY[one.method], one.each("density")[number], vector.numel()
    if density >= 1:
        return vector
    if how in ("size", "ranks") and density <= 0:
        return torch.zeros_like(vector)
    plain = how in ("size", "middle") or vector.dtype == torch.bfloat16
    work = vector if plain else vector.float()  # torch draws no float16 on a processor
    if how == "odds":
        mask = torch.bernoulli(torch.full_like(work, density))
    elif how == "ranks":
        mask = torch.bernoulli(_odds(one, vector, number).to(work.dtype))
    else:
        sizes = vector.abs().reshape(-1).float()
        order = torch.argsort(sizes, descending=how == "size", stable=one.stable)
        first, stays = 0, max(1, int(density * count))
        if how == "middle":
            stays = int(density * count)
            first = max(0, count - stays - int(one.each("gamma", 0.01)[number] * count))
        mask = torch.zeros(count, dtype=vector.dtype)
        mask[order[first : first + stays]] = 1
    return _rescaled(one, work, mask.reshape_as(work)).to(vector.dtype)


def _odds(one: Emulated, vector: Tensor, number: int) -> Tensor:
    """DELLA's probabilities: by the rank of an entry in its row."""
    import torch

    density, spread = one.each("density")[number], one.each("epsilon", 0.15)[number]
    kind = vector.dtype if vector.dtype == torch.bfloat16 else torch.float32
    rows = vector.abs().reshape(1, -1) if vector.dim() < 2 else vector.abs()
    ranks = torch.argsort(torch.argsort(rows, dim=1), dim=1).to(kind) + 1
    low, high = (f(dim=1, keepdim=True) for f in (ranks.amin, ranks.amax))
    share = ((ranks - low) / (high - low)).clamp(0, 1)
    return ((density - spread) + share * 2 * spread).reshape_as(vector)


def _rescaled(one: Emulated, vector: Tensor, mask: Tensor) -> Tensor:
    """What a mask leaves of a vector, with the vector's ℓ1 norm where the recipe says so."""
    left = vector * mask
    if one.settings.get("rescale") not in (True, "l1"):
        return left
    before, after = vector.abs().sum(), left.abs().sum()
    return left if min(before, after) < 1e-7 else left * (before / after)


def _linear(one: Emulated) -> Tensor:
    import torch

    weights = torch.tensor(one.each("weight"), dtype=torch.float32)
    total = torch.zeros_like(one.experts[0], dtype=torch.float32)
    for tensor, weight in zip(one.experts, weights, strict=True):
        total.addcmul_(tensor, weight)
    if one.settings.get("normalize", True):
        total.div_(weights.sum())
    return total.to(one.experts[0].dtype)


def _slerp(one: Emulated) -> Tensor:
    import torch

    pair = [tensor.float().reshape(-1) for tensor in (one.start, one.experts[0])]
    t = torch.tensor(float(one.settings["t"]), dtype=torch.float32)
    norms = [torch.linalg.vector_norm(v) for v in pair]
    first, other = (v / (n if n > 1e-8 else 1) for v, n in zip(pair, norms, strict=True))
    cosine = (first * other).sum().clamp(-1, 1)
    parts = 1 - t, t
    if cosine.abs() <= 0.9995:
        angle = torch.acos(cosine)
        parts = tuple(torch.sin(part * angle) / torch.sin(angle) for part in parts)
    return (parts[0] * pair[0] + parts[1] * pair[1]).reshape_as(one.start).to(one.start.dtype)


def _nuslerp(one: Emulated) -> Tensor:
    import torch

    weights = one.each("weight")
    total = sum(weights)
    t = 0.5 if abs(total) < 1e-6 else weights[1] / total
    pair = list(one.experts) if one.base is None else list(one.vectors())
    flat, shape = one.settings.get("nuslerp_flatten", True), pair[0].shape
    across = bool(one.settings.get("nuslerp_row_wise")) and not flat
    if flat:
        pair = [v.reshape(-1) for v in pair]
    elif across:
        pair = [v.transpose(0, -1) for v in pair]
    units = [v / torch.norm(v, dim=-1, keepdim=True).clamp(min=1e-7) for v in pair]
    cosine = (units[0] * units[1]).sum(dim=-1, keepdim=True).clamp(-1, 1)
    straight = (1 - cosine.square()) <= 1e-16
    angle = torch.acos(torch.where(straight, 0, cosine))
    bent = torch.sin((1 - t) * angle) * pair[0] + torch.sin(t * angle) * pair[1]
    found = torch.where(straight, (1 - t) * pair[0] + t * pair[1], bent / torch.sin(angle))
    found = (found.transpose(0, -1) if across else found).reshape(shape)
    return found if one.base is None else one.base + found


def _multislerp(one: Emulated) -> Tensor:
    import torch

    if len(one.experts) == 1:
        return one.experts[0]
    rows = torch.stack(list(one.experts)) if one.base is None else one.vectors()
    shape, rows = rows.shape[1:], rows.reshape(len(rows), -1)
    weights = torch.tensor(one.each("weight"), dtype=rows.dtype)
    if one.settings.get("normalize_weights", True):
        weights = weights / weights.sum()
    eps = float(one.settings.get("eps", 1e-8))
    norms = torch.norm(rows, dim=-1, keepdim=True)
    units, column = rows / (norms + eps), weights.view(-1, 1)
    mean = (units * column).sum(0)
    length = torch.norm(mean)
    if length < eps:
        found = (rows * column).sum(0)
    else:
        mean = mean / length
        tangent = ((units - (units * mean).sum(-1, keepdim=True) * mean) * column).sum(0)
        angle = torch.norm(tangent) + eps
        found = mean * torch.cos(angle) + tangent * (torch.sin(angle) / angle)
        found = found * (norms.squeeze(-1) * weights).sum()
    found = found.view(shape)
    return found if one.base is None else found + one.base


def _karcher(one: Emulated) -> Tensor:
    import torch

    def length(vector: Tensor) -> Tensor:
        return torch.linalg.vector_norm(vector.float())

    tensors, most = list(one.experts), int(one.settings.get("max_iter", 10))
    if len(tensors) == 1:
        return tensors[0]
    kind, least, share = tensors[0].dtype, float(one.settings.get("tol", 1e-5)), 1 / len(tensors)
    norms = [length(tensor) for tensor in tensors]
    units = [(t / n).to(kind) for t, n in zip(tensors, norms, strict=True) if n > least]
    if not units:
        return torch.zeros_like(tensors[0])
    part = share / sum([share] * len(units))
    mean = torch.zeros_like(units[0])
    for unit in units:
        mean += part * unit
    mean = units[0].clone() if length(mean) < least else (mean / length(mean)).to(kind)
    for _ in range(most):
        step = torch.zeros_like(mean)
        for unit in units:
            cosine = torch.dot(mean.flatten(), unit.flatten()).clamp(-1, 1)
            angle = torch.arccos(cosine)
            if angle >= least:
                step += part * (angle / torch.sin(angle)) * (unit - cosine * mean)
        far = length(step)
        if far < least:
            break
        mean = (torch.cos(far) * mean + torch.sin(far) * (step / far)).to(kind)
        if (now := length(mean)) > least:
            mean = (mean / now).to(kind)
    return torch.as_tensor(sum(share * norm for norm in norms)) * mean


def _model_stock(one: Emulated) -> Tensor:
    import torch

    rows = [one.start, *one.experts]
    if not one.settings.get("filter_wise"):
        rows = [tensor.reshape(-1) for tensor in rows]
    elif one.start.dim() == 1:
        rows = [tensor.unsqueeze(0) for tensor in rows]
    base, *others = rows
    vectors, cosines = [tensor - base for tensor in others], []
    for number, left in enumerate(vectors):
        for right in vectors[number + 1 :]:
            lengths = torch.norm(left, dim=-1) * torch.norm(right, dim=-1)
            cosines.append(((left * right).sum(dim=-1) / lengths.clamp(min=1e-6)).clamp(-1, 1))
    cosine, count = torch.stack(cosines).mean(dim=0).unsqueeze(-1), len(others)
    divisor = 1 + (count - 1) * cosine
    t = torch.where(divisor.abs() < 1e-6, 0, count * cosine / divisor)
    average = others[0]
    for tensor in others[1:]:
        average = average + tensor
    return (t * (average / count) + (1 - t) * base).reshape(one.start.shape)


def _sce(one: Emulated) -> Tensor:
    import torch

    vectors, share = one.vectors(), float(one.settings.get("select_topk", 1.0))
    if share < 1:
        spread = torch.var(vectors, dim=0, unbiased=False).abs().reshape(-1)
        stays = int(torch.count_nonzero(spread) * share) if share > 0 else 0
        mask = torch.zeros_like(spread)
        if one.stable:
            mask[torch.argsort(spread, descending=True, stable=True)[:stays]] = 1
        else:
            mask[torch.topk(spread, k=stays).indices] = 1
        vectors = vectors * mask.reshape(vectors.shape[1:])
    energy = vectors.square().reshape(len(vectors), -1).mean(dim=1)
    total = energy.sum().item()
    weights = torch.full_like(energy, 1) / len(energy) if abs(total) < 1e-6 else energy / total
    weights = weights.reshape(-1, *[1] * (vectors.dim() - 1)) * _agreeing(vectors)
    return one.start + (vectors * weights).sum(dim=0) / weights.sum(dim=0).clamp(min=1e-6)


def _arcee_fusion(one: Emulated) -> Tensor:
    """In float32, whatever the inputs: mergekit's mask is of that type."""
    import torch

    base, other = one.start, one.experts[0]
    p, q = (torch.softmax(tensor, dim=-1) + 1e-8 for tensor in (other, base))
    scores = (other - base).abs() * (p * torch.log(p / q)).sum(dim=-1, keepdim=True)
    ordered = torch.sort(scores.reshape(-1)).values
    places = (torch.tensor([0.25, 0.5, 0.75]) * (ordered.numel() - 1)).long()
    low, median, high = ordered[places]
    return base + (other - base) * (scores >= median + 1.5 * (high - low)).float()


def _nearswap(one: Emulated) -> Tensor:
    base, other = one.start, one.experts[0]
    share = (float(one.settings["t"]) / (base - other).abs().clamp(min=1e-6)).clamp(0, 1)
    return share * other + (1 - share) * base


def _ram(one: Emulated) -> Tensor:
    least, vectors = float(one.settings.get("epsilon", 1e-5)), one.vectors()
    rows = vectors.reshape(len(vectors), -1)
    changed = rows.abs() > least
    counts = changed.sum(dim=0, keepdim=True)
    alone, shared = counts == 1, counts > 1
    left = rows * changed
    own = left * alone
    if one.method == "ramplus_tl":
        ratio = (changed & shared).sum(dim=1) / (changed & alone).sum(dim=1).clamp(min=least)
        bound = float(one.settings.get("alpha", 0.2))
        grown = 1 + float(one.settings.get("r", 0.1)) * ratio.clamp(0, bound)
        own = own * grown.unsqueeze(-1)
    total = (own + left * shared / counts.clamp(min=1)).sum(dim=0)
    return one.start + total.reshape(one.start.shape)


def _passthrough(one: Emulated) -> Tensor:
    scale = one.each("scale")[0]
    return one.experts[0] if scale is None else one.experts[0] * scale


_BY_NAME: Mapping[str, Callable[[Emulated], Tensor]] = {
    "linear": _linear, "slerp": _slerp, "nuslerp": _nuslerp, "multislerp": _multislerp,
    "karcher": _karcher, "model_stock": _model_stock, "sce": _sce, "arcee_fusion": _arcee_fusion,
    "nearswap": _nearswap, "ram": _ram, "ramplus_tl": _ram, "passthrough": _passthrough,
}  # fmt: skip
