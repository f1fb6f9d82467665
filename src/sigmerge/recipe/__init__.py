"""Recipes: YAML in mergekit's dialect, checked strictly, all problems reported together."""

from sigmerge.recipe.parser import load_recipe
from sigmerge.recipe.record import Recipe, RecipeModel
from sigmerge.recipe.sections import (
    CalibrateSection,
    CaptureSection,
    GuideSection,
    RepairSection,
    SearchSection,
    TuneSection,
)

__all__ = [
    "CalibrateSection",
    "CaptureSection",
    "GuideSection",
    "Recipe",
    "RecipeModel",
    "RepairSection",
    "SearchSection",
    "TuneSection",
    "load_recipe",
]
