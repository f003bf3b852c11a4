"""A reader of the rules that ``ObliqueTree.to_text`` writes: it knows the text alone, and computes in float64."""

import re

import numpy as np

NUMBER = r"\d+(?:\.\d+)?(?:e[-+]\d+)?"
FEATURE = rf"(?:(?P<name>[a-z_]\w*)|\((?P<far>\w+) (?P<side>[-+]) (?P<zero>{NUMBER})\))"
TERM = re.compile(rf" *(?P<sign>[-+]?) *(?:(?P<weight>{NUMBER}) )?{FEATURE}| *(?P<minus>[-+]?) *(?P<constant>{NUMBER})")


def leaves_and_answers(text, columns):
    """The numbers of the leaves, ``(n,)``, and their answers ``(n, k)``, for columns by name."""
    n = len(next(iter(columns.values())))
    leaf, answers = np.full(n, -1), {}

    def read(rows, depth):
        line = lines.pop(0)
        assert line.startswith("|   " * depth)
        line = line[4 * depth :]
        if line.startswith("-> "):
            number, answer = re.fullmatch(r"-> leaf (\d+): (.*)", line).groups()
            answers[int(number)] = _answer(answer, columns)
            leaf[rows] = int(number)
            return
        left, side, threshold = re.fullmatch(r"if (.*) ([<>]) (\S+):", line).groups()
        score = sum_of(left, columns)
        right = score > float(threshold) if side == ">" else score < float(threshold)
        read(rows & right, depth + 1)
        assert lines.pop(0) == "|   " * depth + "else:"
        read(rows & ~right, depth + 1)

    lines = text.split("\n")
    if lines[0].startswith("score = "):
        columns = {**columns, "score": sum_of(lines.pop(0).removeprefix("score = "), columns)}
    read(np.ones(n, bool), 0)
    assert not lines and (leaf >= 0).all()
    return leaf, np.stack([answers[number][row] for row, number in enumerate(leaf)])


def _answer(text, columns):
    """One column an output: sums of features with bounds, between semicolons, or numbers between commas."""
    numbers = re.fullmatch(rf"-?{NUMBER}(, -?{NUMBER})*", text)
    return np.stack([_between(part, columns) for part in text.split(", " if numbers else "; ")], axis=1)


def _between(text, columns):
    left, *bounds = re.fullmatch(r"(.*?)(?:, from (\S+) to (\S+))?", text).groups()
    value = sum_of(left, columns)
    return value if bounds == [None, None] else np.clip(value, *map(float, bounds))


def sum_of(text, columns):
    """A sum such as ``1.5 age - (year - 2000) + 3``."""
    total, position = np.zeros(len(next(iter(columns.values())))), 0
    while position < len(text):
        term = TERM.match(text, position)
        assert term, f"{text[position:]!r} is no term"
        position = term.end()
        if term["constant"]:
            total += float(term["minus"] + term["constant"])
            continue
        feature = columns[term["name"] or term["far"]]
        if term["far"]:
            feature = feature - float(term["side"].replace("-", "").replace("+", "-") + term["zero"])
        total += float(term["sign"] + (term["weight"] or "1")) * feature
    return total
