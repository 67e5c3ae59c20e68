"""A site of several processes of `jax.distributed` trains as one of a single process."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from helpers.clients import PATIENCE
from helpers.nodes import CLIENTS, STEPS, Grid, data, identity, loss, params, strategy_of  # noqa: F401
from helpers.paths import ROOT, TESTS
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import federated

pytest.importorskip("flwr")
from flwr.app import Message

from jaxcomp.adapters import flower
from jaxcomp_site import courier
from jaxcomp_site.packing import packed, unpacked

METHOD = federated.diloco(jaxcomp.qsgd_inf(bits=8), loss)
ROUNDS, PROCESSES = 2, 2


def site_of(folder, mesh):
    calls = []

    def own_data(number, taken):
        calls.append(taken)
        if jax.process_index() == 1 and len(calls) == 1:
            raise OSError("the second process cannot read its data")
        return jax.tree.map(lambda x: x[0], data([number], taken // STEPS))

    specs = {"w": P(None, "model"), "b": P("model")}
    placed = None if mesh is None else flower.Placed(mesh, specs, P())
    return flower.Site(METHOD, params(), own_data, folder=folder, placed=placed)


def served(folder, errors):
    """A node whose app hands its messages to the site's processes, again after an error."""

    def app():
        def answered(message, context):
            del context
            content = packed(message.content)
            try:
                answer = courier.ask(folder, content, PATIENCE)
            except courier.SiteError as error:
                errors.append(str(error))
                answer = courier.ask(folder, content, PATIENCE)
            return Message(unpacked(answer), reply_to=message)

        return answered

    return app


def trained(folder):
    strategy, errors = strategy_of(METHOD, min_available_nodes=1), []
    strategy.start(Grid({100: served(folder, errors)}), num_rounds=ROUNDS)
    return strategy.params, errors


@pytest.mark.full
def test_it_trains_as_one_of_a_single_process(tmp_path):
    with socket.create_server(("localhost", 0)) as found:
        address = f"localhost:{found.getsockname()[1]}"
    path = os.pathsep.join(map(str, (ROOT, TESTS)))
    running = [
        subprocess.Popen(
            [sys.executable, __file__, address, str(number), str(tmp_path / "several")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        )
        for number in range(PROCESSES)
    ]
    try:
        several, errors = trained(tmp_path / "several")
        said = [process.communicate(timeout=PATIENCE)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * PROCESSES, said
    assert len(errors) == 1
    assert "another process of the site failed" in errors[0]
    assert "a message is refused: OSError: the second process" in said[1]
    alone = site_of(tmp_path / "alone", None)
    thread = threading.Thread(
        target=alone.serve, args=(lambda: alone.taken >= ROUNDS * STEPS,), daemon=True
    )
    thread.start()
    one, errors = trained(tmp_path / "alone")
    assert errors == []
    thread.join(PATIENCE)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), several, one)
    assert json.loads((tmp_path / "several" / "address").read_text())["port"]


def main(address, number, folder):
    """One of the processes of a site, which ends after the rounds."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, PROCESSES, int(number), initialization_timeout=200)
    mesh = jax.make_mesh((PROCESSES,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    site = site_of(pathlib.Path(folder), mesh)
    site.serve(lambda: site.taken >= ROUNDS * STEPS)


if __name__ == "__main__":
    main(*sys.argv[1:])
