"""The command that tries a result: a prompt, or a minute's check beside its parents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import click

from sigmerge.cli.app import examples
from sigmerge.cli.declared import Argument, Option
from sigmerge.cli.flags import Flags, command


@command(
    "trust_remote_code", "dry_run", name="try",
    epilog=examples('sigmerge try merged/ "What is 7 times 6?"', "sigmerge try merged/"),
)  # fmt: skip
def try_(
    checkpoint: Annotated[Path, Argument(help="A result, or any checkpoint.")],
    flags: Flags,
    prompt: Annotated[
        str | None, Argument(help="What to ask; without it the checkpoint is tried.")
    ] = None,
    max_new_tokens: Annotated[
        int, Option("--max-new-tokens", min=1, help="Of the answer to a prompt.")
    ] = 128,
    alone: Annotated[bool, Option("--alone", help="Without its parents.")] = False,
) -> None:
    """Ask a result something, or see in a minute if it is broken.

    With a prompt it prints the likeliest answer, in the chat template where there is one. Without:
    perplexity on a few texts, repetition, chat template and special tokens, beside the parents that
    its provenance names, and a verdict. Exit code 3 if it is broken.
    """
    from sigmerge.jobs.trial import AnswerJob, TrialJob

    if prompt is not None:
        asked = prompt
        done = flags.run(lambda how: AnswerJob(checkpoint, asked, how, max_new_tokens))
        flags.emit(done, lambda answer: iter([answer.answer]))
        return
    found = flags.run(lambda how: TrialJob(checkpoint, how, alone))
    flags.emit(found, _trial_lines)
    if not flags.dry_run and found.verdict == "broken":
        raise click.exceptions.Exit(3)


def _trial_lines(trial: Any) -> Iterator[str]:
    models = (trial.checkpoint, *trial.parents)
    domains = list(dict.fromkeys(domain for each in models for domain in each.perplexity))
    rows = [("perplexity of a token", *domains, "repeated", "template")]
    for each in models:
        told = "faulty" if each.faults else "yes" if each.template else "none"
        cells = [
            _perplexity(each.perplexity[domain]) if domain in each.perplexity else "–"
            for domain in domains
        ]
        repeated = "–" if each.repeated is None else f"{100 * each.repeated:.0f} %"
        rows.append((each.name, *cells, repeated, told))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        yield "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])
    yield ""
    yield f"verdict: {trial.verdict}"
    yield from (f"  {reason}" for reason in trial.reasons)
    yield from (f"note: {note}" for note in trial.notes)


def _perplexity(value: float | None) -> str:
    return "not finite" if value is None else f"{value:,.2f}" if value < 1e5 else f"{value:.1e}"
