"""Decentralised training: gossip on graphs."""

import functools
import itertools
import statistics
from typing import Any

from claims.claim import FAILS, PART, Change, Claim, Judged, decide
from claims.descent import between, least, within

GOSSIP, COMMAND = "gossip/gossip.json", "python benchmarks/gossip.py --steps 8000 --link-steps 1000"
LINKS = "Least squares of eight workers with optima of their own, on a ring, full gradients, 1,000 "
LINKS += "steps of constant length; links of 64 bits, four bits, signs and the largest tenth."


def _ends(found: dict[str, Any], method: str) -> dict[str, dict[str, float]]:
    links = ("dense", "4 bits", "sign", "top 10 %")
    cases = {link: found["links"][f"{method}, {link}"] for link in links}
    return {link: {**one, "error": one["error"][-1]} for link, one in cases.items()}


def _errors(ends: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{link} {one['error']:.2g}" for link, one in ends.items())


def _drift(found: dict[str, Any]) -> Judged:
    rows = sorted(found["drift"], key=lambda row: -row["rate"])
    halvings = [a["apart"] / b["apart"] for a, b in itertools.pairwise(rows)]
    words = ", ".join(f"{one:.2f}" for one in halvings)
    growing = halvings == sorted(halvings)
    growths = [b / a for a, b in itertools.pairwise(halvings)]
    return Judged(
        f"each halving of the step divides the squared distance by {words}",
        decide(3.5 <= halvings[-1] <= 4.2 and growing),
        least(between(3.5, halvings[-1], 4.2), *growths),
    )


def _choco_linear(found: dict[str, Any]) -> Judged:
    ends = {row["mixing"]: row["variance"] for row in found["choco"]}
    small, large = min(ends), max(ends)
    best = min(ends, key=lambda mixing: ends[mixing])
    words = ", ".join(f"{value:.0e} at γ = {mixing}" for mixing, value in ends.items())
    reached = ends[best] < 1e-20
    return Judged(
        f"variance of the models after 3,000 rounds: {words}",
        decide(reached and ends[small] < 1e-4 and best != large, part=reached),
        least(*map(within, (1e-20, 1e-4, ends[large]), (ends[best], ends[small], ends[best]))),
    )


def _as_dpsgd(found: dict[str, Any], method: str) -> Judged:
    """As good as D-PSGD with dense links, through each link."""
    ends, bound = _ends(found, method), 1.1 * _ends(found, "D-PSGD")["dense"]["error"]
    good = [one["error"] <= bound for one in ends.values()]
    words = f"errors: {_errors(ends)}; D-PSGD with dense links {bound / 1.1:.2g}"
    margin = least(*(within(bound, one["error"]) for one in ends.values()))
    return Judged(words, decide(all(good), part=all(good[:2])), margin)


def _dcd(found: dict[str, Any]) -> Judged:
    """At a step that its theory allows, beside D-PSGD; and at D-PSGD's step."""
    short, long = _ends(found, "DCD, η 0.03"), _ends(found, "DCD")
    plain = _ends(found, "D-PSGD")["dense"]["error"]
    words = f"errors at a step of 0.03: {_errors(short)}; at 0.05: {_errors(long)}; D-PSGD with "
    good = [[one["error"] <= 1.1 * plain for one in each.values()] for each in (short, long)]
    return Judged(
        f"{words}dense links at 0.05: {plain:.2g}",
        decide(all(map(all, good)), all(good[0])),
        least(*(within(1.1 * plain, one["error"]) for one in (*short.values(), *long.values()))),
    )


def _slow_links(found: dict[str, Any]) -> Judged:
    """Seconds of whole trainings, beside the fastest dense all-reduce."""
    [cell] = found["cells"]
    took = {name: one["seconds"] for name, one in cell["methods"].items()}
    words = ", ".join(
        f"{name}: {statistics.median(each):.1f} s ({min(each):.1f} to {max(each):.1f}) in "
        f"{cell['methods'][name]['curve'][-1][0]} steps"
        for name, each in took.items()
    )
    times = {name: statistics.median(each) for name, each in took.items()}
    whole = min(time for name, time in times.items() if name.startswith("all-reduce, dense"))
    ours = times["D-PSGD on a ring, dense"]
    return Judged(words, decide(ours < whole / 2, part=ours < whole), least(whole / 2 / ours))


SMALL, DELAYED, APART = (
    "network/delayed/small/gossip-train.json",
    "network/delayed/gossip-train.json",
    "network/delayed/leaves/gossip-train.json",
)


def _latency(found: dict[str, Any]) -> Judged:
    """A small model, whose messages take less time than the delay; and in words a larger one."""
    one, large = (_slow_links(found[name]) for name in (SMALL, DELAYED))
    [cell], [apart] = found[DELAYED]["cells"], found[APART]["cells"]
    [seconds] = apart["methods"]["all-reduce, dense"]["seconds"]
    [steps] = [at for at, *_ in apart["methods"]["all-reduce, dense"]["curve"]]
    merged = cell["methods"]["all-reduce, dense, one message"]["curve"][-1][0]
    ours = statistics.median(cell["methods"]["D-PSGD on a ring, dense"]["seconds"])
    times = seconds / steps * merged / ours
    first = decide(times > 2, part=times > 1)
    words = (
        f"0.7 million parameters: {large.words}: {large.verdict}; leaves one by one: {merged} "
        f"steps of {seconds / steps:.1f} s, {times:.1f} times D-PSGD's time: {first}"
    )
    return one._replace(words=f"{one.words}; {words}")


def _tracking(found: dict[str, Any]) -> Judged:
    ends, plain = _ends(found, "gradient tracking"), _ends(found, "D-PSGD")["dense"]["error"]
    worst = max(one["error"] for one in ends.values())
    words = f"errors: {_errors(ends)}; D-PSGD stops at {plain:.2g}"
    return Judged(words, decide(worst < 1e-5 < plain), least(within(1e-5, worst), plain / 1e-5))


def _without_all_reduce(found: dict[str, Any]) -> Judged:
    ends, plain = _ends(found, "NoLoCo"), _ends(found, "D-PSGD")["dense"]
    fewer = plain["bits"] / ends["dense"]["bits"]
    words = f"{fewer:.0f} times fewer bits; errors: {_errors(ends)}; D-PSGD {plain['error']:.2g}"
    bound = 1.1 * plain["error"]
    equal = ends["dense"]["error"] <= bound
    margin = least(fewer / 10, within(bound, ends["dense"]["error"]))
    return Judged(words, decide(fewer >= 10 and equal, part=fewer >= 10), margin)


def _dpsvrg(found: dict[str, Any]) -> Judged:
    rows = found["reduction"]["table"]
    slopes = [row["dpsvrg_slope"] for row in rows]
    plain = [row["dspg_slope"] for row in rows]
    settled = [row["settled"] for row in rows]
    times = [row["dspg_gradients"] / row["dpsvrg_gradients"] for row in rows]
    sent = [row["dspg_bytes"] / row["dpsvrg_bytes"] for row in rows]
    words = (
        f"slopes of the logarithms {min(slopes):.1f} to {max(slopes):.1f}, DSPG {min(plain):.1f} "
        f"to {max(plain):.1f} ({min(settled):.2f} to {max(settled):.2f} with ten times longer "
        f"steps); the loss above its least is {min(times):.0f} to {max(times):.0e} "
        f"times less at equal gradients, {min(sent):.1f} to {max(sent):.0f} times at equal bytes"
    )
    faster = max(slopes) <= -0.9 and min(times) > 1
    as_bound = min(settled) >= -0.75 and max(settled) <= -0.4
    verdict = decide(faster and as_bound and min(sent) > 1, part=faster)
    margin = least(
        -max(slopes) / 0.9, 0.75 / -min(settled), -max(settled) / 0.4, min(times), min(sent)
    )
    return Judged(words, verdict, margin)


CLAIMS = (
    Claim(
        name="dpsgd-distance",
        methods=("dpsgd",),
        source="Lian et al., Can decentralized algorithms outperform centralized algorithms?, "
        "2017, theorem on the distance from the mean model",
        claim="With a constant step η the mean squared distance of the models is O(η²), so it does "
        "not change the order of SGD's rate.",
        setting="Least squares of eight workers with optima of their own, on a ring, with steps "
        "of 0.02, 0.01, 0.005 and 0.0025.",
        judge=_drift,
        criterion="the last halving divides by 3.5 to 4.2, and each one by at least as much "
        "as that before it",
        results=GOSSIP,
        command=COMMAND,
        note="O(η²) divides it by 4.",
    ),
    Claim(
        name="dpsgd-slow-links",
        methods=("dpsgd", "choco_sgd", "deepsqueeze"),
        source="Lian et al., Can decentralized algorithms outperform centralized algorithms?, "
        "2017, abstract",
        claim="On a network of low bandwidth D-PSGD can be up to an order of magnitude faster than "
        "its best optimised centralised counterpart.",
        setting="A byte model of 0.7 million parameters to 4.2 bits a byte, eight processes in "
        "network namespaces of one machine in a ring of links of 25 Mbit/s; five seeds, and the "
        "steps of the median run.",
        judge=_slow_links,
        criterion="median seconds of dense D-PSGD less than half of those of the dense all-reduce",
        why="premise",
        results="network/gossip-train.json",
        command="sudo .venv/bin/python benchmarks/network/run.py --only gossip-train --processes 8 "
        "--rates 25mbit --shape ring --repeats 5 --steps 80 --target 4.2",
        note="An all-reduce sends 2 (n − 1)/n of a model from each worker, a ring of D-PSGD two "
        "whole ones, and it takes more steps. The paper's counterpart is a parameter server, whose "
        "links are busier. Compression makes the difference here.",
    ),
    Claim(
        name="dpsgd-latency",
        methods=("dpsgd", "choco_sgd", "deepsqueeze"),
        source="Lian et al., Can decentralized algorithms outperform centralized algorithms?, "
        "2017, abstract and the experiments with latency",
        claim="On a network of high latency D-PSGD can be up to an order of magnitude faster than "
        "its best optimised centralised counterpart.",
        setting="A byte model of 0.08 million parameters to 4.6 bits a byte, and one of 0.7 "
        "million to 4.2, eight processes in network namespaces of one machine behind a switch with "
        "links of 100 Mbit/s and a delay of 50 ms; five seeds, and the steps of the median run.",
        judge=_latency,
        criterion="0.08 million: median seconds of dense D-PSGD less than half of the fastest "
        "dense all-reduce's, leaves merged",
        changed=(
            Change(
                "9179b20c",
                FAILS,
                "The model of 0.7 million parameters was judged, whose messages take as long as "
                "the delay.",
            ),
            Change(
                "bb7dfe7b",
                FAILS,
                "The answer also says the verdict by the first criterion, of commit 10662d7f: half "
                "the time of the dense all-reduce as XLA sends it. Commit 4a240895 replaced it, "
                "before the first committed measurement.",
            ),
        ),
        results=f"{DELAYED} {SMALL} {APART}",
        command="sudo .venv/bin/python benchmarks/network/run.py --only gossip-train --processes 8 "
        "--rates 100mbit --delay 50 --repeats 5 --steps 80 --target 4.2 --methods "
        "'all-reduce, dense, one message' 'dense, at once' 'two shots, 4-bit' "
        "'two shots, 4-bit, one after another' 'D-PSGD on a ring, dense' "
        "'CHOCO-SGD on a ring, 4-bit' 'DeepSqueeze, one peer, 4-bit'\nthe same with "
        "--model '0.08 million' --target 4.6, without 'two shots, 4-bit, one after another'",
        note="XLA sends each leaf of an all-reduce by itself, in 14 hops; the baseline merges them "
        "to one message, as gossip does. With the larger model a ring sends two whole models in a "
        "step, more than the all-reduce, and training takes more steps; gossip of four bits is 3 "
        "to 5 times faster. A dense mean whose messages are sent at once is no all-reduce of XLA: "
        "with the small model D-PSGD takes 0.85 times its time. The criterion is older than the "
        "measurement of the small model (commit c3a5714d), not than that of the larger one.",
    ),
    Claim(
        name="choco-consensus",
        methods=("choco_sgd",),
        source="Koloskova, Stich and Jaggi, Decentralized stochastic optimization and gossip "
        "algorithms with compressed communication, 2019, abstract",
        claim="CHOCO-Gossip reaches consensus at a linear rate with arbitrary compression, for a "
        "step γ that is small enough.",
        setting="Random models on a ring of 16, the largest tenth of 50 elements, 3,000 rounds.",
        judge=_choco_linear,
        criterion="variance < 1e-20 at the best γ, which is not the largest, and < 1e-4 at "
        "the smallest",
        results=GOSSIP,
        command=COMMAND,
        note="The γ of the theory is four orders of magnitude smaller than what works.",
    ),
    Claim(
        name="dcd-as-dpsgd",
        methods=("dcd",),
        source="Tang et al., Communication compression for decentralized training, 2018, abstract",
        claim="DCD-PSGD converges at the rate of centralised training in full precision, if the "
        "compression is precise enough.",
        setting=f"{LINKS} The step of 0.05 is that of the other methods.",
        judge=_dcd,
        criterion="at both steps and with each link, error at most 1.1 times that of D-PSGD "
        "with dense links at 0.05",
        why="tuning",
        results=GOSSIP,
        command=COMMAND,
        note="At 0.05 it diverges with dense links too, so compression is not the reason: it mixes "
        "before it steps, which allows steps below 0.038 here.",
    ),
    Claim(
        name="deepsqueeze-as-dpsgd",
        methods=("deepsqueeze",),
        source="Tang et al., DeepSqueeze, 2019, abstract",
        claim="Error-compensated compression gives decentralised training the rate of training "
        "without compression, for biased codecs too.",
        setting=LINKS,
        judge=functools.partial(_as_dpsgd, method="DeepSqueeze"),
        criterion="with each link, error at most 1.1 times that of D-PSGD with dense links",
        results=GOSSIP,
        command=COMMAND,
        note="All of them stop where D-PSGD stops, because the workers disagree.",
    ),
    Claim(
        name="gradient-tracking-linear",
        methods=("gradient_tracking",),
        source="Liao et al., A compressed gradient tracking method for decentralized optimization "
        "with linear convergence, 2022, abstract",
        claim="Compressed gradient tracking converges linearly to the solution, although workers "
        "differ.",
        setting=LINKS,
        judge=_tracking,
        criterion="error below 1e-5 with each link, and above 1e-5 for D-PSGD with dense links",
        results=GOSSIP,
        command=COMMAND,
        note="It sends twice the bits of D-PSGD in a step.",
    ),
    Claim(
        name="noloco-bytes",
        methods=("noloco",),
        source="Kolehmainen et al., NoLoCo, 2025, abstract",
        claim="Rounds of local steps, after which a worker meets one other, need significantly "
        "less communication without a loss of convergence.",
        setting=f"{LINKS} NoLoCo exchanges after ten steps, the others after each.",
        judge=_without_all_reduce,
        criterion="dense links: at least 10 times fewer bits than D-PSGD, and error at most "
        "1.1 times its",
        why="premise",
        results=GOSSIP,
        command=COMMAND,
        note="The paper compares with DiLoCo on language models.",
    ),
    Claim(
        name="dpsvrg-rate",
        methods=("dpsvrg", "dspg", "DPSVRG"),
        source="Li et al., Decentralized stochastic proximal gradient descent with variance "
        "reduction over time-varying networks, 2021, abstract",
        claim="DPSVRG converges at O(1/T), DSPG at O(1/√T).",
        setting="A lasso and a sparse logistic regression of eight workers, on a ring, a torus, "
        "and a ring in turns with pairs, 8,000 gradients of single rows.",
        judge=_dpsvrg,
        criterion="slope of DPSVRG at most -0.9, of DSPG after its transient -0.75 to -0.4; less "
        "loss at equal gradients and bytes",
        changed=(
            Change(
                "28204314",
                PART,
                "It asked that DSPG's slope at the end be above -0.9; now its slope after the "
                "transient be that of 1/√t.",
            ),
        ),
        results=GOSSIP,
        command=COMMAND,
        note="At its best step DSPG is in its transient at 8,000 gradients, and faster than its "
        "bound. On the ring DPSVRG stops at the error of eight rounds of mixing.",
    ),
)
