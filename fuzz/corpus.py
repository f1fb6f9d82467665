"""Sound recipes for the pools that are fuzzed and killed: one for every method, and slices."""

from __future__ import annotations

import json
from typing import Any

REFERENCE, MATH, CODE = (f"pool/{name}" for name in ("reference", "math", "code"))

PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"weight": [0.2, 0.8], "normalize": False},
    "task_arithmetic": {"weight": 0.5, "lambda": 0.8},
    "ties": {"weight": 0.5, "density": [{"filter": "layers.0", "value": 0.3}, {"value": 0.7}]},
    "dare_linear": {"weight": 0.5, "density": 0.5, "rescale": True},
    "dare_ties": {"weight": 0.5, "density": 0.5},
    "della": {"weight": 0.5, "density": 0.6, "epsilon": 0.1, "lambda": 0.9},
    "della_linear": {"weight": 0.5, "density": 0.6, "epsilon": 0.2},
    "breadcrumbs": {"weight": 0.5, "density": 0.7, "gamma": 0.1},
    "breadcrumbs_ties": {"weight": 0.5, "density": 0.7, "gamma": 0.05},
    "model_stock": {"filter_wise": False},
    "sce": {"select_topk": 0.4},
    "slerp": {"t": [{"filter": "layers.1", "value": [0, 0.5, 1]}, {"value": 0.3}]},
    "nuslerp": {"weight": [0.3, 0.7], "nuslerp_row_wise": True},
    "multislerp": {"weight": 0.5, "eps": 1e-8},
    "karcher": {"max_iter": 10, "tol": 1e-5},
    "arcee_fusion": {},
    "nearswap": {"t": 0.001},
    "ram": {"epsilon": 0.001},
    "ramplus_tl": {"epsilon": 0.001, "r": 0.1, "alpha": 0.2},
    "passthrough": {"scale": [{"filter": "w", "value": 0.5}, {"value": 1}]},
    "lines": {"weight": 0.5, "alpha": 0.4, "beta": 0.8},
    "cabs": {"weight": 0.5},
    "iso_c": {"weight": 0.5, "lambda": [1.0, 1.3]},
    "iso_cts": {"weight": 0.5, "common": 0.7, "rtol": 1e-5},
    "tsv": {"weight": [0.5, 1.0], "rest": 0.3},
    "boost": {"beta": 0.1},
    "wudi": {"steps": 5, "step": "absolute", "rate": 1e-4},
    "knots": {"inner": "dare", "density": 0.5},
    "pcb": {"density": 0.2},
    "consensus": {"share": 0.5, "agree": 1},
    "localize_stitch": {"density": 0.2, "scope": "tensor"},
    "blend": {"on": ["tsv", "ties"], "share": 0.3, "tsv.lambda": 1.2, "ties.density": 0.5},
}
"""Of each method that needs no exemplars; filters and gradients among them."""
SOUPS = ("linear", "multislerp", "karcher", "passthrough")
PAIRS = ("slerp", "arcee_fusion", "nearswap")


def _recipe(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    models: list[dict[str, Any]] = [{"model": MATH, "name": "math"}, {"model": CODE}]
    if method in PAIRS or method == "passthrough":
        models = models[:1]
    if method in PAIRS or method == "model_stock":
        models.insert(0, {"model": REFERENCE})
    base = {} if method in SOUPS else {"base_model": REFERENCE}
    return {"merge_method": method, **base, "models": models, "parameters": parameters}


def _piece(first: int, last: int, *models: str, **more: Any) -> dict[str, Any]:
    sources = [{"model": model, "layer_range": [first, last]} for model in models]
    return {"sources": sources, **more}


SLICED: dict[str, dict[str, Any]] = {
    "slices": {
        "merge_method": "passthrough",
        "slices": [_piece(0, 2, MATH), _piece(1, 2, CODE), _piece(0, 1, MATH)],
    },
    "slices, merged": {
        "merge_method": "slerp",
        "base_model": REFERENCE,
        "slices": [_piece(0, 1, REFERENCE, MATH), _piece(1, 2, REFERENCE, CODE,
                                                         parameters={"t": 0.7})],
        "parameters": {"t": 0.2},
    },
    "slices, another base": {
        "merge_method": "ties",
        "base_model": REFERENCE,
        "slices": [_piece(0, 2, REFERENCE, MATH), _piece(0, 2, CODE, MATH, base_model=CODE)],
        "parameters": {"weight": 0.5, "density": 0.5},
    },
    "slices, repaired": {
        "merge_method": "task_arithmetic",
        "base_model": REFERENCE,
        "slices": [_piece(0, 2, REFERENCE, MATH, CODE), _piece(1, 2, REFERENCE, MATH, CODE)],
        "parameters": {"weight": 0.5},
        "repair": {"shares": {"math": 0.6, "code": 0.4}, "capacity": 0.3},
    },
    "a module": {
        "merge_method": "passthrough",
        "modules": {"default": {"slices": [_piece(0, 2, MATH), _piece(0, 2, MATH)]}},
    },
}  # fmt: skip

RECIPES = {name: _recipe(name, given) for name, given in PARAMETERS.items()} | SLICED

MEASURED_PARAMETERS: dict[str, dict[str, Any]] = {
    "fisher": {"weight": [0.3, 0.7], "floor": 1e-5},
    "regmean": {"gram": "exemplars", "off_diagonal": 0.8, "singular": "jitter", "jitter": 1e-5},
    "cat": {"weight": 0.7, "rank": 2, "trade_off": 4.0, "norm_mask": 3},
    "lot": {"lambda": 0.8, "normalize_tokens": True},
}
"""Of each method that reads exemplars."""
MEASURED: dict[str, dict[str, Any]] = {
    name: {
        **_recipe(name, given),
        "models": [
            {"model": model, "name": model[5:], "exemplars": f"{model}.jsonl"}
            for model in (MATH, CODE)
        ],
        "capture": {"limit": 3, "max_length": 8, "folder": "statistics"},
    }
    for name, given in MEASURED_PARAMETERS.items()
}


def text(name: str) -> str:
    """A recipe as a file; one line for each of its keys, so that lines can be damaged."""
    content = {**{**RECIPES, **MEASURED}[name], "dtype": "float32", "seed": 3}
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in content.items())
