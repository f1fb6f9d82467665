"""Matchers of own items, on answers as models write them."""

from __future__ import annotations

import pytest

from sigmerge.evaluation.match import matches


@pytest.mark.parametrize(
    ("matcher", "output", "answer", "right"),
    [
        ("exact", " Paris\n", "Paris", True),
        ("exact", "paris", "Paris", False),
        ("contains", "It is Paris.", "Paris", True),
        ("number", "So 3 + 4 = 7. The answer is 1,007.00 dollars", "1007", True),
        ("number", "The answer is -3", 3, False),
        ("number", "no idea", "3", False),
        ("number", "it is .5", "0.5", True),
        ("regex", "42 apples", r"^\d+ apples$", True),
        ("regex", "many apples", r"^\d+ apples$", False),
        ("choice", "(B) because", "B", True),
        ("choice", "Answer: c", "C", True),
        ("choice", "Because", "B", False),
        ("choice", "", "B", False),
    ],
)
def test_matchers(matcher: str, output: str, answer: object, right: bool):
    assert matches(matcher, output, answer) is right


def test_case_can_be_ignored():
    assert matches("exact", "paris", "Paris", ignore_case=True)
    assert matches("regex", "YES", "yes", ignore_case=True)
