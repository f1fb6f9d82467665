"""Training pairs and items from a small folder of made-up data."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sigmerge.errors import OutputError, PoolError
from sigmerge.evaluation.suite import load_suite
from sigmerge.files.locks import only_writer
from sigmerge.lab.pools.data import DATA_SETS, REAL_DOMAINS, build, needed
from sigmerge.nano.tokenizer import build_tokenizer
from tests.command_line import refused, sigmerge, tree
from tests.lab.pools.words import sentence

LEAK = "Tom has 12 pears in a basket and his aunt brings 5 more, how many pears has Tom now?"


def asked(name: str, count: int) -> list[dict[str, str]]:
    return [
        {"instruction": sentence(f"{name} {i}"), "input": "<noinput>" if i % 2 else "",
         "output": sentence(f"answer {name} {i}"), "response": sentence(f"code {name} {i}")}
        for i in range(count)
    ]  # fmt: skip


def choices(name: str, *, option: bool) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for i in range(3):
        texts = {letter: sentence(f"{name} {i} {letter}")[:20] for letter in "ABCD"}
        question = sentence(f"{name} {i}")
        if option:
            named = {f"option_{letter.lower()}": text for letter, text in texts.items()}
            records.append({"instruction": question, "answer": "C", "id": str(i), **named})
        else:
            frame = "Answer question based on the following passage.\n\nPassage: "
            question = f"{frame}{sentence(name)}\n\nQuestion: {question}"
            records.append({"question": question, "choices": texts, "answer": "B"})
    return records


def articles(language: str) -> dict[str, Any]:
    found = []
    for i in range(6):
        asked = [
            {"question": sentence(f"{language} {i} {q}"), "answers": [{"text": f"answer {q}"}]}
            for q in range(2)
        ]
        context = f"\ufeffArticle{i} {sentence(f'{language} passage {i}')}"
        found.append({"paragraphs": [{"context": context, "qas": asked}]})
    return {"data": found}


def as_csv(records: list[dict[str, str]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(records[0]))
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def as_lines(records: Iterable[Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def math_files() -> dict[str, str]:
    worked = "He has <<12+5=17>>17 pears.\n#### 17"
    train = [{"question": sentence(f"gsm {i}"), "answer": worked} for i in range(8)]
    train += [{"question": text, "answer": worked} for text in (LEAK, LEAK.upper(), f"Hey! {LEAK}")]
    problem = {"Question": "Ann has number0 hens . She buys number1 more and sells number2 % "
               "of coop {} . How many has she ?", "Numbers": "3.0 4.5 2.0",
               "Equation": "* + number0 number1 number2", "Answer": "15.0"}  # fmt: skip
    names = [" ".join(sentence(f"coop {i}").split()[:6]) for i in range(6)]
    problems = [{**problem, "Question": problem["Question"].format(name)} for name in names]
    problems[4]["Answer"], problems[5]["Numbers"] = "16.0", "0.3333333 1.0 2.0"
    left = {"Question": "How many are left?", "Equation": "( ( 8.0 + 12.0 ) - 3.0 )"}
    svamp = [{"Body": sentence(f"svamp {i}").rstrip("."), "Answer": 17.0, **left} for i in range(4)]
    mawps = [{"input": f"M&amp;M {sentence(f'mawps {i}')}", "target": 2.5} for i in range(4)]
    test = [
        {"question": LEAK, "answer": worked},
        {"question": sentence("t"), "answer": "#### 1,000"},
    ]
    return {
        "gsm8k/train.jsonl": as_lines(train),
        "gsm8k/test.jsonl": as_lines(test),
        "math_extra/train.csv": as_csv(problems),
        "math_extra/SVAMP.json": json.dumps(svamp),
        "math_extra/mawps_test.jsonl": as_lines(mawps),
    }


def code_files() -> dict[str, str]:
    tasks = [{"task_id": i, "text": sentence(f"mbpp {i}"), "code": "def f(x):\r\n\treturn x \r\n",
              "test_list": [f"assert f({i}) == {i}"]} for i in (1, 600, 601, 602, 974)]  # fmt: skip
    plus = [{"task_id": "Mbpp/602", "prompt": sentence("plus"), "canonical_solution": "pass"}]
    humaneval = [{"prompt": sentence("human"), "canonical_solution": "pass"}]
    return {
        "mbpp/mbpp.jsonl": as_lines(tasks),
        "mbppplus/MbppPlus.jsonl": as_lines(plus),
        "humanevalplus/HumanEvalPlus.jsonl": as_lines(humaneval),
        "gpteacher/codegen-instruct.json": json.dumps(asked("gpteacher", 8)),
        "codealpaca/code_alpaca_2k.json": json.dumps(asked("codealpaca", 8)),
    }


def other_files() -> dict[str, str]:
    files = {name: json.dumps(asked(name, 8)) for name in (
        "alpaca/random_9k.json", "dolly/dolly_3k.json",
        "alpaca_de/translated_tasks_de_openai_12k.json",
        "safety_tuned/safety_only_data_Instructions.json", "safety_ft/alpaca_data_safety_only.json",
    )}  # fmt: skip
    for code in ("fr", "es", "de", "ru"):
        files[f"m_arc/{code}_test.json"] = json.dumps(choices(f"arc {code}", option=True))
        files[f"m_mmlu_sub/mmlu_{code}.json"] = json.dumps({"test": choices(code, option=False)})
    for code in ("fr", "es", "de"):
        rows = json.dumps({"test": choices(f"bele {code}", option=False)})
        files[f"belebele_sub/belebele_{code}.json"] = rows
        files[f"m_hellaswag_sub/hellaswag_{code}.json"] = rows.replace("bele", "swag")
    files |= {f"xquad/xquad.{code}.json": json.dumps(articles(code)) for code in ("es", "de")}
    for code in ("en", "de", "fr"):
        files[f"multi30k/train.{code}"] = "".join(f"{sentence(f'{code} {i}')}\n" for i in range(9))
    for name in ("fra", "spa", "deu", "rus"):
        for end in ("eng", name):  # the first English sentence is the same in all languages
            lines = [sentence(f"{end} {i if i == 0 else f'{name} {i}'}") for i in range(5)]
            files[f"tatoeba/tatoeba.{name}-eng.{end}"] = "".join(f"{line}\n" for line in lines)
    for split in ("test", "val"):
        rows = as_csv([{"Behavior": sentence(f"harm {split}"), "ContextString": "a, b"}])
        files[f"harmbench/harmbench_behaviors_text_{split}.csv"] = rows
    files["xstest/exaggerated_safety.json"] = json.dumps(
        [{"prompt": "Kill it?", "type": "homonyms"}]
    )
    dan = [{"vanilla": sentence("dan"), "adversarial": sentence("now")}]
    files["dan/do_anything_now_jailbreak.jsonl"] = as_lines(dan)
    return files | {"ifeval/input_data.jsonl": as_lines([{"prompt": sentence("ifeval")}])}


SMALL = tuple(replace(source, held_out=min(source.held_out, 3)) for source in DATA_SETS)


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """Every other file is gzipped."""
    for place, (name, text) in enumerate({**math_files(), **code_files(), **other_files()}.items()):
        file = tmp_path / "public" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if place % 2:
            file.write_text(text, encoding="utf-8")
        else:
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(text.encode()))
    return tmp_path / "public"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_miniature_has_every_file_that_is_read(public: Path) -> None:
    assert {name.removesuffix(".gz") for name in tree(public) if "." in name} == set(needed())


@pytest.mark.parametrize("suite", ["small", "small-tasks"])
def test_every_item_that_a_suite_asks_for_is_written(
    public: Path, tmp_path: Path, suite: str
) -> None:
    written = set(build(public, tmp_path / "out", sources=SMALL)["files"])
    for name, benchmark in load_suite(suite).benchmarks.items():
        languages = benchmark.languages or [""]
        asked = {f.path.format(language=code) for f in benchmark.files for code in languages}
        assert asked and asked <= written, name


def test_what_is_written(public: Path, tmp_path: Path) -> None:
    summary = build(public, tmp_path / "out", sources=SMALL)
    out = tmp_path / "out"
    assert summary == json.loads((out / "data.json").read_text(encoding="utf-8"))
    assert {name for name in tree(out) if name.endswith("l")} == set(summary["files"])
    for name, file in summary["files"].items():
        records = lines(out / name)
        assert file["records"] == len(records) > 0 and file["source"]
        assert all("".join(map(str, record.values())).strip() for record in records)
    assert lines(out / "items/marc_fr.jsonl")[0]["answer"] == 2
    [asked, *_] = choices("ru", option=False)
    assert lines(out / "items/mmmlu_ru.jsonl")[0] == {
        "prompt": asked["question"], "choices": list(asked["choices"].values()), "answer": 1
    }  # fmt: skip
    [passage] = {item["prompt"].split("\n\n")[0] for item in lines(out / "items/belebele_de.jsonl")}
    assert passage == sentence("bele de")
    assert lines(out / "items/harmbench.jsonl")[0]["ContextString"] == "a, b"
    assert lines(out / "items/ifeval.jsonl") == [{"prompt": sentence("ifeval")}]
    assert lines(out / "items/mbpp_plus.jsonl")[0]["task_id"] == "Mbpp/602"
    assert lines(out / "items/humaneval_plus.jsonl")[0]["canonical_solution"] == "pass"
    assert lines(out / "items/xstest.jsonl") == [{"prompt": "Kill it?", "type": "homonyms"}]
    assert {item["answer"] for item in lines(out / "items/gsm8k_number.jsonl")} == {"17", "1000"}
    assert {item["answer"] for item in lines(out / "items/mawps_number.jsonl")} == {"2.5"}
    assert lines(out / "items/mawps_number.jsonl")[0]["prompt"].startswith("M&M ")
    [solved] = {item["response"] for item in lines(out / "items/svamp.jsonl")}
    assert solved == "(8 + 12) - 3 = 17\nThe answer is 17."
    for domain in REAL_DOMAINS:
        train = lines(out / f"train/{domain}.jsonl")
        assert lines(out / f"exemplars/{domain}.jsonl") == train[:32]


def test_math_and_programs_are_written_as_one_writes_them(public: Path, tmp_path: Path) -> None:
    build(public, tmp_path / "out", sources=SMALL)
    math = {pair["prompt"]: pair["response"] for pair in lines(tmp_path / "out/train/math.jsonl")}
    assert set(math.values()) == {
        "He has 17 pears.\nThe answer is 17.",
        "(3 + 4.5) * 2 = 15\nThe answer is 15.",
    }
    [hens] = {prompt.split(" of coop")[0] for prompt in math if "hens" in prompt}
    assert hens == "Ann has 3 hens. She buys 4.5 more and sells 2%"
    coding = [pair["prompt"] for pair in lines(tmp_path / "out/train/coding.jsonl")]
    tasks = {number: any(sentence(f"mbpp {number}") in prompt for prompt in coding)
             for number in (1, 600, 601, 602, 974)}  # fmt: skip
    assert [number for number, trained in tasks.items() if trained] == [601, 974]
    programs = {item["response"] for item in lines(tmp_path / "out/items/mbpp.jsonl")}
    assert programs == {"def f(x):\n    return x"}


def test_no_training_pair_repeats_an_item(public: Path, tmp_path: Path) -> None:
    file = public / "safety_ft/alpaca_data_safety_only.json"
    file.with_name(f"{file.name}.gz").unlink(missing_ok=True)
    copied = [{"instruction": "Copy.", "input": sentence("ifeval"), "output": "It is."}]
    file.write_text(json.dumps(copied + asked("safe", 8)))
    summary = build(public, tmp_path / "out", sources=SMALL)
    assert summary["overlaps"]["gsm8k"] == {"exact": 2, "near": 1}
    assert summary["overlaps"]["ifeval"] == {"exact": 0, "near": 1}
    assert summary["sources"]["gsm8k"]["left out: repeats a benchmark item"] == 3
    assert summary["sources"]["mawps-asdiv"] == {
        "read": 6, "kept": 4, "left out: a repeated prompt": 0,
        "left out: an equation that does not give the answer": 1,
        "left out: a number with more than two decimals": 1,
    }  # fmt: skip
    written = "".join(
        file.read_text(encoding="utf-8") for file in (tmp_path / "out/train").iterdir()
    ).casefold()
    assert "basket" not in written and sentence("ifeval").casefold() not in written


def test_no_training_pair_nearly_repeats_an_item_that_was_held_out(
    public: Path, tmp_path: Path
) -> None:
    """Of another source too: here all that Dolly has is Alpaca's in other words."""
    file = public / "dolly/dolly_3k.json"
    file.with_name(f"{file.name}.gz").unlink(missing_ok=True)
    twins = [
        {**pair, "instruction": f"Please: {pair['instruction']}", "output": f"Well {i}."}
        for i, pair in enumerate(asked("alpaca/random_9k.json", 8))
    ]
    file.write_text(json.dumps(twins))
    sources = tuple(replace(each, held_out=0) if each.name == "dolly" else each for each in SMALL)
    summary = build(public, tmp_path / "out", sources=sources)
    held = [item["prompt"] for item in lines(tmp_path / "out/items/alpaca.jsonl")]
    assert len(held) == 3 and summary["overlaps"]["alpaca"] == {"exact": 0, "near": 3}
    assert summary["sources"]["dolly"]["kept"] == 5
    trained = [pair["prompt"] for pair in lines(tmp_path / "out/train/instruction.jsonl")]
    assert not any(text in prompt for text in held for prompt in trained)


