"""The Flower app of a site: hands each message to the site's process, which stays up.

Flower starts a process for every message. This one imports no JAX, and takes the message to the
process that `jaxcomp.adapters.flower.Site` runs in, whose folder the SuperNode names:

    flower-supernode ... --node-config 'site="/var/lib/site"'

The `pyproject.toml` of the app has `clientapp = "jaxcomp_site.app:app"`.
"""

import functools
import pathlib
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp

from jaxcomp_site.courier import ask
from jaxcomp_site.packing import pieces, unpacked

app = ClientApp()


@app.train()
def train(message: Any, context: Any) -> Any:
    """The answer of the site's process."""
    folder = context.node_config.get("site")
    if not isinstance(folder, str):
        raise ValueError(
            "`--node-config` of this SuperNode must have the folder of its site, such as "
            f"'site=\"/var/lib/site\"', got {dict(context.node_config)}"
        )
    answer = ask(pathlib.Path(folder), functools.partial(pieces, message.content))
    return Message(content=unpacked(answer, views=True), reply_to=message)
