"""The parts of codecs, combinators of codecs, and entropy coders.

Levels, scales, roundings and steps are parts of a `Quantizer`; choices and indices are parts of a
`Sparsifier`; coders are parts of `Coded`.
"""

from jaxcomp.codecs.adaptive import AdaptiveQuantizer
from jaxcomp.codecs.best_of import BestOf
from jaxcomp.codecs.cast import Cast
from jaxcomp.codecs.coded import Coded
from jaxcomp.codecs.combinators import Chained, Clipped, Contractive
from jaxcomp.codecs.cosine import Cosine
from jaxcomp.codecs.embedded import Embedded
from jaxcomp.codecs.identity import Identity
from jaxcomp.codecs.in_rows import InRows
from jaxcomp.codecs.low_rank import LowRank
from jaxcomp.codecs.modulo import Modulo
from jaxcomp.codecs.natural import Natural
from jaxcomp.codecs.parts import Part, Split
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.codecs.random_k import RandomK
from jaxcomp.codecs.rotated import Rotated
from jaxcomp.codecs.sign_bits import Ballot
from jaxcomp.codecs.sparsifier import Sparsifier
from jaxcomp.codecs.staged import Staged
from jaxcomp.codecs.summed import Summed
from jaxcomp.codecs.votes import Votes
from jaxcomp.entropy.coder import Coder
from jaxcomp.entropy.elias import Elias
from jaxcomp.entropy.huffman import Huffman
from jaxcomp.entropy.rans import Rans
from jaxcomp.entropy.rice import Rice
from jaxcomp.numerics.segments import Segments
from jaxcomp.quantize.levels import Float, Levels, MidRise, Sign, Uniform
from jaxcomp.quantize.optimal import Lattice, OptimalTernary
from jaxcomp.quantize.rounding import Nearest, Rounding, Stochastic, Subtractive
from jaxcomp.quantize.scales import (
    L2,
    ClippedMax,
    MaxAbs,
    MeanAbs,
    PNorm,
    RootMeanSquare,
    Scale,
    WideMax,
)
from jaxcomp.quantize.steps import Exact, PowerOfTwo, Steps, TwoLevel
from jaxcomp.quantize.tables import Geometric, LloydMax, UniformThreshold
from jaxcomp.sparsify.choices import AtLeast, Choice, Largest, NearLargest, Sampled
from jaxcomp.sparsify.deltas import Deltas
from jaxcomp.sparsify.fitted import Fitted
from jaxcomp.sparsify.indices import Bitmap, EliasFano, Indices, Packed, Raw, RiceGaps

__all__ = [
    "L2",
    "AdaptiveQuantizer",
    "AtLeast",
    "Ballot",
    "BestOf",
    "Bitmap",
    "Cast",
    "Chained",
    "Choice",
    "Clipped",
    "ClippedMax",
    "Coded",
    "Coder",
    "Contractive",
    "Cosine",
    "Deltas",
    "Elias",
    "EliasFano",
    "Embedded",
    "Exact",
    "Fitted",
    "Float",
    "Geometric",
    "Huffman",
    "Identity",
    "InRows",
    "Indices",
    "Largest",
    "Lattice",
    "Levels",
    "LloydMax",
    "LowRank",
    "MaxAbs",
    "MeanAbs",
    "MidRise",
    "Modulo",
    "Natural",
    "NearLargest",
    "Nearest",
    "OptimalTernary",
    "PNorm",
    "Packed",
    "Part",
    "PowerOfTwo",
    "Quantizer",
    "RandomK",
    "Rans",
    "Raw",
    "Rice",
    "RiceGaps",
    "RootMeanSquare",
    "Rotated",
    "Rounding",
    "Sampled",
    "Scale",
    "Segments",
    "Sign",
    "Sparsifier",
    "Split",
    "Staged",
    "Steps",
    "Stochastic",
    "Subtractive",
    "Summed",
    "TwoLevel",
    "Uniform",
    "UniformThreshold",
    "Votes",
    "WideMax",
]
