"""Training programs of others, dense and with the drop-in: losses, lines, seconds, bytes by axis.

    make programs                        # all of them; each environment is built once, in .programs
    make programs ARGS="--only maxtext"  # one environment

A program runs in the environment that it asks for, on simulated devices, and prints a JSON object
as its last line. An environment whose Python or packages are missing is left out, with a word.
"""

import json
import pathlib
import re
import statistics
import subprocess
import sys
from typing import Any, NamedTuple

import reporting

ROOT = reporting.HERE.parent
HOME = ROOT / ".programs"
SOURCES = ROOT / "examples" / "programs"
sys.path.append(str(ROOT / "tests" / "helpers"))  # It finds the Pythons.


class Environment(NamedTuple):
    """A Python and what is installed for it; None for that of the project.

    Attributes:
        python: its version.
        packages: those to install, with what they need.
        bare: those to install without what they need.
    """

    python: str
    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()


class Program(NamedTuple):
    """A program, and how it is called.

    Attributes:
        environment: the name of its environment.
        script: its file.
        arguments: what distinguishes this run of it.
        codecs: with which codecs it runs.
    """

    environment: str
    script: str
    arguments: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ("dense", "identity", "qsgd", "sign")


ENVIRONMENTS: dict[str, Environment | None] = {
    "own": None,
    "maxtext": Environment("3.12", ("-r", "examples/programs/maxtext.txt"), ("maxtext==0.2.5",)),
    "keras": Environment("3.11", ("-r", "examples/programs/keras.txt")),
    "tunix": Environment("3.12", ("-r", "examples/programs/tunix.txt")),
    "kauldron": Environment("3.12", ("-r", "examples/programs/kauldron.txt"), ("kauldron==1.4.4",)),
}

PROGRAMS = (
    Program("own", "flax_digits.py"),
    Program("own", "cookbook.py"),
    Program("keras", "keras_fit.py"),
    Program("tunix", "tunix_lora.py"),
    Program("kauldron", "kauldron_train.py"),
    Program("maxtext", "maxtext_train.py", ("--mesh", "data=8")),
    Program("maxtext", "maxtext_train.py", ("--mesh", "data=2,fsdp=4")),
    Program("maxtext", "maxtext_train.py", ("--mesh", "data=2,fsdp=2,tensor=2")),
    Program("maxtext", "maxtext_train.py", ("--mesh", "data=2,fsdp=4", "--experts")),
    Program(
        "maxtext",
        "maxtext_train.py",
        ("--mesh", "data=2,fsdp=4", "--accumulate", "2"),
        ("dense", "identity", "qsgd"),
    ),
    Program(
        "maxtext",
        "maxtext_train.py",
        ("--mesh", "diloco=2,fsdp=4", "--diloco", "2"),
        ("dense", "identity", "qsgd"),
    ),
)

SLOW = ("diloco", "data", "batch", "devices")
"""The axes of the workers, by the names that the programs give them."""

SEEDS = {"qsgd": 3}
"""How many seeds a codec runs with, if not one."""

COLUMNS = (
    "program {program} | lines {lines} | first step, s {first:.0f} | dense {first_dense:.0f} | "
    "loss, dense {dense:.4f} | Identity {identity:.4f} | 4 bits {qsgd} | sign {sign:.4f} | "
    "axis {axis} | bytes over it, dense {sent_dense:,} | 4 bits {sent:,}"
)


def build(name: str, environment: Environment | None) -> pathlib.Path | str:
    """The environment's own Python; a word where it cannot be built."""
    import matrix  # pyright: ignore[reportMissingImports]

    if environment is None:
        return pathlib.Path(sys.executable)
    home = HOME / name
    python, stamp = home / "bin" / "python", home / "installed"
    listed = [ROOT / one for one in environment.packages if one.endswith(".txt")]
    wanted = "\n".join([repr(environment), *(path.read_text() for path in listed)])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    try:
        found = matrix.find(environment.python)
    except SystemExit as error:
        return str(error)
    subprocess.run([found, "-m", "venv", "--clear", home], check=True)
    install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    for packages in (environment.packages, ("--no-deps", *environment.bare, "-e", ".")):
        done = subprocess.run([*install, *packages], cwd=ROOT, text=True, stderr=subprocess.PIPE)
        if done.returncode:
            return f"{packages[-1]} does not install: {done.stderr.strip().splitlines()[-1]}"
    stamp.write_text(wanted)
    return python


