"""Opening a recipe's checkpoints, and checking them from their headers. Reads no tensor."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sigmerge.checkpoints.adapter_folders import home_of
from sigmerge.checkpoints.blocks import positions
from sigmerge.checkpoints.companions import check_tokenizer, companion_files
from sigmerge.checkpoints.computed import disagreements
from sigmerge.checkpoints.contradictions import contradictions
from sigmerge.checkpoints.folder import Checkpoint, is_before, open_checkpoint
from sigmerge.checkpoints.inputs import digested, same_configuration
from sigmerge.checkpoints.modules import SPEAKING, module_of, module_part
from sigmerge.checkpoints.plain import open_tensors
from sigmerge.checkpoints.pool import PoolMembers, clash, differences, open_pool
from sigmerge.errors import PoolError, RecipeError, SigmergeWarning
from sigmerge.files.digests import file_digests, prove
from sigmerge.files.identity import InputIdentity, identify
from sigmerge.files.objects import address
from sigmerge.files.streaming_digest import Leaves
from sigmerge.jobs.options import Options
from sigmerge.messages import few
from sigmerge.operators.base import Operator, Site
from sigmerge.recipe import Recipe, load_recipe
from sigmerge.recipe.record import RecipeSlice, RecipeSource
from sigmerge.recipe.settings import Conditions, matches
from sigmerge.records import InputFile, Member, PlanSlice, PlanSource, RepairPlan

if TYPE_CHECKING:
    from sigmerge.checkpoints.vocabularies import Vocabulary
    from sigmerge.probing.expected import Problems

_APART = "The configurations of the models compute something else"

# Stacks and vocabularies are imported where a recipe asks for one: most do not.


def pool_folders(folder: Path) -> tuple[Path, list[Path]]:
    """The reference's and the experts' folders of a pool that lies in one folder."""
    reference = folder / "reference"
    experts = sorted(
        path.parent for path in folder.glob("*/config.json") if path.parent != reference
    )
    if not (reference / "config.json").is_file() or not experts:
        raise RecipeError(f"{folder}: is no pool; reference/ and a folder per expert are expected.")
    return reference, experts


def open_merge_pool(recipe: Recipe, options: Options) -> tuple[PoolMembers, bool]:
    """The pool of a recipe that merges, and whether tensors outside the blocks are merged."""
    outside = recipe.parameters.get("outside") != "reference"
    vocabulary = _vocabulary(recipe)
    added = vocabulary.added if vocabulary else ()
    if (stacked := _stacked_pool(recipe, options, vocabulary)) is not None:
        return _said(replace(stacked, added_tokens=added), options), outside
    soup = recipe.operator is not None and not recipe.operator.needs_reference
    pool = open_pool(
        recipe.reference,
        recipe.experts,
        allow_pickle=options.allow_pickle,
        outside=outside,
        soup=soup,
        any_architecture=recipe.any_architecture,
        moved=_moving(vocabulary, [*([] if soup else ["reference"]), *recipe.experts]),
        tensors=recipe.tensors,
        match=_matching(recipe),
    )
    return _said(replace(pool, added_tokens=added), options), outside


def _matching(recipe: Recipe) -> Callable[[PoolMembers], PoolMembers] | None:
    if not recipe.match_experts:
        return None
    from sigmerge.checkpoints.matched_experts import with_matched_experts

    return with_matched_experts


def _said(pool: PoolMembers, options: Options) -> PoolMembers:
    say_before(pool.disagreements, options)
    return replace(pool, notes=(*pool.notes, *pool.disagreements))


def say_before(told: Sequence[str], options: Options, what: str = _APART) -> None:
    """Warn, before a tensor is read, where configurations differ; with `strict` raise."""
    if options.strict and told:
        raise PoolError(f"{what}, which --strict refuses:", told)
    for text in told:
        warnings.warn(text, SigmergeWarning, stacklevel=2)


def check_loads(checkpoint: Checkpoint, config: Mapping[str, Any], options: Options) -> list[str]:
    """Raise if transformers could not load a result with this configuration and these tensors.

    Returns a warning if they seem to contradict and transformers is not installed.
    """
    told = contradictions(checkpoint, config)
    shapes = tuple((name, tensor.shape) for name, tensor in checkpoint.tensors.items())
    found = _loading_problems(json.dumps(config), shapes) if told else []
    if isinstance(found, str):
        notes = [f"{checkpoint.title}: config.json says {text} ({found})" for text in told]
        say_before(notes, options, "config.json contradicts the weights")
        return notes
    if found:
        missed = few([f"{name} {problem}" for name, problem in found], 3)
        raise PoolError(
            f"{checkpoint.place}: config.json contradicts the weights, and transformers would not "
            "load them with it; mend it, or download it again:",
            [*(f"it says {text}" for text in told), f"transformers: {missed}"],
        )
    return []


@lru_cache(maxsize=1)
def _loading_problems(config: str, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> Problems:
    """Problems of loading, found by transformers, which is imported only if there is a doubt."""
    from sigmerge.probing.expected import stored_problems

    return stored_problems(json.loads(config), dict(shapes))


def _vocabulary(recipe: Recipe) -> Vocabulary | None:
    """The vocabulary of the result, where the recipe asks for one and rows have to be moved."""
    if recipe.vocabulary is None:
        return None
    from sigmerge.checkpoints.vocabularies import plan_vocabulary

    members = {"reference": home_of(recipe.reference)} if recipe.reference else {}
    members |= {name: home_of(path) for name, path in recipe.experts.items()}
    members |= {s.model: home_of(s.path) for piece in recipe.slices for s in piece.sources}
    home = recipe.tokenizer or next(iter(members.values()))
    return plan_vocabulary(recipe.vocabulary, home, members)


def _moving(
    vocabulary: Vocabulary | None, before: Sequence[str], behind: Sequence[str] | None = None
) -> Callable[[Mapping[str, Checkpoint]], dict[str, Checkpoint]] | None:
    if vocabulary is None:
        return None
    from sigmerge.checkpoints.vocabularies import moved

    return lambda members: moved(members, vocabulary, before, behind or before)


def _stacked_pool(
    recipe: Recipe, options: Options, vocabulary: Vocabulary | None
) -> PoolMembers | None:
    """The pool of a recipe with slices; None if they are whole models, one beside another."""
    sources = {s.model: s for piece in recipe.slices for s in piece.sources}
    members = {
        name: open_checkpoint(source.path, allow_pickle=options.allow_pickle)
        for name, source in sources.items()
    }
    if not recipe.slices or (len(recipe.slices) == 1 and _is_plain(recipe.slices[0], members)):
        return None
    if recipe.match_experts:
        raise RecipeError("match_experts: experts of whole models are matched, not of slices.")
    from sigmerge.checkpoints.slices import LayerRange, StackedSlice, stacked_pool

    same = [member for member in members.values() if Path(member.here) == recipe.reference]
    home = same[0] if same else next(iter(members.values()))
    if recipe.reference and not same:
        home = open_checkpoint(recipe.reference, allow_pickle=options.allow_pickle)

    def ranges(piece: RecipeSlice) -> tuple[LayerRange, ...]:
        def last(source: RecipeSource) -> int:
            if not piece.whole:
                return source.last
            return module_part(members[source.model], piece.module, recipe.modules).stack.depth

        return tuple(LayerRange(s.model, s.first, last(s)) for s in piece.sources)

    slices = [StackedSlice(ranges(piece), piece.base, piece.module) for piece in recipe.slices]
    speaking = [piece for piece in recipe.slices if piece.module in SPEAKING]
    ends = [[s.model for s in speaking[at].sources] for at in (0, -1)]
    vocabulary = vocabulary and _by_source(vocabulary, recipe)
    pool = stacked_pool(members, slices, home, _moving(vocabulary, *ends))
    if vocabulary is not None and pool.output is not None:
        from sigmerge.checkpoints.vocabularies import with_size

        config = with_size(pool.output.config, vocabulary.rows)
        pool = replace(pool, output=replace(pool.output, config=config))
    return pool


def _by_source(vocabulary: Vocabulary, recipe: Recipe) -> Vocabulary:
    """A vocabulary for a stack, where the base model is a source under a name like others."""
    named = [s.model for p in recipe.slices for s in p.sources if s.path == recipe.reference]

    def called(member: str | None) -> str | None:
        return named[0] if named and member == "reference" else member

    request = vocabulary.request
    tokens = {
        t: replace(source, model=called(source.model)) for t, source in request.tokens.items()
    }
    return replace(vocabulary, request=replace(request, base=called(request.base), tokens=tokens))


def planned_slices(recipe: Recipe, pool: PoolMembers) -> tuple[PlanSlice, ...]:
    """What a stacked pool is made of, as a plan lists it."""
    if pool.output is None:
        return ()
    output = pool.output

    def source(piece: RecipeSlice, given: RecipeSource) -> PlanSource:
        last = given.last
        if piece.whole:
            last = module_part(output, piece.module, recipe.modules).stack.depth
        return PlanSource(model=given.model, path=str(given.path), first=given.first, last=last)

    return tuple(
        PlanSlice(
            sources=tuple(source(piece, given) for given in piece.sources),
            base=piece.base,
            module=piece.module or None,
        )
        for piece in recipe.slices
    )


def require_whole(recipe: Recipe, pool: PoolMembers) -> None:
    """Raise for a stack of slices: it has no single weight per expert."""
    if planned_slices(recipe, pool):
        raise RecipeError(
            "slices: the weights of whole models are tuned, not of layers; give them under models:"
        )


def recipe_of(plan: RepairPlan) -> Recipe:
    """A recipe that names the checkpoints of a repair.

    Their architectures were compared when the plan was made, or the recipe named them itself.
    """
    members: dict[str, Any] = {
        "models": [{"model": e.path, "name": name} for name, e in plan.experts.items()]
    }
    if plan.slices:
        members = {"slices": [_section(piece) for piece in plan.slices]}
    reference = plan.reference.path if plan.reference else None
    given = {"merge_method": "task_arithmetic", "base_model": reference, **members}
    recipe = replace(load_recipe(given), any_architecture=True, tensors="intersection")
    return replace(recipe, match_experts=bool(plan.matched))


def _section(piece: PlanSlice) -> dict[str, Any]:
    """A slice as a recipe writes it."""
    base = [source.path for source in piece.sources if source.model == piece.base]
    sources = [
        {"model": s.path, "name": s.model, "layer_range": [s.first, s.last]} for s in piece.sources
    ]
    return {"sources": sources, "base_model": base[0] if base else None}


def _is_plain(piece: RecipeSlice, members: Mapping[str, Checkpoint]) -> bool:
    """Whether a slice, of which there is no other, takes all layers of its models."""
    whole = all(s.first == 0 and s.last == members[s.model].stack.depth for s in piece.sources)
    return whole and not piece.parameters


def open_repair_pool(recipe: Recipe, options: Options) -> PoolMembers:
    """The pool for the profile and the repair, which read the numbered blocks only."""
    if recipe.reference is None:
        raise PoolError("base_model is missing: task vectors need the reference checkpoint.")
    if (stacked := _stacked_pool(recipe, options, None)) is not None:
        _check_counterparts(stacked)
        return _said(stacked, options)
    pool = open_pool(
        recipe.reference,
        recipe.experts,
        allow_pickle=options.allow_pickle,
        outside=False,
        any_architecture=recipe.any_architecture,
        tensors=recipe.tensors and "intersection",
        match=_matching(recipe),
    )
    if pool.stack.depth == 0:
        raise PoolError(f"{pool.layout.path}: no numbered decoder stack found in the tensor names.")
    return _said(pool, options)


def _check_counterparts(pool: PoolMembers) -> None:
    """Whether every layer of a stacked model has a reference and every expert."""
    for name in pool.names:
        block = pool.stack.block_of(name)
        without = [m for m, member in pool.members.items() if name not in member.tensors]
        if block is not None and (without or pool.reference is None):
            raise PoolError(
                f"layer {block} of the result has no counterpart in "
                f"{without[0] if without else 'the reference'}, so its task vectors are not known "
                "and it cannot be repaired. Slices that are repaired have the same sources "
                "throughout, base_model among them."
            )


def open_anchor(
    path: Path, pool: PoolMembers, options: Options, *, any_architecture: bool = False
) -> Checkpoint:
    """The anchor, checked against the pool: same architecture, same blocks."""
    stored = open_tensors(path, allow_pickle=options.allow_pickle)
    if stored.adapter is not None:
        raise PoolError(f"{path}: has an adapter; a repair needs an anchor that is stored.")
    if pool.reference and stored.place == pool.reference.place:
        raise PoolError(f"{path}: is the reference itself, and no merge that could be repaired.")
    problems = differences("anchor", stored, pool.layout, False, any_architecture)
    problems = problems or _misshapen(stored, pool.layout)
    if problems:
        raise PoolError("The anchor is no merge of this pool:", problems)
    check_tokenizer(stored.path)
    configs = {"reference": pool.layout.config, "anchor": stored.config}
    say_before(told := disagreements(configs, "anchor"), options)
    told += check_loads(stored, stored.config, options)
    return replace(stored, notes=(*stored.notes, *told))


def _misshapen(anchor: Checkpoint, layout: Checkpoint) -> list[str]:
    """Tensors outside the blocks that no merge of this pool has: they are copied from the anchor.

    Its vocabulary may be another, and so may the first dimension of what has a row for each token.
    """
    rows = {c.tensors[c.embedding].shape[0] for c in (anchor, layout) if c.embedding}

    def fits(ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
        by_token = ours[1:] == theirs[1:] and {*ours[:1], *theirs[:1]} <= rows
        return ours == theirs or by_token

    return [
        f"{name}: {clash(tensor, anchor.tensors[name])}"
        for name, tensor in sorted(layout.tensors.items())
        if name in anchor.tensors and not fits(tensor.shape, anchor.tensors[name].shape)
    ]


def merged_sites(recipe: Recipe, pool: PoolMembers, outside: bool) -> dict[str, Site]:
    """The tensors that the recipe's operator merges, with their settings."""
    sites = {}
    placed = positions(pool.layout.tensors)
    stacks = {m: module_part(pool.layout, m, recipe.modules).stack for m in recipe.modules}
    for name, stored in sorted(pool.layout.tensors.items()):
        block = pool.stack.block_of(name)
        if stored.floating and stored.size and (outside or block is not None):
            if not recipe.slices or pool.output is None:
                having = [m for m, e in pool.experts.items() if name in e.tensors]
                if not having:
                    continue
                place = placed.get(name)
                site = recipe.site(name, stored.size, pool.stack, place, having)
            else:
                made_of = {m: e.tensors.get(name) for m, e in pool.experts.items()}
                names = {m: tensor.name for m, tensor in made_of.items() if tensor}
                own = stacks[module_of(name, stacks)] if stacks else pool.stack
                both = pool.stack, own
                site = recipe.sliced_site(name, stored.size, names, is_before(name), both)
            sites[name] = replace(site, shape=stored.shape)
    return sites


