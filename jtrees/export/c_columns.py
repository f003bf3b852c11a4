"""The columns of a raw table in C: a struct for a row, enums for levels, and a function from a row to its features."""

import itertools
import re

import numpy as np

from jtrees.export.c_text import escaped, number, string, table
from jtrees.export.encoding import Field, codes_of
from jtrees.tables.frame import Frame
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
_LONGEST = 60  # maximum length of a name; C guarantees that 63 characters are significant


class Columns:
    """The columns of a model in C. In all texts, ``$`` stands for the prefix, and ``$$`` for the prefix in capitals.

    Attributes:
      text: declarations of the struct and the enums of named columns, and of ``$_encode(x, out)``.
    """

    def __init__(self, fields: list[Field], *, named: bool):
        """Writes the declarations. If ``named``, a row is a struct, otherwise an array with columns by position."""
        self.fields, self.named = fields, named
        members, constants = (
            _Names(set(_RESERVED.split())),
            _Names({"FEATURES", "TREES", "DEPTH", "OUTPUTS", "MAIN", "H"}),
        )
        self.members = [members(field.name) for field in fields]
        self.levels = {
            field.name: [constants(f"{member}_{level}".upper()) for level in (*field.levels, "other", "missing")]
            for field, member in zip(fields, self.members, strict=True)
            if field.kind == "text"
        }
        self.text = self._text()

    def _text(self) -> str:
        parts, start, body = [], 0, []
        for field, member in zip(self.fields, self.members, strict=True):
            if field.kind == "text":
                parts.append(_level_functions(member, field, self.levels[field.name]))
            value = f"x->{member}" if self.named else f"x[{field.place}]"
            tables = {part: f"{member}_{part}_features" for part in field.tables}
            parts += [table("double", tables[part], field.tables[part]) for part in tables]
            body += _field_lines(field, value, tables, start)
            start += field.numbers + sum(features.shape[1] for features in field.tables.values())
        if any(field.tables and field.kind != "text" for field in self.fields):
            parts.insert(0, _DATES)
        if any(field.kind != "text" for field in self.fields):
            parts.insert(0, NO_FAST_MATH)
        if self.named:
            parts.append(self._struct())
        parts.append(f"static inline void $_encode(const {self.row} *x, double *out) {{\n" + "\n".join(body) + "\n}\n")
        return "\n".join(parts)

    @property
    def row(self) -> str:
        """The C type of a row, to which an argument points."""
        return "$_row" if self.named else "double"

    def _struct(self) -> str:
        kinds = {"number": "a number", "boolean": "0 or 1", "date": "local days since 1970-01-01", "text": "a level"}
        lines = []
        for field, member in zip(self.fields, self.members, strict=True):
            kind, description = "int" if field.kind == "text" else "double", kinds[field.kind]
            description = "a duration in days, a time of day since midnight" if field.durations else description
            lines.append(f"  {kind} {member}; /* {_comment(field.name)}: {description} */")
        return "/* A row. NaN is a missing number. */\ntypedef struct {\n" + "\n".join(lines) + "\n} $_row;\n"

    def test_rows(self, rows: Frame) -> tuple[str, str]:
        """Returns the declarations of the self-test's rows, and the lines that set ``x`` to row ``i``."""
        numbers = [field for field in self.fields if field.kind != "text"]
        width = max((field.place for field in self.fields), default=0) + 1
        gaps = np.stack([rows.columns[field.name].missing for field in numbers], axis=1) if numbers else None
        values = {field.name: rows.columns[field.name] for field in self.fields}
        cells = {
            field.name: codes_of(field, values[field.name])
            if field.kind == "text"
            else np.where(values[field.name].missing, 0.0, values[field.name].values)
            for field in self.fields
        }
        if self.named:
            row_text = lambda i: ", ".join(
                number(cells[f.name][i], "int" if f.kind == "text" else "double") for f in self.fields
            )
            listed = ",\n".join("{" + row_text(i) + "}" for i in range(len(rows)))
            declared = f"static const $_row $_test_x[{len(rows)}] = {{{listed}}};\n"
            lines = ["    $_row x = $_test_x[i];"]
        else:
            array = np.zeros((len(rows), width))
            for field in self.fields:
                array[:, field.place] = cells[field.name]
            declared = table("double", "test_x", array) + "\n"
            lines = [f"    double x[{width}];", f"    for (int j = 0; j < {width}; j++) x[j] = $_test_x[i][j];"]
        if gaps is not None and gaps.any():
            declared += table("int", "test_gaps", gaps) + "\n"
            for j, field in enumerate(numbers):
                place = f"x.{self.members[self.fields.index(field)]}" if self.named else f"x[{field.place}]"
                lines.append(f"    if ($_test_gaps[i][{j}]) {place} = zero / zero;")
            lines.insert(0, "    const volatile double zero = 0;")
        return declared, "\n".join(lines)


