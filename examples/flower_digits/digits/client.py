"""The client: Flower runs it in a new process for every message."""

from jaxcomp.adapters import flower

from . import task


def batches(context, number, round):
    """Its data for a round; a real node reads its own, and `context.node_config` says where."""
    return task.batches(number, context.run_config["clients"], round)


app = flower.client_app(task.METHOD, task.params(), batches)
