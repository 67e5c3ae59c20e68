"""How often loops of programs for TPUs run, whose text does not say it."""

import pytest

import jaxcomp

TPU = """HloModule step, num_partitions=8

%body (p: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %p = (s32[]{:T(128)}, f32[8]{0:T(256)S(1)}, /*index=2*/s32[]{:T(128)}) parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %copy.1 = s32[]{:T(128)} copy(%i)
  %add.1 = s32[]{:T(128)} add(%copy.1, %one), metadata={op_name="while/body/add"}
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %r = f32[8]{0} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%sum
  %n = s32[]{:T(128)} get-tuple-element(%p), index=2
  ROOT %out = (s32[]{:T(128)}, f32[8]{0:T(256)S(1)}, s32[]{:T(128)}) tuple(%add.1, %r, /*index=2*/%n)
}

%goes_on (q: (s32[], f32[8], s32[])) -> pred[] {
  %q = (s32[]{:T(128)}, f32[8]{0:T(256)S(1)}, s32[]{:T(128)}) parameter(0)
  %end = s32[]{:T(128)} constant(6)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %end), direction=LT, metadata={op_name="while/cond/lt"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %copy.2 = s32[]{:T(128)} copy(%zero)
  %begin = (s32[]{:T(128)}, f32[8]{0:T(256)S(1)}, s32[]{:T(128)}) tuple(%copy.2, %x.1, %zero)
  %w = (s32[]{:T(128)}, f32[8]{0}, s32[]{:T(128)}) while(%begin), condition=%goes_on, body=%body
  ROOT %y = f32[8]{0} get-tuple-element(%w), index=1
}
"""  # noqa: E501
ONCE = 2 * 7 * 32 // 8


@pytest.mark.parametrize(
    ("change", "trips"),
    [
        (("", ""), 6),
        (("constant(6)", "constant(1)"), 1),
        (("constant(6)", "constant(-2)"), 0),
        (("constant(1)", "constant(4)"), 2),
        (("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[]{:T(128)} constant(-3)"), 9),
    ],
)
def test_a_loop_that_counts_from_a_constant_to_a_constant(change, trips):
    found = jaxcomp.collective_bytes(TPU.replace(*change, 1))
    assert found == ({"all-reduce": trips * ONCE} if trips else {})
    assert not found.at_least


@pytest.mark.parametrize(
    "change",
    [
        ("direction=LT", "direction=NE"),
        ("constant(6)", "get-tuple-element(%q), index=2"),
        ("add(%copy.1, %one)", "multiply(%copy.1, %one)"),
        ("add(%copy.1, %one)", "add(%n, %one)"),
        ("constant(1)", "constant(0)"),
        ("copy(%zero)", "copy(%copy.2)"),
        ("copy(%zero)", "copy(%nothing)"),
        ("copy(%zero)", "negate(%zero)"),
        ("tuple(%copy.2, %x.1, %zero)", "fusion(%copy.2, %x.1, %zero)"),
        ("ROOT %out", "%out"),
        ("get-tuple-element(%q), index=0", "get-tuple-element(%other), index=0"),
    ],
    ids="{0[1]}".format,
)  # fmt: skip
def test_any_other_loop_counts_once(change):
    assert change[0] in TPU
    found = jaxcomp.collective_bytes(TPU.replace(*change))
    assert found == {"all-reduce": ONCE}
    assert found.at_least
