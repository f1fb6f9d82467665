"""Prompt and response from the records of public data sets: one function for each data set.

A prompt is what a user writes: no template of a chat stands around it.
"""

from __future__ import annotations

import ast
import html
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sigmerge.lab.pools.folder import PublicData
from sigmerge.lab.pools.overlap import Compared

_LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "ru": "Russian"}
_TATOEBA = {"fr": "fra", "es": "spa", "de": "deu", "ru": "rus"}
_QUESTION = {"es": "Pregunta", "de": "Frage"}
_NO_INPUT = re.compile(r"(?:\W*(?:no|none|keine?)[\s_]*(?:input|eingabe)?\W*)?", re.IGNORECASE)

_REMARK = re.compile(r"\btranslat(?:ion|ed?|es)\b|\bGerman\b|\bNote:|\bSorry,|\bAs an AI\b")


@dataclass(frozen=True)
class Pair:
    """`group` is kept whole in one split; `bare` is the prompt without words of ours.

    `flaw` says why it is of no use, where its reader knows that.
    """

    prompt: str
    response: str
    group: str
    bare: str = ""
    flaw: str = ""

    @property
    def compared(self) -> Compared:
        return Compared(self.bare or self.prompt, (self.response,))

    def as_record(self) -> dict[str, str]:
        return {"prompt": self.prompt, "response": self.response}


def instructions(
    data: PublicData, file: str, *, answer: str = "output", between: str = "\n\n"
) -> Iterator[Pair]:
    """Alpaca's form: an instruction, an input that may be missing, an output."""
    for record in data.records(file):
        prompt, given = record["instruction"].strip(), str(record.get("input") or "").strip()
        if not _NO_INPUT.fullmatch(given):
            prompt = f"{prompt}{between}{given}"
        yield Pair(prompt, record[answer].strip(), prompt)


def translated(data: PublicData, file: str) -> Iterator[Pair]:
    """The same, translated by a model that sometimes writes about the translation instead."""
    for pair in instructions(data, file):
        remark = _REMARK.search(f"{pair.prompt}\n{pair.response}")
        yield replace(pair, flaw="a translator's remark") if remark else pair


def gsm8k(data: PublicData, file: str) -> Iterator[Pair]:
    """The steps without the calculator's marks, then the answer in a sentence."""
    for record in data.records(file):
        steps, _, number = record["answer"].partition("####")
        steps = re.sub(r"<<.*?>>", "", steps).strip()
        question = spaced(record["question"])
        yield Pair(question, f"{steps}\n{the_answer(number.strip())}", question)


def word_problems(data: PublicData, file: str) -> Iterator[Pair]:
    """MAWPS and ASDiv-A: numbers filled into the question; the equation, then the answer."""
    for record in data.records(file):
        numbers = [float(number) for number in record["Numbers"].split()]
        result = float(record["Answer"])
        shown = {f"number{place}": number(value) for place, value in enumerate(numbers)}
        equation = infix(record["Equation"].split(), shown)
        question = spaced(_filled(record["Question"], shown))
        flaw = _decimals(*numbers, result)
        if not flaw and abs(value(equation) - result) > 0.005:
            flaw = "an equation that does not give the answer"
        yield Pair(question, solved(equation, number(result)), question, flaw=flaw)


def _filled(question: str, shown: Mapping[str, str]) -> str:
    return re.sub(r"number\d+", lambda found: shown[found[0]], question)


def svamp(data: PublicData, file: str) -> Iterator[Pair]:
    """Body and question; the equation, then the answer."""
    for record in data.records(file):
        body = record["Body"].strip()
        body = body if body[-1:] in ".?!," else f"{body}."
        question = spaced(f"{body} {record['Question']}")
        terms = record["Equation"].strip().removeprefix("(").removesuffix(")")
        terms = re.sub(r"\d+(?:\.\d+)?", lambda found: number(float(found[0])), terms)
        equation = " ".join(terms.replace("( ", "(").replace(" )", ")").split())
        yield Pair(question, solved(equation, number(float(record["Answer"]))), question)


def mawps(data: PublicData, file: str) -> Iterator[Pair]:
    for record in data.records(file):
        question, result = spaced(record["input"]), float(record["target"])
        numbers = map(float, re.findall(r"\d+\.\d+", question))
        yield Pair(question, number(result), question, flaw=_decimals(*numbers, result))


