#!/usr/bin/env python3
# requires: mpi openmp json xxhash sentencepiece cli11
# timeout: 300
"""Whatever is wrong with what the trainer is given: it ends with a message that says so, with an exit status that is
not zero, without hanging, on one process and on two, and without harming the checkpoints that are there."""
import fcntl
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

program = pathlib.Path(sys.argv[1]).resolve() / "examples" / "train_gpt"
scratch = pathlib.Path(tempfile.mkdtemp(prefix="tessera-bad-"))
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
failures = []

SMALL = dict(steps=6, warm_up_steps=2, width=16, heads=2, layers=1, sequence_length=16, batch=4, micro_batch=2,
             checkpoint_every=2, keep=2, validate_every=0, validation_samples=4, validation_share=0.05,
             sample_tokens=0, threads=1, measure_peak="false")
MANNERS = ("threads", "mpi")


def arguments(settings):
    return [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), str(value))]


def command_of(manner, settings):
    launcher = ["mpiexec", "-n", "2", program] if manner == "mpi" else [program, "--ranks", "2"]
    return [str(word) for word in [*launcher, *arguments(settings)]]


def run(manner, settings):
    return launch(command_of(manner, settings))


def launch(command):
    try:
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace", timeout=60)
    except subprocess.TimeoutExpired as hung:
        return subprocess.CompletedProcess(command, 0, "", f"HANGS: {hung.stderr}")


def expect(what, done, *words):
    """The run must have failed, saying all of the words."""
    text = done.stdout + done.stderr
    missing = [w for w in words if w not in text]
    if done.returncode == 0 or missing:
        failures.append(f"{what}: status {done.returncode}, not said: {missing}\n{text.strip()[-2000:]}")


def good(name="good", **changes):
    """A finished run to spoil."""
    folder = scratch / name
    done = run("threads", {**SMALL, "data": text, "run": folder, **changes})
    if done.returncode != 0:
        sys.exit(f"the good run failed:\n{done.stdout}{done.stderr}")
    return folder


