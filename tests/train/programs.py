#!/usr/bin/env python3
# requires: mpi openmp json xxhash sentencepiece cli11
# timeout: 120
"""The example programs run to their end and keep what their first lines promise: train_gpt trains the same model on
any ranks, generate writes the text of a seed, existing_mpi_code and four_ranks find the same on other ranks and
layouts, and the small demonstrations print what they are there to show."""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

programs = pathlib.Path(sys.argv[1]).resolve() / "examples"
scratch = pathlib.Path(tempfile.mkdtemp(prefix="tessera-programs-"))
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
failures = []

SMALL = dict(steps=40, warm_up_steps=4, width=16, heads=2, layers=1, sequence_length=32, batch=4, micro_batch=2,
             learning_rate=0.01, checkpoint_every=20, keep=2, validate_every=0, validation_samples=4,
             sample_tokens=0, threads=1, measure_peak="false")


def launch(*command, **options):
    try:
        return subprocess.run([str(c) for c in command], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60,
                              **{"stdout": subprocess.PIPE, **options})
    except subprocess.TimeoutExpired as hung:
        return subprocess.CompletedProcess(command, 1, hung.stdout or b"", b"HANGS")


def output(*command):
    """What a program prints that must end well, and what it says beside."""
    done = launch(*command)
    if done.returncode != 0:
        failures.append(f"{' '.join(map(str, command))}: status {done.returncode}\n"
                        f"{(done.stdout + done.stderr).decode(errors='replace')[-2000:]}")
    return done.stdout, done.stderr.decode(errors="replace")


def expect(what, fact):
    if not fact:
        failures.append(what)


def refuses(what, done, *words):
    said = done.stderr.decode(errors="replace")
    expect(f"{what}: status {done.returncode}, says {said}", done.returncode != 0 and all(w in said for w in words))


def numbers(text):
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", text)]


def close(a, b, by):
    return len(a) == len(b) and all(abs(x - y) <= by for x, y in zip(a, b))


def train(name, launcher=(), **changes):
    """The last checkpoint of a run, and the loss of each step."""
    folder = scratch / name
    settings = {**SMALL, "data": text, "run": folder, **changes}
    words = [word for key, value in settings.items() for word in ("--" + key.replace("_", "-"), value)]
    output(*launcher, programs / "train_gpt", *words)
    rows = (folder / "metrics.csv").read_text().splitlines() if folder.exists() else []
    losses = [float(row.split(",")[rows[0].split(",").index("loss")]) for row in rows[1:]]
    expect(f"{name}: a row for each step, and the loss falls: {losses}",
           len(losses) == SMALL["steps"] and losses[-1] < losses[0] - 0.5)
    return folder / "checkpoints" / "step-00000040", losses


text = scratch / "text.txt"
text.write_text("".join(f"line {i} of the text, squared {i * i}\n" for i in range(400)))

# train_gpt: one rank and two train the same model to rounding, thread ranks and MPI ranks to the last bit.
one, losses_of_one = train("one")
threads, losses_of_two = train("threads", ranks=2)
mpi, losses_of_mpi = train("mpi", launcher=("mpiexec", "-n", 2))
expect(f"one rank and two differ: {losses_of_one}, {losses_of_two}", close(losses_of_one, losses_of_two, 0.05))
expect("thread ranks and MPI ranks differ", losses_of_two == losses_of_mpi)
for file in ("model.safetensors", "optimizer.safetensors"):
    expect(f"{file} of thread ranks and of MPI ranks differ",
           (threads / file).exists() and (threads / file).read_bytes() == (mpi / file).read_bytes())


# generate: the same seed gives the same text, from a run's folder or a checkpoint's.
def written(*options, run=scratch / "one", prompt="line 1"):
    return output(programs / "generate", "--run", run, "--prompt", prompt, "--threads", 1, *options)[0]


first = written("--tokens", 60)
expect(f"the prompt comes first, then as many tokens as asked for (of a byte each): {first}",
       first.startswith(b"line 1") and first.endswith(b"\n") and len(first) == 6 + 60 + 1)
expect("the same seed gives another text", written("--tokens", 60, "--seed", 1) == first)
expect("another seed gives the same text", written("--tokens", 60, "--seed", 2) != first)
expect("a shorter text is not the beginning of a longer one", first.startswith(written("--tokens", 20)[:-1]))
expect("no tokens: not the prompt alone", written("--tokens", 0) == b"line 1\n")
expect("a long prompt is lost", written("--tokens", 5, prompt="line 1 of the text, " * 10).startswith(
    b"line 1 of the text, " * 10))
expect("a prompt beyond ASCII is lost", written("--tokens", 5, prompt="Größe 一").startswith("Größe 一".encode()))

