"""Whether tests notice faults: changes one line of a module at random, runs its tests, and notes the first failure.

``python -m tests.mutants jtrees/search/monitor.py ... --number 6 --seed 0 --out mutants.csv`` tries six faults of each
module in a copy of the checkout. Each row of the file is one fault. A fault that no test notices is either a missing
test, or a change with the same results; a reader may write the reason in place of the test. Without modules, the faults
of the file that no test noticed are tried again.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
import csv
from dataclasses import dataclass
import io
import os
from pathlib import Path
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tests import ROOT

OPERATORS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
COLUMNS = ("file", "line", "old", "new", "noticed by", "seconds")


@dataclass(frozen=True)
class Fault:
    """A change of one line: its number from 1, the line as it is, and the changed line."""

    line: int
    old: str
    new: str


def faults_in(source: str) -> list[Fault]:
    """Returns all faults of a module, without those that are no Python."""
    lines, faults = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if not hasattr(node, "lineno") or node.lineno != node.end_lineno:
            continue
        old = lines[node.lineno - 1]
        for start, end, text in _changes(node, old.encode()):
            new = (old.encode()[:start] + text + old.encode()[end:]).decode()
            changed = "\n".join([*lines[: node.lineno - 1], new, *lines[node.lineno :]])
            if new != old and _is_python(changed):
                faults.append(Fault(node.lineno, old, new))
    return sorted(set(faults), key=lambda fault: (fault.line, fault.new))


def _changes(node: ast.AST, line: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields the changes of a node: the first byte, the byte after the last, and the text that replaces them."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield from _operator(left, operator, right, line)
        case ast.BinOp(left=left, op=operator, right=right):
            yield from _operator(left, operator, right, line)
        case ast.BoolOp(op=operator, values=[left, right, *_]):
            yield from _operator(left, operator, right, line)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node.col_offset, operand.col_offset, b""
        case ast.Constant(value=bool(value)):
            yield node.col_offset, node.end_col_offset, str(not value).encode()
        case ast.Constant(value=int() | float() as value):
            yield node.col_offset, node.end_col_offset, str(value + 1).encode()
        case ast.Call(keywords=keywords):
            for keyword in keywords:
                rest = line[keyword.end_col_offset :]
                after = re.match(rb",? ?", rest).end()  # type: ignore[union-attr]
                yield keyword.col_offset, keyword.end_col_offset + after, b""
        case ast.Return(value=ast.BinOp(left=operand) | ast.Call(args=[operand, *_]) as value):
            yield value.col_offset, value.end_col_offset, line[operand.col_offset : operand.end_col_offset]


def _operator(left: ast.expr, operator: ast.AST, right: ast.expr, line: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields the other operator, in the text between the operands, which keeps their brackets."""
    before, after = OPERATORS.get(type(operator), ("", ""))
    start, end = left.end_col_offset or 0, right.col_offset
    if before:
        yield start, end, line[start:end].replace(before.encode(), after.encode(), 1)


def _is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def tests_of(module: str, number: int = 5, root: Path = ROOT) -> list[str]:
    """Returns a number of test files that take part in a module, those that name it most first.

    First come the files that name the module, its public classes, or its functions, if their names have several words
    or follow ``jtrees.``. Then come the files that name the modules that import it, then the importers of these.
    """
    sources = {str(path.relative_to(root)): path.read_text("utf-8") for path in root.glob("jtrees/**/*.py")}
    files: list[Path] = []
    modules, seen = {module}, {name for name in sources if name.endswith("__init__.py")}
    while modules and len(files) < number:
        counts = sum((_naming(name, root) for name in modules), Counter())
        files += sorted(counts.keys() - {*files}, key=lambda file: (-counts[file], file))
        seen |= modules
        imports = re.compile("|".join(map(_module_pattern, modules)))
        modules = {name for name, source in sources.items() if name not in seen and imports.search(source)}
    return [str(file.relative_to(root)) for file in files[:number]]


