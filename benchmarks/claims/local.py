"""Local steps: DiLoCo and its relatives, and averages once a round."""

import statistics
from collections.abc import Sequence
from typing import Any

from claims.claim import Claim, Judged, decide, untried
from claims.descent import least, within

SEEDS = 5
LOCAL, LOCAL_COMMAND = "local/local.json", "python benchmarks/local_methods.py"
NETWORK = "network/seeds/local.json"
OVERLAP = "network/overlap.json"
_RUN = "sudo .venv/bin/python benchmarks/network/run.py --rates 100mbit --processes 4 --only"
NETWORK_COMMAND = f"{_RUN} local --out benchmarks/results/network/seeds --methods"
SLOW_WIRE = (
    "The byte model of the examples (5.1 million parameters) to 4.0 bits a byte, by four processes "
    "over shaped links of 100 Mbit/s, five seeds; each method's rates are tuned on this task."
)
DIGITS = (
    "A perceptron on handwritten digits, eight workers, 1,600 steps of SGD with momentum whose "
    "rate "
    "falls twice, five seeds."
)
BYTES = "A byte model of 0.46 million parameters, four workers, 20 rounds of 15 steps, five seeds."


def _methods(found: dict[str, Any], rate: str = "100mbit", processes: int = 4) -> dict[str, Any]:
    [cell] = [c for c in found["cells"] if (c["rate"], c["processes"]) == (rate, processes)]
    return cell["methods"]


def _spread(values: Sequence[float], form: str) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def _same_rate(found: dict[str, Any]) -> Judged:
    rounds, every = found["adaptive"]["rounds of 16"], found["adaptive"]["every step"]
    holds = statistics.median(rounds["loss"]) <= max(every["loss"])
    fewer = every["exchanges"][0] / rounds["exchanges"][0]
    words = (
        f"{fewer:.0f} times fewer exchanges; training loss {_spread(rounds['loss'], '.4f')}, with "
        f"an exchange in every step {_spread(every['loss'], '.4f')}"
    )
    lower = within(max(every["loss"]), statistics.median(rounds["loss"]))
    return Judged(words, decide(holds and fewer >= 10, part=holds), least(fewer / 10, lower))


def _variance(found: dict[str, Any]) -> Judged:
    """Against constant rounds that exchange about as often: a bit less, and a bit more."""
    one, fewer, more = (found["adaptive"][n] for n in ("ADPSGD", "rounds of 12", "rounds of 8"))
    variance = statistics.median(one["variance"])
    saved = statistics.median(one["exchanges"]) < statistics.median(more["exchanges"])
    holds = saved and variance < min(more["variance"])
    words = (
        f"variance {_spread(one['variance'], '.4f')} with "
        f"{statistics.median(one['exchanges']):.0f} exchanges; rounds of 8: "
        f"{_spread(more['variance'], '.4f')} with {more['exchanges'][0]}; rounds of 12: "
        f"{_spread(fewer['variance'], '.4f')} with {fewer['exchanges'][0]}"
    )
    less = statistics.median(more["exchanges"]) / statistics.median(one["exchanges"])
    return Judged(words, decide(holds), least(less, within(min(more["variance"]), variance)))


def _as_good_as_synchronous(found: dict[str, Any], name: str, bytes_fewer: float) -> Judged:
    """Fewer bytes to the same score, and as many steps."""
    methods = _methods(found)
    local, dense = methods[name], methods["dense"]
    steps, _, sent = zip(*local["ends"], strict=True)
    all_steps, _, all_sent = zip(*dense["ends"], strict=True)
    fewer = statistics.median(all_sent) / statistics.median(sent)
    faster = statistics.median(dense["seconds"]) / statistics.median(local["seconds"])
    words = (
        f"{fewer:.0f} times fewer bytes and {faster:.1f} times less time than dense to the same "
        f"score, in {_spread(steps, '.0f')} steps; dense takes {_spread(all_steps, '.0f')}"
    )
    reached = local["reached"] and dense["reached"]
    enough = reached and fewer >= bytes_fewer
    level = statistics.median(steps) <= 1.1 * statistics.median(all_steps)
    sooner = within(1.1 * statistics.median(all_steps), statistics.median(steps))
    margin = least(fewer / bytes_fewer, sooner) if reached else least(0.0)
    return Judged(words, decide(enough and level, part=enough), margin)


def _diloco(found: dict[str, Any]) -> Judged:
    return _as_good_as_synchronous(found, "DiLoCo, 4-bit two shots", 50)


def _streaming(found: dict[str, Any]) -> Judged:
    return _as_good_as_synchronous(found, "streaming DiLoCo, 4-bit", 100)


