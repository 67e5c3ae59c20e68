"""The command line around codecs and plans."""

import inspect
import json
import re

import numpy as np
import pytest

import jaxcomp
from jaxcomp import cli
from jaxcomp.planning import options, timing
from jaxcomp.recipes import catalogue


def still(way) -> timing.Measured:
    """A device of 1 ns an element for each pass, without looking at what passes."""
    if isinstance(way, jaxcomp.Dense):
        return timing.Measured(10**9, 0.0, 0.0, 0.0, 0.0)
    return timing.Measured(10**9, whole=2.0, decode=1.0, add=0.5, error=0.1)


def run(capsys, *argv: str) -> str:
    cli.main(argv)
    return capsys.readouterr().out


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
        for name, made in vars(jaxcomp).items()
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


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("codecs --codec __import__('os')", "name of jaxcomp"),
        ("codecs --codec jaxcomp.sign()", "malformed"),
        ("codecs --codec sign(", "must be an expression"),
        ("codecs --codec sign(bitz=3)", "must be an expression"),
        ("codecs --codec qsgd(bits=99)", "`bits`"),
        ("codecs --codec Dense()", "must be a codec"),
        ("plan --workers 4 --link 1Gbit", "--params, --model and --tree"),
        ("plan --params 9 --model gpt2 --workers 4 --link 1Gbit", "exactly one of"),
        ("plan --params 9 --workers 4 --link 1Gbit --link-per rack", "invalid choice"),
        ("plan --params 9 --workers 4 --link 1Gbit --fast-link 1Gbit", "--fast-link"),
        ("plan --params 9 --workers 4 --link 1Gbut", "a speed such as"),
        ("plan --params 9.5 --workers 4 --link 1Gbit", "positive whole number"),
        ("plan --params 9 --workers 1 --link 1Gbit", "at least 2"),
        ("plan --params 9 --workers 4 --link 1Gbit --step soon", "a time such as"),
        ("plan --params 9 --workers 4 --link 1Gbit --link-only --rounds", "`compute` must"),
        ("plan --tree nowhere:x --workers 4 --link 1Gbit", "cannot find 'nowhere:x'"),
    ],
)
def test_the_command_line_says_what_is_wrong(argv, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv.split())
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_errors_of_a_number_do_not_come_as_tracebacks():
    assert options.bandwidth("10Gbit/s") == 1.25e9
    assert options.bandwidth("3.3TB") == 3.3e12
    assert options.seconds("50us") == pytest.approx(50e-6)
    assert options.count("25e6") == 25_000_000
    assert options.levels("4x8") == (4, 8)
    assert np.isclose(options.seconds("0.25"), 0.25)
