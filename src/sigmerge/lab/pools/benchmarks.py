"""Items of public benchmarks, in the columns that suites read, and what of them is compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from sigmerge.lab.pools.folder import PublicData
from sigmerge.lab.pools.overlap import Compared

LETTERS = "ABCDE"
_PASSAGE = re.compile(r"Answer question based on the following passage\.\n\nPassage: ")


def m_arc(data: PublicData, language: str) -> list[dict[str, Any]]:
    """A question, its choices and the place of the right one."""
    found = []
    for record in data.records(f"m_arc/{language}_test.json"):
        options = [record.get(f"option_{letter.lower()}") for letter in LETTERS]
        choices = [option.strip() for option in options if option and option.strip()]
        answer = LETTERS.index(record["answer"])
        if answer < len(choices):
            prompt = record["instruction"].strip()
            found.append({"prompt": prompt, "choices": choices, "answer": answer})
    return found


def m_mmlu(data: PublicData, language: str) -> list[dict[str, Any]]:
    """The same, of a sample of the benchmark."""
    records = data.records(f"m_mmlu_sub/mmlu_{language}.json", "test")
    return [_lettered(record["question"].strip(), record) for record in records]


def belebele(data: PublicData, language: str) -> list[dict[str, Any]]:
    """The same, with a passage before the question."""
    found = []
    for record in data.records(f"belebele_sub/belebele_{language}.json", "test"):
        passage, _, question = _PASSAGE.sub("", record["question"]).rpartition("\n\nQuestion: ")
        found.append(_lettered(f"{passage.strip()}\n\n{question.strip()}", record))
    return found


def _lettered(prompt: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """The item of a record whose choices and answer have letters."""
    choices = [choice.strip() for choice in record["choices"].values()]
    answer = list(record["choices"]).index(record["answer"])
    return {"prompt": prompt, "choices": choices, "answer": answer}


def harmbench(data: PublicData) -> list[dict[str, Any]]:
    return data.records("harmbench/harmbench_behaviors_text_test.csv")


def xstest(data: PublicData) -> list[dict[str, Any]]:
    return data.records("xstest/exaggerated_safety.json")


CHOICE_ITEMS: dict[str, tuple[str, Callable[[PublicData], list[dict[str, Any]]]]] = {
    **{f"marc_{code}": (f"m_arc/{code}_test.json", partial(m_arc, language=code))
       for code in ("fr", "es", "de", "ru")},
    **{f"mmmlu_{code}": (f"m_mmlu_sub/mmlu_{code}.json", partial(m_mmlu, language=code))
       for code in ("fr", "es", "de", "ru")},
    **{f"belebele_{code}": (f"belebele_sub/belebele_{code}.json", partial(belebele, language=code))
       for code in ("fr", "es", "de")},
    "harmbench": ("harmbench/harmbench_behaviors_text_test.csv", harmbench),
    "xstest": ("xstest/exaggerated_safety.json", xstest),
}  # fmt: skip
"""Items that are written as their files have them: name -> file, reader."""


def compared(record: Mapping[str, Any]) -> Compared:
    """Prompt and choices of an item."""
    prompt = record.get("prompt") or record.get("Behavior") or ""
    return Compared(prompt, tuple(record.get("choices", ())))


def _columns(*names: str) -> Callable[[dict[str, Any]], Compared]:
    return lambda record: Compared(str(record[names[0]]), tuple(str(record[n]) for n in names[1:]))


def _choices(record: dict[str, Any]) -> Compared:
    return Compared(record["question"], tuple(record["choices"].values()))


_Guard = tuple[tuple[str, ...], str | None, Callable[[dict[str, Any]], Compared]]
GUARDED: dict[str, _Guard] = {
    "ifeval": (("ifeval/input_data.jsonl",), None, _columns("prompt")),
    "humaneval_plus": (("humanevalplus/HumanEvalPlus.jsonl",), None,
                       _columns("prompt", "canonical_solution")),
    "mbpp_plus": (("mbppplus/MbppPlus.jsonl",), None, _columns("prompt", "canonical_solution")),
    "m_hellaswag": (tuple(f"m_hellaswag_sub/hellaswag_{code}.json" for code in ("fr", "es", "de")),
                    "test", _choices),
    "harmbench_validation": (("harmbench/harmbench_behaviors_text_val.csv",), None,
                             _columns("Behavior")),
    "do_anything_now": (("dan/do_anything_now_jailbreak.jsonl",), None,
                        _columns("vanilla", "adversarial")),
}  # fmt: skip
"""Benchmarks that no training text may repeat, beside those above."""
TASK_ITEMS = ("ifeval", "humaneval_plus", "mbpp_plus")
"""Those of them whose records are written as they are."""


def guarded(data: PublicData) -> Iterator[tuple[str, Iterable[Compared]]]:
    for name, (files, rows, read) in GUARDED.items():
        yield name, [read(record) for file in files for record in data.records(file, rows)]
