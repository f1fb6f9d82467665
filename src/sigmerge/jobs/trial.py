"""`sigmerge try`: does a result still read, write and end as a language model should?

A minute instead of a benchmark: it finds what is broken, and does not say which of two good merges
is better (`sigmerge evaluate` does).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from sigmerge.checkpoints.folder import RECORDS_FOLDER, open_checkpoint
from sigmerge.engine.machine import LIBRARIES
from sigmerge.errors import PoolError, require
from sigmerge.jobs.options import Options
from sigmerge.jobs.steps import Description, TrialStep
from sigmerge.jobs.work_folder import WINNER
from sigmerge.messages import few
from sigmerge.records import PROVENANCE, InputFile, Provenance, read
from sigmerge.results import Reply, Trial, TriedModel

if TYPE_CHECKING:
    from sigmerge.probing.generate import HfModel

WORSE, BROKEN = 1.1, 1.5
"""Times the worst parent's nats for a character from which a result is doubtful, and broken."""
GUESSING = 0.75
"""The part of a guess's nats for a token from which a model does not read a language."""
REPEATS, MORE_REPEATS = 0.5, 0.2
"""The repeated share from which a model repeats itself, and how far it must be beyond all parents.
"""


@dataclass(frozen=True)
class TrialJob:
    """A trial of a checkpoint beside its parents, where they are at hand; `alone` without them."""

    folder: Path
    options: Options
    alone: bool = False

    def describe(self) -> Description:
        from sigmerge.probing.trial import trial_texts

        _require()
        models, notes = self._models()
        texts, prompts = trial_texts()
        sizes = [open_checkpoint(place).nbytes for place in models.values()]
        step = TrialStep(
            models={name: str(place) for name, place in models.items()},
            texts=sum(map(len, texts.values())),
            prompts=len(prompts),
            bytes_to_read=sum(sizes),
            peak_memory_bytes=LIBRARIES + 3 * max(sizes),  # float32 beside what is being read
            notes=tuple(notes),
        )
        return Description((step,), self.options.threads)

    def run(self) -> Trial:
        _require()
        models, notes = self._models()
        tried = []
        for count, (name, place) in enumerate(models.items()):
            self.options.progress(f"trying {name}", count, len(models))
            tried.append(self._tried(name, place))
        self.options.progress("trying", len(models), len(models))
        found, *parents = tried
        verdict, reasons = judged(found, parents)
        return Trial(
            checkpoint=found,
            parents=tuple(parents),
            verdict=verdict,
            reasons=tuple(reasons),
            notes=(*notes, *_unread(found)),
        )

    def _models(self) -> tuple[dict[str, Path], list[str]]:
        """What is loaded, the checkpoint first; and which parents are not at hand."""
        place = checkpoint_of(self.folder)
        open_checkpoint(place)  # whose error says what is missing
        models = {self.folder.name or str(place): place}
        notes: list[str] = []
        record = place / RECORDS_FOLDER / PROVENANCE
        if self.alone:
            return models, notes
        if not record.is_file():
            return models, [f"no {RECORDS_FOLDER}/{PROVENANCE} names parents to compare with"]
        for name, parent in _parents(read(Provenance, record, PoolError).inputs):
            if parent is None:
                notes.append(f"{name}: is not at hand any more, or was changed; not compared")
            elif parent not in models.values():
                models[name if name not in models else f"{name} (parent)"] = parent
        return models, notes

    def _tried(self, name: str, place: Path) -> TriedModel:
        from sigmerge.probing.trial import behaviour, perplexity

        found = behaviour(_loaded(place, self.options))
        readings = found.readings
        tokens = sum(each.tokens for each in readings.values())
        nats = sum(each.nats for each in readings.values())
        guess = math.log(found.vocabulary)
        finite = math.isfinite(nats) and tokens > 0
        return TriedModel(
            name=name,
            folder=str(place),
            perplexity={domain: perplexity(each) for domain, each in readings.items()},
            per_character={
                domain: each.nats / each.characters if math.isfinite(each.nats) else None
                for domain, each in readings.items()
            },
            surprise=nats / tokens / guess if finite else None,
            repeated=found.repeated,
            template=found.template,
            faults=found.faults,
            zeros=found.zeros,
            seconds=found.seconds,
        )


@dataclass(frozen=True)
class AnswerJob:
    """The likeliest answer of a checkpoint to a prompt, in its chat template if it has one."""

    folder: Path
    prompt: str
    options: Options
    max_new_tokens: int = 128

    def describe(self) -> Description:
        _require()
        place = checkpoint_of(self.folder)
        weights = open_checkpoint(place).nbytes
        step = TrialStep(
            models={self.folder.name: str(place)},
            texts=0,
            prompts=1,
            bytes_to_read=weights,
            peak_memory_bytes=LIBRARIES + 3 * weights,
        )
        return Description((step,), self.options.threads)

    def run(self) -> Reply:
        from sigmerge.probing.generate import Sampling

        _require()
        place = checkpoint_of(self.folder)
        model = _loaded(place, self.options)
        told = Sampling(max_new_tokens=self.max_new_tokens, templated=True)
        [[answer]], usage = model.generate([model.chat(self.prompt)], told)
        return Reply(
            checkpoint=str(place),
            prompt=self.prompt,
            templated=bool(model.tokenizer.chat_template),
            answer=answer,
            prompt_tokens=usage.prompt_tokens,
            tokens=usage.generated_tokens,
            seconds=usage.seconds,
        )


