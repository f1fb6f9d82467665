"""The JSON Schema of recipes, made of the sections that read them and of the operators' tables.

`python -m tests.recipe_schema` writes src/sigmerge/recipe/recipe.schema.json, which editors read.
"""

from __future__ import annotations

import ast
import inspect
import json
from itertools import pairwise
from typing import Any

from pydantic.json_schema import models_json_schema

from sigmerge.method.controls import VARIANTS
from sigmerge.operators.base import Parameter
from sigmerge.operators.table import OPERATORS, operator
from sigmerge.recipe.schema import RECIPE_SCHEMA
from sigmerge.recipe.scored import SCORED, CalibrateSection
from sigmerge.recipe.sections import (
    CaptureSection,
    MissingSection,
    ModelSection,
    RecipeSection,
    Section,
    SliceSection,
    SourceSection,
    TokenizerSection,
    TrajectorySection,
)

PARTS = {
    "models": ModelSection,
    "run": TrajectorySection,
    "slices": SliceSection,
    "sources": SourceSection,
    "capture": CaptureSection,
    "tokenizer": TokenizerSection,
    "missing": MissingSection,
    **SCORED,
}
VALUE = {
    "description": "a value; a list that changes over the layers; or a list of filters",
    "anyOf": [{"type": ["number", "string", "boolean", "null"]}, {"type": "array"},
              {"type": "object"}],
}  # fmt: skip


def schema() -> dict[str, Any]:
    wanted = [(RecipeSection, "validation"), *((part, "validation") for part in PARTS.values())]
    refs, made = models_json_schema(wanted)
    definitions = made["$defs"]
    found = {key: refs[part, "validation"] for key, part in PARTS.items()}
    top = definitions.pop("RecipeSection")
    for key in ("search", "repair", "tune", "guide", "capture", "tokenizer"):
        top["properties"][key] = found[key]
    top["properties"]["models"]["items"] = found["models"]
    top["properties"]["models"] = {"anyOf": [top["properties"]["models"], found["run"]]}
    top["properties"]["slices"]["items"] = found["slices"]
    definitions["SliceSection"]["properties"]["sources"]["items"] = found["sources"]
    top["properties"]["merge_method"] = methods()
    definitions["RepairSection"]["properties"]["variant"]["enum"] = sorted(VARIANTS)
    definitions["Parameters"] = parameters()
    sections = {section.__name__: section for section in (*PARTS.values(), CalibrateSection)}
    described(top, RecipeSection)
    for name, section in sections.items():
        described(definitions[name], section)
    for part in (top, *definitions.values()):
        if "parameters" in part.get("properties", {}):
            own = part["properties"]["parameters"]
            part["properties"]["parameters"] = {
                "description": own["description"],
                "$ref": "#/$defs/Parameters",
            }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of sigmerge",
        **top,
        "$defs": definitions,
    }


def described(part: dict[str, Any], section: type[Section]) -> None:
    """Put what stands below a field of a section into the schema, for editors and the site."""
    for each in reversed(section.__mro__[:-1]):
        if not issubclass(each, Section):
            continue
        [tree] = ast.parse(inspect.getsource(each)).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name) and isinstance(text.value, ast.Constant)
                words = " ".join(str(text.value.value).split()).removesuffix(".")
                part["properties"][field.target.id]["description"] = words


def methods() -> dict[str, Any]:
    """Every method with its title, as editors show them."""
    each = [{"const": name, "description": operator(name).title} for name in sorted(OPERATORS)]
    stored = {"const": "checkpoint", "description": "a merge that was made elsewhere: anchor"}
    return {"anyOf": [*each, stored, {"type": "string", "description": "an operator of your own"}]}


def parameters() -> dict[str, Any]:
    """Every parameter of any method, with the methods that read it."""
    read: dict[str, list[tuple[str, Parameter]]] = {}
    for name in sorted(OPERATORS):
        for parameter in operator(name).parameters:
            if "." in parameter.name:  # an option of a blend's part, whichever it is
                continue
            read.setdefault(parameter.name, []).append((name, parameter))
    properties = {}
    for key, by in sorted(read.items()):
        docs = list(dict.fromkeys(parameter.doc for _, parameter in by))
        of = ", ".join(name for name, _ in by)
        properties[key] = {"description": f"{'; '.join(docs)} ({of})", **_values(by)}
    return {"type": "object", "properties": properties}


def _values(by: list[tuple[str, Parameter]]) -> dict[str, Any]:
    """Words that a parameter takes in every method that reads it; else any value."""
    words = [parameter.kind for _, parameter in by]
    if all(isinstance(kind, tuple) for kind in words):
        return {"enum": sorted({word for kind in words for word in kind})}  # type: ignore[union-attr]
    return {"anyOf": VALUE["anyOf"]}


def text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    RECIPE_SCHEMA.write_text(text(), encoding="utf-8")
    print(f"{RECIPE_SCHEMA}: {len(text()):,} bytes")
