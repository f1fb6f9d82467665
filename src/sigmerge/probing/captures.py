"""Cached statistics of one expert on its own exemplars, for operators that read data.

They are stored block by block, so that an interrupted capture resumes after its last block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.adapter_folders import home_of
from sigmerge.checkpoints.declared import (
    checkpoint_files,
    files_around,
    named,
    shown_folder,
    weight_files,
)
from sigmerge.checkpoints.folder import Checkpoint
from sigmerge.engine.machine import device_kind
from sigmerge.errors import RecipeError
from sigmerge.kept import Derivation, Given, Inputs
from sigmerge.probing.exemplars import Exemplar, Tokens, read_exemplars, tokenize
from sigmerge.probing.memory import free_cached, in_memory


@dataclass(frozen=True)
class Capture:
    """The capture of one expert; `kind` is what the operator needs, features or fisher.

    `reference` is needed where features are those of θ_ref + scale · Δ. A `seed` draws labels.
    """

    expert: str
    kind: str
    checkpoint: Checkpoint
    tokenizer: Path
    file: Path
    exemplars: tuple[Exemplar, ...]
    limit: int | None
    max_length: int
    device: str
    trust: bool
    skip_bos: bool = False
    scale: float = 1.0
    reference: Checkpoint | None = None
    labels: str = "argmax"
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens an exemplar is cut to: max_length, or all positions that the model has."""
        config = self.checkpoint.config
        config = config.get("text_config") or config
        known = [config.get(key) for key in ("n_positions", "max_position_embeddings")]
        limits = [limit for limit in known if isinstance(limit, int) and limit > 0]
        return min([self.max_length, *limits])

    def tokens(self, tokenizer: Path | None = None) -> list[Tokens]:
        """The tokenized exemplars."""
        try:
            return tokenize(
                tokenizer or self.tokenizer,
                self.exemplars,
                self.longest,
                answers=self.kind == "fisher" and self.labels == "data",
                skip_bos=self.kind == "features" and self.skip_bos,
                trust=self.trust,
            )
        except RecipeError as error:
            raise RecipeError(f"{self.expert}: {error}") from None

    def derivation(
        self,
        near: Path | None,
        threads: int = 1,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Derivation:
        """The statistics; `near` is a member of the pool that they are kept beside."""
        inputs = Inputs.of(
            expert=checkpoint_files(self.checkpoint),
            tokenizer=files_around(self.tokenizer),
            exemplars=self.file,
        )
        settings: dict[str, Any] = {
            "limit": self.limit,
            "max_length": self.max_length,
            "device": device_kind(self.device),
            "trust_remote_code": self.trust,
        }
        if self.kind == "fisher":
            settings["labels"] = self.labels
            settings["seed"] = self.seed if self.labels == "sampled" else None
        else:
            settings |= {"skip_bos": self.skip_bos, "scale": self.scale}
            if self.reference is not None:
                inputs |= Inputs.of(reference=weight_files(self.reference))
        return Derivation(
            self.kind,
            partial(_captured, self, threads, progress),
            inputs,
            settings,
            ("torch", "transformers", "tokenizers"),
            of=self.checkpoint.place,
            near=near,
        )


def _captured(
    planned: Capture, threads: int, progress: Callable[[int, int], None], given: Given
) -> dict[str, Any]:
    """Write the statistics; returns notes about them."""
    from sigmerge.probing.skeleton import reader

    shown = read_exemplars(given.path("exemplars"), planned.limit)
    planned = replace(planned, exemplars=tuple(shown))
    resumed = any(given.out.iterdir())
    tokens = planned.tokens(given.folder("tokenizer", planned.tokenizer.name))
    members = [one for one in (planned.checkpoint, planned.reference) if one is not None]
    given.allow(file for member in members for file in member.files)
    folder = shown_folder(given, "expert", planned.checkpoint)
    expert = replace(planned.checkpoint, path=home_of(folder))
    read = reader(planned.checkpoint, planned.reference, planned.scale)
    how: dict[str, Any] = {
        "threads": threads,
        "device": planned.device,
        "trust": planned.trust,
        "progress": progress,
        "wrote": lambda file: given.put(file.stem, True, file.name),
    }
    about: dict[str, Any] = {"resumed": resumed, "tokens": sum(len(row.ids) for row in tokens)}
    with named(folder, planned.checkpoint), in_memory(f"{planned.checkpoint.place}: its capture"):
        about |= _CAPTURES[planned.kind](planned, expert, read, tokens, given.out, how)
    free_cached()
    return about


def _features(
    planned: Capture, expert: Checkpoint, read: Any, tokens: Any, out: Path, how: dict[str, Any]
) -> dict[str, Any]:
    from sigmerge.probing.capture import capture_features

    capture_features(expert, read, tokens, out, skip_bos=planned.skip_bos, **how)
    return {}


def _fisher(
    planned: Capture, expert: Checkpoint, read: Any, tokens: Any, out: Path, how: dict[str, Any]
) -> dict[str, Any]:
    from sigmerge.probing.fisher import capture_fisher

    how |= {"labels": planned.labels, "seed": planned.seed}
    return {"norm": capture_fisher(expert, read, tokens, out, **how)}


_CAPTURES: Mapping[str, Callable[..., dict[str, Any]]] = {"features": _features, "fisher": _fisher}