def _field_lines(field: Field, value: str, tables: dict[str, str], start: int) -> list[str]:
    """Returns the lines that write the features of a column, starting at position ``start``."""
    lines = []
    if field.kind != "text":
        difference = f"{value} - {number(field.start, 'double')}" if field.start else value
        lines.append(f"  out[{start}] = {value} != {value} ? {number(field.center, 'double')} : {difference};")
        if field.masked:
            lines.append(f"  out[{start + 1}] = {value} != {value};")
    start += field.numbers
    for part, name in tables.items():
        last, width = len(field.tables[part]) - 1, field.tables[part].shape[1]
        if part == "level":
            code = f"{value} < 0 || {value} > {last} ? {last - 1} : {value}"
        else:
            code = f"{value} != {value} ? {last} : $_{part}({value})"
        lines.append(f"  for (int k = 0; k < {width}; k++) out[{start} + k] = $_{name}[{code}][k];")
        start += width
    return lines


def _level_functions(member: str, field: Field, names: list[str]) -> str:
    texts, count = (*field.levels, *field.missing), len(field.levels)
    if cut := [level for level in texts if "\0" in level]:
        column = quoted(field.name)
        raise ValueError(f"levels must have no null character in C, got {quoted(cut[0])} of the column {column}")
    constants = ",\n".join(
        f"  $$_{name} /* {_comment(level)} */"
        for name, level in zip(names, (*field.levels, "any other", "none"), strict=True)
    )
    return f"""\
/* Levels of {_comment(field.name)}. */
enum {{
{constants}
}};

/* The level of a canonical text, such as 1 instead of 1.0. A null pointer is a missing value, as are some texts. */
static inline int $_{member}_of(const char *text) {{
  static const char *const texts[] = {{{", ".join(map(string, texts))}}};
  if (!text) return $$_{names[-1]};
  for (int i = 0; i < {len(texts)}; i++) {{
    const char *a = texts[i], *b = text;
    while (*a && *a == *b) a++, b++;
    if (*a == *b) return i < {count} ? i : $$_{names[-1]};
  }}
  return $$_{names[-2]};
}}
"""


def _comment(text: str) -> str:
    """Returns a text on a single line that does not end a comment."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return escaped(printable.replace("*/", "* /").replace("/*", "/ *"))


class _Names:
    """Creates C names that differ from each other."""

    def __init__(self, used: set[str]):
        self.used = set(used)

    def __call__(self, text: str) -> str:
        base = re.sub("[^0-9A-Za-z_]", "_", text[:_LONGEST])
        # Names that begin with two underscores, or with an underscore and a capital, are reserved for the compiler.
        base = f"x{base}" if re.match("$|_$|_[A-Z_]", base) else f"_{base}" if base[0].isdigit() else base
        candidates = itertools.chain([base], (f"{base}_{i}" for i in itertools.count(2)))
        name = next(candidate for candidate in candidates if candidate not in self.used)
        self.used.add(name)
        return name


# Options for fast mathematics of GCC, Clang and MSVC. Under them, a comparison does not recognise NaN.
NO_FAST_MATH = """\
#if (defined __FINITE_MATH_ONLY__ && __FINITE_MATH_ONLY__) || defined _M_FP_FAST
#error "NaN is a missing value here: compile without -ffast-math, -ffinite-math-only or /fp:fast"
#endif
"""

# The algorithm is from https://howardhinnant.github.io/date_algorithms.html. Years begin in March. The calendar repeats
# after 400 years.
_DATES = """\
static inline long long $_whole_days(double days) {
  const long long whole = (long long)days;
  return whole - (whole > days);
}

/* The month of days since 1970-01-01, 0 to 11. */
static inline int $_month(double days) {
  const long long z = $_whole_days(days) + 719468;
  const long long day = z - (z >= 0 ? z : z - 146096) / 146097 * 146097;
  const long long year = (day - day / 1460 + day / 36524 - day / 146096) / 365;
  const long long year_day = day - (365 * year + year / 4 - year / 100);
  return (int)(((5 * year_day + 2) / 153 + 2) % 12);
}

/* The weekday of days since 1970-01-01, 0 for Monday. */
static inline int $_weekday(double days) {
  return (int)((($_whole_days(days) + 3) % 7 + 7) % 7);
}

/* The milliseconds since midnight. */
static inline long long $_milliseconds(double days) {
  return (long long)((days - $_whole_days(days)) * 86400000 + 0.5);
}

/* The hour of the day, 0 to 23. */
static inline int $_hour(double days) { return (int)($_milliseconds(days) / 3600000 % 24); }

/* The minute of the hour, 0 to 59. */
static inline int $_minute(double days) { return (int)($_milliseconds(days) / 60000 % 60); }
"""
