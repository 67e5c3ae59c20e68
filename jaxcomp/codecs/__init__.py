"""Codecs, combinators of codecs, and entropy coders: the parts that recipes are made of."""

from jaxcomp.codecs.coded import (
    Coded as Coded,
)
from jaxcomp.codecs.combinators import (
    Chained as Chained,
    Clipped as Clipped,
    Contractive as Contractive,
)
from jaxcomp.codecs.cosine import (
    Cosine as Cosine,
)
from jaxcomp.codecs.identity import (
    Identity as Identity,
)
from jaxcomp.codecs.low_rank import (
    LowRank as LowRank,
)
from jaxcomp.codecs.rotated import (
    Rotated as Rotated,
)
from jaxcomp.codecs.sign_bits import (
    Ballot as Ballot,
)
from jaxcomp.entropy.elias import (
    Elias as Elias,
)
from jaxcomp.entropy.huffman import (
    Huffman as Huffman,
)
from jaxcomp.entropy.rans import (
    Rans as Rans,
)
from jaxcomp.entropy.rice import (
    Rice as Rice,
)
