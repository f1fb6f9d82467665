"""What the page says, and that nothing a user wrote can become markup."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from sigmerge.errors import MissingExtra
from sigmerge.pages.page import PageRun, render, write_page
from sigmerge.pages.svg import nice_ticks
from sigmerge.records import MergePlan, PairedScores, Provenance, RepairPlan, ScoreNoise
from tests.lab.analysis import samples

HOSTILE = """</script><script>alert("x")</script><img src=x onerror='alert(1)'>&"""


class Outline(HTMLParser):
    """Counts elements and gathers what a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.text += data


def titles(page: str) -> list[str]:
    return re.findall(r"<h4>(.*?)</h4>", page)


def table_of(page: str, title: str) -> list[list[str]]:
    """The cells of a figure's table, without its heads."""
    [rows] = re.findall(rf"<h4>{title}</h4>.*?<tbody>(.*?)</tbody>", page, re.S)
    each = re.findall(r"<tr>(.*?)</tr>", rows, re.S)
    return [re.findall(r">([^<>\n]+)<", row) for row in each]


def test_full_page_has_every_figure():
    page = render([samples.run("TIES")])
    assert titles(page) == [
        "Scores per domain",
        "Experts, anchor and repaired merge",
        "Conflict over depth",
        "Capacity over depth",
        "Deficits",
        "Shares and claim order",
        "Budget",
        "Claimed coordinates",
        "Occupancy over depth",
        "Layer 0, turn by turn",
        "Admitted mass",
    ]
    # Each with its table.
    assert page.count("<figure>") == page.count("<summary>Exact values</summary>")
    assert "merge_method: ties" in page
    assert "413 MB" in page and "4.2 s" in page
    assert "role=tab" not in page.split("<script>")[0]


def noisy(gain: float) -> PageRun:
    """A run with the same gain on every domain, and 95 % intervals of ± 3.92 points around each."""
    errors = dict.fromkeys(samples.DOMAINS, 0.02)
    experts = dict.fromkeys(samples.DOMAINS, errors)
    anchor = dict.fromkeys(samples.DOMAINS, 0.5)
    repaired = dict.fromkeys(samples.DOMAINS, 0.5 + gain)
    noise = ScoreNoise(items=dict.fromkeys(samples.DOMAINS, 480), experts=experts, anchor=errors,
                       repaired=errors, gain=errors)  # fmt: skip
    scores = PairedScores(experts={"math": dict.fromkeys(samples.DOMAINS, 0.9)}, anchor=anchor,
                          repaired=repaired, noise=noise)  # fmt: skip
    return replace(samples.run("TIES"), scores=scores, calibration=None, seconds=75.0)


def test_a_gain_within_its_interval_has_no_colour():
    small, large = render([noisy(0.01)]), render([noisy(0.09)])
    assert 'class="up"><span>+9.00 <small>± 3.9</small></span></td>' in large
    assert "<span>+1.00 <small>± 3.9</small></span></td>" in small
    assert 'class="value up"' in large and 'class="value up"' not in small
    assert '<dd class="up">+9.00 ± 1.8</dd>' in large  # five domains: 3.92 / √5
    assert '<dd class="level">+1.00 ± 1.8</dd>' in small
    assert "which is within its 95 % interval" in small
    assert "The repair raised math" in large and "The repair raised math" not in small
    assert "changed within the interval" in small and "changed within" not in large
    assert "<span>480</span></td>" in small and "on 2,400 items" in small


def test_a_gain_whose_interval_is_not_known_has_no_colour():
    """As on the calibration split, where the repaired merge's items are not kept."""
    run = noisy(0.09)
    assert run.scores and run.scores.noise
    noise = run.scores.noise.model_copy(update={"repaired": {}, "gain": {}})
    page = render([replace(run, calibration=run.scores.model_copy(update={"noise": noise}))])
    assert page.count('class="up"><span>+9.00') == len(samples.DOMAINS)  # of the other split
    assert page.count("<span>+9.00 <small>± ?</small></span></td>") == len(samples.DOMAINS)