def written_dtypes(recipe: Recipe, pool: PoolMembers) -> dict[str, str]:
    """The type of every tensor of a merge: the recipe's, or the narrowest that holds all members'.

    As in mergekit: bfloat16 beside float16 is written as float32.
    """
    found = {}
    for name, stored in pool.layout.tensors.items():
        types = {m.tensors[name].dtype for m in pool.members.values() if name in m.tensors}
        mixed = "F32" if len(types) > 1 else stored.dtype
        found[name] = (recipe.out_dtype or mixed) if stored.floating else stored.dtype
    return found


def mixed_precision(recipe: Recipe, pool: PoolMembers, written: Mapping[str, str]) -> list[str]:
    """A note where members differ in precision and the recipe does not say what is written."""
    changed = [n for n, t in pool.layout.tensors.items() if written[n] != t.dtype]
    if recipe.out_dtype is not None or not changed:
        return []
    return [f"the models differ in precision: {len(changed)} tensors are written as float32; "
            "dtype: in the recipe says otherwise"]  # fmt: skip


def idle_settings(recipe: Recipe, pool: PoolMembers, sites: Mapping[str, Site]) -> list[str]:
    """Notes about filters that match no tensor, and experts of which nothing is kept."""
    names = set(sites)
    if pool.output is not None:  # filters of a source see the names that its tensors have there
        names |= {t.name for e in pool.experts.values() for t in e.tensors.values()}
    scopes = [recipe.parameters, *(model.parameters for model in recipe.models)]
    scopes += [piece.parameters for piece in recipe.slices]
    scopes += [source.parameters for piece in recipe.slices for source in piece.sources]
    notes = [f"filter: {pattern} matches no tensor" for pattern in _unmatched(scopes, names)]
    for module, shared in recipe.modules.items():
        scopes = [shared, *((model.parts or {}).get(module, {}) for model in recipe.models)]
        inside = {name for name in names if module_of(name, recipe.modules) == module}
        notes += [
            f"filter: {pattern} matches no tensor of {module}"
            for pattern in _unmatched(scopes, inside)
        ]
    return notes + [note for key in ("density", "weight") for note in _nothing_of(key, sites)]


