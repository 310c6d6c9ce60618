"""coli.devices.cuda.compile and the text of the kernels: what can be held without a card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from devices.cuda.nvrtc import compile_text, resources, wrong_arithmetic

import coli
from coli.devices.base import DeviceError
from coli.devices.cuda.compile import ARCHITECTURES, FILES, compile_cubin, source
from coli.devices.cuda.context import PARAMETERS

CONTRACT_CONSTANTS = (
    "1.44269504088896341f", "0.693359375f", "2.12194440e-4f", "1.9875691500e-4f", "1.3981999507e-3f",
    "8.3334519073e-3f", "4.1665795894e-2f", "1.6666665459e-1f", "5.0000001201e-1f", "2.0f / 15.0f",
    "2.0f / 13.0f", "2.0f / 11.0f",
    "2.0f / 9.0f", "2.0f / 7.0f", "2.0f / 5.0f", "2.0f / 3.0f", "12582912.0f",
)  # fmt: skip

BREAKS = {
    "operators with fused multiply-add": ("y[0] = y[1] * y[2] + y[3];", "--fmad=true"),
    "an explicit fma": ("y[0] = __fmaf_rn(y[1], y[2], y[3]);", "--fmad=false"),
    "an approximate division": ("y[0] = __fdividef(y[1], y[2]);", "--fmad=false"),
    "an approximate exponential": ("y[0] = __expf(y[1]);", "--fmad=false"),
    "a rounding up": ("y[0] = __fmul_ru(y[1], y[2]);", "--fmad=false"),
    "subnormals flushed": ("y[0] = y[1] + y[2];", "--ftz=true"),
}


FORMATS = ("i8_row", "i8_group", "i4_row", "i4_group")
KERNELS = {f"gemv_{f}_{t}" for f in FORMATS for t in (1, 2, 4, 8)} | {"gemv_i8_row_tall", "gemv_i8_group_tall"}
KERNELS |= {f"project_{f}" for f in FORMATS}
KERNELS |= {f"{k}_{f}_{t}" for k in ("gemm", "gate_up_tiles") for f in FORMATS for t in (16, 64)}
KERNELS |= {f"{k}_{f}" for k in ("gate_up", "down") for f in FORMATS} | {
    f"dense_{f}" for f in ("f32", "bf16", "f16")
}
KERNELS |= {
    f"attention_{k}_{f}" for k in ("prepare", "scores_one", "scores_rows", "values", "rows") for f in ("f32", "f16")
}
KERNELS |= {
    "pull", "pull_float", "silu_mul", "raise_flag", "read_all", "conv_heads", "deltanet",
    "deltanet_token", "deltanet_rows", "group_experts", "gated_norm", "attention_finish",
}  # fmt: skip
KERNELS |= {f"router_logits_{f}" for f in ("f32", "bf16", "f16")} | {f"choose_experts_{n}" for n in (8, 16, 32)}
KERNELS |= {
    "begin_rows", "residual_norm", "gather_norm", "send_rows", "moe_gate_up", "moe_down", "await_answer",
    "combine_norm",
}  # fmt: skip


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_without_spills(arch):
    """Every kernel becomes machine code for every architecture, with nothing in local memory."""
    _, log = compile_text(source(), arch, "--fmad=false", "--ptxas-options=-v")
    found = resources(log)
    assert set(found) == KERNELS
    assert {name: r for name, r in found.items() if r[1] or r[2]} == {}


@pytest.mark.parametrize("arch", ["compute_75", "compute_90", "compute_120"])
def test_ptx_holds_only_correctly_rounded_arithmetic(arch):
    """No fma, no approximation, no flush to zero, and no multiplication that ptxas might fuse."""
    ptx, _ = compile_text(source(), arch, "--fmad=false")
    assert "mul.rn.f32" in ptx
    assert wrong_arithmetic(ptx) == set()


@pytest.mark.parametrize("what", BREAKS)
def test_ptx_check_bites(what):
    """The check finds a kernel that breaks the contract."""
    statement, flag = BREAKS[what]
    text = 'extern "C" __global__ void k(float *y) { %s }' % statement
    ptx, _ = compile_text(text, "compute_90", flag)
    assert wrong_arithmetic(ptx) != set()


def test_products_read_sixteen_bytes_at_once():
    """Weights come in 16-byte loads past L1: 2 a group of int4, 4 of int8, all before the first product."""
    ptx, _ = compile_text(source(), "compute_90", "--fmad=false")
    for name, loads in (("gemv_i8_row_1", 4), ("gemv_i4_group_1", 2), ("gemv_i8_row_tall", 16)):
        body = ptx[ptx.index(f".entry {name}(") :]
        body = body[: body.index("\n}")]
        assert body.count("ld.global.nc.L1::no_allocate.v4.u32") == loads
        assert body.rindex("ld.global.nc.L1::no_allocate.v4.u32") < body.index("dp4a")


def test_constants_are_those_of_the_cpu():
    """The transcendentals' constants stand in the C source as they stand here."""
    c = (Path(coli.__file__).parent / "_core" / "simd" / "float_ops.inc").read_text()
    cu = source()
    for constant in CONTRACT_CONSTANTS:
        assert constant in c and constant in cu, constant


def test_parameters_match_the_kernels():
    """PARAMETERS lists as many values of the same sizes as each kernel takes."""
    ptx, _ = compile_text(source(), "compute_90", "--fmad=false")
    kinds = {"u64": "8", "u32": "4", "f32": "f", "b8": "A"}
    seen = set()
    for name, declared in re.findall(r"\.entry (\w+)\(([^)]*)\)", ptx):
        kernel = max((k for k in PARAMETERS if name == k or name.startswith(k + "_")), key=len)
        seen.add(kernel)
        found = "".join(kinds[kind] for kind in re.findall(r"\.param(?: \.align \d+)? \.(\w+)", declared))
        assert found == PARAMETERS[kernel].translate(str.maketrans("pqiS", "884A")), name
    assert seen == set(PARAMETERS)


def test_cubin_is_kept_by_its_content(tmp_path, monkeypatch):
    """The same text for the same architecture is one entry of the cache; another text or architecture is another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = 'extern "C" __global__ void k(float *y) { y[0] = 1.0f; }'

    def entries() -> int:
        return sum(b"\x7fELF" in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())

    first = compile_cubin("sm_80", text)
    assert entries() == 1
    assert compile_cubin("sm_80", text) == first
    assert entries() == 1
    assert compile_cubin("sm_80", text.replace("1.0f", "2.0f")) != first
    assert compile_cubin("sm_90", text) != first
    assert entries() == 3


def test_compile_refused_names_the_complaint(tmp_path, monkeypatch):
    """A text that does not compile is a DeviceError with the compiler's first complaint."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DeviceError, match=r"do not compile for sm_90: .*foo"):
        compile_cubin("sm_90", 'extern "C" __global__ void k() { foo(); }')


def test_files_are_all_kernels():
    """Every .cu file is part of the text, the contract first."""
    folder = Path(coli.__file__).parent / "devices" / "cuda" / "kernels"
    assert sorted(FILES) == sorted(p.name for p in folder.glob("*.cu"))
    assert FILES[0] == "contract.cu"
