"""Compiles every kernel, and a compressed step over eight devices, for an H100 and a TPU v5e.

    make aot

No such device is needed: their compilers are ordinary wheels (`make aot` puts 1.3 GB of them into
`.aot`). What is compiled is checked: a kernel reads its input and writes its output, with nothing
beside it as large as the array; nothing spills (an H100's compiler says so); what the collectives
of the step move is one dense buffer of words, as long as `wire_bytes` says.
"""

import argparse
import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 8 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
NAMES = {"gpu": "H100", "tpu": "TPU v5e"}
CALLS = {"gpu": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}
BUCKETS, WORKERS = 4800, 8
BLOCKS = (128, 256, 512, 1024, 2048, 4096, 8192)


def prepare(target: str, wheels: pathlib.Path, dump: pathlib.Path) -> None:
    """Sets the environment variables that JAX and the compilers read at import."""
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(WORKERS)
    if target == "tpu":
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
        os.environ["TPU_LIBRARY_PATH"] = str(wheels / "tpu/libtpu/libtpu.so")
    else:
        nvcc = wheels / "gpu/nvidia/cuda_nvcc"
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        os.environ["PATH"] += f":{nvcc / 'bin'}"
        os.environ["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={nvcc} --xla_dump_to={dump}"
        sys.path.append(str(wheels / "gpu"))


def devices(target: str) -> list[Any]:
    from jax.experimental import topologies

    if target == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    wanted = {"platform": "cuda", "target_config": H100, "topology": f"1x1x{WORKERS}"}
    try:
        return topologies.get_topology_desc(**wanted).devices
    except NotImplementedError:  # Until the plugin is loaded, which needs no driver.
        import jax_plugins.xla_cuda12 as plugin  # pyright: ignore[reportMissingImports]

        plugin.initialize()
        return topologies.get_topology_desc(**wanted).devices


class Report:
    """Compiles programs, checks each, and keeps a row for it."""

    def __init__(self, target: str, dump: pathlib.Path):
        self.target, self.dump, self.seen = target, dump, set(dump.glob("*.ptx"))
        self.rows: list[dict[str, Any]] = []

    def compile(self, name: str, lower: Any, large: int, calls: int = 1) -> Any:
        """Compiles; its temporaries must be below `large` bytes, unless that is 0."""
        start = time.perf_counter()
        compiled = lower().compile()
        row = {"program": name, "compile s": round(time.perf_counter() - start, 2)}
        text = compiled.as_text()
        entry = text[text.index("ENTRY") :]
        row["kernels"] = entry.count(f'custom_call_target="{CALLS[self.target]}"')
        row["other fusions"] = len(re.findall(r" fusion\(", entry))
        row["temporary bytes"] = compiled.memory_analysis().temp_size_in_bytes
        row |= self._registers()
        self.rows.append(row)
        problems = []
        if row["kernels"] != calls:
            problems.append(f"{row['kernels']} kernels, expected {calls}")
        if large and row["temporary bytes"] >= large:
            problems.append(f"{row['temporary bytes']} temporary bytes")
        if large and row["other fusions"] > 1:  # The other fusion folds a number into the key.
            problems.append(f"{row['other fusions']} fusions beside the kernel")
        if self.target == "gpu" and not row["registers"]:
            problems.append("no kernel was found in what was compiled")
        if row.get("spilled bytes"):
            problems.append(f"{row['spilled bytes']} bytes spilled")
        if problems:
            raise SystemExit(f"{NAMES[self.target]}, {name}: {'; '.join(problems)}")
        print(f"{NAMES[self.target]}: " + ", ".join(f"{k} {v}" for k, v in row.items()), flush=True)
        return compiled

    def _registers(self) -> dict[str, int]:
        """Registers and spills of the kernels compiled last, from the assembler (GPU only)."""
        if self.target != "gpu":
            return {}
        new, self.seen = set(self.dump.glob("*.ptx")) - self.seen, set(self.dump.glob("*.ptx"))
        spilled, registers = 0, 0
        for path in new:
            if "entry jaxcomp_" not in path.read_text():
                continue
            said = assembled(path)
            spilled += sum(map(int, re.findall(r"(\d+) bytes spill", said)))
            registers = max(registers, *map(int, re.findall(r"Used (\d+) registers", said)))
        return {"registers": registers, "spilled bytes": spilled}


def assembled(path: pathlib.Path) -> str:
    """What the assembler says about registers and memory of the kernels in a file."""
    command = ["ptxas", "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def operations(report: Report, device: Any) -> None:
    """Every operation that has a kernel, alone on one device."""
    import jax
    import jax.numpy as jnp
    import kernels
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    place = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    dtypes: tuple[Any, ...] = (jnp.float32, jnp.bfloat16)
    if report.target == "gpu":
        dtypes += (jnp.float16,)  # A TPU uses the reference for float16.
    every = [*kernels.packing(BUCKETS), *kernels.coding(BUCKETS, dtypes)]
    for block in BLOCKS:
        every += kernels.rotations(BUCKETS * block, (block,))
    for one in every:
        run = jax.jit(lambda *args, one=one: one.run(*args, implementation=report.target))
        shapes = jax.eval_shape(one.inputs)
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in shapes]
        report.compile(one.name, lambda run=run, args=args: run.lower(*args), one.bytes)


def training_state(tx: Any, params: Any, mesh: Any, axis: str) -> tuple[Any, Any]:
    """Parameters on every device of a mesh, and the state of a transformation, as shapes."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxcomp

    def placed(x, spec):
        shape = (WORKERS, *x.shape[1:]) if axis in spec else x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.eval_shape(tx.init, params)
    like = jax.tree.map(lambda x: placed(x, PartitionSpec()), params)
    return like, jax.tree.map(placed, state, jaxcomp.state_specs(state, axis))


def step(report: Report, found: list[Any]) -> None:
    """Compiles a training step over eight devices, and checks what its collectives move."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from cases import KERNEL_CODECS
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import jaxcomp
    from jaxcomp.reducers import choose

    mesh = Mesh(np.array(found[:WORKERS]), ("data",))
    params = {f"layer{i}": jax.ShapeDtypeStruct((512, 500 + i), jnp.float32) for i in range(8)}
    split = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.ShapeDtypeStruct((8 * WORKERS, 512), jnp.float32, sharding=split)

    def loss(params, x):
        return sum(jnp.mean(jnp.tanh(x @ w) ** 2) for w in params.values())

    links: dict[str, Any] = {
        name: choose.link_or_reducer(codec) for name, codec in KERNEL_CODECS.items()
    }
    # In each direction one kernel encodes and one decodes. With a residual, another kernel decodes
    # the worker's own message.
    ways = [
        (f"{name}, gathered", jaxcomp.Gather(link), {"all-gather"}, link, 1)
        for name, link in links.items()
    ]
    ways += [
        (f"{name}, two shots", jaxcomp.TwoShot(link, link), {"all-gather", "all-to-all"}, link, 2)
        for name, link in [*list(links.items())[:1], ("sign", links["sign"])]
    ]
    for name, reducer, kinds, link, directions in ways:
        tx = optax.chain(jaxcomp.compressed_mean(reducer, "data"), optax.sgd(0.1))

        def train(params, state, x, tx=tx):
            grads = jax.grad(loss)(jaxcomp.local(params, "data"), x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        args = (*training_state(tx, params, mesh, "data"), batch)
        run = jaxcomp.data_parallel(train, mesh, "data")
        calls = directions * (3 if isinstance(link.feedback, jaxcomp.Residual) else 2)
        compiled = report.compile(f"step, {name}", lambda r=run, a=args: r.lower(*a), 0, calls)
        lines = [
            line.strip()
            for line in compiled.as_text().splitlines()
            if re.search(r" (all|reduce|collective)-[a-z-]+(-start)?\(", line)
        ]
        shapes = [re.findall(r"[a-z]+\d+\[[\d,]*\](?:\{[^}]*\})?", line) for line in lines]
        moved = jaxcomp.collective_bytes(compiled)
        sent = jaxcomp.wire_bytes(reducer, params, workers=WORKERS)
        print(f"  collectives: {shapes}; {moved} bytes sent by a device, {sent} by its shapes")
        report.rows[-1] |= {"collectives": [s[0] for s in shapes], "link bytes": moved}
        # A TPU pads the words for each worker to tiles of 1,024.
        room = directions * WORKERS * 4096
        if not sent <= sum(moved.values()) <= sent * 1.01 + room or set(moved) != kinds:
            raise SystemExit(f"{NAMES[report.target]}, {name}: {moved}, expected {sent}")
        if not all(shape[0].startswith("u32[") for shape in shapes):
            raise SystemExit(f"{NAMES[report.target]}, {name}: {shapes}, expected words")


@contextlib.contextmanager
def compiler(doc: str | None, out: str, **sizes: int) -> Iterator[tuple[Any, list[Any], Any]]:
    """Reads the command line, and yields options, devices, and the folder of dumps."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("target", choices=NAMES)
    parser.add_argument("--wheels", type=pathlib.Path, default=pathlib.Path(".aot"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(out))
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    wheels = options.wheels.resolve()
    if not (wheels / options.target).is_dir():
        parser.error(f"--wheels has no folder {options.target!r}; `make aot` installs it")
    with tempfile.TemporaryDirectory() as folder:
        prepare(options.target, wheels, pathlib.Path(folder))
        yield options, devices(options.target), pathlib.Path(folder)


def main() -> None:
    with compiler(__doc__, "out/aot") as (options, found, dump):
        report = Report(options.target, dump)
        operations(report, found[0])
        step(report, found)
    import jax
    from reporting import keep

    path = options.out / f"{options.target}.json"
    target = NAMES[options.target]
    keep(path, {"target": target, "jax": jax.__version__, "programs": report.rows})
    print(f"{len(report.rows)} programs compiled for a {target}; written to {path}")


if __name__ == "__main__":
    main()
