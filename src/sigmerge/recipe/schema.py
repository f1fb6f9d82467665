"""Where editors find the JSON Schema of recipes: `python -m tests.recipe_schema` makes it."""

from pathlib import Path

RECIPE_SCHEMA = Path(__file__).with_name("recipe.schema.json")


def modeline() -> str:
    """The line by which a language server for YAML finds the schema."""
    return f"# yaml-language-server: $schema={RECIPE_SCHEMA.as_uri()}"
