"""Builds the Cython modules of ``coli._core``; everything static is in pyproject.toml.

Two facts are found by trying, not by asking names and versions: whether the compiler can build *and
run* an OpenMP program, and which flags it takes.  Without OpenMP the build goes on and is serial;
``coli doctor`` and ``Model.stats()["threads"]`` say so.  No ``-march=native`` and no file-wide
``-mavx*``: each instruction set is a function attribute, so one binary runs everywhere.
"""

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# pip runs this file without its folder on the path; the settings need nothing that is built here.
sys.path.insert(0, str(Path(__file__).parent))

from coli import settings  # noqa: E402
from coli.errors import ColiError  # noqa: E402

# -ffp-contract=off is the contract's first rule (no fused multiply-add) and must be on every source;
# -fno-math-errno lets sqrtf become one instruction without changing its result.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]

OPENMP_PROBE = """
#include <omp.h>
#include <stdio.h>
int main(void) {
    int n = 0;
    #pragma omp parallel num_threads(2)
    {
        #pragma omp atomic
        n++;
    }
    printf("%d", n);
    return n == 2 ? 0 : 1;
}
"""

# (compile flags, link flags): gcc and clang on Linux, then Apple clang with libomp.
OPENMP_FLAGS = [(["-fopenmp"], ["-fopenmp"]), (["-Xpreprocessor", "-fopenmp"], ["-lomp"])]


def probe_openmp(compiler):
    """Compile, link and run a two-thread program; return its flags, or None."""
    for compile_flags, link_flags in OPENMP_FLAGS:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(OPENMP_PROBE)
            try:
                objects = compiler.compile([str(source)], output_dir=folder, extra_postargs=compile_flags)
                compiler.link_executable(objects, "probe", output_dir=folder, extra_postargs=link_flags)
                if subprocess.run([str(Path(folder, "probe"))], stdout=subprocess.DEVNULL, timeout=30).returncode == 0:
                    return compile_flags, link_flags
            except Exception:  # any failure means "not with these flags"; the next pair is tried
                continue
    return None


class BuildExt(build_ext):
    """The compiler is known only here, so flags are chosen here."""

    def build_extensions(self):
        found = None if settings.get("no_openmp") else probe_openmp(self.compiler)
        if found is None:
            print(
                "coli: this compiler cannot build and run an OpenMP program; building the serial CPU path "
                "(one thread). Install libgomp (gcc) or libomp (clang) and build again for more.",
                file=sys.stderr,
            )
        for ext in self.extensions:
            ext.extra_compile_args = FLAGS + (found[0] if found else [])
            ext.extra_link_args = found[1] if found else []
        super().build_extensions()


CORE = Path("coli/_core")


def extension(name, *sources):
    """One module of coli._core; every C header is a dependency, so that an edit rebuilds."""
    return Extension(
        f"coli._core.{name}",
        [str(CORE / f"{name}.pyx"), *(str(CORE / s) for s in sources)],
        include_dirs=[str(CORE), str(CORE / "simd"), str(CORE / "src")],
        depends=[str(p) for pattern in ("simd/*", "src/*", "*.pxd") for p in CORE.glob(pattern)],
        define_macros=[("CYTHON_WITHOUT_ASSERTIONS", None)],
    )


extensions = [
    extension("kernels", "simd/dispatch.c"),
    extension("quantize", "src/search.c"),
    extension("step", "src/team.c", "src/step.c"),
    extension("cudalaunch"),
    extension("routing"),
]
# Threads only help where there is more than one source to compile.
try:
    jobs = settings.get("build_jobs") or os.cpu_count() or 1
except ColiError as error:
    sys.exit(f"coli: {error}")
setup(
    ext_modules=cythonize(
        extensions,
        language_level=3,
        compiler_directives={
            "boundscheck": False,
            "wraparound": False,
            "initializedcheck": False,
            "cdivision": True,
            "embedsignature": True,
        },
    ),
    cmdclass={"build_ext": BuildExt},
    options={"build_ext": {"parallel": jobs}} if platform.system() != "Windows" else {},
)
