"""The tests: a file for each module, with shared tables, recipes and textbook definitions."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # the checkout, where scripts of the tests run
