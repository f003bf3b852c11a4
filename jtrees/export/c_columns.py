"""C source, and the columns of a raw table: a struct, enums for levels, and a function from a row to its features."""

from functools import partial
import re
from typing import Any, NamedTuple

import numpy as np

from jtrees.export import template
from jtrees.export.program import Field
from jtrees.export.template import c_comment, c_literal, period_code
from jtrees.tables.frame import Frame, level_codes
from jtrees.tables.periods import PERIODS
from jtrees.tables.program import Operation
from jtrees.validation import quoted

_RESERVED = """
auto break case char const continue default do double else enum extern float for goto if inline int long register
restrict return short signed sizeof static struct switch typedef union unsigned void volatile while
asm bool catch class delete explicit export false friend mutable namespace new operator private protected public
template this throw true try typeid typename using virtual
alignas alignof and and_eq bitand bitor char8_t char16_t char32_t co_await co_return co_yield compl concept const_cast
consteval constexpr constinit decltype dynamic_cast noexcept not not_eq nullptr or or_eq reinterpret_cast requires
static_assert static_cast thread_local typeof typeof_unqual wchar_t xor xor_eq
linux unix i386 i486 i586 i686 arm mips sparc sun sgi vax hpux hppa m68k mc68000 sequent pyr tower svr4 bsdi ultrix
host_mips cray riscv far near huge small hyper interface min max pascal cdecl
EOF BUFSIZ FILE NULL RAND_MAX EXIT_SUCCESS EXIT_FAILURE CHAR_BIT CHAR_MIN CHAR_MAX INT_MIN INT_MAX NAN INFINITY
HUGE_VAL I complex imaginary assert errno stdin stdout stderr signbit isnan isinf isfinite isnormal fpclassify noreturn
IN OUT ERROR OPTIONAL TRUE FALSE BOOL CONST VOID DELETE DOMAIN OVERFLOW UNDERFLOW SING TLOSS PLOSS
"""  # words of C and C++, macros of compilers for some systems, and macros of C and Windows headers
_LONGEST = 60  # maximum length of a name without the prefix


class Source(NamedTuple):
    """Writes C source in which all names begin with a prefix.

    In templates, ``$`` stands for the prefix, and ``$$`` for the prefix in capitals.
    """

    prefix: str

    def fill(self, text: str, **parts: Any) -> str:
        """Returns a template with its parts, which may hold any text: see :func:`jtrees.export.template.fill`."""
        return template.fill(text.replace("$$", self.prefix.upper()).replace("$", self.prefix), **parts)

    def table(self, kind: str, name: str, values: Any, width: int | None = None) -> str:
        """Returns the definition of a constant array.

        ``width`` is the declared size of the last axis. Elements beyond the values are 0.
        """
        values = np.asarray(values)
        shape = "".join(f"[{n}]" for n in (*values.shape[:-1], width or values.shape[-1]))
        listed = template.array(values, partial(_number, kind=kind), "{}")
        return f"static const {kind} {self.prefix}_{name}{shape} = {listed};"


def _number(value: Any, kind: str) -> str:
    """Returns a number as the shortest text that reads back as itself."""
    if kind == "int":
        return str(int(value))
    return f"{np.float32(value)!s}f" if kind == "float" else str(np.float64(value))


