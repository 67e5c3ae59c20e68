"""The command line around codecs and plans."""

import inspect
import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxcomp
import jaxcomp_command
from jaxcomp.planning import models, timing
from jaxcomp.recipes import catalogue
from jaxcomp_command import arguments, options


def still(way) -> timing.Measured:
    """A device of 1 ns an element for each pass, without looking at what passes."""
    if isinstance(way, jaxcomp.Dense):
        return timing.Measured(10**9, 0.0, 0.0, 0.0, 0.0)
    return timing.Measured(10**9, whole=2.0, decode=1.0, add=0.5, error=0.1)


def run(capsys, *argv: str) -> str:
    jaxcomp_command.main(argv)
    return capsys.readouterr().out


@pytest.mark.full
def test_every_codec_is_listed_with_its_bits(capsys):
    lines = json.loads(run(capsys, "codecs", "--elements", "16384", "--json"))
    assert [line["codec"] for line in lines] == list(catalogue.expressions())
    bits = {line["codec"]: line["bits"] for line in lines}
    assert bits["sign()"] == pytest.approx(1.0625)
    nested = "top_k(fraction=0.01, values=qsgd_inf(bits=4, bucket_size=128))"
    table = run(capsys, "codecs", "--codec", "sign()", nested)
    assert "Residual" in table
    assert nested in table


def test_every_public_recipe_of_a_codec_is_listed():
    """`dgc_warmup` is a schedule of fractions."""
    recipes = {
        name
        for name, made in inspect.getmembers(jaxcomp)
        if inspect.isfunction(made) and made.__module__.startswith("jaxcomp.recipes.")
    }
    assert {entry.partition("(")[0] for entry in catalogue.expressions()} | {
        "dgc_warmup"
    } == recipes


def test_codecs_are_timed_beside_a_copy(capsys):
    (line,) = json.loads(
        run(capsys, "bench", "--codec", "sign()", "--elements", "4096", "--repeats", "1", "--json")
    )
    assert line["encode"] + line["decode"] > 0
    assert line["copies"] > 0


def test_a_plan_is_printed_and_drawn(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda way, elements, repeats: still(way))
    common = ["plan", "--params", "25M", "--workers", "4", "--link", "100Mbit"]
    few = ["--codec", "TwoShot(qsgd(), qsgd())", "sign()"]
    text = run(capsys, *common, *few, "--plot", str(tmp_path / "plan.png"), "--step", "100ms")
    assert "Take " in text
    assert "block*/up " in text
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    found = json.loads(run(capsys, *common, *few, "--json"))
    assert found["network"] == {"bandwidth": 12.5e6, "latency": 50e-6}
    assert {way["name"] for way in found["ways"]} >= {"TwoShot(qsgd(), qsgd())", "dense bfloat16"}
    rounds = run(capsys, *common, *few, "--step", "100ms", "--rounds", "--longest", "50")
    assert re.search(r"Take .* with every=\d+ and (delay=\d+|no delay)", rounds)
    links = ["--workers", "2x8", "--link", "10Gbit", "--fast-link", "400Gbit"]
    two = run(capsys, *common[:3], *few, *links)
    assert "2 x 8 workers" in two
    assert json.loads(run(capsys, *common[:3], *few, *links, "--json"))["workers"] == [2, 8]


def test_a_plan_of_a_fully_sharded_model(capsys):
    command = ["plan", "--params", "1e7", "--workers", "8", "--link", "1Gbit", "--fsdp"]
    found = json.loads(run(capsys, *command, "--link-only", "--json"))
    best = {way["name"]: way for way in found["ways"]}[found["best"]]
    assert found["best"] == "8-bit weights, 4-bit gradients"
    assert best["speedup"] > 2.1
    pair = 'mx("mxfp8") / qsgd_inf(bits=4)'
    once = json.loads(
        run(capsys, *command, "--link-only", "--json", "--gathers", "1", "--codec", pair, "sign()")
    )
    sizes = {way["name"]: way["bytes"] for way in once["ways"]}
    assert sizes["sign()"] < sizes[pair] < 0.5 * sizes["dense bfloat16"]
    command[command.index("8")] = "2x4"
    given = [*command, "--fast-link", "1Tbit", "--link-only", "--json"]
    twice, copied = (json.loads(run(capsys, *given, *more)) for more in ([], ["--second-copy"]))
    sent = [[way["bytes"] for way in plan["ways"]] for plan in (copied, twice)]
    assert all(one < two for one, two in zip(*sent, strict=True))


