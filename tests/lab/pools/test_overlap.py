"""Repeated texts, found by rows of words, against a comparison of every text with every item."""

from __future__ import annotations

import random

import pytest

from sigmerge.lab.pools.overlap import Compared, Overlaps

ITEM = "Joan found 70 seashells on the beach and she gave Sam some of her seashells yesterday."
ANSWER = "She gave him 43 seashells, since 70 - 27 = 43, and she kept the other 27 for herself."


def plain(text: str) -> list[str]:
    kept = [letter if letter.isalnum() or letter == "_" else " " for letter in text.casefold()]
    return "".join(kept).split()


def rows(texts: list[list[str]], length: int) -> set[str]:
    found = set()
    for text in texts:
        for start in range(len(text)):
            if len(text[start : start + length]) == length:
                found.add(" ".join(text[start : start + length]))
    return found


def half(one: set[str], other: set[str]) -> bool:
    return bool(one | other) and 2 * len(one & other) >= len(one | other) and bool(one & other)


def slow(text: Compared, items: dict[str, list[Compared]], training: list[Compared]) -> dict:
    """The definition, word by word; every training text is searched for every phrase."""
    found = {}
    prompt, answers = plain(text.prompt), [plain(answer) for answer in text.answers]
    for name, texts in items.items():
        for item in texts:
            asked, said = plain(item.prompt), [plain(answer) for answer in item.answers]
            kind = ""
            for phrase in rows([asked], 8) & rows([prompt, *answers], 8):
                having = sum(
                    phrase in rows([plain(t.prompt), *map(plain, t.answers)], 8) for t in training
                )
                kind = kind if having > 10 else "near"
            if half(rows([asked], 5), rows([prompt], 5)):
                kind = "near"
            if half(rows([asked, *said], 5), rows([prompt, *answers], 5)):
                kind = "near"
            if asked and asked == prompt:
                kind = "exact"
            if kind and found.get(name) != "exact":
                found[name] = kind
    return found


@pytest.mark.parametrize(
    ("prompt", "response", "kind"),
    [
        (ITEM, "43", "exact"),
        (ITEM.upper().replace(" ", "\n "), "43", "exact"),
        (ITEM.replace(".", " !").replace("seashells", "seashells,"), "43", "exact"),
        (ITEM.replace("Joan", "Mary").replace("yesterday", "today"), "43", "near"),
        ("Read: on the beach and she gave Sam some pears.", "Fine.", "near"),
        ("What is this about?", f"It is about this: {ITEM}", "near"),
        ("Solve it.", ANSWER, "near"),  # more than half of the item
        ("Solve it.", ANSWER[:60], ""),
        ("Joan found 70 seashells", ANSWER.replace("him", "Sam"), ""),
        ("Sam found 12 pears near the river.", "He ate them.", ""),
        ("", "", ""),
    ],
)
def test_exact_case_near_and_clean(prompt: str, response: str, kind: str) -> None:
    items = {"shells": [Compared(ITEM, (ANSWER,))], "other": [Compared("", ("",))]}
    text = Compared(prompt, (response,))
    assert Overlaps(items).of(text) == ({"shells": kind} if kind else {})
    assert slow(text, items, [text]) == ({"shells": kind} if kind else {})


def test_the_same_answer_to_a_short_prompt_is_near() -> None:
    items = {"shells": [Compared("How many?", (ANSWER,))]}
    assert Overlaps(items).of(Compared("So how many, Sam?", (ANSWER,))) == {"shells": "near"}


def test_a_common_phrase_proves_nothing() -> None:
    phrase = "write a python function that takes a list"
    items = {"code": [Compared(f"{phrase} of numbers and sorts them, please, by their last digit")]}
    training = [Compared(f"{phrase} number {place}") for place in range(11)]
    overlaps = Overlaps(items)
    assert overlaps.of(training[0]) == {"code": "near"}
    overlaps.pass_over_common_phrases(training[:10])
    assert overlaps.of(training[0]) == {"code": "near"}
    overlaps.pass_over_common_phrases(training)
    assert overlaps.of(training[0]) == {} == slow(training[0], items, training)


@pytest.mark.parametrize("seed", range(6))
def test_random_texts_against_the_slow_comparison(seed: int) -> None:
    """Three letters for words, so that rows meet often; commas and capitals between them."""
    draw = random.Random(seed)

    def text(longest: int) -> str:
        words = draw.choices("abc" if seed % 2 else "abcdef", k=draw.randint(0, longest))
        shown = [draw.choice([word, word.upper()]) for word in words]
        return "".join(word + draw.choice([" ", ", "]) for word in shown)

    items = {name: [Compared(text(14), (text(6),)) for _ in range(8)] for name in ("one", "two")}
    known = [item for found in items.values() for item in found]
    training = [Compared(text(14), (text(8),)) for _ in range(40)]
    training += [Compared(draw.choice(known).prompt + text(3), (text(6),)) for _ in range(20)]
    overlaps = Overlaps(items)
    overlaps.pass_over_common_phrases(training)
    expected = [slow(each, items, training) for each in training]
    assert [overlaps.of(each) for each in training] == expected
    assert any(expected) and not all(expected)
