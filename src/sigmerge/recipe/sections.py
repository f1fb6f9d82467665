"""The sections of a recipe, and error messages for wrong keys."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from sigmerge.messages import shown, unknown


class Section(BaseModel):
    """A part of a document that a user wrote: an unknown key or another type is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)


def _model_text(given: Any) -> Any:
    """A model as one text, also where a file has mergekit's long form of it."""
    if not isinstance(given, dict):
        return given
    if not isinstance(given.get("override_architecture"), str | None):
        raise ValueError("override_architecture is the name of an architecture")
    ends = {"@": ("path", "revision"), "+": ("model", "lora")}
    between = "@" if "path" in given else "+"
    parts = [_model_text(given.get(key)) for key in ends[between]]
    parts = [part for part in parts if part is not None]
    if set(given) - {*ends[between], "override_architecture"} or not all(
        isinstance(part, str) for part in parts
    ):
        raise ValueError("a model is a text, or a mapping with model and lora")
    return between.join(parts)


ModelName = Annotated[str, BeforeValidator(_model_text)]
Truth = Annotated[bool, Field(strict=False)]
Whole = Annotated[int, Field(strict=False)]
"""An integer that mergekit also accepts as text."""


class ModelSection(Section):
    model: ModelName
    """A folder, an address of a remote store, `model+adapter`, or `owner/name` on the hub."""
    name: str | None = None
    """Its domain; else the folder's name."""
    exemplars: str | None = None
    """JSONL of `prompt` or `prompt` and `response`, for methods that read data."""
    parameters: dict[str, Any] | None = None
    """Of this model alone."""


class TrajectorySection(Section):
    """`models:` as the checkpoints of one run, oldest first by the numbers in their names."""

    glob: str
    """A pattern of paths, as run/step-*."""
    schedule: Literal["uniform", "ema", "cosine", "1-sqrt"] | None = None
    """Weights over the checkpoints that sum to 1; without it the recipe's own hold."""
    decay: float = Field(default=0.9, gt=0, lt=1)
    """Of ema: the part of the older mean that is kept at every checkpoint."""
    last: int | None = Field(default=None, ge=1)
    """Only so many of the newest."""


class SourceSection(Section):
    """One source of a slice: layers `layer_range[0]` … `layer_range[1]` − 1 of a model."""

    model: ModelName
    """A model, as under `models:`."""
    layer_range: list[Whole] = Field(min_length=2, max_length=2)
    """Its first layer, and the one behind its last."""
    name: str | None = None
    """Its domain."""
    parameters: dict[str, Any] | None = None
    """Of this source alone."""


class SliceSection(Section):
    """A run of layers of the result; its sources are merged layer by layer."""

    sources: list[Any]
    """The models whose layers are merged, each with its range."""
    base_model: ModelName | None = None
    """The reference of this slice."""
    parameters: dict[str, Any] | None = None
    """Of this slice alone."""


class ModuleSection(Section):
    """A part of a model, as mergekit calls it."""

    slices: list[Any] | None = None
    models: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class CaptureSection(Section):
    """The `capture:` section: how an operator that reads data gets its statistics.

    `limit` exemplars of each file are taken, from its top; all if it is not given. `scale` moves
    the network that features come from to θ_ref + scale · Δ_k. Another `device` gives statistics
    that differ in the last bits, so each device has its own.
    """

    limit: int | None = Field(default=None, ge=1)
    """Exemplars from the top of each file; else all."""
    max_length: int = Field(default=256, ge=1)
    """Tokens of prompt and response together."""
    skip_bos: bool = False
    """Leave each exemplar's first token out of the sums."""
    scale: float = Field(default=1.0, allow_inf_nan=False)
    """Features of θ_ref + scale · Δ instead of the expert's."""
    labels: Literal["argmax", "sampled", "data"] = "argmax"
    """For fisher: the likeliest label, one drawn by the model, or the response."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where exemplars pass through the experts."""
    folder: str | None = None
    """Where another machine left its statistics."""


Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    BeforeValidator(lambda name: name.removeprefix("torch.") if isinstance(name, str) else name),
]


class MissingSection(Section):
    """How rows are formed of tokens that no model has."""

    method: Literal["omp", "knn", "mean", "zero", "random", "subword"] = "omp"
    """From rows of shared tokens with the coefficients of the donor's rows, or as it says."""
    k: Annotated[Whole, Field(ge=1)] = 64
    """omp, knn: shared tokens per row."""
    metric: Literal["euclidean", "cosine"] = "euclidean"
    """knn: what near is."""
    weights: Literal["distance", "barycentric", "least_squares"] = "distance"
    """knn: coefficients of the nearest rows."""
    subword: Literal["mean", "sum", "weighted_mean", "first_last"] = "mean"
    """subword: what is made of the rows of a token's pieces."""
    scale: float = 1.0
    """A factor of all new rows."""


class TokenizerSection(Section):
    """mergekit's long form of `tokenizer_source`."""

    source: ModelName = "union"
    """`base`, `union`, or the model whose tokenizer is taken."""
    tokens: dict[str, Any] | None = None
    """Rows of single tokens: where each comes from."""
    pad_to_multiple_of: Annotated[Whole, Field(ge=0)] | None = None
    """Rows of the embedding are padded to a multiple of this."""
    missing: MissingSection | None = None
    """How rows are formed of tokens that no model has; `source` is then a model."""


