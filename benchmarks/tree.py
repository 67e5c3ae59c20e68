"""Times codecs that take leaves whole on a model of many shapes, beside a copy of it.

    python benchmarks/tree.py

The tree is that of ResNet-50's gradients, Gaussian, of which the default policy compresses the
leaves of two dimensions and more. Encoding and decoding run in turns with a numpy copy of as many
floats, into warm buffers.
"""

from typing import Any

import jax
import numpy as np
import reporting
import timing

import jaxcomp
from jaxcomp.planning.models import resnet50

CODECS = {
    "top_k 1 %": jaxcomp.top_k(),
    "dgc 0.1 %": jaxcomp.dgc(),
    "sidco 0.1 %": jaxcomp.sidco(),
    "threshold": jaxcomp.threshold(2.6, fraction=0.012),
    "terngrad": jaxcomp.terngrad(),
    "qsgd_inf 4-bit": jaxcomp.qsgd_inf(bits=4),
}

COLUMNS = (
    "codec {codec} | encode / copy {encode:.1f} | decode / copy {decode:.1f} | "
    "both / copy {both:.1f} | both ms {both_ms:.0f} | copy ms {copy_ms:.1f}"
)


def measure(codec: Any, tree: Any, repeats: int) -> dict[str, float]:
    """Times as multiples of a copy, and milliseconds."""
    policy = jaxcomp.Policy(codec)
    payload = jax.jit(lambda tree: jaxcomp.encode(policy, 0, tree))(tree)
    data = np.zeros(sum(leaf.size for leaf in jax.tree.leaves(tree)), np.float32)

    def encode(tree: Any) -> Any:
        return jaxcomp.encode(policy, 0, tree).batches

    def decode(payload: Any) -> Any:
        return jaxcomp.decode(policy, 0, payload, tree)

    runs = {"copy": timing.copy_of(data), "encode": timing.into_warm(encode, tree)}
    runs["decode"] = timing.into_warm(decode, payload)
    took = timing.in_turns(runs, repeats)
    copy, encoding, decoding = (took[name].median for name in ("copy", "encode", "decode"))
    return {
        "encode": encoding / copy,
        "decode": decoding / copy,
        "both": (encoding + decoding) / copy,
        "both_ms": 1e3 * (encoding + decoding),
        "copy_ms": 1e3 * copy,
    }


def main() -> None:
    options = reporting.options(
        __doc__,
        reporting.RESULTS / "cpu" / "tree",
        codec=(CODECS, "some of them"),
        repeats=(11, "runs that a median is taken over"),
    )
    rng = np.random.default_rng(0)
    tree = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), resnet50())
    tree = jax.device_put(tree)
    rows = [
        {"codec": name} | measure(CODECS[name], tree, options.repeats) for name in options.codec
    ]
    title = "ResNet-50's gradients, as multiples of a copy"
    reporting.show(reporting.Table(title, COLUMNS, rows), {"rows": rows}, options.out / "tree.md")


if __name__ == "__main__":
    main()
