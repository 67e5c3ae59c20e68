"""Sharded models: weights, changes of weights, activations and tokens that travel compressed."""

from typing import Any

from claims.claim import Claim, decide

RESULTS, COMMAND = "sharded/sharded.json", "python benchmarks/sharded_training.py"
COMPILED, COMPILE = "aot_sharded/tpu.json", "python benchmarks/aot_sharded.py tpu, after make aot"
SETTING = (
    "A transformer on bytes of source text and a perceptron on handwritten digits, four workers, "
    "five seeds; the held-out loss against dense training of the same seed."
)


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


def _close(found: dict[str, Any], way: str, codecs: str) -> tuple[str, str]:
    """Within half a per cent of dense on both tasks, judged by the whole interval."""
    records = _records(found, way, codecs)
    within = [r["verdict"] == "yes" for r in records.values()]
    fewer = min(r["fewer"] for r in records.values())
    words = f"{codecs}: held-out loss {_said(records)} above dense, {fewer:.1f} times fewer bytes"
    return words, decide(all(within), part=any(within))


def _traffic(found: dict[str, Any]) -> tuple[str, str]:
    sent = {one["name"]: one["bytes"] for one in found["programs"]}
    pair = "8-bit weights, 4-bit gradients"
    once = sent["fully sharded, bfloat16"] / sent[f"fully sharded, {pair}"]
    again = sent["fully sharded in a loop, bfloat16"] / sent[f"fully sharded in a loop, {pair}"]
    words = (
        f"{once:.2f} times fewer bytes than bfloat16 where weights are gathered once, "
        f"{again:.2f} times where the backward pass gathers them again"
    )
    return words, decide(min(once, again) >= 4, part=once >= 2)


def _qsdp(found: dict[str, Any]) -> tuple[str, str]:
    return _close(found, "fully sharded", "8-bit weights, 4-bit gradients")


def _differences(found: dict[str, Any]) -> tuple[str, str]:
    words, verdict = _close(found, "sharded optimizer", "dense up, 4-bit down, Residual")
    direct = _records(found, "fully sharded", "4-bit weights, dense gradients")
    return f"{words}; weights themselves in 4 bits: {_said(direct)} above dense", verdict


def _loco(found: dict[str, Any]) -> tuple[str, str]:
    words, verdict = _close(found, "sharded optimizer", "LoCo")
    without = _records(found, "sharded optimizer", "LoCo without memory")
    return f"{words}; without the memory {_said(without)}", verdict


def _activations(found: dict[str, Any]) -> tuple[str, str]:
    words, verdict = _close(found, "tensor parallel", "8-bit")
    rotated = _records(found, "tensor parallel", "4-bit, rotated")
    return f"{words}; 4 bits, rotated: {_said(rotated)}", verdict


def _tokens(found: dict[str, Any]) -> tuple[str, str]:
    return _close(found, "experts", "mxfp8 dispatch, dense combine")


def _stages(found: dict[str, Any]) -> tuple[str, str]:
    """Whether direct quantisation to few bits loses, as AQ-SGD says of its baseline."""
    four = _records(found, "pipeline", "4-bit")
    eight = _records(found, "pipeline", "8-bit")
    rotated = _records(found, "pipeline", "4-bit, rotated_uniform")
    worse = [r["low"] > 0 for r in four.values()]
    words = (
        f"direct 4 bits: {_said(four)} above dense; rotated: {_said(rotated)}; 8 bits: "
        f"{_said(eight)}"
    )
    return words, decide(all(worse), part=any(worse))


CLAIMS = (
    Claim(
        name="zero-pp-traffic",
        methods=("zero_pp",),
        source="Wang et al., ZeRO++, 2023, abstract",
        claim="Quantised weights and gradients and a second copy within a node reduce the "
        "communication volume of ZeRO by a factor of four.",
        setting="Eight layers of 1,024 × 1,024 over eight TPU v5e, from the compiled program.",
        judge=_traffic,
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
        results=RESULTS,
        command=COMMAND,
        note="The paper's remedy, changes of the activations of each sample, is not built.",
    ),
)