def _sparse_bytes(found: dict[str, Any]) -> Judged:
    fast, slow = (_methods(found, rate)["SparseLoCo"] for rate in ("unshaped", "10mbit"))
    bits = 8 * fast["collective_bytes"]["all-gather"] / 3 / fast["parameters"]
    times = statistics.median(slow["seconds"]) / statistics.median(fast["seconds"])
    words = (
        f"{bits:.3f} bits a parameter and round, {32 / bits:.0f} times fewer than float32; at "
        f"10 Mbit/s {times:.2f} times the time without a limit"
    )
    verdict = decide(bits <= 0.219 and times <= 1.1, part=bits <= 0.219)
    return Judged(words, verdict, least(within(0.219, bits), within(1.1, times)))


def _tuned(found: dict[str, Any]) -> str:
    best = found["tuned"]
    return (
        f"dense DiLoCo {_spread(best['score'], '.3f')} with the best of {len(best['grid'])} pairs "
        f"of rates ({best['inner']:g} inside, {best['outer']:g} outside)"
    )


def _sparse(found: dict[str, Any]) -> Judged:
    sparse, published = found["tuned sparse"], found["bits"]["DiLoCo, dense"]
    words = (
        f"{_spread(sparse['score'], '.3f')} bits a byte at "
        f"{found['bits']['SparseLoCo']['bits']:.3f} bits a parameter and round, with the best of "
        f"{len(sparse['grid'])} pairs of rates ({sparse['inner']:g} inside, {sparse['outer']:g} "
        f"outside); {_tuned(found)}, {_spread(published['score'], '.3f')} with published ones"
    )
    ours, other = statistics.median(sparse["score"]), min(found["tuned"]["score"])
    return Judged(words, decide(ours < other), least(within(other, ours)))


def _muloco(found: dict[str, Any]) -> Judged:
    two, dense = (found["bits"][name]["score"] for name in ("MuLoCo, 2-bit", "MuLoCo, dense"))
    worse = statistics.median(two) / statistics.median(dense) - 1
    words = (
        f"two bits end {100 * worse:+.2f} % from dense: {_spread(two, '.3f')} and "
        f"{_spread(dense, '.3f')} bits a byte; {_tuned(found)}"
    )
    parts = [worse <= 0.01, max(two) < min(found["tuned"]["score"])]
    margin = least(within(0.01, worse), within(min(found["tuned"]["score"]), max(two)))
    return Judged(words, decide(all(parts), part=any(parts)), margin)


def _hidden(found: dict[str, Any]) -> Judged:
    cases = _methods(found).values()
    idle = [case["hidden"] for case in cases if case["idle"]]
    busy = [case["hidden"] for case in cases if not case["idle"]]
    words = (
        f"{100 * min(idle):.0f} % of an exchange is hidden where hosts idle in the steps, and "
        f"{100 * min(busy):.0f} to {100 * max(busy):.0f} % where the steps keep all cores busy"
    )
    verdict = decide(min(busy) >= 0.95, part=min(idle) >= 0.95)
    return Judged(words, verdict, least(min(busy) / 0.95))