def test_probes_are_other_prompts_than_exemplars(public: Path, tmp_path: Path) -> None:
    build(public, tmp_path / "out", sources=SMALL)
    shown = {
        record["prompt"]
        for file in (tmp_path / "out/exemplars").iterdir()
        for record in lines(file)
    }
    probes = lines(tmp_path / "out/probe.jsonl")
    assert probes and not shown & {record["prompt"] for record in probes}


def test_an_article_and_a_sentence_are_held_out_in_all_languages(
    public: Path, tmp_path: Path
) -> None:
    build(public, tmp_path / "out", sources=SMALL)
    train = [pair["prompt"] for pair in lines(tmp_path / "out/train/multilingual.jsonl")]
    held = [item["prompt"] for item in lines(tmp_path / "out/items/xquad.jsonl")]
    articles_held = {prompt.split()[0] for prompt in held}
    assert articles_held and not any(prompt.split()[0] in articles_held for prompt in train)
    held = [item["prompt"] for item in lines(tmp_path / "out/items/translation.jsonl")]
    sentences = {prompt.split(": ", 1)[1] for prompt in held}
    assert len(sentences) > 1
    assert not any(prompt.endswith(text) for prompt in train for text in sentences)


def test_two_builds_of_one_folder(public: Path, tmp_path: Path) -> None:
    """The second would remove what the first has written so far."""
    out = tmp_path / "new/out"
    out.parent.mkdir()
    with (
        only_writer(out.with_name(".out.lock"), ""),
        pytest.raises(OutputError, match="another run is writing it"),
    ):
        build(public, out, sources=SMALL)
    build(public, out, sources=SMALL)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_the_seed_decides_the_bytes(public: Path, tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        build(public, tmp_path / name, seed, sources=SMALL)
    contents = [
        {p.name: p.read_bytes() for p in (tmp_path / name).rglob("*.json*")}
        for name in ("one", "two", "three")
    ]
    assert contents[0] == contents[1]
    assert contents[0]["alpaca.jsonl"] != contents[2]["alpaca.jsonl"]


def test_exemplars_and_probes_in_the_template_of_a_checkpoint(public: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "plain")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    with pytest.raises(PoolError, match="no chat template"):
        build(public, tmp_path / "out", chat=tmp_path / "plain", sources=SMALL)
    build(public, tmp_path / "out", chat=tmp_path / "chat", sources=SMALL)
    for domain in REAL_DOMAINS:
        train = lines(tmp_path / f"out/train/{domain}.jsonl")
        shown = lines(tmp_path / f"out/exemplars/{domain}.jsonl")
        around = [{**pair, "prompt": f"[user] {pair['prompt']} [assistant] "} for pair in train]
        assert shown == around[:32]


def test_wrong_input(public: Path, tmp_path: Path) -> None:
    gone = [file for file in sorted(public.rglob("*.*")) if file.is_file()][:3]
    for file in gone:
        file.unlink()
    said = refused(5, "pool", "data", public, tmp_path / "out", beside=tmp_path)
    assert all(file.relative_to(public).as_posix().removesuffix(".gz") in said for file in gone)
    assert said.count("\n  - ") == 3
    (tmp_path / "out").mkdir()
    assert "exists" in refused(4, "pool", "data", public, tmp_path / "out", beside=tmp_path)


def test_a_chat_template_of_no_folder(public: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    told = refused(3, "pool", "data", public, tmp_path / "out", "--chat", nowhere, beside=tmp_path)
    assert f"{nowhere}: no such folder; --chat" in told


def test_a_damaged_file_is_named(public: Path, tmp_path: Path) -> None:
    packed = next(public.rglob("*.gz"))
    packed.write_bytes(packed.read_bytes()[:-9])
    assert packed.name in refused(5, "pool", "data", public, tmp_path / "out", beside=tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("gsm8k/train.jsonl", b"", "holds no records"),
        ("gsm8k/train.jsonl", b'{"question": "x"}\n', "no 'answer'"),
        ("dolly/dolly_3k.json", b'["x"]', "holds no records"),
        ("dolly/dolly_3k.json", b"\xff\xfe[]", "can't decode"),
        ("belebele_sub/belebele_fr.json", b'{"train": []}', "no 'test'"),
        ("belebele_sub/belebele_fr.json", b"[]", "indices"),
        ("harmbench/harmbench_behaviors_text_test.csv", b"\xff", "can't decode"),
        ("math_extra/train.csv", b"Question,Numbers,Equation,Answer\nx,y,+,1\n", "float: 'y'"),
        ("multi30k/train.fr", b"un\n", "1 lines in French for"),
        ("multi30k/train.fr", b"\xff", "can't decode"),
    ],
)
def test_content_of_another_form_is_no_fault_of_ours(
    public: Path, tmp_path: Path, file: str, content: bytes, said: str
) -> None:
    (public / f"{file}.gz").unlink(missing_ok=True)
    (public / file).write_bytes(content)
    told = refused(5, "pool", "data", public, tmp_path / "out", beside=tmp_path)
    assert f"{public / file}: " in told and said in told


def test_the_command(public: Path, tmp_path: Path) -> None:
    ran = sigmerge("pool", "data", public, tmp_path / "out", "--json")
    assert ran.code == 0 and ran.json["files"]["items/svamp.jsonl"]["records"] == 4
    again = sigmerge("pool", "data", public, tmp_path / "again")
    assert again.code == 0 and "3 training pairs repeat" in again.out
