"""Run a part of the tests on the oldest versions that are declared, and on newer ones than CI has.

Each environment is built once in `.matrix/`; `--fresh` builds them anew, with whatever is newest.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOME = ROOT / ".matrix"
SHOWN = ("jax", "numpy", "optax", "flax")


class Environment(NamedTuple):
    """A Python and what is installed for it beside the project."""

    name: str
    python: str
    packages: tuple[str, ...]


ENVIRONMENTS = (
    Environment("lowest", "3.11", ("-c", "constraints-lowest.txt")),
    Environment("jax-0.11", "3.12", ("jax==0.11.*", "jaxlib==0.11.*")),
    Environment("jax-0.12", "3.13", ("jax==0.12.*", "jaxlib==0.12.*")),
)

CORE = (
    (
        "codecs/test_codecs",
        "golden or compile_once or lowers or variants_agree or half_precision or "
        "test_contract and (Fitted or Chained or fit or AdaptiveQ or Bitmap)",
    ),
    ("messages/test_messages", "golden or family"),
    ("adapters/test_flower", ""),
    ("adapters/test_flower_hostile", ""),
    ("bits/test_kernels", "own_kernel or is_one_kernel or (the_same and (two or 4 or 64) and gpu)"),
    ("rotate/test_rotate", "lowers"),
    ("numerics/test_digits", ""),
    ("misuse/test_elementwise", ""),  # It reads names of primitives.
    ("misuse/test_own_gradients", ""),  # These read private attributes of JAX.
    ("misuse/test_uniform", ""),
    ("misuse/test_places", ""),
    ("mesh/test_names", ""),
    ("reducers/test_modes", ""),
    ("collectives/test_gradients", ""),
    ("collectives/test_fully_sharded", ""),
    ("transforms/test_sharded_optimizer", "refused or mappings or parts or finite"),
    ("transforms/test_sharded", ""),
    ("transforms/test_compressed_value_and_grad", ""),
    ("misuse/test_batch_scale", ""),
    ("end_to_end/test_composition", ""),
    ("transforms/test_nonfinite", ""),
    ("wire/test_wire", "moves or agreed or describe or dense"),
    ("test_import", ""),
    ("benchmarks/test_network", "ranks or median or added"),
    ("end_to_end/test_examples", "quickstart or contract or readme"),
)
"""Files and what is selected in them: every recipe's bytes, and each part of the library once."""

LIMIT = 900
"""Seconds for each of them: a compilation that does not end must not hold up the others."""


def find(version: str) -> str:
    """The Python of this version: of the environment, of the path, or of pyenv."""
    given = os.environ.get(f"PYTHON{version.replace('.', '')}") or f"python{version}"
    found = [given] if shutil.which(given) else []
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=True)
        versions = pathlib.Path(root.stdout.strip(), "versions").glob(f"{version}.*")
        newest = sorted(versions, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
        found += [str(path / "bin" / "python") for path in reversed(newest)]
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    for python in found:
        said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
        if said.stdout.strip() == version:
            return python
    name = f"PYTHON{version.replace('.', '')}"
    raise SystemExit(f"Python {version} was not found; set {name} to its path")


def build(environment: Environment) -> pathlib.Path:
    """The environment's own Python, with everything installed."""
    home = HOME / environment.name
    python, stamp = home / "bin" / "python", home / "installed"
    sources = [ROOT / "pyproject.toml", ROOT / "constraints-lowest.txt"]
    wanted = "\n".join([*environment.packages, *(path.read_text() for path in sources)])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([find(environment.python), "-m", "venv", home], check=True)
    install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    command = [*install, "-e", ".[examples,test]", *environment.packages]
    subprocess.run(command, cwd=ROOT, check=True)
    stamp.write_text(wanted)
    return python


def versions(python: pathlib.Path) -> str:
    """The versions of Python and of the most important packages."""
    ask = f"""
import platform
from importlib import metadata
print("python", platform.python_version(), *(f"{{n}} {{metadata.version(n)}}" for n in {SHOWN}))
"""
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    return said.stdout.strip()


def run(environment: Environment, python: pathlib.Path) -> tuple[int, int, float]:
    """The number of passed tests, the number of failures, and the minutes."""
    begin, passed, failed = time.monotonic(), 0, 0
    settings = {
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(HOME / environment.name / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    for file, select in CORE:
        command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
        command += ["-p", "no:cacheprovider", "-m", "not slow", f"tests/{file}.py"]
        command += ["-k", select] if select else []
        start = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **settings},
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
            output, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            kept = error.stdout or b""
            output = kept.decode() if isinstance(kept, bytes) else kept
            output, code = f"{output}\nnot done after {LIMIT} s", 124
        counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error)", output)}
        wrong = counts.get("failed", 0) + counts.get("error", 0)
        passed += counts.get("passed", 0)
        failed += wrong or int(code != 0)
        took, last = time.monotonic() - start, output.strip().rpartition("\n")[2]
        print(f"  {environment.name:9} {file:30} {took:5.0f} s  {last}", flush=True)
        if code:
            print("\n".join(output.splitlines()[-60:]), flush=True)
    return passed, failed, (time.monotonic() - begin) / 60


def main() -> None:
    names = [environment.name for environment in ENVIRONMENTS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"environments (default: {', '.join(names)})")
    parser.add_argument("--fresh", action="store_true", help="build them anew")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(names))
    if unknown:
        parser.error(f"`names` must be of {names}, got {unknown}")
    rows = []
    for environment in ENVIRONMENTS:
        if options.names and environment.name not in options.names:
            continue
        if options.fresh:
            shutil.rmtree(HOME / environment.name, ignore_errors=True)
        python = build(environment)
        rows.append((environment.name, versions(python), *run(environment, python)))
    width = max(len(row[1]) for row in rows)
    print(f"\n{'environment':12} {'versions':{width}} {'passed':>7} {'failed':>7} {'minutes':>8}")
    for name, shown, passed, failed, minutes in rows:
        print(f"{name:12} {shown:{width}} {passed:7} {failed:7} {minutes:8.1f}")
    sys.exit(any(row[3] for row in rows))


if __name__ == "__main__":
    main()
