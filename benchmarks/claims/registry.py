"""All families of claims, and which methods have no claim."""

import importlib
import inspect
import pathlib
import pkgutil
from types import ModuleType

import reporting

import claims
from claims.claim import Claim
from jaxcomp import algorithms

SYSTEMS = {
    "QSGD": "qsgd",
    "QSGDinf": "qsgd_inf",
    "NUQSGD": "nuqsgd",
    "TernGrad": "terngrad",
    "natural compression": "natural",
    "natural dithering": "natural_dithering",
    "SIDCo": "sidco",
    "DGC": "dgc",
    "FastSGD": "fastsgd",
    "DGD-DEF": "dgd_def",
    "DQ-PSGD": "dq_psgd",
    "QCMD-Adagrad": "qcmd_adagrad",
    "QRDA-Adagrad": "qrda_adagrad",
    "censored heavy ball": "censored_heavy_ball",
    "FedPAQ": "fedpaq",
    "GenQSGD": "genqsgd",
    "Artemis": "artemis",
    "MCM": "mcm",
    "NEOLITHIC": "neolithic",
    "CD-Adam": "cd_adam",
    "predictive coding": "predictive coding",
    "Wyner-Ziv coding": "wyner_ziv",
    "FedVote": "FedVote",
    "ADPSGD": "adpsgd",
    "DPSVRG": "dpsvrg",
    "CEO": "CEO",
    "PULSE": "weights",
}
"""Compared systems, with the name of the library that covers each, if it has one."""

PAGES = {
    "quantizers": (
        "Quantizers",
        "codecs errors harder ternary theorems trained_quantizers",
    ),
    "sparsifiers": ("Sparsifiers and low rank", "examples low_rank sparse wide"),
    "feedback": (
        "Error feedback and shifts",
        "bidirectional censored contractive full_gradients noisy premises preserved signs",
    ),
    "adaptive": (
        "Adaptive steps and large batches",
        "adaptive large_batches momenta sparse_models",
    ),
    "local": ("Local steps", "local periods trained_start visible"),
    "federated": (
        "Federated training",
        "bounds federated federated_rates side_information votes",
    ),
    "gossip": ("Gossip on graphs", "decentralised gossip_bytes gossip_trained"),
    "sharded": ("Sharded models and patches of weights", "patches sharded"),
    "limits": (
        "Limits, laws and democratic codes",
        "democratic information operations real_gradients",
    ),
    "resources": ("Time, traffic and memory", "end_to_end footprints traffic"),
}
"""The pages of details in docs/reproductions: their titles, and the families of each."""

TRIED = {
    "QSGDinf": "Tried: its error beside NUQSGD's on six laws, and two networks at four bits with "
    "twenty seeds. It loses 0.2 points on one and nothing on the other; the published "
    "claims are NUQSGD's about it.",
    "NUQSGD": "Tried: its error on six laws, and two networks at four bits. Its error is below "
    "QSGD's on all, and its bound too; it trains better than QSGD, and a little worse "
    "than QSGDinf.",
    "DGC": "Tried: digits, a byte transformer and a perceptron with layers of 512 units at 0.1 %. "
    "The perceptron loses 0.4 points (−0.6 to −0.1) with 556 times fewer bytes: some hundred steps "
    "are few for elements that are sent once in a thousand.",
    "DGD-DEF": (
        "Tried: the rate from which descent keeps its factor, in 32 and 512 dimensions. The "
        "democratic code needs 0.69 bits, the near-democratic one two, a scalar quantiser one "
        "to three."
    ),
    "CD-Adam": (
        "Tried: least squares with batches and full gradients. It is near AMSGrad with full "
        "gradients, and has twice its error with batches, where plain error feedback is the "
        "best."
    ),
    "predictive coding": (
        "Tried: thirty clients of two digits each, three values of λ. 99.4 % of the bytes are "
        "saved, in about one round more than FedAvg, where the claim is as few."
    ),
    "Wyner-Ziv coding": (
        "Tried: guesses from the last message, the last step and the others' mean, on a quadratic "
        "and gradients of two networks. Noisy gradients of adjacent steps are hardly alike; where "
        "they are, the error is down to a fifth."
    ),
}
"""What was tried of systems without a claim that holds, and why none does."""


def families() -> list[tuple[str, ModuleType]]:
    """The headings of all families and their modules, in the order of the modules' names."""
    found = []
    for entry in sorted(pkgutil.iter_modules(claims.__path__), key=lambda entry: entry.name):
        module = importlib.import_module(f"claims.{entry.name}")
        if "CLAIMS" in vars(module):
            heading = (module.__doc__ or entry.name).partition("\n")[0]
            found.append((heading.rstrip("."), module))
    return found


def page_of() -> dict[str, str]:
    """The page of details of each claim."""
    homes = {name: page for page, (_, names) in PAGES.items() for name in names.split()}
    return {
        claim.name: homes[module.__name__.partition(".")[2]]
        for _, module in families()
        for claim in module.CLAIMS
    }


def every() -> dict[str, Claim]:
    """All claims by their names."""
    found: dict[str, Claim] = {}
    for _, module in families():
        for claim in module.CLAIMS:
            if claim.name in found:
                raise ValueError(f"`name` of a claim must be unique, got {claim.name!r} twice")
            found[claim.name] = claim
    return found


def pending(results: pathlib.Path = reporting.RESULTS) -> list[str]:
    """The claims that were not measured yet: they have no row."""
    return [
        name
        for name, claim in every().items()
        if not all((results / file).is_file() for file in claim.files)
    ]


def methods() -> list[str]:
    """The public recipes of `jaxcomp.algorithms`."""
    made = inspect.getmembers(algorithms, inspect.isfunction)
    return [name for name, make in made if make.__module__.startswith(algorithms.__name__)]


def uncovered() -> list[str]:
    """The recipes and the systems that no measured claim names."""
    later = pending()
    rows = [claim for name, claim in every().items() if name not in later]
    named = {name for claim in rows for name in claim.methods}
    missing = [name for name in methods() if name not in named]
    return missing + [name for name, ours in SYSTEMS.items() if not named & {name, ours}]