class Columns:
    """The columns of a model in C.

    Attributes:
      row: the C type of a row, to which an argument points.
      text: declarations of the struct and the enums of named columns, and of ``$_encode(x, out)``.
    """

    def __init__(self, source: Source, fields: list[Field], *, named: bool):
        """Writes the declarations. If ``named``, a row is a struct, otherwise an array with columns by position."""
        self.source, self.fields, self.named = source, fields, named
        self.row = source.fill("$_row" if named else "double")
        members: dict[str, int] = dict.fromkeys(_RESERVED.split(), 2)
        constants: dict[str, int] = {}
        self.members = [new_name(field.name, members) for field in fields]
        parts, body, place = [], [], 0
        if any(field.kind != "text" for field in fields):
            parts.append(NO_FAST_MATH)
        if any(field.kind == "date" and field.operations[-1].part for field in fields):
            parts.append(_calendar(source))
        for field, member in zip(fields, self.members, strict=True):
            if field.kind == "text":
                levels = (*field.column.levels, "other", "missing")
                names = [new_name(f"{member}_{level}".upper(), constants) for level in levels]
                parts.append(_level_functions(source, member, field, names))
            value = f"x->{member}" if named else f"x[{field.place}]"
            for operation in field.operations:
                table = f"{member}_{operation.part}_features"
                if operation.name == "lookup":
                    parts.append(source.table("double", table, operation.table))
                body.append(_operation(source, operation, field, value, place, table))
                place += operation.width
        if named:
            parts.append(self._struct())
        parts.append(source.fill(_ENCODE, ROW=self.row, BODY="\n".join(body)))
        self.text = "\n".join(parts)

    def _struct(self) -> str:
        kinds = {"number": "a number", "boolean": "0 or 1", "date": "local days since 1970-01-01", "text": "a level"}
        lines = []
        for field, member in zip(self.fields, self.members, strict=True):
            kind, description = "int" if field.kind == "text" else "double", kinds[field.kind]
            description = "a duration in days, a time of day since midnight" if field.column.durations else description
            lines.append(f"  {kind} {member}; /* {c_comment(field.name)}: {description} */")
        return self.source.fill(_STRUCT, MEMBERS="\n".join(lines))

    def test_rows(self, rows: Frame) -> tuple[str, str]:
        """Returns the declarations of the self-test's rows, and the lines that set ``x`` to row ``i``."""
        width, cells, gaps = max(field.place for field in self.fields) + 1, [], []
        lines = ["    $_row x;" if self.named else f"    double x[{width}] = {{0}};"]
        for j, (field, member) in enumerate(zip(self.fields, self.members, strict=True)):
            raw, target = rows.columns[field.name], f"x.{member}" if self.named else f"x[{field.place}]"
            if field.kind == "text":
                cells.append(level_codes(field.column.levels, raw))
                lines.append(f"    {target} = (int)$_test_x[i][{j}];")
            else:
                cells.append(np.where(raw.missing, 0.0, raw.values))
                lines.append(f"    {target} = $_test_gaps[i][{len(gaps)}] ? zero / zero : $_test_x[i][{j}];")
                gaps.append(raw.missing)
        tables = [self.source.table("double", "test_x", np.stack(cells, axis=1))]
        if gaps:
            tables.append(self.source.table("int", "test_gaps", np.stack(gaps, axis=1)))
            lines.insert(0, "    const volatile double zero = 0;")
        return "\n".join([*tables, ""]), self.source.fill("\n".join(lines))


def _operation(source: Source, operation: Operation, field: Field, value: str, place: int, table: str) -> str:
    """Returns the statement that writes the features of an operation, from a place on."""
    last = len(operation.table) - 1
    if operation.part == "level":
        code = f"{value} < 0 || {value} > {last} ? {last - 1} : {value}"
    else:
        code = source.fill("@X@ != @X@ ? @LAST@ : $_@PERIOD@(@X@)", X=value, LAST=last, PERIOD=operation.part)
    start, center = (_number(value, "double") for value in (operation.start, operation.center))
    parts = {"START": start, "CENTER": center, "X": value, "PLACE": place, "TABLE": table, "CODE": code}
    parts["WIDTH"] = operation.width
    gaps = [f"{value} == {_number(number, 'double')}" for number in field.missing_numbers]
    parts["IS_MISSING"] = " || ".join([f"{value} != {value}", *gaps])
    return source.fill(_OPERATIONS[operation.name], **parts)


def _calendar(source: Source) -> str:
    functions = [source.fill(_DAYS)]
    for name, period in PERIODS.items():
        code = source.fill(period_code(name, _STEPS, **_UNITS))
        functions.append(source.fill(_PERIOD, NAME=name, FIRST=period.levels[0], CODE=code))
    return "\n".join(functions)