CLAIMS = (
    Claim(
        name="local-sgd-rate",
        methods=("local_sgd", "cpsgd"),
        source="Stich, Local SGD converges fast and communicates little, 2019, abstract",
        claim="Local SGD converges at the rate of mini-batch SGD, and rounds of communication can "
        "be reduced up to a factor of √T.",
        setting=f"{DIGITS} Rounds of 16 steps; √T is 40.",
        judge=_same_rate,
        criterion="at least 10 times fewer exchanges; median training loss at most the "
        "worst seed's of every step",
        results=LOCAL,
        command=LOCAL_COMMAND,
        note="The theorem is for convex losses; a perceptron is not convex. Longer rounds than 16 "
        "steps were not measured.",
    ),
    Claim(
        name="adpsgd-variance",
        methods=("adpsgd", "ADPSGD"),
        source="Jiang and Agrawal, Adaptive periodic averaging, 2020, abstract",
        claim="An adaptive period achieves a smaller overall variance of the workers' models than "
        "a constant period, with less communication.",
        setting=DIGITS,
        judge=_variance,
        criterion="fewer exchanges than rounds of 8 (medians), and a median variance "
        "below that of their best seed",
        results=LOCAL,
        command=LOCAL_COMMAND,
    ),
    Claim(
        name="adpsgd-speed",
        methods=("adpsgd", "ADPSGD"),
        source="Jiang and Agrawal, Adaptive periodic averaging, 2020, abstract",
        claim="Over full communication ADPSGD is 1.14 to 1.27 times faster at 100 Gbit/s, and 1.46 "
        "to 1.95 times at 10 Gbit/s.",
        setting="None: it needs a cluster of GPUs on both networks.",
        judge=untried,
        why="premise",
        note="The published numbers follow from (1 + ρ)/(1 + ρ/p) with rounds of p = 8 steps, for "
        "a ratio ρ of communication to computation of 0.16 to 0.32 and of 0.56 to 1.26: the slow "
        "network cost 3.5 to 4 times as much, not ten. At 100 Mbit/s with four processes ADPSGD "
        "takes 40.3 s to the score that dense gradients reach in 224 s on a machine that is 1.4 "
        "times faster (network/local.json, network/train.json).",
    ),
    Claim(
        name="diloco-synchronous",
        methods=("diloco",),
        source="Douillard et al., DiLoCo, 2023, abstract",
        claim="DiLoCo on eight workers performs as well as fully synchronous optimisation while it "
        "communicates 500 times less.",
        setting=f"{SLOW_WIRE} Rounds of 30 steps, two shots of four bits.",
        judge=_diloco,
        criterion="the same score with at least 50 times fewer bytes, in at most 10 % "
        "more steps (medians)",
        why="premise",
        results=NETWORK,
        command=f"{NETWORK_COMMAND} dense 'DiLoCo, 4-bit two shots'",
        note="A short training from random parameters: the paper starts from a pretrained model.",
    ),
    Claim(
        name="streaming-bandwidth",
        methods=("streaming_diloco",),
        source="Douillard et al., Streaming DiLoCo with overlapping communication, 2025, abstract",
        claim="Fragments, overlap and four bits reach similar quality with two orders of magnitude "
        "less bandwidth.",
        setting=f"{SLOW_WIRE} Rounds of 40 steps in four fragments, a delay of five steps.",
        judge=_streaming,
        criterion="the same score with at least 100 times fewer bytes, in at most 10 % "
        "more steps (medians)",
        why="premise",
        results=NETWORK,
        command=f"{NETWORK_COMMAND} dense 'streaming DiLoCo, 4-bit'",
        note="The score is the same, the number of steps is not.",
    ),
    Claim(
        name="streaming-overlap",
        methods=("streaming_diloco",),
        source="Douillard et al., Streaming DiLoCo with overlapping communication, 2025, abstract",
        claim="Workers train on while an exchange is under way, which hides its time.",
        setting="Four processes at 100 Mbit/s, whose exchanges run beside the steps "
        "(`jaxcomp.Overlapped`), with and without 0.2 s of idle time in a step.",
        judge=_hidden,
        criterion="at least 95 % of an exchange hidden where the steps keep all cores busy",
        why="premise",
        results=OVERLAP,
        command=f"{_RUN} overlap",
        note="What an exchange computes takes its time from the steps where the CPU itself trains. "
        "Idle hosts stand for hosts of accelerators.",
    ),
    Claim(
        name="muloco-two-bits",
        methods=("muloco",),
        source="Thérien et al., MuLoCo, 2025, abstract of the first version",
        claim="With Muon inside and error feedback, two bits cost next to no performance, and "
        "MuLoCo significantly outperforms DiLoCo.",
        setting=BYTES,
        judge=_muloco,
        criterion="median loss at most 1 % above dense MuLoCo's; worst seed below the "
        "best of tuned dense DiLoCo",
        results=LOCAL,
        command=LOCAL_COMMAND,
        note="Steps are equal; on two cores a step of Muon takes six times as long as one of "
        "Adam. With a second compression to two bits on the way back the loss is 3 % above dense, "
        "so the recipe gathers.",
    ),
    Claim(
        name="sparseloco-diloco",
        methods=("sparseloco",),
        source="Sarfi et al., Communication efficient LLM pre-training with SparseLoCo, 2025, "
        "abstract",
        claim="With 1 to 3 % of the elements in two bits SparseLoCo outperforms full-precision "
        "DiLoCo.",
        setting=f"{BYTES} 128 of 8,192 elements.",
        judge=_sparse,
        criterion="median loss below that of the best seed of dense DiLoCo, rates of both tuned",
        why="false",
        results=LOCAL,
        command=LOCAL_COMMAND,
        note="Both have the best of the same pairs of rates; SparseLoCo, which has no outer "
        "momentum, has three higher outer rates too; both best pairs are inside their grids. With "
        "the published outer rate of 0.7, far too long for so short a training, DiLoCo ends "
        "higher.",
    ),
    Claim(
        name="sparseloco-bytes",
        methods=("sparseloco",),
        source="Sarfi et al., Communication efficient LLM pre-training with SparseLoCo, 2025; the "
        "published code's format has 0.219 bits a parameter (64 of 4,096, 12 bits of place)",
        claim="Messages are so small that slow links between data centres no longer matter.",
        setting=SLOW_WIRE.replace("of 100 Mbit/s", "of 10 Mbit/s and without a limit"),
        judge=_sparse_bytes,
        criterion="at most 0.219 bits a parameter and round; at 10 Mbit/s at most 1.1 "
        "times the time without limit",
        results=NETWORK,
        command=f"{NETWORK_COMMAND} SparseLoCo, at 10mbit and unshaped",
    ),
)
