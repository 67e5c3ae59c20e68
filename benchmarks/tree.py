"""Times codecs that take leaves whole on models of many leaves, beside a copy of them.

    python benchmarks/tree.py

The trees are those of ResNet-50's and GPT-2's gradients, Gaussian, of which the default policy
compresses the leaves of two dimensions and more. Encoding and decoding run in turns with a numpy
copy of as many floats, into warm buffers. Page faults are those of one encoding and one decoding,
and seconds of the processor those of tracing and compiling both, without a compilation cache.
"""

import resource
import time
from typing import Any

import jax
import numpy as np
import reporting
import timing

import jaxcomp
from jaxcomp.planning.models import gpt2, resnet50

TREES = {"ResNet-50": resnet50, "GPT-2": gpt2}

CODECS = {
    "top_k 1 %": jaxcomp.top_k(),
    "dgc 0.1 %": jaxcomp.dgc(),
    "sidco 0.1 %": jaxcomp.sidco(),
    "threshold": jaxcomp.threshold(2.6, fraction=0.012),
    "terngrad": jaxcomp.terngrad(),
    "qsgd_inf 4-bit": jaxcomp.qsgd_inf(bits=4),
}

COLUMNS = (
    "tree {tree} | codec {codec} | encode / copy {encode:.1f} | decode / copy {decode:.1f} | "
    "both / copy {both:.1f} | both ms {both_ms:.0f} | copy ms {copy_ms:.1f} | "
    "page faults {faults:,.0f} | temporary MB {temporary:.0f} | compile CPU s {compiling:.1f}"
)


def measure(codec: Any, tree: Any, repeats: int) -> dict[str, float]:
    """Times as multiples of a copy, milliseconds, page faults, memory, and seconds to compile."""
    policy = jaxcomp.Policy(codec)

    def encode(tree: Any) -> Any:
        return jaxcomp.encode(policy, 0, tree)

    def decode(payload: Any) -> Any:
        return jaxcomp.decode(policy, 0, payload, tree)

    begin = time.process_time()
    encoder = jax.jit(encode).lower(tree).compile()
    payload = encoder(tree)
    decoder = jax.jit(decode).lower(payload).compile()
    compiling = time.process_time() - begin
    analysed: list[Any] = [one.memory_analysis() for one in (encoder, decoder)]
    data = np.zeros(sum(leaf.size for leaf in jax.tree.leaves(tree)), np.float32)
    runs = {"copy": timing.copy_of(data), "encode": timing.into_warm(encode, tree)}
    runs["decode"] = timing.into_warm(decode, payload)
    took = timing.in_turns(runs, repeats)
    copy, encoding, decoding = (took[name].median for name in ("copy", "encode", "decode"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    runs["encode"](), runs["decode"]()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return {
        "encode": encoding / copy,
        "decode": decoding / copy,
        "both": (encoding + decoding) / copy,
        "both_ms": 1e3 * (encoding + decoding),
        "copy_ms": 1e3 * copy,
        "faults": faults,
        "compiling": compiling,
        "temporary": max(one.temp_size_in_bytes for one in analysed) / 1e6,
    }


def main() -> None:
    options = reporting.options(
        __doc__,
        reporting.RESULTS / "cpu" / "tree",
        tree=(TREES, "some of them"),
        codec=(CODECS, "some of them"),
        repeats=(7, "runs that a median is taken over"),
    )
    rows = []
    for name in options.tree:
        rng = np.random.default_rng(0)
        tree = jax.tree.map(
            lambda x, rng=rng: rng.standard_normal(x.shape, np.float32), TREES[name]()
        )
        tree = jax.device_put(tree)
        rows += [
            {"tree": name, "codec": codec} | measure(CODECS[codec], tree, options.repeats)
            for codec in options.codec
        ]
    title = "The gradients of models, as multiples of a copy"
    reporting.show(reporting.Table(title, COLUMNS, rows), {"rows": rows}, options.out / "tree.md")


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    main()
