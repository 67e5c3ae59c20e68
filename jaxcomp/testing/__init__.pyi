from jaxcomp.testing.bias import (
    assert_contractive as assert_contractive,
    assert_every_part_arrives as assert_every_part_arrives,
    assert_feedback_sends_all as assert_feedback_sends_all,
    assert_unbiased as assert_unbiased,
)
from jaxcomp.testing.codec import (
    assert_declares_hooks as assert_declares_hooks,
    assert_deterministic as assert_deterministic,
    assert_handles_extremes as assert_handles_extremes,
    assert_keeps_shape as assert_keeps_shape,
    assert_shows_nonfinite as assert_shows_nonfinite,
    assert_sums as assert_sums,
    assert_wire_bytes as assert_wire_bytes,
    check_codec as check_codec,
)
from jaxcomp.testing.feedback import check_feedback as check_feedback
from jaxcomp.testing.gates import check_gate as check_gate
from jaxcomp.testing.reducer import check_reducer as check_reducer
from jaxcomp.testing.relay import Relay as Relay
from jaxcomp.testing.rows import (
    assert_follows_first as assert_follows_first,
    assert_handles_largest as assert_handles_largest,
)
from jaxcomp.testing.settings import assert_is_setting as assert_is_setting
from jaxcomp.testing.variance import exact_variance as exact_variance
