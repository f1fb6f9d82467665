"""The profile of a pool: how contested every layer is, and the capacity that leaves it.

Measured once per pool, independent of any anchor, and kept beside the pool by content.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sigmerge.checkpoints.blocks import find_stack
from sigmerge.checkpoints.companions import tokenizer_files, vocabulary
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.checkpoints.pool import Pool
from sigmerge.checkpoints.source import OpenMembers, PoolSource
from sigmerge.engine.machine import INTERPRETER, LIBRARIES, free_memory
from sigmerge.engine.stream import CHUNK, Stream
from sigmerge.engine.workers import Workers
from sigmerge.errors import PoolError, RecipeError, require
from sigmerge.files.cache import beside, keep_bytes, keep_json, kept_bytes, kept_json
from sigmerge.files.digests import file_digests
from sigmerge.files.documents import content_key
from sigmerge.files.identity import identify, unchanged
from sigmerge.files.scratch import scratch
from sigmerge.jobs.options import Description, Options, Step
from sigmerge.jobs.pools import PoolInputs, block_sites, open_repair_pool, weight_digests
from sigmerge.kernels import Array
from sigmerge.kernels.signature import signature
from sigmerge.method import conflict
from sigmerge.operators.base import Chunk, Pass, Passes, Site
from sigmerge.probing.exemplars import check_same_vocabulary, read_exemplars
from sigmerge.probing.loading import checked_device
from sigmerge.recipe import Recipe
from sigmerge.results import Profile

Views = dict[str, Array]
PROFILE_FORMAT = 1
PROBE_FORMAT = 2


@dataclass(frozen=True)
class MeasuredViews:
    """The views that could be measured and the layer sizes n_i; the representation view needs
    probe prompts."""

    views: Views
    coordinates: Array


@dataclass(frozen=True)
class ProfileJob:
    """The profile of a recipe's pool."""

    recipe: Recipe
    options: Options

    def describe(self) -> Description:
        pool = open_repair_pool(self.recipe, self.options)
        return Description((describe_profile(self.recipe, pool, self.options),),
                           self.options.threads)  # fmt: skip

    def run(self) -> Profile:
        recipe = self.recipe
        pool = open_repair_pool(recipe, self.options)
        measured = measure_profile(recipe, pool, self.options)
        section = recipe.repair
        c_min, c_max = (section.c_min, section.c_max) if section else (0.10, 0.45)
        names = [name for name in conflict.VIEWS if name in measured.views]
        score, warnings = conflict.conflict_score(measured.views, names)
        if "representation" not in names:
            warnings += (
                "No probe prompts: the representation view is left out. Add probe: to the "
                "repair: section.",
            )
        return Profile(
            views={name: tuple(measured.views[name].tolist()) for name in names},
            conflict=tuple(score.tolist()),
            capacity=tuple(conflict.capacity(score, c_min, c_max).tolist()),
            coordinates=tuple(measured.coordinates.tolist()),
            c_min=c_min,
            c_max=c_max,
            warnings=warnings,
        )


def describe_profile(recipe: Recipe, pool: Pool, options: Options) -> Step:
    """The profile as a step of a dry run: probe and tokenizers are checked, no tensor is read."""
    blocks = block_sites(pool)
    facts: dict[str, object] = {
        "experts": {name: expert.place for name, expert in pool.experts.items()},
        "layers": pool.stack.depth,
        "coordinates": sum(site.size for block in blocks for site in block),
    }
    memory = INTERPRETER
    if prompts := check_probe(recipe, pool, options):
        facts["probe_prompts"] = len(prompts)
        largest = max(4 * sum(t.size for t in e.tensors.values()) for e in pool.experts.values())
        memory = LIBRARIES + min(largest, free_memory())
    return Step(
        "profile",
        facts,
        bytes_to_read=sum(member.nbytes for member in pool.members.values()),
        peak_memory_bytes=memory,
    )


def check_probe(recipe: Recipe, pool: Pool, options: Options) -> list[str]:
    """The prompts of a recipe's probe, which all members read alike; none without a probe."""
    if recipe.repair is None or recipe.repair.probe is None:
        return []
    checked_device(_device(recipe))
    prompts = probe_prompts(recipe.folder / recipe.repair.probe)
    _check_vocabularies(pool, options)
    return prompts


def measure_profile(
    recipe: Recipe, pool: Pool, options: Options, *, again: bool = False
) -> MeasuredViews:
    """The views of a pool. What was kept of an earlier pass is taken, unless it is made `again`."""
    coordinates = np.array([sum(site.size for site in block) for block in block_sites(pool)])
    views = _weight_views(pool, options, again)
    probe = recipe.repair.probe if recipe.repair else None
    if probe is not None:
        views["representation"] = _representation(recipe, pool, options, again)
    ordered: Views = {name: views[name] for name in conflict.VIEWS if name in views}
    return MeasuredViews(ordered, coordinates.astype(np.int64))