def _unmatched(scopes: Iterable[Mapping[str, Any]], names: Collection[str]) -> list[str]:
    """The filters of some parameters that are part of no name."""
    patterns = {
        str(pattern)
        for scope in scopes
        for setting in scope.values()
        if isinstance(setting, Conditions)
        for pattern, _ in setting.rules
        if pattern not in (None, "*")
    }
    return sorted(p for p in patterns if not any(matches(p, name) for name in names))


def _nothing_of(key: str, sites: Mapping[str, Site]) -> list[str]:
    """Notes about experts whose density or weight is 0 wherever they are merged."""
    # A value for each expert; a user's operator may call something else by that name.
    given = [s for s in sites.values() if isinstance(s.settings.get(key), tuple)]
    values = [pair for s in given for pair in zip(s.experts, s.settings[key], strict=False)]
    kept = {name for name, value in values if value}
    return [f"{key}: 0 leaves nothing of {n}" for n in dict.fromkeys(n for n, _ in values)
            if n not in kept]  # fmt: skip


def lacking(operator: Operator, sites: Mapping[str, Site]) -> list[str]:
    """Problems of parameters that have no value at some tensor: no filter matches there."""
    problems = []
    for name in (parameter.name for parameter in operator.parameters):
        without = [t for t, site in sites.items() if _has_gap(site.settings[name])]
        if without:
            some = f" for {len(without)} tensors ({without[0]}, …)"
            where = "" if len(without) == len(sites) else some
            problems.append(f"{name} is missing{where}; give it a value without a filter")
    return problems


