"""A site whose process is a new one for every message, as Flower starts it: for comparison."""

import pathlib

from jaxcomp.adapters import flower

from .task import Task

task = Task("diloco", 0, 1, 64, 20)
"""The default settings of the app."""


def batches(context, number, round):
    return task.data(number, round * task.steps)


app = flower.client_app(
    task.build(),
    task.params(),
    batches,
    memory=lambda context: pathlib.Path(context.node_config["site"]) / "memory",
    metrics=lambda context, number, round: {
        "tokens": task.tokens(task.steps),
        "steps": task.steps,
    },
)