def _weight_views(pool: Pool, options: Options, again: bool) -> Views:
    """Direction and sign views: one pass that reads every weight once."""
    unchecked = ["unchecked"] if options.allow_nonfinite else []
    members = [pool.layout, *pool.experts.values()]
    # All at once: at the end of a call threads wait for the last one.
    files = [file for each in members for file in each.files]
    before, digests = identify(files), file_digests(files, options.threads)
    weights = [" ".join(sorted(digests[file] for file in each.files)) for each in members]
    key = content_key(["weights", PROFILE_FORMAT, *unchecked, *weights, *_stacked(pool)])
    note = beside(pool.layout.path, f"signature-{key}.json")
    experts, depth = len(pool.experts), pool.stack.depth
    kept = {} if again else kept_json(note, {"dots", "mass"}) or {}
    dots = _numbers(kept.get("dots"), (depth, experts, experts))
    mass = _numbers(kept.get("mass"), (depth, 2))
    if dots is None or mass is None:
        dots, mass = _signature(pool, options)
        unchanged(before)  # they are kept under the content of before
        content = {"experts": list(pool.experts), "dots": dots.tolist(), "mass": mass.tolist()}
        keep_json(note, content)
    return {
        "direction": conflict.direction_view(dots),
        "sign": conflict.sign_view(mass[:, 0], mass[:, 1]),
    }


def _stacked(pool: Pool) -> list[Any]:
    """What the layers of a stack are made of: the same files may be stacked in another way."""
    if pool.output is None:
        return []
    members = [pool.layout, *pool.experts.values()]
    names = [[site.tensor for site in block] for block in block_sites(pool)]
    return [[[[m.tensors[name].name for m in members] for name in block] for block in names]]


