"""Compiles every kernel, and a compressed step over eight devices, for an H100 and a TPU v5e.

    make aot

No such device is needed: their compilers are ordinary wheels (`make aot` puts 1.3 GB of them into
`.aot`). What is compiled is checked: a kernel reads its input and writes its output, with nothing
beside it as large as the array; nothing spills (an H100's compiler says so); what the collectives
of the step move is one dense buffer of words, as long as `wire_bytes` says.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
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


def prepare(target: str, wheels: pathlib.Path, dump: pathlib.Path) -> None:
    """What must be in the environment before JAX is imported."""
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
    """What was compiled, and whether it is as it should be."""

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
        if large and row["other fusions"] > 1:  # One puts the key and a number together.
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
        """What the assembler says of the kernels that were compiled last (GPU only)."""
        if self.target != "gpu":
            return {}
        new, self.seen = set(self.dump.glob("*.ptx")) - self.seen, set(self.dump.glob("*.ptx"))
        spilled, registers = 0, 0
        for path in new:
            if "entry jaxcomp_" not in path.read_text():
                continue
            command = ["ptxas", "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            spilled += sum(map(int, re.findall(r"(\d+) bytes spill", said)))
            registers = max(registers, *map(int, re.findall(r"Used (\d+) registers", said)))
        return {"registers": registers, "spilled bytes": spilled}


def kernels(report: Report, device: Any) -> None:
    """Every operation, alone on one device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from harness import KERNEL_CODECS
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxcomp import bits

    place = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())

    def like(*shape, dtype: Any = jnp.uint32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    own: dict[str, Any] = {"implementation": report.target}
    for width in (1, 2, 3, 4, 5, 6, 7, 8, 1.6):
        size = 640 if width == 1.6 else 512
        codes, words = like(BUCKETS, size), like(BUCKETS, bits.words(size, width))
        pack = jax.jit(lambda x, width=width: bits.pack(x, bits=width, **own))
        unpack = jax.jit(lambda x, w=width, s=size: bits.unpack(x, bits=w, size=s, **own))
        report.compile(f"pack {width}", lambda f=pack, x=codes: f.lower(x), 4 * BUCKETS * size)
        report.compile(f"unpack {width}", lambda f=unpack, x=words: f.lower(x), 4 * BUCKETS * size)
    for name, codec in KERNEL_CODECS.items():
        size = codec.bucket_size or 0
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            if dtype == jnp.float16 and report.target == "tpu":
                continue  # A TPU takes the reference.
            x, out = like(BUCKETS, size, dtype=dtype), jax.ShapeDtypeStruct((BUCKETS, size), dtype)

            def encode(x, count, key, codec=codec):
                return bits.encode(codec, x, count, key, jnp.uint32(0), **own)

            def add(words, steps, codec=codec, out=out):
                return bits.decode_sum(codec, words, steps, out, **own)

            given = (x, like(BUCKETS, dtype=jnp.int32), like(2))
            payloads = (
                like(WORKERS, BUCKETS, bits.words(size, codec.bits)),
                like(WORKERS, BUCKETS, dtype=jnp.float32),
            )
            label, large = f"{name}, {jnp.dtype(dtype).name}", BUCKETS * size * x.dtype.itemsize
            report.compile(f"encode {label}", lambda a=given, f=encode: jax.jit(f).lower(*a), large)
            report.compile(
                f"decode and sum of 8, {label}",
                lambda a=payloads, f=add: jax.jit(f).lower(*a),
                large,
            )


def rotations(report: Report, device: Any) -> None:
    """Random rotations, there and back."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxcomp.rotate import hadamard

    place = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    for block in (128, 256, 512, 1024, 2048, 4096, 8192):
        x = jax.ShapeDtypeStruct((BUCKETS, block), jnp.float32, sharding=place)
        seed = jax.ShapeDtypeStruct((BUCKETS,), jnp.uint32, sharding=place)
        for turn in (hadamard.rotate, hadamard.unrotate):

            def turned(x, high, low, turn=turn, block=block):
                scaled = {"down": 1 / block, "up": 8.0}
                return turn(x, high, low, block, **scaled, implementation=report.target)

            report.compile(
                f"{turn.__name__}, blocks of {block}",
                lambda a=(x, seed, seed), f=turned: jax.jit(f).lower(*a),
                4 * BUCKETS * block,
            )


def step(report: Report, found: list[Any]) -> None:
    """A training step over eight devices: what its collectives are, and what they move."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from harness import KERNEL_CODECS
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import jaxcomp

    mesh = Mesh(np.array(found[:WORKERS]), ("data",))
    params = {f"layer{i}": jax.ShapeDtypeStruct((512, 500 + i), jnp.float32) for i in range(8)}
    split = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.ShapeDtypeStruct((8 * WORKERS, 512), jnp.float32, sharding=split)

    def loss(params, x):
        return sum(jnp.mean(jnp.tanh(x @ w) ** 2) for w in params.values())

    links = {name: jaxcomp.Auto(codec).uplink for name, codec in KERNEL_CODECS.items()}
    # Of each direction, one kernel encodes and one decodes; with a residual, another one decodes
    # what was sent.
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

        state = jax.eval_shape(tx.init, params)
        specs = jaxcomp.state_specs(state, "data")

        def placed(x, spec):
            shape = (WORKERS, *x.shape[1:]) if "data" in spec else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

        args = (
            jax.tree.map(lambda x: placed(x, PartitionSpec()), params),
            jax.tree.map(placed, state, specs),
            batch,
        )
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
        # A TPU fills tiles of 1,024 words, for each worker that a share goes to.
        room = directions * WORKERS * 4096
        if not sent <= sum(moved.values()) <= sent * 1.01 + room or set(moved) != kinds:
            raise SystemExit(f"{NAMES[report.target]}, {name}: {moved}, expected {sent}")
        if not all(shape[0].startswith("u32[") for shape in shapes):
            raise SystemExit(f"{NAMES[report.target]}, {name}: {shapes}, expected words")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=NAMES)
    parser.add_argument("--wheels", type=pathlib.Path, default=pathlib.Path(".aot"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/aot"))
    options = parser.parse_args()
    wheels = options.wheels.resolve()
    if not (wheels / options.target).is_dir():
        parser.error(f"--wheels has no folder {options.target!r}; `make aot` installs it")
    with tempfile.TemporaryDirectory() as folder:
        dump = pathlib.Path(folder)
        prepare(options.target, wheels, dump)
        found = devices(options.target)
        report = Report(options.target, dump)
        kernels(report, found[0])
        rotations(report, found[0])
        step(report, found)
    import jax

    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.target}.json"
    results = {"target": NAMES[options.target], "jax": jax.__version__, "programs": report.rows}
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(report.rows)} programs compiled for a {NAMES[options.target]}; written to {path}")


if __name__ == "__main__":
    main()