class TokenRowSection(Section):
    """The row that a token gets in models that lack it, or, with `force`, in all."""

    source: Any = None
    force: Truth = False


class TokenModelSection(Section):
    """A row by what it holds: zero, or a model's row of a token or of an id."""

    kind: Literal["zero", "model_token"]
    model: ModelName | None = None
    token: str | None = None
    token_id: Annotated[Whole, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        given = [self.token, self.token_id]
        if self.kind == "zero" and [self.model, *given] != [None] * 3:
            raise ValueError("kind: zero takes nothing else")
        if self.kind == "model_token" and (self.model is None or given.count(None) != 1):
            raise ValueError("kind: model_token takes model, and one of token and token_id")
        return self


class DenseExpertSection(Section):
    """A dense model whose feed-forward parts become an expert, and the prompts that lead there."""

    source_model: ModelName
    positive_prompts: list[str] | None = None
    negative_prompts: list[str] | None = None
    noise_scale: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)] | None = None
    residual_scale: Annotated[float, Field(allow_inf_nan=False, strict=False)] | None = None


class MixtureSection(Section):
    """The top level of a file for `sigmerge moe`, which mergekit-moe takes, too."""

    base_model: ModelName
    experts: list[Any] = Field(min_length=1)
    gate_mode: Literal[
        "hidden", "hidden_last", "hidden_avg", "cheap_embed", "random", "uniform_random"
    ] = "hidden"
    dtype: Dtype | None = None
    experts_per_token: Annotated[Whole, Field(ge=1)] = 2
    shared_experts: list[Any] | None = None
    architecture: str | None = None
    seed: int = 0


class RecipeSection(Section):
    """The top level. Its sections are checked one by one, so that each reports all its problems."""

    name: str | None = None
    """Of the recipe in a file of several."""
    merge_method: str | None = None
    """How the models become one; `checkpoint` with `anchor:` for a merge made elsewhere."""
    base_model: ModelName | None = None
    """The reference that the experts were fine-tuned from."""
    models: list[Any] = []
    """The experts."""
    slices: list[Any] = []
    """Runs of layers that are stacked, in place of `models:`."""
    modules: dict[str, Any] | None = None
    """Parts of a model that are merged each in its own way."""
    parameters: dict[str, Any] | None = None
    """Of the method, for all models."""
    dtype: Dtype | None = None
    """The type that is written; else that of the models."""
    out_dtype: Dtype | None = None
    """The same, and goes before it."""
    tokenizer_source: ModelName | None = None
    """`base`, `union`, or the model whose tokenizer is taken."""
    tokenizer: Any = None
    """The same in its long form."""
    chat_template: str | None = None
    """A template's name, a `.jinja` file, or the text itself."""
    tensors: Literal["union", "intersection"] | None = None
    """Which tensors are merged where not all models have the same; otherwise that is an error."""
    match_experts: bool = False
    """Merge the experts of mixtures with those they are most alike, whatever their numbers."""
    output: Literal["adapter"] | None = None
    """`adapter`: adapters of one model become one adapter."""
    space: Literal["core", "knots"] | None = None
    """With `output: adapter`, the coordinates that are merged; `core` by default."""
    rank: Annotated[int, Field(ge=1)] | None = None
    """With `output: adapter`, the largest rank of the result; else the sum of the ranks."""
    preset: Literal["mergekit", "paper"] = "mergekit"
    """Whose defaults hold where mergekit and the papers differ."""
    seed: int = 0
    """Of random draws."""
    anchor: str | None = None
    """A stored merge that is repaired."""
    capture: Any = None
    """How methods that read data are given it."""
    search: Any = None
    """Coefficients found by MERGE³."""
    guide: Any = None
    """Calls that steer the weights."""
    repair: Any = None
    """The repair of the merge."""
    tune: Any = None
    """What `sigmerge tune` may spend and tries."""


def worded(items: Sequence[Any], known: Iterable[str]) -> str:
    """pydantic's errors about one key, as a message about a recipe; several are alternatives."""
    first = items[0]
    if first["type"] == "extra_forbidden":
        return unknown("key here", first["loc"][-1], known)
    if first["type"] == "missing":
        return "is missing"
    if first["type"] == "model_type":
        return f"must be a mapping with {', '.join(known)}, not {shown(first['input'])}"
    if first["type"] == "value_error":
        return str(first["msg"]).removeprefix("Value error, ")
    if first["type"] in ("too_short", "too_long"):  # of a list with a fixed length
        length = first["ctx"].get("min_length", first["ctx"].get("max_length"))
        return f"must be a list of {length} numbers, not {shown(first['input'])}"
    wanted = [
        item["ctx"]["expected"]
        if item["type"] == "literal_error"
        else item["msg"].removeprefix("Input should be ")
        for item in items
    ]
    wanted[0] = wanted[0][0].lower() + wanted[0][1:]
    must = "" if wanted[0].startswith("keys should") else "must be "
    return f"{must}{' or '.join(dict.fromkeys(wanted))}, not {shown(first['input'])}"
