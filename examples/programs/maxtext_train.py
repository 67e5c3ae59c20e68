"""MaxText's own training program with a compressed mean over the data axis.

    python examples/programs/maxtext_train.py --codec qsgd --mesh data=2,fsdp=4

It copies the installed MaxText, applies the patch beside this file to the copy, and runs a small
model on eight simulated devices. The last line is a JSON object of what it saw.
"""

import argparse
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CODECS = {
    "dense": "",
    "identity": "jaxcomp.codecs.Identity()",
    "qsgd": "jaxcomp.qsgd_inf(bits=4)",
    "sign": "jaxcomp.sign()",
}
STEP = "maxtext/trainers/pre_train/train.py"
DILOCO = "maxtext/trainers/diloco/utils/spmd_diloco_sync.py"
MODEL = {
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 16,
    "base_mlp_dim": 128,
    "base_num_decoder_layers": 2,
    "vocab_size": 256,
    "max_target_length": 32,
    "per_device_batch_size": 2,
    "attention": "dot_product",
    "dtype": "float32",
}
EXPERTS = {
    "decoder_block": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 128,
    "megablox": "false",
    "sparse_matmul": "true",
}
QUIET = {
    "run_name": "small",
    "dataset_type": "synthetic",
    "enable_checkpointing": "false",
    "hardware": "cpu",
    "enable_goodput_recording": "false",
    "monitor_goodput": "false",
    "skip_jax_distributed_system": "true",
    "enable_tensorboard": "false",
}


def patched(folder: pathlib.Path, options: argparse.Namespace) -> int:
    """A copy of MaxText with the patch, and the number of lines that it adds."""
    import importlib.util

    installed = importlib.util.find_spec("maxtext")
    if installed is None or installed.origin is None:
        raise SystemExit("MaxText is not installed: `make programs` makes an environment with it")
    shutil.copytree(pathlib.Path(installed.origin).parent, folder / "maxtext")
    if options.codec == "dense":
        return 0
    kind = "_accumulation" if options.accumulate > 1 else "_memory" * (options.codec == "sign")
    patch = HERE / f"maxtext{'_diloco' if options.diloco else kind}.patch"
    subprocess.run(["patch", "-s", "-p1", "-i", patch], cwd=folder, check=True)
    step = folder / (DILOCO if options.diloco else STEP)
    text = re.sub(r"CODEC = .*", f"CODEC = {CODECS[options.codec]}", step.read_text(), count=1)
    step.write_text(text)
    return sum(re.match(r"\+(?!\+\+ )", line) is not None for line in patch.read_text().split("\n"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", choices=CODECS, default="qsgd")
    parser.add_argument("--mesh", default="data=8", help="axes of MaxText, such as data=2,fsdp=4")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    parser.add_argument("--diloco", type=int, help="steps of a round, over the axis diloco")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    axes = dict(part.split("=") for part in options.mesh.split(","))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="maxtext-"))
    try:
        print(json.dumps(run(folder, options, {name: int(size) for name, size in axes.items()})))
    finally:
        shutil.rmtree(folder)


def run(folder: pathlib.Path, options: argparse.Namespace, axes: dict[str, int]) -> dict:
    """What one run of MaxText saw."""
    lines = patched(folder, options)
    every = {"fsdp": 1, "data": 1} | axes
    sizes = {f"ici_{name}_parallelism": size for name, size in every.items()}
    settings = QUIET | MODEL | (EXPERTS if options.experts else {}) | sizes
    settings |= {
        "base_output_directory": folder / "out",
        "metrics_file": folder / "metrics",
        "steps": options.steps,
        "init_weights_seed": options.seed,
        "data_shuffle_seed": options.seed,
        "gradient_accumulation_steps": options.accumulate,
        "enable_diloco": str(bool(options.diloco)).lower(),
        "diloco_sync_period": options.diloco or 1,
        # XLA aborts in the partitioning of a gather from a table that is split in two ways.
        "use_iota_embed": str(sizes.get("ici_tensor_parallelism", 1) > 1).lower(),
    }
    program = [sys.executable, "-m", STEP.removesuffix(".py").replace("/", ".")]
    program += [folder / "maxtext" / "configs" / "base.yml"]
    program += [f"{name}={value}" for name, value in settings.items()]
    flags = f"--xla_force_host_platform_device_count={math.prod(axes.values())}"
    flags += f" --xla_dump_to={folder / 'hlo'} --xla_dump_hlo_module_re=.*train_step.*"
    flags += " --xla_dump_hlo_as_text"
    paths = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": paths}
    begin = time.monotonic()
    with subprocess.Popen(
        program, env=os.environ | own | {"DECOUPLE_GCLOUD": "TRUE"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        first, log = None, []
        for line in process.stdout or ():
            log.append(line)
            if "completed step: 0" in line:
                first = time.monotonic() - begin
    if process.returncode or first is None:
        raise SystemExit("".join(log[-30:]))
    rows = [json.loads(line) for line in (folder / "metrics").read_text().splitlines()]
    kinds = {"experts": options.experts, "DiLoCo": options.diloco}
    kinds |= {"two micro-batches": options.accumulate == 2}
    name = "".join(f", {kind}" for kind, chosen in kinds.items() if chosen)
    return {
        "program": f"MaxText{name}, {options.mesh}",
        "codec": options.codec,
        "seed": options.seed,
        "losses": [row["learning/loss"] for row in rows],
        "tokens": rows[0]["learning/total_weights"],
        "seconds_to_first_step": first,
        "bytes": bytes_of_step(folder / "hlo", axes),
        "lines": lines,
    }


def bytes_of_step(folder: pathlib.Path, axes: dict[str, int]) -> dict:
    """The bytes that one device sends in a step, by axis, from the compiled program."""
    import jax

    import jaxcomp

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", math.prod(axes.values()))
    order = [name for name in ("diloco", "data", "fsdp", "tensor", "expert") if name in axes]
    mesh = jax.make_mesh([axes[name] for name in order], order)
    newest = max(folder.glob("*train_step*after_optimizations.txt"))
    sent = jaxcomp.collective_bytes(newest.read_text(), mesh=mesh)
    return {str(axis): n for axis, n in sent.items()}


if __name__ == "__main__":
    main()
