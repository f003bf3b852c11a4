"""The line at the end of a run, which counts what was skipped by what it needs."""

from types import SimpleNamespace

import pytest

from tests import needs


def skipped(reason):
    return SimpleNamespace(longrepr=("tests/test_any.py", 1, f"Skipped: {reason}"))


def test_skipped_tests_are_counted_by_what_they_need():
    with pytest.raises(pytest.skip.Exception) as data:
        needs.check(None, "data sets")
    with pytest.raises(pytest.skip.Exception) as package:
        needs.package("jtrees_missing")
    needs.check("/usr/bin/node", "Node.js")
    reasons = [data.value.msg, needs.mark(None, "Node.js").kwargs["reason"], package.value.msg, data.value.msg]
    line = needs.summary(map(skipped, [*reasons, "has no columns of several types"]))
    assert line == "skipped tests by what they need: 1 Node.js, 2 data sets, 1 the package jtrees_missing"
    assert needs.summary([]) == needs.summary([skipped("the other holds a function")]) == ""
    assert needs.mark("/usr/bin/node", "Node.js").args == (False,)