def test_a_plan_of_experts_says_what_to_write(capsys, monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda way, elements, repeats: still(way))
    command = ["plan", "--experts", "--tokens", "64", "--width", "128", "--workers", "4"]
    exact = ["--link", "1Mbit", "--exact"]
    jaxcomp_command.main([*command, *exact])
    out, err = capsys.readouterr()
    assert 'jaxcomp.algorithms.experts(expert, axis_name, jaxcomp.mx("mxfp8"), combine=' in out
    assert err.startswith("timing Quantizer(Float(")
    assert err.count("\n") == 1
    found = json.loads(run(capsys, *command, "--link", "1Tbit", "--exact", "--json"))
    assert found["best"] == "dense bfloat16"
    assert found["ways"][-1]["break_even"] > 0


def test_a_plan_of_sites_has_a_rate_for_each_direction(capsys):
    command = ["plan", "--params", "1e7", "--workers", "4", "--link", "20Mbit"]
    sites = ["--sites", "--codec", "sign() / qsgd_inf(bits=8)", "--step", "250ms", "--every", "9"]
    same, modem = (
        json.loads(run(capsys, *command, *sites, *more, "--json"))
        for more in ([], ["--upload", "2Mbit"])
    )
    assert modem["seconds"] - same["seconds"] == pytest.approx(9 * 8 * same["up"] / 20e6)
    assert "bytes down" in run(capsys, *command, *sites)


def test_the_tree_and_the_step_may_be_the_users_own(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda way, elements, repeats: still(way))
    (tmp_path / "their_model.py").write_text(
        "import jax.numpy as jnp\n"
        "def shapes(): return {'kernel': jnp.zeros((300, 300)), 'bias': jnp.zeros(300)}\n"
        "def step(): return jnp.zeros(3)\n"
    )
    monkeypatch.chdir(tmp_path)
    theirs = ["--tree", "their_model:shapes", "--step", "their_model:step"]
    text = run(capsys, "plan", *theirs, "--workers", "4", "--link", "1Mbit")
    assert "kernel" in text
    assert "300x300" in text


@pytest.mark.full
def test_a_budget_is_spent_on_saved_gradients(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda way, elements, repeats: still(way))
    monkeypatch.chdir(tmp_path)
    loud, quiet = np.random.default_rng(0).standard_normal((2, 64, 64), np.float32)
    np.savez("early.npz", **{"block/loud": loud, "quiet": 0.01 * quiet})
    np.savez("late.npz", **{"block/loud": 2 * loud, "quiet": 0.01 * quiet})
    common = [
        "plan",
        "--gradients",
        "early.npz",
        "late.npz",
        "--workers",
        "4",
        "--link",
        "1Mbit",
        "--codec",
    ]
    ladder = [f"qsgd_inf(bits={bits})" for bits in (2, 4)]
    text = run(capsys, *common, *ladder, "--budget", "5kB")
    assert re.search(r"block/loud +64x64 +qsgd_inf\(bits=4\) +4\.\d\d", text)
    assert "of 5,000 bytes over a device's link, of 4 workers: error" in text
    assert "budget of 5,000 bytes, TwoShot" in text
    told = json.loads(run(capsys, *common, *ladder, "--budget", "5000", "--json"))
    assert [leaf["name"] for leaf in told["budget"]["leaves"]] == [ladder[1], ladder[0]]
    link = {way["name"]: way["bytes"] for way in told["plan"]["ways"]}
    assert link["budget of 5,000 bytes, TwoShot"] == told["budget"]["bytes"] <= 5000
    pathlib.Path("no.npz").write_text("text")
    for argv, said in {
        "--gradients early.npz": "--gradients needs a --budget",
        "--params 9 --budget 5kB": "--budget needs --gradients",
        "--gradients no.npz --budget 5kB": "must be a file of arrays, as numpy.savez writes",
        "--gradients none.npz --budget 5kB": "cannot read none.npz: No such file",
        "--gradients early.npz --budget 10": "`bytes_per_step` must be at least",
        "--gradients early.npz --budget 5q": "--budget must be a number of bytes, as in 400kB",
        "--gradients early.npz --budget 5kB --codec Psum(thc)": "must be codecs by name",
        "--gradients early.npz --params 9 --budget 1": "exactly one of --params, --model, --tree",
    }.items():
        line = refused(capsys, ["plan", "--workers", "4", "--link", "1Mbit", *argv.split()])
        assert said in line, line


def refused(capsys, argv: list[str]) -> str:
    """What is said in one line, with status 2 and nothing on standard output."""
    with pytest.raises(SystemExit) as stopped:
        jaxcomp_command.main(argv)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert not out
    return line


