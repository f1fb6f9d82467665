"""Training pairs and held-out items of five domains, from a folder of public data.

    sigmerge pool data DATA OUT

OUT/train/DOMAIN.jsonl      {"prompt", "response"}
OUT/items/NAME.jsonl        held-out {"prompt", "response"}; NAME_number: {"prompt", "answer"};
                            choices: {"prompt", "choices", "answer"}; harmbench, xstest: their own
OUT/exemplars/DOMAIN.jsonl  some of the training pairs
OUT/probe.jsonl             {"prompt", "domain"}, prompts of other training pairs
OUT/data.json               sources, numbers of records, sums; what was left out, and why

No training pair repeats an item of a benchmark (`overlap`), and a passage, a sentence or a prompt
is held out with all pairs that have it. Draws depend on the seed and the texts alone.

With the chat template of a checkpoint, prompts of exemplars and probes are what its experts read:
the capture passes and the probe add no template of their own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sigmerge.checkpoints.publishing import put_in_place, sync_tree
from sigmerge.errors import OutputError, PoolError
from sigmerge.files.locks import only_writer
from sigmerge.files.safe_open import remove
from sigmerge.lab.pools import benchmarks, pairs
from sigmerge.lab.pools.folder import PublicData
from sigmerge.lab.pools.overlap import Compared, Overlaps
from sigmerge.lab.pools.pairs import Pair
from sigmerge.probing.exemplars import tokenizer_of

REAL_DOMAINS = ("math", "instruction", "coding", "multilingual", "safety")
PAIRS_SHOWN, PROMPTS_SHOWN = 32, 20
"""Exemplars and probe prompts of a domain."""
LONGEST_PROMPT, LONGEST_RESPONSE = 300, 200
LONGEST_TEXT = 1300
"""Characters of a prompt: of few words, it may still be long."""
MBPP_TRAINING = range(601, 975)
_NO_OUTPUT = re.compile(r"<?no ?output>?\.?", re.IGNORECASE)
_MARKUP = re.compile(r"</?(?:a|b|i|p|br|td|tr|ul|li|h\d|div|img|span|body|html|table)\b[^>]*>"
                     r"|&(?:nbsp|amp|lt|gt|quot|#\d+);")  # fmt: skip
_MBPP = "mbpp/mbpp.jsonl"
_MBPP_PLUS = "mbppplus/MbppPlus.jsonl"
_TATOEBA_FILES = tuple(
    f"tatoeba/tatoeba.{name}-eng.{end}" for name in ("fra", "spa", "deu", "rus")
    for end in ("eng", name)
)  # fmt: skip


def _mbpp_training(data: PublicData) -> Iterable[Pair]:
    tested = {int(record["task_id"].partition("/")[2]) for record in data.records(_MBPP_PLUS)}
    return pairs.mbpp(data, _MBPP, lambda number: number in MBPP_TRAINING and number not in tested)


@dataclass(frozen=True)
class DataSet:
    """A data set: how many of its pairs are held out into `items`, and how many train at most."""

    name: str
    domain: str
    files: tuple[str, ...]
    read: Callable[[PublicData], Iterable[Pair]]
    most: int
    held_out: int = 0
    items: str = ""


def _instructions(
    name: str, domain: str, file: str, most: int, held: int = 0, items: str = ""
) -> DataSet:
    read = partial(pairs.instructions, file=file)
    return DataSet(name, domain, (file,), read, most, held, items)


_XQUAD = tuple(f"xquad/xquad.{code}.json" for code in ("es", "de"))
_MULTI30K = tuple(f"multi30k/train.{code}" for code in ("en", "de", "fr"))
_GERMAN = "alpaca_de/translated_tasks_de_openai_12k.json"
_GPTEACHER = "gpteacher/codegen-instruct.json"
_REFUSALS = "safety_tuned/safety_only_data_Instructions.json"
DATA_SETS = (
    DataSet("gsm8k", "math", ("gsm8k/train.jsonl",),
           partial(pairs.gsm8k, file="gsm8k/train.jsonl"), 6500),
    DataSet("mawps-asdiv", "math", ("math_extra/train.csv",),
           partial(pairs.word_problems, file="math_extra/train.csv"), 2500),
    _instructions("alpaca", "instruction", "alpaca/random_9k.json", 6000, 800, "alpaca"),
    _instructions("dolly", "instruction", "dolly/dolly_3k.json", 2500, 500, "dolly"),
    DataSet("gpteacher", "coding", (_GPTEACHER,),
           partial(pairs.instructions, file=_GPTEACHER, answer="response", between="\n\nInput: "),
           4500, 600, "code"),
    _instructions("codealpaca", "coding", "codealpaca/code_alpaca_2k.json", 2000, 200, "code"),
    DataSet("mbpp", "coding", (_MBPP, _MBPP_PLUS), _mbpp_training, 374),
    DataSet("alpaca-de", "multilingual", (_GERMAN,),
           partial(pairs.translated, file=_GERMAN), 3500, 800, "german"),
    DataSet("xquad", "multilingual", _XQUAD, pairs.xquad, 1500, 600, "xquad"),
    DataSet("multi30k", "multilingual", _MULTI30K, pairs.multi30k, 2000, 400, "translation"),
    DataSet("tatoeba", "multilingual", _TATOEBA_FILES, pairs.tatoeba, 2000, 400, "translation"),
    _instructions("safety-tuned", "safety", _REFUSALS, 2500, 500, "refusals"),
    _instructions("safety-alpaca", "safety", "safety_ft/alpaca_data_safety_only.json", 1900),
)  # fmt: skip
"""Where training pairs come from."""

Tests = tuple[str, Callable[[PublicData], Iterable[Pair]], int]
TESTS: dict[str, Tests] = {
    "gsm8k": ("gsm8k/test.jsonl", partial(pairs.gsm8k, file="gsm8k/test.jsonl"), 800),
    "svamp": ("math_extra/SVAMP.json", partial(pairs.svamp, file="math_extra/SVAMP.json"), 1000),
    "mbpp": (_MBPP, partial(pairs.mbpp, file=_MBPP, ids=lambda number: number <= 600), 600),
    "mawps": ("math_extra/mawps_test.jsonl",
              partial(pairs.mawps, file="math_extra/mawps_test.jsonl"), 600),
}  # fmt: skip
"""Benchmarks whose items are pairs: file, reader, items at most."""
NUMBER_ITEMS = ("gsm8k", "svamp", "mawps")
"""Those whose items have a number for an answer."""


def needed() -> list[str]:
    """Every file of the data folder that is read."""
    files = [file for source in DATA_SETS for file in source.files]
    files += [test[0] for test in TESTS.values()]
    files += [items[0] for items in benchmarks.CHOICE_ITEMS.values()]
    return sorted({*files, *(file for names, *_ in benchmarks.GUARDED.values() for file in names)})


@dataclass
class RealData:
    """What is drawn, until it is written."""

    seed: int
    train: dict[str, list[Pair]] = field(default_factory=lambda: {d: [] for d in REAL_DOMAINS})
    items: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    origin: dict[str, list[str]] = field(default_factory=dict)
    """Files of the data folder, by the file here that is made of them."""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """What became of a source's pairs."""
    overlaps: dict[str, dict[str, int]] = field(default_factory=dict)
    """Training pairs that were dropped for a benchmark, by kind."""

    def order(self, drawn: Iterable[str], name: str) -> list[str]:
        """Texts, each once, in an order that depends on the seed and the texts alone."""
        keys = {text: f"{self.seed}|{name}|{text}".encode() for text in drawn}
        return sorted(keys, key=lambda text: hashlib.sha256(keys[text]).digest())