def _naming(module: str, root: Path) -> Counter[Path]:
    """Returns the test files that name a module, and how often; a file with the module's name comes first."""
    names = re.findall(r"^(?:class|def|async def) ([A-Za-z]\w+)", (root / module).read_text("utf-8"), re.MULTILINE)
    patterns = [
        rf"\b{name}\b" if name.lower() != name or "_" in name else rf"jtrees\.[\w.]*\b{name}\b" for name in names
    ]
    named = re.compile("|".join([_module_pattern(module), *patterns]))
    counts = {file: len(named.findall(file.read_text("utf-8"))) for file in root.glob("tests/test_*.py")}
    package, name = Path(module.removesuffix("/__init__.py").removesuffix(".py")).parts[-2:]
    for by_name, count in ((package, 10**3), (name, 10**6)):
        if (file := root / f"tests/test_{by_name}.py").exists():
            counts[file] += count
    return Counter({file: count for file, count in counts.items() if count})


def _module_pattern(module: str) -> str:
    """Returns a pattern of the texts that name a module."""
    package, _, name = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".").rpartition(".")
    return rf"{re.escape(package)}\.{name}\b|from {re.escape(package)} import .*\b{name}\b"


def first_failure(tests: list[str], folder: Path, seconds: float) -> str:
    """Returns the first test that fails in a copy of the checkout; empty if none fails; ``"too long"`` after a time.

    A test that fails must also fail alone, because some tests fail by chance on a busy machine.
    """
    end, by_chance = time.monotonic() + seconds, []
    while True:
        failed = _failed([*tests, *(f"--deselect={test}" for test in by_chance)], folder, end)
        if not failed.startswith("tests/") or _failed([failed], folder, end + seconds):
            return failed
        by_chance.append(failed)


def _failed(arguments: list[str], folder: Path, end: float) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *arguments]
    environment, seconds = os.environ | {"PYTHONPATH": str(folder)}, max(0.0, end - time.monotonic())
    try:
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "too long"
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return failed[1] if failed else "" if run.returncode == 0 else f"exit {run.returncode}"


def tried(module: str, fault: Fault, folder: Path, options: argparse.Namespace) -> list[str]:
    """Returns the row of a fault, after its tests in a copy of the checkout, which has no fault afterwards."""
    source = (ROOT / module).read_text("utf-8")
    lines = source.splitlines()
    lines[fault.line - 1] = fault.new
    (folder / module).write_text("\n".join(lines) + "\n", "utf-8")
    began = time.monotonic()
    noticed = first_failure(tests_of(module, options.files), folder, options.seconds)
    (folder / module).write_text(source, "utf-8")
    seconds = f"{time.monotonic() - began:.0f}"
    return [module, str(fault.line), fault.old.strip(), fault.new.strip(), noticed, seconds]


def _try_again(folder: Path, options: argparse.Namespace) -> None:
    """Tries again each fault of the file that no test noticed, and replaces its row."""
    lines = options.out.read_text("utf-8").splitlines()
    for number, text in enumerate(lines):
        module, line, old, new, noticed, _ = (next(csv.reader([text])) + 6 * [""])[:6]
        if text.startswith("#") or noticed not in ("", "too long"):
            continue
        source = (ROOT / module).read_text("utf-8").splitlines() if (ROOT / module).exists() else []
        places = [place for place, code in enumerate(source, 1) if code.strip() == old]
        if places:
            place = min(places, key=lambda place: abs(place - int(line)))
            row = tried(module, Fault(place, old, source[place - 1].replace(old, new)), folder, options)
        else:
            row = [module, line, old, new, "the line no longer exists", "0"]
        with io.StringIO() as one:
            csv.writer(one, lineterminator="").writerow(row)
            lines[number] = one.getvalue()
        options.out.write_text("\n".join(lines) + "\n", "utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Tries faults of modules and appends a row for each to a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", help="files such as jtrees/search/monitor.py; none: the survivors again")
    parser.add_argument("--number", type=int, default=6, help="faults of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=5, help="test files of a module")
    parser.add_argument("--seconds", type=float, default=120, help="the most time for the tests of a fault")
    parser.add_argument("--out", type=Path, required=True, help="a CSV file, to which rows are appended")
    options = parser.parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        if not options.modules:
            return _try_again(folder, options)
        with options.out.open("a", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            if not options.out.stat().st_size:
                rows.writerow(COLUMNS)
            file.write(f"# python -m tests.mutants {shlex.join(words)}\n")
            for module in options.modules:
                faults = faults_in((ROOT / module).read_text("utf-8"))
                draw = random.Random(f"{options.seed} {module}")
                for fault in draw.sample(faults, min(options.number, len(faults))):
                    rows.writerow(tried(module, fault, folder, options))
                    file.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores Ctrl-C, which tests send
    main()
