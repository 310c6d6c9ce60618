"""setup.py: what its variables may hold.  That it builds is seen by everything else; Cython need not be here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("text", ["many", "0", "-1", "1.5"])
def test_build_jobs_that_are_no_count_are_one_line(text, tmp_path):
    """The build ends before it begins, with one line that says what is accepted; also where pip runs the file."""
    code = "import sys, types; sys.modules['Cython'] = sys.modules['Cython.Build'] = types.SimpleNamespace(cythonize=0)"
    code += f"; __file__ = {str(ROOT / 'setup.py')!r}; exec(compile(open(__file__).read(), __file__, 'exec'))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, env=os.environ | {"COLI_BUILD_JOBS": text},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == f"coli: COLI_BUILD_JOBS={text!r} is not valid: expected a number of processes, 1 or more\n"
    assert list(tmp_path.iterdir()) == []
