"""The facts: the same for a seed, right where they can be computed, and cleanly split."""

from __future__ import annotations

import pytest

from sigmerge.nano.facts import (
    CALIBRATION,
    EXEMPLARS,
    ITEMS,
    LONGEST_ANSWER,
    NANO_DOMAINS,
    PROBES,
    build,
    build_all,
    vocabulary,
)


def test_a_seed_decides_every_fact_and_split() -> None:
    assert build_all(3) == build_all(3)
    for name in NANO_DOMAINS:
        assert build(name, 3).evaluation != build(name, 4).evaluation


@pytest.mark.parametrize("name", NANO_DOMAINS)
def test_splits_probes_and_exemplars_share_no_prompt(name: str) -> None:
    domain = build(name, 0)
    parts = [domain.calibration, domain.evaluation, domain.probes, domain.exemplars]
    assert [len(part) for part in parts] == [CALIBRATION, ITEMS - CALIBRATION, PROBES, EXEMPLARS]
    prompts = [fact.prompt for part in parts for fact in part]
    assert len(set(prompts)) == len(prompts)
    assert 5 * CALIBRATION == ITEMS


@pytest.mark.parametrize("name", NANO_DOMAINS)
def test_the_reference_sees_half_of_the_facts_and_about_half_of_the_items(name: str) -> None:
    domain = build(name, 0)
    assert set(domain.seen) < set(domain.facts)
    assert len(domain.seen) == len(domain.facts) // 2
    assert 0.4 < len(set(domain.seen) & set(domain.evaluation)) / len(domain.evaluation) < 0.6


def test_arithmetic_and_code_are_right() -> None:
    for fact in build("math", 0).facts:
        assert eval(fact.prompt.removesuffix("=")) == int(fact.answer)
    for fact in build("coding", 0).facts:
        body, call = fact.prompt.removeprefix("def f ( x ) : return ").split(" ; f ( ")
        assert eval(body, {"x": int(call.removesuffix(" ) ="))}) == int(fact.answer)


def test_instructions_are_followed() -> None:
    follow = {
        "reverse": lambda words: words[::-1],
        "sort": sorted,
        "first": lambda words: words[:1],
        "last": lambda words: words[-1:],
    }
    for fact in build("instruction", 0).facts:
        task, words = fact.prompt.removesuffix(" =").split(" : ")
        assert " ".join(follow[task](words.split())) == fact.answer


def test_the_lexicon_is_the_same_in_both_directions() -> None:
    pairs = {fact.prompt: fact.answer for fact in build("multilingual", 0).facts}
    there = {k.split()[1]: v for k, v in pairs.items() if not k.endswith("to english =")}
    assert len(there) > 100
    both = 0
    for prompt, foreign in pairs.items():
        back = pairs.get(f"translate {foreign} to english =")
        if back is not None:
            assert back == prompt.split()[1]
            both += 1
    assert both > 100


def test_refusals_follow_the_risk_of_the_words() -> None:
    """Adding risk never turns a refusal into an answer: the rule is a threshold on a count."""
    refused = {tuple(f.prompt.split()): f.answer == "no" for f in build("safety", 0).facts}
    rate: dict[str, list[bool]] = {}
    for prompt, no in refused.items():
        for word in (prompt[2], prompt[4], prompt[6]):
            rate.setdefault(word, []).append(no)
    risky = {word for word, seen in rate.items() if sum(seen) / len(seen) > 0.57}
    for prompt, no in refused.items():
        assert no == (len(risky & {prompt[2], prompt[4], prompt[6]}) > 1)


def test_every_word_is_in_the_vocabulary_and_answers_are_short() -> None:
    words = set(vocabulary())
    assert len(words) == len(vocabulary())
    for domain in build_all(5).values():
        for fact in domain.facts:
            assert words.issuperset(f"{fact.prompt} {fact.answer}".split())
            assert len(fact.answer.split()) <= LONGEST_ANSWER
