"""Examples of the commands, as their help shows them."""

_EXPRESSIONS = """\
Codecs and reducers are written as in Python, with the public names of jaxcomp, numbers, strings and
tuples: sign, 'top_k(fraction=1/100)', 'jaxcomp.qsgd_inf(bits=4)',
'TwoShot(up=qsgd(bits=4), down=qsgd(bits=8))', or what print(codec) shows."""
EXAMPLES = {
    "codecs": f"""{_EXPRESSIONS}

examples:
  jaxcomp codecs
  jaxcomp codecs --codec sign 'top_k(fraction=1/100)' 'eden(bits=2, rotations=2)'""",
    "bench": f"""{_EXPRESSIONS}

examples:
  jaxcomp bench --codec sign 'qsgd_inf(bits=4)'
  jaxcomp bench --codec 'PowerIteration(rank=4)' --elements 25M""",
    "plan": f"""{_EXPRESSIONS}

examples:
  jaxcomp plan --params 125e6 --workers 16 --link 10Gbps --step 250ms
  jaxcomp plan --model gpt2 --workers 4x8 --link 25Gbit --fast-link 400Gbit --step 300ms
  jaxcomp plan --tree my_model:shapes --workers 8 --link 1.25GB/s --step my_model:step
  jaxcomp plan --params 25M --workers 4 --link 100Mbit --step 250ms --rounds --link-only
  jaxcomp plan --gradients early.npz late.npz --budget 400kB --workers 8 --link 100Mbit
  jaxcomp plan --params 1e9 --workers 4x8 --link 25Gbit --fast-link 400Gbit --fsdp
  jaxcomp plan --params 1e9 --workers 8 --link 1Gbit --fsdp --codec 'mx("mxfp8") / qsgd_inf(bits=4)'
  jaxcomp plan --weights 7e9 --link 100Mbit --rate 3e-6
  jaxcomp plan --params 125e6 --workers 4 --link 100Mbit --latency 25ms --step 250ms --every 100 \
    --sites --codec 'chunk_top_k() / qsgd_inf(bits=8)'
  jaxcomp plan --params 125e6 --workers 4 --link 20Mbit --upload 2Mbit --latency 25ms --step 250ms \
    --every 500 --sites --codec 'chunk_top_k() / qsgd_inf(bits=8)'

--budget gives each leaf the codec that measured gradients ask for, within so many bytes. Save them:
  flat, _ = jax.tree_util.tree_flatten_with_path(gradients)  # of one worker
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  np.savez("early.npz", **{{name(path): leaf for path, leaf in flat}})""",
    "audit": """\
Save the compiled program, not the lowered one:
  compiled = step.lower(params, state, batch).compile()
  pathlib.Path("step.txt").write_text(compiled.as_text())
or run with XLA_FLAGS=--xla_dump_to=FOLDER, and take *after_optimizations.txt.

examples:
  jaxcomp audit step.txt
  jaxcomp audit dense.txt compressed.txt --json
  jaxcomp audit step.txt --mesh data=2,fsdp=4""",
    "report": """\
The training loop writes the file:
  tx = jaxcomp.compressed_mean(codec, "data", stats=True)
  log = jaxcomp.telemetry.Log(jaxcomp.telemetry.Csv("run.csv"))
  log(state, {"loss": loss})  # after each step

examples:
  jaxcomp report run.csv
  jaxcomp report run.csv --plot run.svg --window 20""",
    "fit": """\
A file is one worker's gradient before the mean: an array a parameter, by its name. Save a few:
  grads = jax.grad(loss)(params, batch)
  leaves = jax.tree_util.tree_leaves_with_path(grads)
  np.savez("early.npz", **{jax.tree_util.keystr(path): leaf for path, leaf in leaves})
or run examples/byte_lm.py --codec dense --save-gradients. Give them in the order of training.

examples:
  jaxcomp fit early.npz middle.npz late.npz
  jaxcomp fit gradients/*.npz --share 0.001 --plot fit.svg""",
    "weights": """\
jaxcomp.weights.Publisher writes them, and jaxcomp_weights.Reader reads them.

examples:
  jaxcomp weights s3://bucket/run
  jaxcomp weights runs/weights --verify
  jaxcomp weights https://host/run --verify --key 6f1c...e2""",
    "watch": """\
The folder is that of the server's checkpoints, CompressedFedAvg(checkpoint=FOLDER). The page is on
127.0.0.1 alone; from another machine, forward its port: ssh -L 7171:127.0.0.1:7171 HOST

examples:
  jaxcomp watch /var/lib/server/checkpoint
  jaxcomp watch /var/lib/server/checkpoint --port 0
  jaxcomp watch /var/lib/server/checkpoint --once""",
}
"""The text below the options of each command."""
