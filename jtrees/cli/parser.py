"""The arguments of the five commands. This module imports only the standard library, so the help is fast."""

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys
from typing import Any

from jtrees import __version__

LOSSES = ("squared_error", "absolute_error", "huber", "quantile", "poisson", "gamma", "tweedie")
SUFFIXES = (".h", ".py", ".onnx", ".stablehlo", ".sql", ".js", ".mjs")
_SEVERAL: Any = {"nargs": "+", "action": "extend", "default": []}  # values that a repeated option adds to


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the arguments of a command, its name in ``command``, and all words in ``words``.

    Prints help, the version or an error, and exits, as :mod:`argparse` does.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    return _parser().parse_args(words, argparse.Namespace(words=words))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jtrees", description="Decision trees trained by gradient descent.")
    parser.add_argument("--version", action="version", version=f"jtrees {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def command(name: str, description: str) -> Any:
        added = commands.add_parser(name, help=description, description=description, allow_abbrev=False)
        return added.add_argument, added

    add, fit = command("fit", "Fits a model to a table and saves it.")
    _add_training(fit)
    add("--out", type=Path, required=True, metavar="MODEL", help="the file to write, such as model.jtrees")

    add, predict = command("predict", "Predicts for the rows of a table, as CSV.")
    add("model", type=Path, metavar="MODEL")
    _add_table(predict, training=False)
    add("--out", type=Path, metavar="FILE", help="the file to write (default: standard output)")
    add("--probabilities", action="store_true", help="also write the probability of each class")

    add, explain = command("explain", "Explains the prediction for a row of a table.")
    add("model", type=Path, metavar="MODEL")
    _add_table(explain, training=False)
    add("--row", type=int, default=0, help="number of the row, from 0 (default: 0); other rows are the background")
    add("--extrapolate", action="store_true", help="the nearest change may be outside the ranges of the table")

    add, _ = command("export", f"Writes a model as {', '.join(SUFFIXES)}, for other machines.")
    add("model", type=Path, metavar="MODEL")
    add("file", type=Path, metavar="FILE", help="the file to write; its suffix sets the format")

    add, report = command("report", "Fits, compares and explains a model; one HTML page.")
    _add_training(report)
    add("--out", type=Path, required=True, metavar="PAGE", help="the file to write, such as report.html")
    return parser


def _add_training(parser: argparse.ArgumentParser) -> None:
    _add_table(parser, training=True)
    add = parser.add_argument
    add("--target", required=True, metavar="COLUMN", help="the column to predict")
    add("--task", choices=["regression", "classification"], help="(default: inferred from the target)")
    kind = parser.add_mutually_exclusive_group().add_argument
    kind("--tree", action="store_true", help="one tree to read, instead of a more accurate sum of trees")
    kind("--recipe", help="another recipe, such as GET or Bagged(LatentTree) (default: Boosted, a sum of trees)")
    add("--set", **_SEVERAL, metavar="OPTION=VALUE", help="options of the recipe: depth=3 or base.depth=3")
    add("--loss", metavar="NAME", help=f"loss of regression: {', '.join(LOSSES)} (default: {LOSSES[0]})")
    add("--quantile", type=float, metavar="LEVEL", help="level of --loss quantile (default: 0.5)")
    add("--monotone", **_SEVERAL, metavar="COLUMN=SIGN", help="sign 1: must not fall; -1: must not rise")
    add("--seed", type=_seed, default=0)
    add("--max-seconds", type=float, help="ends the training with the best model so far, compilation not counted")


def _seed(text: str) -> int:
    if not text.isdecimal() or (seed := int(text)) >= 2**32:  # the seeds of NumPy
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {2**32 - 1}, got {text[:80]}")
    return seed


def _add_table(parser: argparse.ArgumentParser, *, training: bool) -> None:
    parser.add_argument("table", type=Path, metavar="TABLE", help="a file: CSV with a header, or .parquet")
    add_rules(parser, training=training)


def add_rules(parser: Any, *, training: bool) -> None:
    """Adds the options for reading a file, and, if ``training``, the options for the kinds of its columns."""
    add = parser.add_argument
    add("--separator", default=",", help="field separator of CSV (default: a comma)")
    decimal = "as the cells say, else a point" if training else "as in training"
    add("--decimal", metavar="MARK", help=f"decimal separator of CSV (default: {decimal})")
    add("--encoding", default="utf-8", metavar="NAME", help="the encoding of CSV, such as latin-1 (default: utf-8)")
    default = "NA, nan, null, ? and others" if training else "those of the training"
    missing_help = f"further texts or numbers that mean a missing value, besides {default}"
    alone = "; without TEXT, those others are levels in columns of text" * training
    add("--missing", nargs="*" if training else "+", action="extend", metavar="TEXT", help=missing_help + alone)
    if training:
        kinds = "number, decimal point, decimal comma, boolean, date, a format such as %%d/%%m/%%Y, text or drop"
        kinds_help = f"what columns hold, if it is not what their cells look like, such as id=drop: {kinds}"
        add("--columns", **_SEVERAL, metavar="COLUMN=KIND", help=kinds_help)
