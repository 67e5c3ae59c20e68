"""The papers whose claims are tried, by the names that readers know."""

import re

from claims.claim import Claim

PAPERS = {
    "0/1 Adam": "0/1 Adam",
    "1-bit Adam": "1-bit Adam",
    "3PC (CLAG)": "3PC:",
    "AdaGrad": "Adaptive subgradient methods for online",
    "ADPSGD": "Adaptive periodic averaging",
    "AQ-SGD": "AQ-SGD",
    "Artemis": "Bidirectional compression in heterogeneous|Artemis, 2020",
    "CD-Adam": "Communication-compressed adaptive gradient",
    "Censored heavy ball": "censored heavy ball",
    "CEO": "Fundamental limits of communication efficiency",
    "CHOCO-SGD": "Decentralized stochastic optimization and gossip",
    "Compressed gradient tracking": "compressed gradient tracking",
    "DCD-PSGD": "Communication compression for decentralized training",
    "DeepSeek-V3": "DeepSeek-V3",
    "DeepSqueeze": "DeepSqueeze",
    "Democratic codes (DGD-DEF, DQ-PSGD)": "Efficient randomized subspace embeddings",
    "DeMo": "DeMo:",
    "DGC": "Deep gradient compression",
    "DIANA": "compressed gradient differences",
    "DiLoCo": "Douillard et al., DiLoCo",
    "DORE": "A double residual compression",
    "DoubleSqueeze": "DoubleSqueeze",
    "D-PSGD": "Can decentralized algorithms outperform",
    "DPSVRG": "proximal gradient descent with variance reduction",
    "DRIVE": "DRIVE:",
    "EF21": "EF21:",
    "EF21 with bells & whistles": "EF21 with bells",
    "EF21-SGDM": "Momentum provably improves",
    "EF-SignSGD": "Error feedback fixes SignSGD",
    "Entropy-coded quantizers": "Asymptotically efficient quantizing",
    "Error feedback, several papers": "Papers of error feedback",
    "Exact methods, several papers": "Theorems of the papers",
    "FastSGD": "FastSGD:",
    "FedPAQ": "FedPAQ",
    "FedVote": "plurality vote",
    "Flash Communication": "Flash Communication",
    "GenQSGD": "GenQSGD",
    "LAG": r"\bLAG[:,]",
    "LAMB": "Large batch optimization for deep",
    "LARS": "Large batch training of convolutional",
    "Local SGD": "Local SGD converges",
    "LoCo": r"Xie et al\., LoCo",
    "MARINA": "MARINA:",
    "MCM": "Preserved central model",
    "MuLoCo": "MuLoCo",
    "Natural compression": "Natural compression for",
    "NEOLITHIC": "Lower bounds and nearly optimal",
    "NoLoCo": "NoLoCo",
    "NUQSGD": "NUQSGD",
    "Post-local SGD": "use local SGD",
    "PowerSGD": "PowerSGD",
    "Predictive coding": "predictive coding",
    "PULSE": r"\(PULSE\)",
    "QCMD- and QRDA-Adagrad": "Quantized adaptive subgradient",
    "QSDP": "Quantized Distributed Training",
    "QSGD": r"\bQSGD, 2017",
    "SDP4Bit": "SDP4Bit",
    "SIDCo": "statistical-based gradient compression",
    "signSGD with majority vote": "signSGD with majority vote",
    "SparseLoCo": "SparseLoCo",
    "Streaming DiLoCo": "Streaming DiLoCo",
    "Survey of compressors": "survey and quantitative evaluation",
    "TernGrad": "TernGrad",
    "Wyner-Ziv estimators": "Wyner-Ziv estimators",
    "Wyner-Ziv gradient compression": "Wyner-Ziv gradient compression",
    "ZeRO++": r"ZeRO\+\+",
}
"""Each paper's words in a claim's `source`, as a pattern."""


def papers(claim: Claim) -> list[str]:
    """The papers of a claim, with their years."""
    found = []
    for name, pattern in PAPERS.items():
        if there := re.search(pattern, claim.source):
            year = re.search(r"\b(?:19|20)\d\d\b", claim.source[there.start() :])
            found.append(f"{name}, {year[0]}" if year else name)
    return found