def test_words_are_explained_and_settings_are_readable():
    page = render([replace(noisy(0.01), recipe=f"{samples.RECIPE}  evaluate: {{suite: nano}}\n")])
    text = page.split("<script>")[0]
    for words in (
        "Macro-5, the mean of 5 domain scores", "An anchor is a merge before its repair",
        "coordinates, each for one domain alone", "what an expert learnt at a claimed coordinate",
        "evaluate (suite nano)", "1 min 15 s", "the whole run; 4.2 s for its last step",
    ):  # fmt: skip
        assert words in text, words
    assert "{&#39;" not in text and "iB<" not in text
    assert not re.search(r"\d (B|kB|GB)<", text)


@pytest.mark.parametrize(
    ("digest", "shown"),
    [("0123456789abcdef" * 4, "sha256 0123456789ab"),
     ("4MiB-blake3:" + "fedcba9876543210" * 4, "4MiB-blake3 fedcba987654")],
)  # fmt: skip
def test_a_digest_is_shown_by_its_kind_and_its_first_digits(digest, shown):
    run = samples.run("one")
    outputs = {"model.safetensors": digest}
    provenance = {**run.provenance.as_json(), "outputs": outputs}
    page = render([replace(run, provenance=Provenance.model_validate(provenance))])
    assert f">{shown}<" in page


def test_several_runs_share_an_overview():
    runs = samples.demo()
    page = render(runs)
    assert page.count('role="tab"') == page.count('role="tabpanel"') == len(runs)
    assert "The repair improved 6 of 7 anchors" in page
    assert page.count("The repair hurt this anchor") == 1


def test_plain_merge_without_scores_has_no_plots():
    plan = MergePlan(operator="linear", seed=0)
    page = render([PageRun("linear", recipe=samples.RECIPE, plan=plan)])
    assert titles(page) == []
    assert "linear, merged ·" in page and "./pool/reference" in page


def test_anchor_scored_but_not_repaired():
    scores = samples.scores(0).model_copy(update={"repaired": None})
    page = render([PageRun("linear", scores=scores)])
    assert titles(page) == ["Scores per domain", "Experts, anchor and repaired merge"]


def test_two_domains_have_no_radar():
    page = render([PageRun("x", scores=PairedScores(anchor={"a": 0.5, "b": 0.6}))])
    assert titles(page) == ["Scores per domain"]


@pytest.mark.parametrize("part", ["plan", "scores", "calibration"])
def test_any_part_may_be_missing(part):
    assert "<h1>" in render([replace(samples.run("TIES"), **{part: None})])


@pytest.mark.parametrize(
    "key", ["views", "conflict", "capacity", "deficit", "share", "order", "quota", "claimed"]
)
def test_any_part_of_a_plan_may_be_missing(key):
    run = samples.run("TIES")
    assert "<h1>" in render([changed(run, **{key: type(getattr(run.plan, key))()})])


def changed(run: PageRun, **values: object) -> PageRun:
    """The run with other values in its plan."""
    assert run.plan is not None
    return replace(run, plan=type(run.plan).model_validate({**run.plan.as_json(), **values}))


def test_the_turns_of_a_layer_are_its_claims_in_claim_order():
    """Each domain finds free what the earlier ones left, in the layer that opens most."""
    run = samples.run("TIES")
    plan = run.plan
    layer = max(range(6), key=lambda i: sum(plan.claimed[i]))
    page = render([run])
    [table] = re.findall(
        rf"<h4>Layer {layer}, turn by turn</h4>.*?<tbody>(.*?)</tbody>", page, re.S
    )
    cells = [re.findall(r">([^<>\n]+)<", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.S)]
    free = plan.coordinates[layer]
    for turn, (name, shown) in enumerate(zip(plan.order, cells, strict=True), start=1):
        place = list(samples.DOMAINS).index(name)
        claim = plan.claimed[layer][place]
        numbers = [plan.quota[layer][place], free, claim, free - claim]
        free -= claim
        mass = f"{plan.admitted_mass[layer][place]:,.3f}"
        assert shown == [f"{turn}. {name}", *(f"{number:,}" for number in numbers), mass]
    assert f"{free:,} stay free" in page


