"""Operations of democratic embeddings, from compiled programs."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import track

import jaxcomp
from claims.claim import Claim, Judged, decide
from claims.descent import least, within
from jaxcomp.layout import batches

SIZES = (64, 256, 1024, 4096, 16_384)
"""Coordinates of one block."""
BITS, REDUNDANCY, SLACK = 3, 1.5, 1.1


def _counted(f: Any, *given: Any) -> dict[str, Any]:
    """Operations that XLA counts, which has each loop's body once, and the turns of its loops."""
    compiled: Any = jax.jit(f).lower(*given).compile()
    text = compiled.as_text()
    turns = re.findall(r'known_trip_count":\{"n":"(\d+)"', text)
    loops = text.count(" while(")
    if len(turns) != loops:
        raise RuntimeError(f"{loops} loops, but {len(turns)} known numbers of turns")
    flops = compiled.cost_analysis()["flops"]
    return {"operations": flops, "turns": sorted(map(int, turns))}


def _encoded(codec: Any, size: int) -> dict[str, Any]:
    def encode(words: Any, x: Any) -> Any:
        key = batches.batch_key(words, 0, 0)
        return codec.encode(key, x, jnp.full(1, size), ())[0]

    words = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return _counted(encode, words, jax.ShapeDtypeStruct((1, size), jnp.float32))


def _frame(block: int, size: int) -> dict[str, Any]:
    """A product with a dense frame, as one step of a random orthonormal one needs two of."""
    frame = jax.ShapeDtypeStruct((block, size), jnp.float32)
    return _counted(lambda s, x: s @ x, frame, jax.ShapeDtypeStruct((size,), jnp.float32))


def _measure() -> dict[str, Any]:
    rows = []
    for block in track(SIZES, description="operations"):
        size = int(block / REDUNDANCY)
        near = jaxcomp.ndsc(BITS, bucket_size=block, dithered=False)
        democratic = jaxcomp.dsc(BITS, bucket_size=None, redundancy=REDUNDANCY, dithered=False)
        rows.append({
            "block": block,
            "size": size,
            "near-democratic": _encoded(dataclasses.replace(near, block=block), block),
            "democratic": _encoded(dataclasses.replace(democratic, block=block), size),
            "dense frame": _frame(block, size),
        })  # fmt: skip
    return {"numbers": {"rows": rows}}


def _total(row: dict[str, Any], name: str) -> float:
    """Operations with loops counted as often as they turn, or more: the rest is counted so too."""
    return row[name]["operations"] * math.prod(row[name]["turns"])


def _judged(numbers: dict[str, Any]) -> Judged:
    first, last = numbers["rows"][0], numbers["rows"][-1]
    begin, end = first["block"], last["block"]
    limits = {
        "near-democratic": end / begin * math.log2(end) / math.log2(begin),
        "democratic": (last["size"] / first["size"]) ** 2,
    }
    words, margins = [], []
    for name, limit in limits.items():
        grown = _total(last, name) / _total(first, name)
        each = ", ".join(
            f"{_total(row, name) / row['block'] / math.log2(row['block']):.1f}"
            for row in numbers["rows"]
        )
        words.append(
            f"{name} {grown:,.0f} times as many (allowed {SLACK} × {limit:,.0f}), {each} n log₂ n, "
            f"loops of {math.prod(last[name]['turns'])} turns"
        )
        margins.append(within(SLACK * limit, grown))
    dense = last["dense frame"]["operations"]
    ratios = ", ".join(f"{dense / _total(last, name):.1f} times {name} coding's" for name in limits)
    met = [margin >= 1 for margin in margins]
    text = (
        f"operations from {begin} to {end:,} coordinates: {'; '.join(words)}; one product with a "
        f"dense frame of {end:,} rows has {ratios}"
    )
    return Judged(text, decide(all(met), part=any(met)), least(*margins))


CLAIMS = (
    Claim(
        name="democratic-cost",
        methods=("dsc", "ndsc", "DGD-DEF"),
        source="Saha, Pilanci and Goldsmith, Efficient randomized subspace embeddings for "
        "distributed optimization under a communication budget, 2022, abstract",
        claim="Democratic source coding needs O(n²) multiplications, and its near-democratic "
        "relaxation by Hadamard matrices O(n log n) additions.",
        setting=f"One block of {SIZES[0]} to {SIZES[-1]:,} coordinates, {BITS} bits, {REDUNDANCY} "
        "coordinates an element for democratic coding: the operations that XLA counts in the "
        "compiled encoder, with each loop as often as it turns.",
        judge=_judged,
        criterion="from 64 to 16,384: near-democratic grows ≤ 1.1 times as n log n, democratic ≤ "
        "1.1 times as n²",
        fixed="44d7364d",
        run=_measure,
        minutes=0.5,
        note="Operations are additions, products with ±1, hashes of the random signs and those of "
        "the quantiser. The library's frames are Hadamard ones for both codes, and its iteration "
        "has a fixed number of turns, where the paper's grows with log n. Operations outside of a "
        "loop are counted as often as those in it. Longer vectors are cut into blocks, so that "
        "their operations grow as n.",
    ),
)
