from jaxcomp.codecs.adaptive import AdaptiveQuantizer as AdaptiveQuantizer
from jaxcomp.codecs.best_of import BestOf as BestOf
from jaxcomp.codecs.cast import Cast as Cast
from jaxcomp.codecs.coded import Coded as Coded
from jaxcomp.codecs.combinators import (
    Chained as Chained,
    Clipped as Clipped,
    Contractive as Contractive,
)
from jaxcomp.codecs.cosine import Cosine as Cosine
from jaxcomp.codecs.embedded import Embedded as Embedded
from jaxcomp.codecs.identity import Identity as Identity
from jaxcomp.codecs.in_rows import InRows as InRows
from jaxcomp.codecs.low_rank import LowRank as LowRank
from jaxcomp.codecs.modulo import Modulo as Modulo
from jaxcomp.codecs.natural import Natural as Natural
from jaxcomp.codecs.parts import Part as Part, Split as Split
from jaxcomp.codecs.quantizer import Quantizer as Quantizer
from jaxcomp.codecs.random_k import RandomK as RandomK
from jaxcomp.codecs.rotated import Rotated as Rotated
from jaxcomp.codecs.sign_bits import Ballot as Ballot
from jaxcomp.codecs.sparsifier import Sparsifier as Sparsifier
from jaxcomp.codecs.staged import Staged as Staged
from jaxcomp.codecs.summed import Summed as Summed
from jaxcomp.codecs.votes import Votes as Votes
from jaxcomp.entropy.coder import Coder as Coder
from jaxcomp.entropy.elias import Elias as Elias
from jaxcomp.entropy.huffman import Huffman as Huffman
from jaxcomp.entropy.rans import Rans as Rans
from jaxcomp.entropy.rice import Rice as Rice
from jaxcomp.numerics.segments import Segments as Segments
from jaxcomp.quantize.levels import (
    Float as Float,
    Levels as Levels,
    MidRise as MidRise,
    Sign as Sign,
    Uniform as Uniform,
)
from jaxcomp.quantize.optimal import Lattice as Lattice, OptimalTernary as OptimalTernary
from jaxcomp.quantize.rounding import (
    Nearest as Nearest,
    Rounding as Rounding,
    Stochastic as Stochastic,
    Subtractive as Subtractive,
)
from jaxcomp.quantize.scales import (
    L2 as L2,
    ClippedMax as ClippedMax,
    MaxAbs as MaxAbs,
    MeanAbs as MeanAbs,
    PNorm as PNorm,
    RootMeanSquare as RootMeanSquare,
    Scale as Scale,
    WideMax as WideMax,
)
from jaxcomp.quantize.steps import (
    Exact as Exact,
    PowerOfTwo as PowerOfTwo,
    Steps as Steps,
    TwoLevel as TwoLevel,
)
from jaxcomp.quantize.tables import (
    Geometric as Geometric,
    LloydMax as LloydMax,
    UniformThreshold as UniformThreshold,
)
from jaxcomp.sparsify.choices import (
    AtLeast as AtLeast,
    Choice as Choice,
    Largest as Largest,
    NearLargest as NearLargest,
    Sampled as Sampled,
)
from jaxcomp.sparsify.deltas import Deltas as Deltas
from jaxcomp.sparsify.fitted import Fitted as Fitted
from jaxcomp.sparsify.indices import (
    Bitmap as Bitmap,
    EliasFano as EliasFano,
    Indices as Indices,
    Packed as Packed,
    Raw as Raw,
    RiceGaps as RiceGaps,
)
from jaxcomp.sparsify.visible import Visible as Visible