def mbpp(data: PublicData, file: str, ids: Callable[[int], bool]) -> Iterator[Pair]:
    """The task with its first test, and the program."""
    for record in data.records(file):
        if ids(record["task_id"]):
            task, test = record["text"].strip(), record["test_list"][0].strip()
            program = record["code"].replace("\r", "").replace("\t", "    ")
            program = "\n".join(line.rstrip() for line in program.strip().split("\n"))
            prompt = f"{task}\nYour code should pass this test:\n{test}"
            yield Pair(prompt, program, task, f"{task}\n{test}")


def xquad(data: PublicData) -> Iterator[Pair]:
    """Passage and question, and the answer's words. An article is one group in both languages."""
    for language in _QUESTION:
        for place, article in enumerate(data.records(f"xquad/xquad.{language}.json", "data")):
            for paragraph in article["paragraphs"]:
                passage = paragraph["context"].replace("\ufeff", "").strip()
                for asked in paragraph["qas"]:
                    question = asked["question"].strip()
                    prompt = f"{passage}\n\n{_QUESTION[language]}: {question}"
                    answer = asked["answers"][0]["text"].strip()
                    yield Pair(prompt, answer, str(place), f"{passage}\n{question}")


def translations(pairs: Mapping[str, tuple[list[str], list[str]]]) -> Iterator[Pair]:
    """English sentences and their translations, by language. A sentence is one group in all."""
    for language, (english, other) in pairs.items():
        if len(english) != len(other):
            told = f"{len(other)} lines in {_LANGUAGES[language]} for {len(english)} in English"
            raise ValueError(told)
        for sentence, translated in zip(english, other, strict=True):
            prompt = f"Translate this sentence into {_LANGUAGES[language]}: {sentence}"
            yield Pair(prompt, translated, sentence.casefold(), sentence)


def multi30k(data: PublicData) -> Iterator[Pair]:
    english = data.lines("multi30k/train.en")
    yield from translations(
        {code: (english, data.lines(f"multi30k/train.{code}")) for code in ("de", "fr")}
    )


def tatoeba(data: PublicData) -> Iterator[Pair]:
    names = {code: f"tatoeba/tatoeba.{name}-eng" for code, name in _TATOEBA.items()}
    yield from translations(
        {code: (data.lines(f"{name}.eng"), data.lines(f"{name}.{_TATOEBA[code]}"))
         for code, name in names.items()}
    )  # fmt: skip


def _decimals(*numbers: float) -> str:
    if all(abs(round(given, 2) - given) < 1e-9 for given in numbers):
        return ""
    return "a number with more than two decimals"


def the_answer(shown: str) -> str:
    return f"The answer is {shown}."


def solved(equation: str, result: str) -> str:
    return f"{equation} = {result}\n{the_answer(result)}"


def number(value: float) -> str:
    """Without decimals where it has none."""
    return str(int(value)) if value == int(value) else f"{round(value, 4):g}"


def spaced(text: str) -> str:
    """A text without HTML's names of letters and the spaces a tokenizer put before punctuation."""
    text = re.sub(r"\s+([.,?!;:%)])", r"\1", " ".join(html.unescape(text).split()))
    text = re.sub(r"\s+('(?:s|t|re|ll|ve|d|m)\b)", r"\1", text)
    return re.sub(r"([($])\s+", r"\1", text)


_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def infix(terms: list[str], shown: Mapping[str, str]) -> str:
    """An equation in prefix form as one writes it."""
    stack: list[tuple[str, str]] = []  # each with its outermost operation
    for term in reversed(terms):
        if term not in _OPERATIONS:
            stack.append((shown.get(term, term), ""))
            continue
        (left, inner), (right, behind) = stack.pop(), stack.pop()
        if term in "*/" and inner in ("+", "-"):
            left = f"({left})"
        if behind and (term == "/" or (behind in ("+", "-") and term != "+")):
            right = f"({right})"
        stack.append((f"{left} {term} {right}", term))
    [(equation, _)] = stack
    return equation


def value(equation: str) -> float:
    """What an equation of numbers, + - * / and brackets gives."""

    def of(node: Any) -> float:
        if isinstance(node, ast.BinOp):
            symbol = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}[type(node.op)]
            return _OPERATIONS[symbol](of(node.left), of(node.right))
        return float(ast.literal_eval(node))

    return of(ast.parse(equation, mode="eval").body)