surest = written("--tokens", 60, "--temperature", 0)
expect("temperature 0 depends on the seed", written("--tokens", 60, "--temperature", 0, "--seed", 2) == surest)
for one_choice in (("--top-k", 1), ("--top-p", 1e-6)):
    for seed in (1, 2):
        expect(f"{one_choice}, seed {seed}: not the most probable tokens",
               written("--tokens", 60, *one_choice, "--seed", seed) == surest)
few = {k: written("--tokens", 60, "--top-k", k, "--top-p", 1, "--temperature", 1.5) for k in (2, 0)}
expect(f"top-k is without effect: {few}", few[2] != few[0] and few[2] != surest)
less = {p: written("--tokens", 60, "--top-p", p, "--temperature", 1.5) for p in (0.3, 1)}
expect(f"top-p is without effect: {less}", less[0.3] != less[1])

expect("a checkpoint's folder gives another text than its run's", written("--tokens", 60, run=one) == first)
older = one.parent / "step-00000020"
_, said = output(programs / "generate", "--run", older, "--tokens", 5)
expect(f"an older checkpoint is not used: {said}", "step 20" in said)
learnt, _ = train("pieces", tokenizer="sentencepiece", vocabulary=300, family="llama", storage="fp32")
pieces = written("--tokens", 20, run=scratch / "pieces")
expect(f"pieces of words are not text: {pieces}", pieces.strip().startswith(b"line 1"))
expect("pieces: the same seed gives another text", written("--tokens", 20, run=learnt) == pieces)

with open("/dev/full", "wb") as full:
    refuses("generate on a full disk", launch(programs / "generate", "--run", one, stdout=full),
            "E-io-004", "No space left on device")
refuses("generate without a checkpoint", launch(programs / "generate", "--run", scratch), "E-train-063")
refuses("generate without a prompt", launch(programs / "generate", "--run", one, "--prompt", ""), "E-train-033")

# existing_mpi_code: any number of ranks finds the same powers, to the last digit but one.
alone, together = (output("mpiexec", "-n", n, programs / "existing_mpi_code")[0].decode() for n in (1, 2))
for printed in (alone, together):
    errors = [numbers(line)[1] for line in printed.splitlines() if line.startswith("step")]
    powers = numbers(next((line for line in printed.splitlines() if line.startswith("powers:")), ""))
    expect(f"existing_mpi_code: {printed}", len(errors) == 5 and errors[0] == 1 and errors[-1] < 0.2 * errors[0]
           and errors == sorted(errors, reverse=True))
    expect(f"the powers are not symmetric, as the rod is: {powers}",
           len(powers) == 8 and close(powers, powers[::-1], 0.011))
expect(f"existing_mpi_code on one rank and on two:\n{alone}{together}", close(numbers(alone), numbers(together), 0.011))

# four_ranks: any layout trains the same model.
layouts = [[], ["data 1 x tensor 1 x pipeline 2 x context 2, zero 1, zero bubble, micro-batch 1"],
           ["data 4, zero 1, micro-batch 1"]]
losses = [numbers(output(programs / "four_ranks", *layout)[0].decode()) for layout in layouts]
expect(f"four_ranks: three losses that fall: {losses}", losses[0][0::2] == [20, 40, 60] and losses[0][-1] < 0.3)
expect(f"four_ranks: layouts differ: {losses}", all(close(found, losses[0], 0.011) for found in losses))
refuses("four_ranks with a layout of other ranks", launch(programs / "four_ranks", "data 3"), "four_ranks: ", "[E-")

# The demonstrations.
expect("minimal: the README's four lines", output(programs / "minimal")[0] == b"gradient 8.0, weight 0.89\n" * 4)
lines = output(programs / "pipeline_schedules", scratch, 2, 4)[0].decode().splitlines()
expect(f"pipeline_schedules: GPipe is idle for (stages - 1) / (stages - 1 + micro-batches): {lines}",
       len(lines) == 4 and re.match(r"GPipe +idle  20\.0 %, micro-batches kept: 4 4$", lines[0]))
lines = output(programs / "pipeline_run", scratch)[0].decode().splitlines()
expect(f"pipeline_run: a line for each of four schedules: {lines}", len(lines) == 4)
for line in lines:
    name, shares = line.split()[0], re.findall(r"([\d.]+) %", line)
    expect(f"pipeline_run: {line}", len(shares) == 2 and all(0 < float(share) < 100 for share in shares))
    picture = scratch / f"measured_{name}.svg"
    expect(f"pipeline_run: no picture of {name}", picture.exists() and "</svg>" in picture.read_text())
for name in ("pipeline_schedules", "pipeline_run"):
    refuses(f"{name} without a folder", launch(programs / name), "usage: ")
    refuses(f"{name} without a place to write", launch(programs / name, scratch / "nowhere"), "cannot write")

shutil.rmtree(scratch, ignore_errors=True)
print("\n".join(failures) or "every program did what it says")
sys.exit(1 if failures else 0)