def _has_gap(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and None in value)


def block_sites(pool: PoolMembers) -> list[list[Site]]:
    """The floating tensors of every numbered block in flat order (rulings 1 and 3)."""
    blocks: list[list[Site]] = [[] for _ in range(pool.stack.depth)]
    experts = tuple(pool.experts)
    for name, stored in sorted(pool.layout.tensors.items()):
        block = pool.stack.block_of(name)
        if block is not None and stored.floating and stored.size:
            blocks[block].append(Site(name, stored.size, block, len(blocks), experts, {}, 0))
    return blocks


def weight_digests(checkpoint: Checkpoint, options: Options) -> tuple[str, ...]:
    """Digests of a checkpoint's weight files, in the files' order."""
    digests = file_digests(checkpoint.files, options.threads)
    return tuple(digests[file] for file in checkpoint.files)


def member(checkpoint: Checkpoint, options: Options) -> Member:
    """A checkpoint as a plan names it."""
    return Member(path=checkpoint.place, sha256=weight_digests(checkpoint, options))


@dataclass(frozen=True)
class PoolInputs:
    """The files that go into a result, as they were before the first tensor was read."""

    members: Mapping[Path, str]
    """File -> the name of its checkpoint, or of the expert that is shown it. A pickle, which a
    user gave, and not the file that it was converted to."""
    before: tuple[InputIdentity, ...]
    leaves: Leaves
    """Of remote files, what is hashed while it is read."""
    proven: dict[Path, str] = field(default_factory=dict)
    """Digests of what was hashed beside the work."""

    @classmethod
    def of(
        cls,
        checkpoints: Mapping[str, Checkpoint],
        others: Mapping[Path, str] | None = None,
        *,
        read: Iterable[Checkpoint] = (),
    ) -> PoolInputs:
        """With `read`, the checkpoints whose tensors this process reads through `leaves`."""
        files: dict[Path, str] = {}
        pickles: dict[Path, InputIdentity] = {}
        for name, checkpoint in checkpoints.items():
            same_configuration(checkpoint)
            for file in (*checkpoint.files, *companion_files(checkpoint.path)):
                files.setdefault(checkpoint.given(file), name)  # adapters share their model's
            pickles |= checkpoint.pickles
        files = {**(others or {}), **files}
        own = {pickle.file for pickle in pickles.values()}
        before = (*identify([*(files.keys() - own), *pickles]), *pickles.values())
        return cls(files, before, Leaves(file for one in read for file in one.files))

    def hash(self, options: Options, step: Callable[[int], None]) -> None:
        """Hash beside the work what `digested` looks up after it; one thread is not shared."""
        if options.threads > 1:
            files = [one.file for one in self.before if one.file not in self.leaves]
            self.proven.update(prove(files, options.threads, step))

    def digested(self, options: Options) -> tuple[InputFile, ...]:
        """The files with their digests; PoolError if one changed since."""
        total = sum(one.size for one in self.before)
        hashed = 0

        def progress(count: int) -> None:
            nonlocal hashed
            hashed += count
            options.progress("hashing inputs", hashed, total)

        found = digested(self.before, options.threads, progress, self.leaves.digest, self.proven)
        known = {one.file: one for one in found}
        if hashed:  # the digests of the other files were known
            options.progress("hashing inputs", total, total)
        return tuple(
            InputFile(
                member=name,
                file=address(file),
                size=known[file].size,
                sha256=str(known[file].sha256),
            )
            for file, name in self.members.items()
        )


def other_inputs(recipe: Recipe, captured: bool) -> dict[Path, str]:
    """PoolInputs of a merge besides its checkpoints: configuration, tokenizer, exemplars."""
    files: dict[Path, str] = {}
    if recipe.slices and recipe.reference is not None:  # which need be the source of no slice
        files |= dict.fromkeys(companion_files(home_of(recipe.reference)), "reference")
    if recipe.tokenizer is not None:
        files |= dict.fromkeys(companion_files(recipe.tokenizer), "tokenizer")
        files |= dict.fromkeys(_donor_files(recipe, recipe.tokenizer), "tokenizer")
    if captured:
        files |= {m.exemplars: m.name for m in recipe.models if m.exemplars is not None}
    return files


def _donor_files(recipe: Recipe, donor: Path) -> list[Path]:
    """The weights of a donor that rows of new tokens are made from."""
    from sigmerge.checkpoints.token_rows import FITTED

    wanted = recipe.vocabulary and recipe.vocabulary.missing
    if not wanted or wanted.method not in FITTED:
        return []
    opened = open_checkpoint(donor)
    names = [name for name in (opened.embedding, opened.head) if name]
    return list(dict.fromkeys(opened.tensors[name].file for name in names))
