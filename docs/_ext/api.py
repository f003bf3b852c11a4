"""Sphinx directive ``api`` for the reference: a table of the names of a module, followed by an entry for each name.

.. code-block:: rst

   .. api:: jtrees.routing
      :first:

      leaf_index leaf_probabilities

``first`` makes the module itself a target of references. Only one directive of each module on the site has it.
"""

import importlib
import inspect
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from latex2mathml.converter import convert
from sphinx.domains.python import PyObject
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

_FIELD_OF_TUPLE = "Alias for field number"
_ARRAY_LIKE = r"~?[\w.]*\bArray \| ~?[\w.]*\bndarray \| [^,)=]*?\bcomplex\b"
_KINDS = {"func": "function", "meth": "method", "class": "class"}
_INHERITED = r"set_\w+_request|get_metadata_routing"  # of scikit-learn
_OTHERS = "TreeEstimator, MultiOutputMixin, RegressorMixin, ClassifierMixin, object"  # bases without methods on pages


class Api(SphinxDirective):
    """``.. api:: module`` with names as its content, separated by spaces."""

    required_arguments = 1
    option_spec = {"first": directives.flag}  # noqa: RUF012 (required by docutils)
    has_content = True

    def run(self) -> list[Any]:
        module = self.arguments[0]
        names = " ".join(self.content).split()
        lines = [f".. py:module:: {module}", ""] if "first" in self.options else []
        lines += [f".. currentmodule:: {module}", "", f"In ``{module}``:", ""]
        lines += [".. autosummary::", "   :nosignatures:", ""]
        lines += [f"   {name}" for name in names]
        for name in names:
            member = getattr(importlib.import_module(module), name)
            if inspect.isclass(member):
                lines += ["", f".. autoclass:: {name}", "   :members:"]
                if any(base.__name__.startswith("_") for base in member.__bases__):  # which has the methods
                    lines += [f"   :inherited-members: {_OTHERS}"]
                if issubclass(member, Exception):
                    lines += ["   :no-members:"]
            elif callable(member):
                lines += ["", f".. autofunction:: {name}"]
            else:
                lines += ["", f".. autodata:: {name}", "   :no-value:"]
        lines.append("")
        return self.parse_text_to_nodes(StringList(lines, self.get_source_info()[0]))


def skipped(app: Any, object_type: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Skips fields of named tuples, which the docstring of the class lists, and methods that other libraries add."""
    if (inspect.getdoc(member) or "").startswith(_FIELD_OF_TUPLE) or re.fullmatch(_INHERITED, name):
        return True
    return True if name in ("replace", "search") and object_type == "class" and callable(member) else None


def escaped(app: Any, object_type: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Escapes ``|weight|`` and ``(n, *k)`` outside literals, because reStructuredText would read them as markup."""
    for i, line in enumerate(lines):
        parts = re.split(r"(``.*?``)", line)
        for j in range(0, len(parts), 2):
            parts[j] = re.sub(r"(?<![\w*])\*(?=\w+[),])", r"\\*", parts[j].replace("|", r"\|"))
        lines[i] = "".join(parts)


def escaped_types(app: Any, object_type: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    """Escapes shapes in the types of attributes, which napoleon adds."""
    lines[:] = [line.replace("*", "\\*") if line.startswith(":vartype") else line for line in lines]


def shortened(app: Any, object_type: str, name: str, member: Any, options: Any, signature: str, returns: str) -> Any:
    """Replaces the union of types that ``ArrayLike`` stands for by the name ``ArrayLike``."""
    short = lambda text: text and re.sub(_ARRAY_LIKE, "ArrayLike", text)
    return short(signature), short(returns)


def resolved(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Resolves a reference by an alias such as ``jtrees.Regression``, or by a bare name such as ``advance``."""
    if node.get("refdomain") != "py" or node.get("reftype") == "mod":
        return None
    last, entries = node["reftarget"].rpartition(".")[2], {}
    for name, entry in env.domaindata["py"]["objects"].items():
        kind = _KINDS.get(node["reftype"], entry.objtype)
        if name.rpartition(".")[2] == last and not entry.aliased and entry.objtype == kind:
            entries[entry.docname, entry.node_id] = entry
    is_ours = node["reftarget"].startswith("jtrees.") or "." not in node["reftarget"]
    if len(entries) != 1 or not is_ours or "._" in node["reftarget"]:
        return None
    ((page, anchor),) = entries
    return make_refnode(app.builder, node["refdoc"], page, anchor, contnode, last)


def math(display: str) -> Any:
    """Returns a visitor that writes formulas as MathML, which browsers draw without scripts or network access."""

    def visit(translator: Any, node: Any) -> None:
        formula = convert(node.astext(), display=display)
        translator.body.append(f'<div class="formula">{formula}</div>' if display == "block" else formula)
        raise nodes.SkipNode

    return visit


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("api", Api)
    app.add_html_math_renderer("mathml", (math("inline"), None), (math("block"), None))
    for field in PyObject.doc_field_types:
        field.label = "Attributes" if field.name == "variable" else field.label  # the heading in docstrings
    app.connect("autodoc-skip-member", skipped)
    app.connect("autodoc-process-docstring", escaped, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", escaped_types, priority=900)
    app.connect("autodoc-process-signature", shortened)
    app.connect("missing-reference", resolved)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
