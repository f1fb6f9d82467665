"""Recipes: YAML in mergekit's dialect, checked strictly, all problems reported together."""

from sigmerge.recipe.parser import load_recipe
from sigmerge.recipe.record import Recipe, RecipeModel
from sigmerge.recipe.sections import CaptureSection

__all__ = ["CaptureSection", "Recipe", "RecipeModel", "load_recipe"]