def run(python: pathlib.Path, program: Program, codec: str, seed: int) -> dict[str, Any] | str:
    """What one run of a program printed; the end of its log if it failed."""
    command = [python, SOURCES / program.script, *program.arguments]
    command += ["--codec", codec, "--seed", str(seed)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return "\n".join((done.stdout + done.stderr).splitlines()[-15:])
    return json.loads(lines[-1])


def row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the table, from all runs of a program."""
    last: dict[str, list[float]] = {}
    for one in runs:
        last.setdefault(one["codec"], []).append(one["losses"][-1])
    by = {one["codec"]: one for one in reversed(runs)}
    dense, coded = by["dense"], by.get("qsgd", {})
    found: dict[str, Any] = {name: values[0] for name, values in last.items()}
    values = last.get("qsgd", [])
    found["qsgd"] = f"{statistics.mean(values):.4f}" if values else ""
    if len(values) > 1:
        found["qsgd"] += f" ± {statistics.stdev(values):.4f}"
    first = {"first": coded.get("seconds_to_first_step"), "lines": coded.get("lines")}
    first |= {"first_dense": dense["seconds_to_first_step"], "program": dense["program"]}
    axis = next((one for one in SLOW if one in repr(dense["bytes"])), "")
    of_axis = [crossing(one.get("bytes"), axis) for one in (dense, coded)]
    first |= {"axis": axis, "sent_dense": of_axis[0], "sent": of_axis[1]} if axis else {}
    return found | {name: value for name, value in first.items() if value is not None}


def crossing(sent: dict[str, int] | None, axis: str) -> int:
    """The bytes of the collectives that cross an axis, alone or with others."""
    return sum(n for axes, n in (sent or {}).items() if re.search(rf"\b{axis}\b", axes))


def main() -> None:
    options = reporting.options(
        __doc__,
        reporting.RESULTS / "programs",
        only=(dict.fromkeys(ENVIRONMENTS), "environments"),
        skip=(0, "programs at the beginning to leave out, after a run that was stopped"),
    )
    pythons = {name: build(name, ENVIRONMENTS[name]) for name in options.only}
    missing = {name: word for name, word in pythons.items() if isinstance(word, str)}
    path = options.out / "programs.json"
    kept = reporting.read(path)["programs"] if path.exists() else {}
    for program in PROGRAMS[options.skip :]:
        python = pythons.get(program.environment)
        if not isinstance(python, pathlib.Path):
            continue
        runs, with_ = [], versions(python)
        for codec in program.codecs:
            for seed in range(SEEDS.get(codec, 1)):
                found = run(python, program, codec, seed)
                if isinstance(found, str):
                    raise SystemExit(f"{program.script} --codec {codec} failed:\n{found}")
                runs.append(found | {"versions": with_})
                print(
                    f"{found['program']:50} {codec:9} {seed} {found['losses'][-1]:.5f}", flush=True
                )
        kept[runs[0]["program"]] = runs
        rows = [row(of_one) for of_one in kept.values()]
        table = reporting.Table("Programs of others", COLUMNS, rows)
        reporting.show(table, {"programs": kept}, options.out / "programs.md")
    for name, word in missing.items():
        print(f"left out: {name}: {word}")


def versions(python: pathlib.Path) -> str:
    """The versions of Python and of what is most important."""
    names = ("jax", "flax", "maxtext", "keras", "google-tunix", "kauldron")
    ask = f"""
import platform
from importlib import metadata
found = [f"python {{platform.python_version()}}"]
for name in {names}:
    try: found.append(f"{{name}} {{metadata.version(name)}}")
    except metadata.PackageNotFoundError: pass
print(", ".join(found))
"""
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    return said.stdout.strip()


if __name__ == "__main__":
    main()