def _level_functions(source: Source, member: str, field: Field, names: list[str]) -> str:
    texts, count = (*field.column.levels, *field.missing), len(field.column.levels)
    if cut := [level for level in texts if "\0" in level]:
        column = quoted(field.name)
        raise ValueError(f"levels must have no null character in C, got {quoted(cut[0])} of the column {column}")
    constants = ",\n".join(
        source.fill("  $$_@NAME@ /* @LEVEL@ */", NAME=name, LEVEL=c_comment(level))
        for name, level in zip(names, (*field.column.levels, "any other", "none"), strict=True)
    )
    listed = ", ".join(map(c_literal, texts))
    sizes, ends = {"ALL": len(texts), "COUNT": count}, {"OTHER": names[-2], "MISSING": names[-1]}
    column = {"MEMBER": member, "NAME": c_comment(field.name)}
    return source.fill(_LEVELS, CONSTANTS=constants, TEXTS=listed, **sizes, **ends, **column)


def new_name(text: str, used: dict[str, int]) -> str:
    """Returns a name in C that is not among the names ``used``, and adds it to them.

    Each name has the next number to try after it, because thousands of levels may have one name without numbers.
    """
    base = re.sub("[^0-9A-Za-z_]", "_", text[:_LONGEST])
    # Names that begin with two underscores, or with an underscore and a capital, are reserved for the compiler.
    base = f"x{base}" if re.match("$|_$|_[A-Z_]", base) else f"_{base}" if base[0].isdigit() else base
    name = base
    while name in used:
        name = f"{base}_{used[base]}"
        used[base] += 1
    used[name] = 2
    return name


# Options for fast mathematics of GCC, Clang and MSVC. If an option is set, a comparison does not recognise NaN.
NO_FAST_MATH = """\
#if (defined __FINITE_MATH_ONLY__ && __FINITE_MATH_ONLY__) || defined _M_FP_FAST
#error "NaN is a missing value here: compile without -ffast-math, -ffinite-math-only or /fp:fast"
#endif
"""

# The code of each operation of a column's program.
_OPERATIONS = {
    "difference": "  out[@PLACE@] = @IS_MISSING@ ? @CENTER@ : @X@ - @START@;",
    "missing": "  out[@PLACE@] = @IS_MISSING@;",
    "lookup": "  for (int k = 0; k < @WIDTH@; k++) out[@PLACE@ + k] = $_@TABLE@[@CODE@][k];",
}

# The code of the units and the steps of the calendar. Only remainders are taken of numbers below 0.
_UNITS = {"day": "$_whole_days(days)", "time": "$_milliseconds(days)"}
_STEPS = {"+": "({0} + {1})", "*": "{0} * {1}", "//": "{0} / {1}", "%": "({0} % {1} + {1}) % {1}"}

_DAYS = """\
static inline long long $_whole_days(double days) {
  const long long whole = (long long)days;
  return whole - (whole > days);
}

/* The milliseconds since midnight. */
static inline long long $_milliseconds(double days) {
  return (long long)((days - $_whole_days(days)) * 86400000 + 0.5);
}
"""

_PERIOD = """\
/* The @NAME@ of days since 1970-01-01, 0 for @FIRST@. */
static inline int $_@NAME@(double days) { return (int)(@CODE@); }
"""

_STRUCT = """\
/* A row. NaN is a missing number. */
typedef struct {
@MEMBERS@
} $_row;
"""

_ENCODE = """\
static inline void $_encode(const @ROW@ *x, double *out) {
@BODY@
}
"""

_LEVELS = """\
/* Levels of @NAME@. */
enum {
@CONSTANTS@
};

/* The level of a canonical text, such as 1 instead of 1.0. A null pointer is a missing value, as are some texts. */
static inline int $_@MEMBER@_of(const char *text) {
  static const char *const texts[] = {@TEXTS@};
  if (!text) return $$_@MISSING@;
  for (int i = 0; i < @ALL@; i++) {
    const char *a = texts[i], *b = text;
    while (*a && *a == *b) a++, b++;
    if (*a == *b) return i < @COUNT@ ? i : $$_@MISSING@;
  }
  return $$_@OTHER@;
}
"""