def snapshot(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


text = scratch / "text.txt"
text.write_text("".join(f"line {i} of the text, squared {i * i}\n" for i in range(400)))
other = scratch / "other.txt"
other.write_text(text.read_text().replace("line", "row"))
(scratch / "empty.txt").write_text("")
(scratch / "short.txt").write_text("too short")
(scratch / "unknown.json").write_text('{"learning_rte": 0.1}')
(scratch / "wrong.json").write_text('{"layers": "four"}')
(scratch / "broken.json").write_text('{"layers": 4')
shard = struct.pack("<256i", 20240520, 1, 4000, *[0] * 253)
(scratch / "tokens.bin").write_bytes(shard + struct.pack("<4000H", *[i % 50 for i in range(3999)], 50))
(scratch / "cut.bin").write_bytes(shard + struct.pack("<100H", *[1] * 100))

for manner in MANNERS:
    base = {**SMALL, "data": text, "run": scratch / f"fresh-{manner}"}
    for what, changes, words in [
        ("a missing text", {"data": scratch / "nowhere.txt"}, ["E-io-001", "nowhere.txt"]),
        ("an empty text", {"data": scratch / "empty.txt"}, ["E-io-003", "empty.txt"]),
        ("a text shorter than a sequence", {"data": scratch / "short.txt"}, ["E-data-009", "give more text"]),
        ("a folder as text", {"data": scratch}, ["E-io-002"]),
        ("no text", {"data": ""}, ["E-train-005", "--data"]),
        ("a token out of range", {"data": scratch / "tokens.bin", "tokenizer": "tokens", "vocabulary": 50},
         ["E-data-003", "token 3999 is 50"]),
        ("a cut token file", {"data": scratch / "cut.bin", "tokenizer": "tokens", "vocabulary": 50}, ["E-data-004"]),
        ("more pieces than the text has", {"tokenizer": "sentencepiece", "vocabulary": 200000}, ["E-data-014"]),
        ("an impossible width", {"width": 15}, ["E-train-006", "set width to 16"]),
        ("a negative size", {"layers": -1}, ["E-train-003", "layers"]),
        ("a word where a number belongs", {"layers": "four"}, ["E-train-004", "whole number"]),
        ("a warm-up longer than the run", {"warm_up_steps": 60}, ["E-train-008"]),
        ("an option that does not exist", {"learning_rte": 1}, ["E-train-009", "--learning-rate"]),
        ("an unknown key in the config", {"config": scratch / "unknown.json"}, ["learning_rte", "learning_rate"]),
        ("a wrong type in the config", {"config": scratch / "wrong.json"}, ["layers", "four"]),
        ("a config that is cut", {"config": scratch / "broken.json"}, ["E-io-011", "broken.json"]),
        ("a config that is not there", {"config": scratch / "nowhere.json"}, ["nowhere.json"]),
        ("a device that the program or the machine is without", {"device": "cuda", "threads": 0}, ["CUDA", "host"]),
        ("a device that does not exist", {"device": "abacus"}, ["E-train-002", "host|cuda"]),
        ("a layout for other ranks", {"tensor": 3}, ["E-parallel-071", "start 3"]),
        ("a layout that cannot be read", {"layout": "tensors 2"}, ["E-parallel-075", "tensors 2"]),
        ("a layout in two places", {"layout": "tensor 2", "zero_stage": 2}, ["E-train-007", "zero_stage"]),
        ("a choice without what it belongs to", {"sequence_parallel": "true"}, ["E-parallel-072", "tensor"]),
        ("a run's folder that is a file", {"run": text}, ["text.txt"]),
    ]:
        expect(f"{what}, {manner}", run(manner, {**base, **changes}), *words)

    spoilt = good(f"spoilt-{manner}")
    newest = spoilt / "checkpoints" / "step-00000006"
    before = snapshot(spoilt / "checkpoints")
    same = {**SMALL, "data": text, "run": spoilt, "steps": 8}  # without the allowance nothing goes on

    for what, changes, words in [
        ("more steps", {}, ["E-train-051", "steps: 6 there, 8 here", "--allow-difference steps"]),
        ("another text", {"steps": 6, "data": other}, ["E-train-051", "--allow-difference data"]),
        ("another seed", {"steps": 6, "seed": 1}, ["seed: 1337 there, 1 here"]),
        ("another shape", {"steps": 6, "width": 32}, ["width: 16 there, 32 here"]),
        ("another shape that is allowed", {"steps": 6, "width": 32, "allow_difference": "width"},
         ["E-train-060", "of another shape or type", "wte.weight (BF16 [256, 16] in the file, BF16 [256, 32]"]),
        ("another depth that is allowed", {"steps": 6, "layers": 2, "allow_difference": "layers"},
         ["E-train-060", "missing (12)", "h.1.attn.c_attn.weight"]),
        ("an allowed difference that does not exist", {"allow_difference": "colour"}, ["E-train-001", "colour"]),
    ]:
        expect(f"resuming with {what}, {manner}", run(manner, {**same, **changes}), *words)
    if manner == "threads":
        expect("resuming on three ranks", launch([program, "--ranks", "3", *arguments({**same, "steps": 6})]),
               "E-train-051", "layout: data 2, zero 1, micro-batch 2 there")
    if snapshot(spoilt / "checkpoints") != before:
        failures.append(f"refused resumptions changed the checkpoints, {manner}")

    for file, damage, words in [
        ("model.safetensors", lambda b: b[:-7], ["E-train-062", "was cut", "step-00000004"]),
        ("optimizer.safetensors", lambda b: b[:900] + bytes([b[900] ^ 1]) + b[901:], ["E-train-062", "was altered"]),
        ("state.json", lambda b: b.replace(b'"step": 6', b'"step": 5'), ["E-train-062", "state.json"]),
        ("manifest.json", lambda b: b[: len(b) // 2], ["E-train-062", "manifest.json"]),
    ]:
        whole = (newest / file).read_bytes()
        (newest / file).write_bytes(damage(whole))
        expect(f"a damaged {file}, {manner}", run(manner, {**same, "steps": 6}), *words)
        (newest / file).write_bytes(whole)
    whole = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").unlink()
    expect(f"a checkpoint without its weights, {manner}", run(manner, {**same, "steps": 6}), "lacks its file")
    (newest / "model.safetensors").write_bytes(whole)
    if snapshot(spoilt / "checkpoints") != before:
        failures.append(f"damaged checkpoints were not left as they were, {manner}")

    with open(spoilt / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        expect(f"a run that another program works on, {manner}", run(manner, {**same, "steps": 6}), "E-io-039")

    # A disk that fills up in the middle of the second checkpoint: the first stays, and with more room the run goes
    # on from it. The disk is a small one in memory, which needs the right to mount in a namespace of one's own.
    full = scratch / f"full-{manner}"
    full.mkdir()
    settings = {**SMALL, "data": text, "run": full / "run", "width": 64, "checkpoint_every": 3}
    script = """mount -t tmpfs -o size=$1 none "$2" || exit 99
        shift; folder=$1; shift; "$@"; status=$?
        ls "$folder/run/checkpoints"; mount -o remount,size=100m "$folder"; "$@" >&2 || exit 98; exit $status"""
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", full], capture_output=True).returncode != 0:
        print("not run: a full disk (no right to mount one)")
    else:
        done = launch(["unshare", "-rm", "sh", "-c", script, "sh", "1500k", full, *command_of(manner, settings)])
        expect(f"a full disk, {manner}", done, "E-io-004", "No space left on device", "safetensors")
        if done.stdout.split() and done.stdout.split()[0] != "step-00000003" or done.returncode in (98, 99):
            failures.append(f"a full disk, {manner}: status {done.returncode}, left {done.stdout}")
        if "resumed from" not in done.stderr:
            failures.append(f"after a full disk the run did not go on, {manner}")

    # A loss that is not a number: the step is named and the last good checkpoint is kept.
    lost = scratch / f"lost-{manner}"
    done = run(manner, {**SMALL, "data": text, "run": lost, "learning_rate": 9e15, "steps": 30, "clip": 0,
                        "checkpoint_every": 1})
    expect(f"a loss that is not finite, {manner}", done, "E-train-070", "step ", "The last good checkpoint is")

done = launch(["mpiexec", "-n", "1", program, *arguments({**SMALL, "data": text, "run": scratch / "x"}), ":",
               "-n", "1", program, *arguments({**SMALL, "data": text, "run": scratch / "x", "layers": 2})])
expect("ranks that disagree", done, "E-train-041", "layers 2", "rank 0: layers 1")
for part, last in (("first", 48), ("second", 49)):
    (scratch / part).mkdir()
    (scratch / part / "tokens.bin").write_bytes(shard + struct.pack("<4000H", *[i % 50 for i in range(3999)], last))
tokens = {**SMALL, "data": "tokens.bin", "tokenizer": "tokens", "vocabulary": 50, "run": scratch / "x"}
done = launch(["mpiexec", "-n", "1", "-wdir", scratch / "first", program, *arguments(tokens), ":",
               "-n", "1", "-wdir", scratch / "second", program, *arguments(tokens)])
expect("ranks that find different data", done, "E-train-042", "rank 1", "tokens.bin")
expect("thread ranks under mpiexec", launch(["mpiexec", "-n", "2", program, "--ranks", "2",
                                             *arguments({**SMALL, "data": text, "run": scratch / "x"})]), "E-train-007", "mpiexec")

expect("generating without a device", launch([program.parent / "generate", "--run", lost, "--device", "cuda"]),
       "generate: ", "CUDA", "host")

help_text = launch([program, "--help"])
if help_text.returncode != 0 or "--learning-rate" not in help_text.stdout or "Examples" not in help_text.stdout:
    failures.append(f"--help: {help_text}")

shutil.rmtree(scratch, ignore_errors=True)
print("\n".join(failures) or "every fault was met with its message")
sys.exit(1 if failures else 0)
