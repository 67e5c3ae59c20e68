"""Flower's SuperNode for a site: asks for messages more often, and starts no process for them.

`flower-supernode` asks for a message every three seconds, starts a process for each, which imports
Flower for more than a second, and looks for its answer twice a second. This takes its place:

    python -m jaxcomp_site.node --superlink server.example.org:8000 --root-certificates ca.pem \
        --auth-supernode-private-key site.key --node-config 'site="/var/lib/site"'

The connection is Flower's own, and the app is `jaxcomp_site.app`: it runs no code that the server
sends. With a version of Flower that has another connection, `flower-supernode` takes over.
"""

import argparse
import concurrent.futures
import functools
import logging
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from flwr.app import Context, Error, Message, RecordDict

from jaxcomp_site import arriving, polling
from jaxcomp_site.app import app

log = logging.getLogger("flwr")

_AGAIN, _LONGEST = 0.05, 1.0
"""Seconds after which an object is asked for again that the server is still sending."""
_AT_ONCE = 2
"""Objects of an answer that are sent at the same time, as by Flower."""
_RAISED = 2
"""Flower's code of an app that has raised an error."""


class Connection(NamedTuple):
    """Flower's connection between a node and the SuperLink, whose calls are tried again and again.

    Attributes:
        node: the number that the SuperLink gave this node.
        receive: the next message without its content, and the ids of its objects; None for none.
        send: announces an answer with the ids of its objects; returns those to be pushed.
        get_run: not used.
        get_fab: not used.
        pull: an object of a message.
        push: sends an object of an answer.
        confirm: says that a message is here in whole.
    """

    node: int
    receive: Callable[[], Any]
    send: Callable[..., Any]
    get_run: Callable[..., Any]
    get_fab: Callable[..., Any]
    pull: Callable[[int, str], bytes]
    push: Callable[[int, str, str, bytes], None]
    confirm: Callable[[int, str], None]


def serve(line: Connection, config: Any, until: Callable[[], bool] = lambda: False) -> None:
    """Answers messages one after another, until `until()`."""
    from flwr.supercore.run import RunNotRunningException

    pace, last = polling.Pace(), time.monotonic()
    while not until():
        try:
            found = line.receive()
            if found is not None:
                pace.came(time.monotonic() - last)
                _serve_one(line, config, *found)
                last = time.monotonic()
        except RunNotRunningException:  # No `Exception`.
            log.info("a message of a run that has ended is left out")
        time.sleep(pace.pause(time.monotonic() - last))


def _serve_one(line: Connection, config: Any, message: Any, tree: Any) -> None:
    """Receives the rest of a message, and sends its answer; an error loses this message only."""
    from flwr.supercore.inflatable import inflatable_object

    run, begin = message.metadata.run_id, time.monotonic()
    pull, confirm = functools.partial(line.pull, run), functools.partial(line.confirm, run)
    try:
        with tempfile.TemporaryFile(dir=_place_of(config)) as file:
            message = arriving.receive(tree, pull, confirm, file, (_AGAIN, _LONGEST))
            message.metadata.__dict__["_message_id"] = tree.object_id
            here = time.monotonic()
            answer = _answer(message, line.node, config)
            there = time.monotonic()
        answer.metadata.__dict__["_message_id"] = answer.object_id
        with inflatable_object.no_object_id_recompute():
            ids = inflatable_object.get_object_tree(answer)
            wanted, session = line.send(answer, ids, there - here)
            objects = inflatable_object.get_all_nested_objects(answer)
            push = functools.partial(line.push, run, session)
            with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
                # Flower's own function makes a copy of the whole answer first.
                list(
                    pool.map(lambda id_: push(id_, objects[id_].deflate()), objects.keys() & wanted)
                )
        parts = here - begin, there - here, time.monotonic() - there
        log.info("received in %.3f s, answered in %.3f s, sent in %.3f s", *parts)
    except Exception as error:
        log.exception("a message is lost: %s", error)


def _place_of(config: Any) -> str | None:
    """The site's folder, which has room for a message, or that of the system for such files."""
    folder = config.get("site")
    return folder if isinstance(folder, str) and os.path.isdir(folder) else None


def _answer(message: Any, node: int, config: Any) -> Any:
    """The answer of the app; its error is told to the server, as by Flower."""
    try:
        return app(message, Context(message.metadata.run_id, node, config, RecordDict(), {}))
    except Exception as error:
        log.exception("the app has raised an error")
        return Message(Error(_RAISED, f"{type(error)}:<'{error}'>"), reply_to=message)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads those options of `flower-supernode` that a connection has."""
    text = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser("python -m jaxcomp_site.node", description=text)
    add = parser.add_argument
    add("--superlink", required=True, metavar="HOST:PORT", help="where the SuperLink is")
    add("--insecure", action="store_true", help="without TLS")
    add("--root-certificates", type=pathlib.Path, metavar="FILE", help="of the SuperLink")
    add("--auth-supernode-private-key", type=pathlib.Path, metavar="FILE", help="of this node")
    add("--node-config", required=True, help="""such as 'site="/var/lib/site"'""")
    add("--max-retries", type=int, help="of a call; without end by default")
    add("--max-wait-time", type=float, metavar="SECONDS", help="of a call")
    add("--port", type=int, help="for flower-supernode, if it takes over")
    return parser.parse_args(argv)


def main() -> None:
    """Serves the site of this node, until the SuperLink refuses it or a signal ends it."""
    args = parse()
    try:
        from flwr.common.config import parse_config_args
        from flwr.supernode.fleet_http_connection import http_request_response
    except ImportError:
        log.warning("this version of Flower has another connection: flower-supernode takes over")
        os.execvp("flower-supernode", ["flower-supernode", *sys.argv[1:]])
    # A node that ends says so, or the SuperLink refuses its successor for a minute.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    certificates, file = args.root_certificates, args.auth_supernode_private_key
    with http_request_response(
        args.superlink,
        args.insecure,
        None if certificates is None else certificates.read_bytes(),
        None if file is None else _keys(file),
        args.max_retries,
        args.max_wait_time,
    ) as line:
        log.info("node %d asks for messages of %s", line[0], args.superlink)
        serve(Connection(*line), parse_config_args([args.node_config]))


def _keys(file: pathlib.Path) -> tuple[Any, Any]:
    """The key pair of a node, from the file of its private key."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    key = load_ssh_private_key(file.read_bytes(), None)
    return key, key.public_key()


if __name__ == "__main__":
    main()
