"""The harnesses. A new one is a file in `harnesses/` and a line here."""

from __future__ import annotations

from importlib import import_module

from sigmerge.evaluation.benchmark import Benchmark

HARNESSES = {
    "lm_eval": "sigmerge.evaluation.harnesses.lm_eval:LmEval",
    "code": "sigmerge.evaluation.harnesses.code:Code",
    "safety": "sigmerge.evaluation.harnesses.safety:Safety",
    "jsonl": "sigmerge.evaluation.harnesses.jsonl:Jsonl",
    "likelihood": "sigmerge.evaluation.harnesses.likelihood:Likelihood",
    "command": "sigmerge.evaluation.harnesses.command:Command",
    "nano": "sigmerge.evaluation.harnesses.nano:Nano",
}
"""The name in a suite, and the class that reads and measures such a benchmark."""


def benchmark_class(harness: str) -> type[Benchmark]:
    """The class of a harness, imported now; KeyError if there is none of this name."""
    module, _, name = HARNESSES[harness].partition(":")
    found: type[Benchmark] = getattr(import_module(module), name)
    return found
