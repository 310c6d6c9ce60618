"""The index of the acceptance cases."""

from __future__ import annotations

import re

import pytest
from cases import index


@pytest.mark.parametrize("case", sorted(set(index.TITLES) - index.SERVER))
def test_case_without_a_server_has_a_test(case):
    """Every case that needs no server is some test's, by its number."""
    assert index.covering()[case]


def test_page_names_tests_that_exist():
    """Whoever renames a test writes the page anew: python tests/cases/index.py."""
    named = re.findall(r"`(\w[\w/]*\.py)(?:::(\w+))?`", index.PAGE.read_text(encoding="utf-8").partition("| --- |")[2])
    assert len(named) > 80
    for path, test in named:
        file = index.TESTS / path
        assert f"def {test}(" in file.read_text(encoding="utf-8") if test else file.exists()
