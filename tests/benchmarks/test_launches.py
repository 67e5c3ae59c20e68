"""Launches and their bytes are read from a program's text, and their times from a profile."""

import jax
import jax.numpy as jnp
import pytest
from helpers.paths import ROOT

TEXT = """
HloModule jit_encode

%fused_slice (p: f32[1000]) -> f32[512] {
  %p = f32[1000]{0} parameter(0)
  ROOT %cut = f32[512]{0} slice(%p), slice={[0:512]}
}

%fused_sum (p: f32[1000]) -> f32[] {
  %p = f32[1000]{0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %sum = f32[] reduce(%p, %zero), dimensions={0}, to_apply=%add
}

%body (p: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %p = (s32[], bf16[8]{0}) parameter(0)
  %x = bf16[8]{0} get-tuple-element(%p), index=1
  %y = bf16[8]{0} copy(%x)
  ROOT %out = (s32[], bf16[8]{0}) tuple(%x, %y)
}

%condition (p: (s32[], bf16[8])) -> pred[] {
  ROOT %p = pred[] parameter(0)
}

ENTRY %main (x: f32[1000]) -> u32[1,64] {
  %x = f32[1000]{0} parameter(0)
  %head = f32[512]{0} fusion(%x), kind=kLoop, calls=%fused_slice, metadata={op_name="slice"}
  %total = f32[] fusion(%x), kind=kInput, calls=%fused_sum
  %rows = f32[1,512]{1,0} bitcast(%head)
  %loop = (s32[], bf16[8]{0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %call = u32[1,64]{1,0} custom-call(%rows, %total), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(encode)/jaxcomp_encode/pallas_call"}
  ROOT %out = u32[1,64]{1,0} bitcast(%call)
}
"""
PTX = """
.visible .entry jaxcomp_encode(
	.param .u64 one
)
.reqntid 32
{
	.reg .b32 %r<9>;
	mov.u32 %r1, 0;
$L__BB0_1:
	ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd1 + 0 ];
	st.global.b16 [ %rd2 + 0 ], { %rs1 };
	@%p1 bra $L__BB0_1;
	ret;

}
"""


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def test_every_launch_has_its_kind_and_its_bytes():
    import launches

    found = launches.launches(TEXT)
    assert [(one.kind, one.bytes, one.times) for one in found] == [
        ("fusion", 2 * 512 * 4, 1),  # It reads a slice.
        ("fusion", 1000 * 4 + 4, 1),
        ("copy", 2 * 8 * 2, 3),
        ("kernel", 512 * 4 + 4 + 64 * 4, 1),
    ]
    assert found[-1].name == "jaxcomp_encode"
    record = launches.record(TEXT, 4000)
    assert record["launches"] == {"fusion": 2, "copy": 3, "kernel": 1}
    assert record["passes"] == (4096 + 4004 + 96 + 2308) / 4000
    assert record["largest"][0] == ["head", 1.02]


def test_the_machine_code_of_a_kernel_is_counted(tmp_path, monkeypatch):
    import launches

    said = "ptxas info : Used 40 registers, used 1 barriers, 256 bytes smem, 400 bytes cmem[0]"
    monkeypatch.setattr(launches.aot, "assembled", lambda path: said)
    (tmp_path / "one.ptx").write_text(PTX)
    seen = set()
    found = launches.kernels_of(tmp_path, seen)
    want = launches.Kernel(instructions=5, loops=1, registers=40, shared=256, narrowest=2)
    assert found == {"jaxcomp_encode": want}
    assert launches.kernels_of(tmp_path, seen) == {}  # Of the programs after it.


def test_the_profiler_names_what_runs():
    import gpu_parts

    one = jax.jit(lambda x: jnp.sin(x).sum(axis=0)).lower(jnp.ones((700, 700))).compile()
    x = jnp.ones((700, 700))
    one(x).block_until_ready()
    found = gpu_parts.kernel_times(lambda: jax.block_until_ready(one(x)), "/host:CPU")
    assert any("fusion" in name or "sine" in name for name in found)
    assert all(time >= 0 for time in found.values())
    assert gpu_parts.kernel_times(lambda: jax.block_until_ready(one(x)), "/device:none") == {}


def test_every_codec_is_timed_whole_and_in_parts():
    import gpu_parts

    parts = {part.name: part for part in gpu_parts.parts(10_000)}
    for dtype in gpu_parts.DTYPES:
        assert f"copy, {dtype}: copy" in parts
        for name in gpu_parts.CODECS:
            assert {f"{name}, {dtype}: as called", f"{name}, {dtype}: whole buckets"} <= {*parts}
        assert f"eden 1-bit, {dtype}: quantiser" in parts
        assert f"sign, {dtype}: kernel" in parts
    part = parts["qsgd 3-bit, bfloat16: whole buckets"]
    (x,) = part.inputs()
    assert (x.size, x.dtype, x.nbytes) == (9728, jnp.bfloat16, part.bytes)
