"""Sharded models: weights, changes of weights, activations and tokens that travel compressed."""

from typing import Any

from claims.claim import Claim, Judged, decide
from claims.descent import least, within

RESULTS, COMMAND = "sharded/sharded.json", "python benchmarks/sharded_training.py"
COMPILED, COMPILE = "aot_sharded/tpu.json", "python benchmarks/aot_sharded.py tpu, after make aot"
SETTING = (
    "A transformer on bytes of source text and a perceptron on handwritten digits, four workers, "
    "five seeds; the held-out loss against dense training of the same seed."
)
CLOSE = "95 % interval of the held-out loss ends at most 0.5 % above dense, on both tasks"


def _records(found: dict[str, Any], way: str, codecs: str) -> dict[str, dict[str, Any]]:
    """The records of both tasks."""
    import sharded_training

    every = sharded_training.summary(found["runs"])
    return {r["task"]: r for r in every if (r["way"], r["codecs"]) == (way, codecs)}


def _said(records: dict[str, dict[str, Any]]) -> str:
    return ", ".join(
        f"{task} {r['above']:+.2f} % ({r['low']:+.2f} to {r['high']:+.2f})"
        for task, r in records.items()
    )


def _close(found: dict[str, Any], way: str, codecs: str) -> Judged:
    """Within half a per cent of dense on both tasks, judged by the whole interval."""
    import sharded_training

    records = _records(found, way, codecs)
    close = [r["verdict"] == "yes" for r in records.values()]
    fewer = min(r["fewer"] for r in records.values())
    words = f"{codecs}: held-out loss {_said(records)} above dense, {fewer:.1f} times fewer bytes"
    margin = least(*(within(sharded_training.BOUND, r["high"]) for r in records.values()))
    return Judged(words, decide(all(close), part=any(close)), margin)


def _beside(one: Judged, words: str) -> Judged:
    return one._replace(words=f"{one.words}; {words}")


def _traffic(found: dict[str, Any]) -> Judged:
    sent = {one["name"]: one["bytes"] for one in found["programs"]}
    pair = "8-bit weights, 4-bit gradients"
    once = sent["fully sharded, bfloat16"] / sent[f"fully sharded, {pair}"]
    again = sent["fully sharded in a loop, bfloat16"] / sent[f"fully sharded in a loop, {pair}"]
    words = (
        f"{once:.2f} times fewer bytes than bfloat16 where weights are gathered once, "
        f"{again:.2f} times where the backward pass gathers them again"
    )
    verdict = decide(min(once, again) >= 4, part=once >= 2)
    return Judged(words, verdict, least(min(once, again) / 4))


def _qsdp(found: dict[str, Any]) -> Judged:
    return _close(found, "fully sharded", "8-bit weights, 4-bit gradients")


def _differences(found: dict[str, Any]) -> Judged:
    one = _close(found, "sharded optimizer", "dense up, 4-bit down, Residual")
    direct = _records(found, "fully sharded", "4-bit weights, dense gradients")
    return _beside(one, f"weights themselves in 4 bits: {_said(direct)} above dense")


def _loco(found: dict[str, Any]) -> Judged:
    one = _close(found, "sharded optimizer", "LoCo")
    without = _records(found, "sharded optimizer", "LoCo without memory")
    return _beside(one, f"without the memory {_said(without)}")


def _activations(found: dict[str, Any]) -> Judged:
    one = _close(found, "tensor parallel", "8-bit")
    rotated = _records(found, "tensor parallel", "4-bit, rotated")
    return _beside(one, f"4 bits, rotated: {_said(rotated)}")


def _tokens(found: dict[str, Any]) -> Judged:
    return _close(found, "experts", "mxfp8 dispatch, dense combine")