def build(
    folder: Path,
    out: Path,
    seed: int = 0,
    *,
    chat: Path | None = None,
    sources: Sequence[DataSet] = DATA_SETS,
) -> dict[str, Any]:
    """Write training pairs, items, exemplars and probe prompts into the new folder `out`.

    `chat` is the checkpoint whose chat template stands around the prompts of exemplars and probes.
    Returns what stands in its data.json.
    """
    if out.exists():
        raise OutputError(f"{out}: exists already; name a new folder or remove it.")
    data = PublicData(folder)
    data.check(needed())
    shown = partial(_in_chat, _chatting(chat)) if chat else str
    made = RealData(seed)
    with data.understood():
        compared = _add_tests(made, data)
        drawn = {source: _draw(made, data, source, compared) for source in sources}
    _keep(made, drawn, Overlaps(compared))
    hidden = out.with_name(f".{out.name}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(out.with_name(f".{out.name}.lock"), f"{out}: another run is writing it."):
        remove(hidden)
        summary = _write(made, data, hidden, shown)
        sync_tree(hidden)
        put_in_place(hidden, out, overwrite=False, durable=True)
    return summary


def _chatting(folder: Path) -> Any:
    """The tokenizer of a folder, with its chat template."""
    if not folder.is_dir():
        raise PoolError(f"{folder}: no such folder; --chat is a checkpoint with its tokenizer.")
    tokenizer = tokenizer_of(folder)
    if not tokenizer.chat_template:
        raise PoolError(f"{folder}: its tokenizer has no chat template; do without --chat.")
    return tokenizer


def _in_chat(tokenizer: Any, prompt: str) -> str:
    """A prompt as a chat, up to where the response begins."""
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def flaw(pair: Pair, domain: str = "") -> str:
    """Why a pair is of no use; empty if it is."""
    if not pair.prompt.strip() or not pair.response.strip():
        return "empty"
    if _NO_OUTPUT.fullmatch(pair.response):
        return "no output"
    if len(pair.prompt.split()) > LONGEST_PROMPT:
        return f"a prompt of over {LONGEST_PROMPT} words"
    if len(pair.prompt) > LONGEST_TEXT:
        return f"a prompt of over {LONGEST_TEXT} characters"
    if len(pair.response.split()) > LONGEST_RESPONSE:
        return f"a response of over {LONGEST_RESPONSE} words"
    if domain != "coding" and _MARKUP.search(f"{pair.prompt}\n{pair.response}"):
        return "markup"
    return pair.flaw


def _add_tests(made: RealData, data: PublicData) -> dict[str, list[Compared]]:
    """The benchmarks with files of their own; what training pairs are compared with."""
    compared = {}
    for name, (file, read, most) in TESTS.items():
        found = {pair.group: pair for pair in read(data) if not flaw(pair, "coding")}
        chosen = [found[group] for group in made.order(found, name)[:most]]
        # Nearly all of MAWPS stands in the training data too: only the chosen items are guarded.
        guarded = chosen if name == "mawps" else list(found.values())
        compared[name] = [pair.compared for pair in guarded]
        if name in NUMBER_ITEMS:
            made.items[f"{name}_number"] = [
                {"prompt": pair.prompt, "answer": _number(pair.response)} for pair in chosen
            ]
            made.origin[f"items/{name}_number.jsonl"] = [file]
        if name != "mawps":
            made.items[name] = [pair.as_record() for pair in chosen]
            made.origin[f"items/{name}.jsonl"] = [file]
    for name, (file, records) in benchmarks.CHOICE_ITEMS.items():
        made.items[name], made.origin[f"items/{name}.jsonl"] = records(data), [file]
        compared[name] = [benchmarks.compared(item) for item in made.items[name]]
    for name in benchmarks.TASK_ITEMS:
        [file], rows, _ = benchmarks.GUARDED[name]
        made.items[name] = data.records(file, rows)
        made.origin[f"items/{name}.jsonl"] = [file]
    return compared | {name: list(texts) for name, texts in benchmarks.guarded(data)}


def _number(response: str) -> str:
    """The number that a response ends with."""
    return response.rstrip(".").split()[-1].replace(",", "").lstrip("$")


def _draw(
    made: RealData, data: PublicData, source: DataSet, compared: dict[str, list[Compared]]
) -> list[Pair]:
    """Hold items of a source out, whole groups at a time; candidates for training."""
    counts = made.counts[source.name] = Counter()
    groups: dict[str, list[Pair]] = {}
    for pair in source.read(data):
        counts["read"] += 1
        if reason := flaw(pair, source.domain):
            counts[f"left out: {reason}"] += 1
        else:
            groups.setdefault(pair.group, []).append(pair)
    held: list[Pair] = []
    for group in made.order(groups, source.name):
        if len(held) < source.held_out:
            held += groups.pop(group)
    if source.items:
        chosen = held[: source.held_out]
        made.items.setdefault(source.items, []).extend(pair.as_record() for pair in chosen)
        made.origin.setdefault(f"items/{source.items}.jsonl", []).extend(source.files)
        compared.setdefault(source.items, []).extend(pair.compared for pair in held)
        counts["held out"] = len(held)
    left = [pair for group in groups.values() for pair in group]
    prompts = {pair.prompt: pair for pair in reversed(left)}
    counts["left out: a repeated prompt"] += len(left) - len(prompts)
    order = made.order(prompts, f"{source.name} training")
    return [prompts[prompt] for prompt in order]


def _keep(made: RealData, drawn: dict[DataSet, list[Pair]], overlaps: Overlaps) -> None:
    """Training pairs that repeat no item, as many of each source as it may have."""
    candidates = {source: found[: 2 * source.most] for source, found in drawn.items()}
    everything = [pair.compared for found in candidates.values() for pair in found]
    overlaps.pass_over_common_phrases(everything)
    for source, found in candidates.items():
        counts, kept = made.counts[source.name], list[Pair]()
        for pair in found:
            if len(kept) == source.most:
                break
            repeated = overlaps.of(pair.compared)
            for name, kind in repeated.items():
                tally = made.overlaps.setdefault(name, {"exact": 0, "near": 0})
                tally[kind] += 1
            if repeated:
                counts["left out: repeats a benchmark item"] += 1
            else:
                kept.append(pair)
        counts["kept"] = len(kept)
        made.train[source.domain] += kept
        made.origin.setdefault(f"train/{source.domain}.jsonl", []).extend(source.files)


def _write(
    made: RealData, data: PublicData, out: Path, shown: Callable[[str], str]
) -> dict[str, Any]:
    files: dict[str, Sequence[dict[str, Any]]] = {}
    probes = []
    for domain, kept in made.train.items():
        by_prompt = {pair.prompt: pair.as_record() for pair in reversed(kept)}
        records = [by_prompt[prompt] for prompt in made.order(by_prompt, domain)]
        files[f"train/{domain}.jsonl"] = records
        files[f"exemplars/{domain}.jsonl"] = [
            {**record, "prompt": shown(record["prompt"])} for record in records[:PAIRS_SHOWN]
        ]
        others = records[PAIRS_SHOWN : PAIRS_SHOWN + PROMPTS_SHOWN]
        probes += [{"prompt": shown(record["prompt"]), "domain": domain} for record in others]
        made.origin[f"exemplars/{domain}.jsonl"] = [f"train/{domain}.jsonl"]
    files["probe.jsonl"] = probes
    made.origin["probe.jsonl"] = [f"train/{domain}.jsonl" for domain in made.train]
    files |= {f"items/{name}.jsonl": items for name, items in sorted(made.items.items())}
    described = {}
    for name, rows in files.items():
        lines = [json.dumps(record, ensure_ascii=False) for record in rows]
        content = "".join(f"{line}\n" for line in lines).encode()
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
        described[name] = {
            "records": len(rows),
            "sha256": hashlib.sha256(content).hexdigest(),
            "source": sorted(set(made.origin[name])),
        }
    summary = {
        "seed": made.seed,
        "files": described,
        "sources": {name: dict(counts) for name, counts in made.counts.items()},
        "overlaps": {name: made.overlaps[name] for name in sorted(made.overlaps)},
        "read": dict(sorted(data.sums.items())),
    }
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    (out / "data.json").write_text(f"{text}\n", encoding="utf-8")
    return summary
