from jaxcomp.collectives.costs import LinkBytes as LinkBytes, wire_bytes as wire_bytes
from jaxcomp.collectives.moves import all_to_all as all_to_all, ppermute as ppermute
from jaxcomp.collectives.shards import all_gather as all_gather, psum_scatter as psum_scatter
from jaxcomp.collectives.sums import pmean as pmean, psum as psum, pvary as pvary