PLAN = "plan --params 9 --workers 4 --link"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            "--codec sign",
            "the first argument must be codecs, bench, plan, audit, report, fit, weights or watch",
        ),
        ("plam --params 9", "got 'plam'; did you mean plan?"),
        ("plan", "jaxcomp plan: needs --workers and --link"),
        ("plan --params", "--params needs a value"),
        (f"{PLAN} 1Gbit --latncy 3", "'--latncy' must be an option of this command; did you mean"),
        (f"{PLAN} 1Gbit sign", "did you mean --codec 'sign'?"),
        ("codecs --codec __import__('os')", "name of jaxcomp"),
        ("codecs --codec sing", "'sing' must be a public name of jaxcomp or jaxcomp.codecs"),
        ("codecs --codec sign(", "must be an expression such as"),
        ("codecs --codec sign(bitz=3)", "'sign' in 'sign(bitz=3)' must have the arguments"),
        ("codecs --codec top_k(1/0)", "cannot be built: division by zero"),
        ("codecs --codec qsgd(bits=99)", "`bits`"),
        ("codecs --codec Dense()", "must be a codec"),
        (
            "bench --codec Every(4)",
            "must be a codec, a link or a reducer, got Every(k=4, offset=None)",
        ),
        ("bench --codec Hierarchical(Dense(),qsgd())", "a reducer over one axis"),
        ("plan --workers 4 --link 1Gbit", "--params, --model, --tree and --gradients"),
        ("plan --params 9 --model gpt2 --workers 4 --link 1Gbit", "exactly one of"),
        (
            "plan --model gpt5 --workers 4 --link 1Gbit",
            "--model must be gpt2 or resnet50, or another model by --params 7e9 or --tree",
        ),
        ("plan --model ResNet-50 --workers 4 --link 1Gbit", "did you mean resnet50?"),
        ("plan --params 9 --worker 4 --link 1Gbit", "did you mean --workers?"),
        (f"{PLAN} 1Gbit --link-per rack", "--link-per must be host or device, got 'rack'"),
        (f"{PLAN} 1Gbit --fast-link 1Gbit", "--fast-link"),
        (f"{PLAN} 1Gbut", "--link must be a speed such as"),
        (f"{PLAN} 10gb", "must say if it is bits or bytes, as in 10Gbit or 10GB, got '10gb'"),
        (f"{PLAN} 1e9", "got '1e9': did you mean 1e9Gbit or 1e9GB?"),
        (f"{PLAN} 10G", "got '10G': did you mean 10Gbit or 10GB?"),
        (f"{PLAN} 1Gbit --latency 2", "--latency must have a unit, as in 2ms or 2s, got '2'"),
        (f"{PLAN} 1Gbit --step 250", "--step must have a unit, as in 250ms or 250s, got '250'"),
        (f"{PLAN} 1Gbit --tokens 64", "--tokens and --width need --experts"),
        (f"{PLAN} 1Gbit --experts", "--params and --experts cannot be given together"),
        (
            "plan --workers 4 --link 1Gbit --experts --width 9",
            "--experts needs --workers, --tokens",
        ),
        ("plan --params 9.5 --workers 4 --link 1Gbit", "positive whole number"),
        ("plan --params 9 --workers 1 --link 1Gbit", "at least 2"),
        (f"{PLAN} 1Gbit --step soon", "a time such as"),
        (f"{PLAN} 1Gbit --overlap 2", "--overlap must be a number from 0 to 1, got '2'"),
        (f"{PLAN} 1Gbit --link-only --rounds", "`compute` must"),
        (f"{PLAN} 1Gbit --upload 3Mbit", "--upload needs --sites"),
        (f"{PLAN} 1Gbit --fsdp --rounds", "--rounds and --fsdp cannot be given together"),
        (f"{PLAN} 1Gbit --codec Every(4)", "must be a codec, a link, a policy or a reducer"),
        (f"{PLAN} 1Gbit --plot plan.doc", "must end in .png, .svg or .pdf, got 'plan.doc'"),
        (f"{PLAN} 1Gbit --plot no/where/plan.png", "must be in a folder that exists"),
        (f"{PLAN} 1Gbit --step math:pi", "--step math:pi must be a function"),
        ("plan --tree nowhere:x --workers 4 --link 1Gbit", "cannot find 'nowhere:x'"),
        ("plan --tree nowhere --workers 4 --link 1Gbit", "--tree must be MODULE:NAME"),
        ("audit step.txt --mesh data=2,fsdp", "--mesh must be names of axes with their sizes"),
        ("audit no/where.txt", "jaxcomp audit: cannot read no/where.txt: No such file"),
    ],
)
def test_the_command_line_says_in_one_line_what_is_wrong(argv, said, capsys):
    assert said in refused(capsys, argv.split(" "))


