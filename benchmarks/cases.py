"""The codecs that are timed, and the number of workers."""

import jaxcomp

WORKERS = 8
CODECS = {
    "qsgd_inf 4-bit": jaxcomp.qsgd_inf(bits=4),
    "qsgd_inf 8-bit": jaxcomp.qsgd_inf(bits=8),
    "qsgd 4-bit": jaxcomp.qsgd(bits=4),
    "blockwise 4-bit": jaxcomp.blockwise(bits=4),
    "blockwise 8-bit": jaxcomp.blockwise(bits=8),
    "qsgd_inf 4-bit, subtractive": jaxcomp.qsgd_inf(bits=4, levels="midrise", subtractive=True),
    "nuqsgd 4-bit": jaxcomp.nuqsgd(bits=4),
    "natural_dithering 4-bit": jaxcomp.natural_dithering(bits=4),
    "natural 9-bit": jaxcomp.natural(),
    "alq 4-bit": jaxcomp.alq(bits=4),
    "mxfp4": jaxcomp.mx("mxfp4"),
    "nvfp4": jaxcomp.mx("nvfp4"),
    "eden 4-bit": jaxcomp.eden(bits=4),
    "drive": jaxcomp.drive(),
    "ndsc 4-bit": jaxcomp.ndsc(bits=4),
    "sign": jaxcomp.sign(),
    "terngrad": jaxcomp.terngrad(),
    "threshold_ternary, heuristic": jaxcomp.threshold_ternary("heuristic"),
    "random_k 10 %": jaxcomp.random_k(fraction=0.1),
    "cast bfloat16": jaxcomp.cast("bfloat16"),
    "cast float8_e4m3fn": jaxcomp.cast("float8_e4m3fn"),
    "top_k 1 %": jaxcomp.top_k(fraction=0.01),
    "top_k 0.1 %": jaxcomp.top_k(fraction=0.001),
    "top_k 1 %, 4-bit values": jaxcomp.top_k(
        fraction=0.01, values=jaxcomp.qsgd_inf(bits=4, bucket_size=128)
    ),
    "sidco 1 %": jaxcomp.sidco(fraction=0.01),
    "sidco 0.1 %": jaxcomp.sidco(fraction=0.001),
    "sidco 0.1 %, pareto": jaxcomp.sidco(fraction=0.001, law="pareto"),
    "dgc 1 %": jaxcomp.dgc(fraction=0.01),
    "dgc 0.1 %": jaxcomp.dgc(fraction=0.001),
    "threshold 2.6": jaxcomp.threshold(2.6, fraction=0.012),
}

KERNEL_CODECS = {
    "qsgd_inf 4-bit": jaxcomp.qsgd_inf(bits=4),
    "qsgd_inf 8-bit": jaxcomp.qsgd_inf(bits=8),
    "qsgd 3-bit": jaxcomp.qsgd(bits=3),
    "nuqsgd 4-bit": jaxcomp.nuqsgd(bits=4),
    "qsgd_inf 3-bit, mid-rise": jaxcomp.qsgd_inf(bits=3, levels="midrise"),
    "sign": jaxcomp.sign(),
    "terngrad, buckets of 640": jaxcomp.terngrad(bucket_size=640),
}
"""One for each scale, rounding, and way of packing."""
