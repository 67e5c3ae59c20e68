"""Settings of the strategy that a method has a use for, or not."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxcomp import checks
from jaxcomp.adapters.flower import raw, records
from jaxcomp.adapters.flower.closing import Quorum
from jaxcomp.adapters.flower.server_round import log
from jaxcomp.federated.method import Method
from jaxcomp.types import PyTree
from jaxcomp.weights import Publisher
from jaxcomp_files.versions import Versions


def check(
    method: Method,
    clients: int,
    weighted_by_key: str | None,
    weight_of: Any,
    settings: Mapping[str, Any],
) -> None:
    """Refuses settings that a method has no use for, instead of ignoring them."""
    method.sampling.expected(clients)  # Raises if it needs more clients.
    for name in ("fraction_train", "min_train_nodes"):
        if name in settings:
            raise ValueError(
                f"`{name}` must be left out: how many clients take part is the method's, such as "
                f"Method(sampling=jaxcomp.federated.Exactly(10)), got {settings[name]!r}"
            )
    if weighted_by_key is not None and not (isinstance(weighted_by_key, str) and weighted_by_key):
        raise ValueError(
            "`weighted_by_key` must be the name of a number that clients report, such as "
            f"'num-examples', or None, got {weighted_by_key!r}"
        )
    if weight_of is not None:
        checks.function("weight_of", weight_of)
        if weighted_by_key is not None:
            raise ValueError(
                "`weight_of` must be None beside a `weighted_by_key`, which is another weight, got "
                f"{weight_of!r} and {weighted_by_key!r}"
            )
    for name, given in (("weighted_by_key", weighted_by_key), ("weight_of", weight_of)):
        if given is not None and (method.mean in ("all", "messages") or method.work.control):
            over = "control variates" if method.work.control else f'a mean over "{method.mean}"'
            raise ValueError(
                f"`{name}` must be None with {over}, which needs the weights of all clients before "
                f"any of them reports, got {given!r}; give `weights`"
            )


def check_publisher(publisher: Publisher | None, shared: PyTree) -> None:
    """Refuses a publisher of parameters that are not all that clients need."""
    if publisher is None:
        return
    checks.instance("weights_to", publisher, Publisher, "jaxcomp.weights.Publisher(url)")
    if jax.tree.leaves(shared):
        raise ValueError(
            "`weights_to` must be None with side information that clients get with the parameters, "
            "which is not published"
        )


def check_rounds(method: Method, clients: int, least: Any, quorum: Quorum | None) -> None:
    """Refuses rounds that would never begin, or a quorum that the method cannot have."""
    checks.integer("min_available_nodes", least, 1, clients)
    if quorum is not None:
        checks.part("quorum", quorum, Quorum)
        quorum.check(method)
        facts = method.uplink.feedback.facts
        if not (facts.keeps_unsent or facts.mirrors):
            log.warning(
                "a message that is late or refused is lost: %r keeps nothing of it; "
                "jaxcomp.Link(codec, jaxcomp.Residual()) does",
                method.uplink.feedback,
            )


def check_clients(secrets: Any, numbers: Any, largest: float | None) -> None:
    """Refuses secrets of nodes whose numbers are not known, and a limit that refuses all."""
    if largest is not None:
        checks.positive("largest", largest)
    if secrets is not None and numbers is None:
        raise ValueError(
            "`numbers` must be given with `secrets`: whose secret a node has follows from its "
            "number, got None"
        )


def log_summary(method: Method, clients: int) -> None:
    """Logs what a method compresses with, and how many clients there are."""
    log.info("\t├──> Method: %r", method.uplink.policy)
    log.info("\t└──> Clients: %d, sampled by %r", clients, method.sampling)


def check_start(initial: Any, params: PyTree, new: Versions | None) -> None:
    """Refuses parameters of somebody else, and a folder for new checkpoints that has some."""
    if raw.digest(records.params_of(initial, params)) != raw.digest(params):
        raise ValueError(
            "`initial_arrays` must be None or the strategy's own parameters, got others; give them "
            "as `params`, or go on from a checkpoint with `restore`"
        )
    if new is not None and new.newest() is not None:
        raise ValueError(
            "`checkpoint` must be a new folder, or that of a checkpoint from which `restore` went "
            f"on, got {new.folder}, whose checkpoint would be overwritten"
        )