def test_a_missing_matplotlib_is_told_before_anything_is_timed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(timing, "measure", lambda *_, **__: pytest.fail("timed"))
    argv = [*PLAN.split(), "1Gbit", "--plot", "plan.png"]
    assert "needs matplotlib, which is not installed" in refused(capsys, argv)


@pytest.mark.full
def test_a_reducer_is_timed_whole(capsys):
    """Bits are those of one device, between two workers: a low-rank mean sends both factors."""
    given = ["--elements", "4096", "--repeats", "1", "--json", "--codec", "PowerIteration(rank=4)"]
    (line,) = json.loads(run(capsys, "bench", *given))
    assert line["bits"] == pytest.approx(32 * 4 * (64 + 64) / 4096)
    assert line["encode"] > 0
    assert line["decode"] is line["add"] is None


def test_a_warning_is_one_line():
    command = [sys.executable, "-m", "jaxcomp_command", "codecs", "--codec", "Gather(sign)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    warned, refused = done.stderr.splitlines()
    assert warned.startswith("jaxcomp codecs: Quantizer(")
    assert "use Link(codec, Residual())" in warned
    assert refused.startswith("jaxcomp codecs: 'Gather(sign)' must be a codec, such as sign")


UNKNOWN_LOOP = """HloModule step, num_partitions=8

%body (a: f32[4]) -> f32[4] {
  ROOT %r = f32[4]{0} all-reduce(%a), replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %main (x: f32[4]) -> f32[4] {
  ROOT %w = f32[4]{0} while(%x), condition=%never, body=%body
}
"""


def test_the_bytes_of_saved_programs_are_counted(capsys, tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mean = jax.shard_map(
        lambda x: jax.lax.pmean(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    lowered = jax.jit(mean).lower(jnp.zeros((8, 1000)))
    saved, wrong = tmp_path / "step.txt", tmp_path / "lowered.txt"
    saved.write_text(lowered.compile().as_text())
    wrong.write_text(lowered.as_text())
    assert json.loads(run(capsys, "audit", str(saved), "--json")) == {
        str(saved): {"all-reduce": 7000}
    }
    assert re.search(r"all-reduce +7,000\n.* in all +7,000", run(capsys, "audit", str(saved)))
    by_axis = run(capsys, "audit", str(saved), "--mesh", "a=2,data=4")
    assert re.search(r"axes +bytes\n.*\n.* a, data +7,000\n.* in all +7,000", by_axis)
    assert "as many devices as the program, 8, got 4" in refused(
        capsys, ["audit", str(saved), "--mesh", "data=4"]
    )
    saved.write_text(UNKNOWN_LOOP)
    assert re.search(r"in all, at least +28\n", run(capsys, "audit", str(saved)))
    assert json.loads(run(capsys, "audit", str(saved), "--json", "--mesh", "data=8")) == {
        str(saved): {"data": 28, "at_least": True}
    }
    assert "is a lowered program: save" in refused(capsys, ["audit", str(wrong)])
    wrong.write_bytes(b"\xff\xfe")
    assert "must be text" in refused(capsys, ["audit", str(wrong)])


def test_help_and_mistakes_do_not_import_jax():
    """So they come at once."""
    script = """
import sys
from jaxcomp_command import main
for argv in (["--help"], ["plan", "--help"], ["plan", "--link"], []):
    try:
        main(argv)
    except SystemExit:
        pass
assert "jax" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    assert "examples:" in done.stdout
    assert "jaxcomp plan --model gpt2 --workers 4x8" in done.stdout
    assert done.stderr == "jaxcomp plan: --link needs a value; see jaxcomp plan --help\n"


def test_known_models_are_those_of_the_package():
    assert set(arguments.MODELS) == set(models.MODELS)


@pytest.mark.parametrize(
    "text",
    [
        "10Gbps",
        "10Gbit",
        "10 Gbit/s",
        "10Gbits/s",
        "10Gb",
        "10Gb/s",
        "1.25GB/s",
        "1.25 GBps",
        "10000Mbit",
        "1250MB",
        "0.01Tbit",
    ],
)
def test_speeds_of_links(text):
    assert options.bandwidth(text) == pytest.approx(1.25e9)


def test_numbers_with_their_units():
    assert options.bandwidth("3.3TB") == 3.3e12
    assert options.seconds("50us") == pytest.approx(50e-6)
    assert options.seconds("250 ms") == pytest.approx(0.25)
    assert options.seconds("0.25s") == 0.25
    assert options.seconds("0") == 0
    assert options.count("25e6") == options.count("25M") == 25_000_000
    assert options.count("7B") == 7_000_000_000
    assert options.workers("4x8") == (4, 8)