def _stages(found: dict[str, Any]) -> Judged:
    """Whether direct quantisation to few bits loses, as AQ-SGD says of its baseline."""
    four = _records(found, "pipeline", "4-bit")
    eight = _records(found, "pipeline", "8-bit")
    rotated = _records(found, "pipeline", "4-bit, rotated_uniform")
    worse = [r["low"] > 0 for r in four.values()]
    words = (
        f"direct 4 bits: {_said(four)} above dense; rotated: {_said(rotated)}; 8 bits: "
        f"{_said(eight)}"
    )
    # An interval is above zero where its mean is more than half of its length.
    ratios = [r["above"] / (r["above"] - r["low"]) for r in four.values()]
    return Judged(words, decide(all(worse), part=any(worse)), least(*ratios))


CLAIMS = (
    Claim(
        name="zero-pp-traffic",
        methods=("zero_pp",),
        source="Wang et al., ZeRO++, 2023, abstract",
        claim="Quantised weights and gradients and a second copy within a node reduce the "
        "communication volume of ZeRO by a factor of four.",
        setting="Eight layers of 1,024 × 1,024 over eight TPU v5e, from the compiled program.",
        judge=_traffic,
        criterion="at least 4 times fewer bytes than bfloat16, with weights gathered "
        "once and gathered again",
        why="ours",
        results=COMPILED,
        command=COMPILE,
        note="The second copy within a node, which saves the second gathering of the weights "
        "between nodes, is not built.",
    ),
    Claim(
        name="qsdp-accuracy",
        methods=("qsdp",),
        source="Markov et al., Quantized Distributed Training of Large Models with Convergence "
        "Guarantees, 2023, abstract",
        claim="Sharded training with weights and gradients in 8 bits preserves accuracy.",
        setting=f"{SETTING} Weights have 8 bits, gradients 4.",
        judge=_qsdp,
        criterion=CLOSE,
        why="false",
        results=RESULTS,
        command=COMMAND,
        note="With fewer bits of gradients than the paper's.",
    ),
    Claim(
        name="sdp4bit-differences",
        methods=("sdp4bit",),
        source="Jia et al., SDP4Bit, 2024, abstract",
        claim="Changes of weights in 4 bits have negligible impact on the end-to-end loss.",
        setting=SETTING,
        judge=_differences,
        criterion=CLOSE,
        results=RESULTS,
        command=COMMAND,
    ),
    Claim(
        name="loco-memory",
        methods=("loco",),
        source="Xie et al., LoCo, 2024, abstract",
        claim="Gradients in 4 bits with a memory in 8 bits train as well as in full precision.",
        setting=SETTING,
        judge=_loco,
        criterion=CLOSE,
        why="false",
        results=RESULTS,
        command=COMMAND,
    ),
    Claim(
        name="tensor-parallel-activations",
        methods=("tensor_parallel",),
        source="Li et al., Flash Communication, 2024, abstract",
        claim="Activations of tensor-parallel blocks can be sent in few bits with negligible loss "
        "of quality.",
        setting=SETTING,
        judge=_activations,
        criterion=CLOSE,
        results=RESULTS,
        command=COMMAND,
        note="The paper is about inference; here the gradients of the activations travel in as few "
        "bits.",
    ),
    Claim(
        name="mxfp8-tokens",
        methods=("experts",),
        source="DeepSeek-AI, DeepSeek-V3, 2024, section 3.3",
        claim="Training with tokens that are dispatched in 8 bits stays within 0.25 % of the loss "
        "in bfloat16.",
        setting=f"{SETTING} Judged against 0.5 %.",
        judge=_tokens,
        criterion=CLOSE,
        why="size",
        results=RESULTS,
        command=COMMAND,
        note="The paper's figure is for training in FP8 throughout.",
    ),
    Claim(
        name="pipeline-activations",
        methods=("pipeline",),
        source="Wang et al., AQ-SGD, 2022, abstract and section 4",
        claim="Sending activations directly in 2 to 4 bits slows the training or fails.",
        setting=SETTING,
        judge=_stages,
        criterion="95 % interval of the held-out loss with direct 4 bits is above that "
        "of dense, on both tasks",
        why="size",
        results=RESULTS,
        command=COMMAND,
        note="The paper's remedy, changes of the activations of each sample, is not built.",
    ),
)