def _numbers(kept: object, shape: tuple[int, ...]) -> Array | None:
    """Finite numbers of this shape; None if they have to be measured again."""
    try:
        found = np.array(kept, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found.shape == shape and np.isfinite(found).all() else None


def _signature(pool: Pool, options: Options) -> tuple[Any, Any]:
    experts, depth = len(pool.experts), pool.stack.depth
    dots, mass = np.zeros((depth, experts, experts)), np.zeros((depth, 2))
    blocks = block_sites(pool)
    total = sum(site.size for block in blocks for site in block)
    done = 0

    def visit(chunk: Chunk) -> tuple[Site, int, Any, Any]:
        products, masses = chunk.sums(experts, experts), chunk.sums(2)
        chunk.read(signature, chunk.step, products, masses)
        return chunk.site, chunk.size, products.sums, masses.sums

    def fold(_: None, result: tuple[Site, int, Any, Any]) -> None:
        nonlocal done
        site, size, products, masses = result
        assert site.block is not None
        for part, sums in zip(products, masses, strict=True):
            dots[site.block] += part
            mass[site.block] += sums
        done += size
        options.progress("profiling weights", done, total)

    def passes() -> Passes:
        yield Pass(visit, fold)

    with (
        PoolSource(pool.members, allow_nonfinite=options.allow_nonfinite) as source,
        Workers(options.threads) as workers,
    ):
        _stream(pool, blocks, source, workers, options).survey(passes())
    return dots, mass


def _stream(
    pool: Pool,
    blocks: list[list[Site]],
    source: PoolSource,
    workers: Workers,
    options: Options,
) -> Stream:
    """The blocks, to be passed over by the threads of this process or by a cluster."""
    if (cluster := options.cluster) is None:
        device = options.gpu()
        return Stream(blocks, source, workers, _granule, device=device, anywhere=lambda _: True)
    from sigmerge.engine.cluster import ClusterStream

    return ClusterStream(
        blocks,
        source,
        workers,
        _granule,
        cluster=cluster,
        open_source=OpenMembers.of(pool.members, allow_nonfinite=options.allow_nonfinite),
        memory=INTERPRETER + cluster.threads * (len(pool.experts) + 1) * 4 * CHUNK,
        open_device=options.open_gpu,
    )


def _granule(site: Site) -> int:
    return 4


def _device(recipe: Recipe) -> str:
    return recipe.repair.device if recipe.repair else "cpu"


def _representation(recipe: Recipe, pool: Pool, options: Options, again: bool) -> Array:
    """The representation view: each expert is loaded and run once, one after the other.

    All experts read the prompts through the reference's tokenizer (ruling 23).
    """
    assert recipe.repair is not None and recipe.repair.probe is not None
    prompts, device = probe_prompts(recipe.folder / recipe.repair.probe), _device(recipe)
    _check_vocabularies(pool, options)
    tokenizer = _tokenizer(pool)
    read_by = file_digests(tokenizer_files(tokenizer))
    grams = []
    for number, (name, expert) in enumerate(pool.experts.items()):
        options.progress("probing experts", number, len(pool.experts))
        config = expert.path / "config.json"
        before = PoolInputs.of({name: expert}, dict.fromkeys(read_by, "tokenizer")).before
        key = content_key([
            "gram", PROBE_FORMAT, prompts, " ".join(sorted(weight_digests(expert, options))),
            *file_digests([config]).values(),
            *(f"{f.name} {digest}" for f, digest in read_by.items()),
            *([] if device == "cpu" else [device]),
        ])  # fmt: skip
        note = beside(pool.layout.path, f"gram-{key}.npy")
        layers = _own_layers(pool, expert)
        gram = None if again else _kept_gram(note)
        if gram is None or not _fits(gram, layers, pool):
            gram = _probed(expert, tokenizer, prompts, options, device)
            if not _fits(gram, layers, pool):
                raise PoolError(
                    f"{name}: {len(gram)} blocks ran on the probe, the tensor names show "
                    f"{max(layers) + 1}."
                )
            unchanged(before)  # the Gram is kept under the content of before
            _keep_gram(note, gram)
        grams.append(gram[layers])
    options.progress("probing experts", len(pool.experts), len(pool.experts))
    return conflict.representation_view(np.stack(grams))


def probe_prompts(file: Path) -> list[str]:
    """The prompts of a probe, which models can be shown here.

    The representation view compares prompts: one alone shows nothing.
    """
    require("The representation view", "models", "torch", "transformers")
    exemplars = read_exemplars(file, what="prompts")
    if blank := [one.place for one in exemplars if not one.prompt.strip()]:
        raise RecipeError(f"{blank[0]}: its prompt is empty; take the line away.")
    prompts = [one.prompt for one in exemplars]
    if len(set(prompts)) < 2:
        raise RecipeError(
            f"{file}: the representation view compares prompts, and all of these are the same; "
            "give two that differ at least, or leave probe: out."
        )
    return prompts


def _own_layers(pool: Pool, expert: Checkpoint) -> list[int]:
    """Which of an expert's own layers each layer of the pool is: another one in a stack of slices.

    A probe runs the expert as it is.
    """
    if pool.output is None:
        return list(range(pool.stack.depth))
    own = find_stack((tensor.name, tensor.size) for tensor in expert.tensors.values())
    found = {pool.stack.block_of(n): own.block_of(t.name) for n, t in expert.tensors.items()}
    layers = [found.get(layer) for layer in range(pool.stack.depth)]
    return [layer for layer in layers if layer is not None]


def _fits(gram: Array, layers: list[int], pool: Pool) -> bool:
    """Whether Grams are of these layers; a stack need not have all of an expert's."""
    return len(gram) > max(layers) and (pool.output is not None or len(gram) == len(layers))


def _kept_gram(note: Path) -> Array | None:
    """An expert's Grams from their note; None if they have to be measured again."""
    content = kept_bytes(note)
    if content is None:
        return None
    found = np.load(io.BytesIO(content), allow_pickle=False)
    square = found.ndim == 3 and found.shape[1] == found.shape[2]
    return found if square and found.dtype.kind == "f" and np.isfinite(found).all() else None


def _keep_gram(note: Path, gram: Array) -> None:
    content = io.BytesIO()
    np.save(content, gram)
    keep_bytes(note, content.getvalue())


def _tokenizer(pool: Pool) -> Path:
    """The folder of the reference's tokenizer; the first expert's if the reference has none."""
    folders = [pool.layout.path, *(expert.path for expert in pool.experts.values())]
    found = next((folder for folder in folders if vocabulary(folder) is not None), None)
    if found is None:
        raise PoolError(
            f"{pool.layout.path}: has no tokenizer, and no expert has one; the probe needs it."
        )
    return found


def _check_vocabularies(pool: Pool, options: Options) -> None:
    """PoolError if an expert's vocabulary differs from the reference's: the views would differ."""
    chosen = _tokenizer(pool)
    folders = {"reference": chosen}
    for name, expert in pool.experts.items():
        if vocabulary(expert.path) is not None:
            folders[name] = expert.path
    check_same_vocabulary(folders, options.trust_remote_code)


def _probed(
    expert: Checkpoint, tokenizer: Path, prompts: list[str], options: Options, device: str
) -> Array:
    """An expert's Grams; layers that memory does not hold in float32 stay on the disk."""
    from sigmerge.probing.hidden import probe

    needed = 4 * sum(tensor.size for tensor in expert.tensors.values())
    if needed < 0.8 * free_memory() or device != "cpu":
        return probe(
            expert.here,
            prompts,
            tokenizer=tokenizer,
            device=device,
            trust_remote_code=options.trust_remote_code,
        )
    room = beside(expert.path, "")
    room.mkdir(parents=True, exist_ok=True)
    with scratch(room) as folder:
        return probe(
            expert.here,
            prompts,
            tokenizer=tokenizer,
            offload_folder=str(folder),
            trust_remote_code=options.trust_remote_code,
        )