def test_occupancy_over_depth_adds_up_to_what_is_claimed():
    run = samples.run("TIES")
    plan = run.plan
    page = render([run])
    for i, shown in enumerate(table_of(page, "Occupancy over depth")):
        size = plan.coordinates[i]
        parts = [plan.claimed[i][list(samples.DOMAINS).index(name)] / size for name in plan.order]
        wanted = [*parts, sum(parts), plan.capacity[i]]
        assert shown == [str(i), *(f"{100 * part:.2f}" for part in wanted)]


def test_a_control_that_claims_anything_else_is_drawn_without_the_papers_rule():
    run = changed(samples.run("TIES"), variant="random_mask")
    page = render([run])
    assert "turn by turn" in page and "where its expert moved furthest" not in page


def test_no_deficit_is_said():
    run = samples.run("TIES")
    nothing = dict.fromkeys(samples.DOMAINS, 0.0)
    zeros = [[0] * 5] * 6
    values = {"deficit": nothing, "share": nothing, "claimed": zeros, "admitted_mass": zeros}
    page = render([changed(run, **values)])
    assert "the anchor is returned unchanged" in page
    assert "turn by turn" not in page and "Occupancy over depth" not in page


@pytest.mark.parametrize(
    ("low", "high", "most", "ticks"),
    [
        (0.0, 1.0, 6, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.803, 0.917, 6, [0.80, 0.85, 0.90, 0.95]),
        (0.0, 274.9, 6, [0.0, 100.0, 200.0, 300.0]),
    ],
)
def test_ticks_are_round_and_span_the_values(low, high, most, ticks):
    assert nice_ticks(low, high, most) == pytest.approx(ticks)


def test_scores_that_are_all_alike_can_be_drawn():
    level = dict.fromkeys(samples.DOMAINS, 0.0)
    scores = PairedScores(experts={"math": level}, anchor=level, repaired=level)
    assert len(titles(render([PageRun("flat", scores=scores)]))) == 2


def test_captions_do_not_claim_the_papers_rules_for_a_control():
    run = samples.run("TIES")
    control = render([changed(run, variant="random_mask")])
    for rule in ("the less it opens", "in proportion to the deficits", "moved furthest"):
        assert rule in render([run]) and rule not in control


def test_warnings_are_shown_once():
    run = samples.run("TIES")
    warned = changed(run, warnings=["The sign view is constant."])
    page = render([replace(warned, warnings=["The sign view is constant."])])
    assert page.count("The sign view is constant.") == 1


def test_hostile_text_stays_text():
    tame = Outline(render([renamed("quiet")]))
    wild_page = render([renamed(HOSTILE)])
    wild = Outline(wild_page)
    assert wild.tags == tame.tags
    assert not [name for name, _ in wild.attributes if name.startswith("on")]
    assert HOSTILE in wild.text
    assert wild_page.count("</script>") == 1


def renamed(word: str) -> PageRun:
    """A run in which a user's word stands wherever a user can write one."""

    def swap(value):
        if isinstance(value, dict):
            return {word if key == "math" else key: swap(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [swap(inner) for inner in value]
        return word if value == "math" else value

    run = samples.run(word)
    file = {"member": word, "file": word, "size": 1, "sha256": word}
    assert run.plan and run.provenance and run.scores and run.calibration
    provenance = {**run.provenance.as_json(), "device": word, "inputs": [file]}
    plan = {**swap(run.plan.as_json()), "variant": word, "warnings": [word]}
    return replace(
        run,
        recipe=f"merge_method: ties\n# {word}",
        plan=RepairPlan.model_validate(plan),
        provenance=Provenance.model_validate(provenance),
        scores=PairedScores.model_validate(swap(run.scores.as_json())),
        calibration=PairedScores.model_validate(swap(run.calibration.as_json())),
        warnings=[f"Beware of {word}"],
    )


def test_policy_admits_only_the_pages_own_style_and_script():
    page = render(samples.demo())
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for element in ("style", "script"):
        content = re.search(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    assert "http://" not in page and "https://" not in page


def test_page_is_small_and_the_same_every_time(tmp_path):
    for name in ("a.html", "b.html"):
        write_page(tmp_path / name, samples.demo())
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert (tmp_path / "a.html").stat().st_size < 1_000_000


def test_missing_jinja_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"pip install 'sigmerge-llm\[report\]'"):
        render([PageRun("linear")])