def checkpoint_of(folder: Path) -> Path:
    """The checkpoint of a result: of a run what it repaired, of a tuning or a search the winner."""
    if not (folder / "config.json").is_file():
        for name in ("repaired", "anchor", WINNER):
            if (folder / name / "config.json").is_file():
                return folder / name
    return folder


def _require() -> None:
    require("Trying a checkpoint", models=["torch", "transformers"])


def _loaded(place: Path, options: Options) -> HfModel:
    from sigmerge.probing.generate import HfModel

    return HfModel(place, "auto", None, options.trust_remote_code)


def _parents(inputs: Sequence[InputFile]) -> Iterator[tuple[str, Path | None]]:
    """The members of a provenance and where they lie; None for one whose files are not as then."""
    for name in dict.fromkeys(each.member for each in inputs):
        files = [each for each in inputs if each.member == name]
        there = all(
            Path(each.file).is_file() and Path(each.file).stat().st_size == each.size
            for each in files
        )
        homes = {Path(each.file).name: Path(each.file).parent for each in files}
        home, adapter = homes.get("config.json"), homes.get("adapter_config.json")
        if home is None or not there:
            yield name, None
        else:
            yield name, home if adapter in (None, home) else Path(f"{home}+{adapter}")


def judged(
    found: TriedModel, parents: Sequence[TriedModel]
) -> tuple[Literal["fine", "doubtful", "broken"], list[str]]:
    """The verdict on a model and what it rests on."""
    broken, doubts = list(_broken(found, parents)), list(_doubts(found, parents))
    if broken:
        return "broken", [*broken, *doubts]
    if doubts:
        return "doubtful", doubts
    beside = "as its parents do" if parents else "as a language model should (no parents beside it)"
    return "fine", [f"It reads, writes and ends {beside}."]


def _broken(found: TriedModel, parents: Sequence[TriedModel]) -> Iterator[str]:
    if None in found.perplexity.values():
        yield "Its numbers are not finite (NaN or infinity): some weights are damaged."
        return
    shared = {name for each in parents for name in each.zeros}
    if empty := [name for name in found.zeros if name not in shared]:
        yield f"Nothing but zeros is in {few(empty, 2)}."
    if found.surprise is not None and found.surprise > GUESSING:
        known = [each.surprise for each in parents if each.surprise is not None]
        if not known or min(known) <= GUESSING:
            yield (
                f"It reads ordinary texts little better than by guessing ({found.surprise:.0%} of "
                "a guess's surprise)."
            )
    times = _against_worst(found, parents)
    if times is not None and times[0] > BROKEN:
        yield _worse(*times)


def _doubts(found: TriedModel, parents: Sequence[TriedModel]) -> Iterator[str]:
    times = _against_worst(found, parents)
    if times is not None and WORSE < times[0] <= BROKEN:
        yield _worse(*times)
    others = [each.repeated for each in parents if each.repeated is not None]
    beyond = max(others, default=0.0) + MORE_REPEATS
    if found.repeated is not None and found.repeated > max(REPEATS, beyond):
        most = f"; its parents at most {max(others):.0%}" if others else ""
        yield f"It repeats itself: {found.repeated:.0%} of what it writes it wrote before{most}."
    shared = {fault for each in parents for fault in each.faults}
    yield from (f"{fault[0].upper()}{fault[1:]}." for fault in found.faults if fault not in shared)
    if not found.template and (having := [each.name for each in parents if each.template]):
        yield (
            f"It has no chat template, and {', '.join(having)} "
            f"{'has' if len(having) == 1 else 'have'} one: name it by chat_template: in the recipe."
        )


def _worse(times: float, name: str) -> str:
    return (
        f"It reads texts worse than its worst parent, {name}: {times:.2f} times the surprise for "
        "a character."
    )


def _against_worst(found: TriedModel, parents: Sequence[TriedModel]) -> tuple[float, str] | None:
    """How many times a parent's nats the model has, of the parent that comes off worst.

    Domains that both could read count alike.
    """
    ratios = []
    for each in parents:
        pairs = [
            (nats, other)
            for domain, nats in found.per_character.items()
            if nats is not None and (other := each.per_character.get(domain)) is not None
        ]
        if pairs:
            own, theirs = (fmean(column) for column in zip(*pairs, strict=True))
            ratios.append((own / max(theirs, 1e-9), each.name))
    return min(ratios, default=None)


def _unread(found: TriedModel) -> Iterator[str]:
    from sigmerge.probing.trial import trial_texts

    texts, _ = trial_texts()
    if left := [domain for domain in texts if domain not in found.perplexity]:
        yield f"not read, since its tokenizer does not know the words: {', '.join(left)}"
    if not found.template:
        yield "it has no chat template: prompts were given as they are"
