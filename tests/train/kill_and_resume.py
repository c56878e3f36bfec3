#!/usr/bin/env python3
# requires: mpi openmp json xxhash sentencepiece cli11
# timeout: 600
"""Kills the trainer at random moments, resumes it, and compares the final checkpoint, byte for byte, with that of
a run that nobody disturbed. Kills hit two thread ranks and two MPI ranks in turn: a run that was killed on one
goes on on the other. TESSERA_KILLS says how many kills (20)."""
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

program = pathlib.Path(sys.argv[1]).resolve() / "examples" / "train_gpt"
kills = int(os.environ.get("TESSERA_KILLS", "20"))
seed = int(os.environ.get("TESSERA_SEED", str(random.randrange(10**6))))
random.seed(seed)
print(f"{kills} kills, TESSERA_SEED={seed}")

STEPS = 40
SETTINGS = f"""--steps {STEPS} --warm-up-steps 5 --width 32 --heads 2 --layers 2 --sequence-length 32 --batch 5
    --micro-batch 2 --dropout 0.1 --checkpoint-every 3 --keep 2 --validate-every 7 --validation-samples 8
    --validation-share 0.02 --sample-tokens 0 --threads 1 --measure-peak false""".split()


def command(kind, data, run):
    launch = ["mpiexec", "-n", "2", program] if kind == "mpi" else [program, "--ranks", "2"]
    return [*map(str, launch), "--data", str(data), "--run", str(run), *SETTINGS]


def final_files(run):
    folder = run / "checkpoints" / f"step-{STEPS:08}"
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def steps_in(run):
    return [float(line.split(",")[0]) for line in (run / "metrics.csv").read_text().splitlines()[1:]]


def finish(kind, data, run):
    done = subprocess.run(command(kind, data, run), capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        sys.exit(f"the run on {kind} ranks failed:\n{done.stdout}{done.stderr}")


def kill_after(seconds, kind, data, run):
    """Starts a run and kills all of its processes; False if it had ended before."""
    started = subprocess.Popen(command(kind, data, run), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    try:
        started.wait(seconds)
        if started.returncode != 0:
            sys.exit(f"a resumed run on {kind} ranks ended with {started.returncode}")
        return False
    except subprocess.TimeoutExpired:
        victims = family(started.pid)
        for victim in victims:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                pass
        started.wait()
        while any(alive(v) for v in victims):
            time.sleep(0.01)
        return True


def family(root):
    """The process and all that descend from it."""
    children = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


with tempfile.TemporaryDirectory(prefix="tessera-kill-") as scratch:
    scratch = pathlib.Path(scratch)
    data = scratch / "text.txt"
    data.write_text("".join(f"verse {i}: the number {i * i} follows {i * (i + 1)}\n" for i in range(2000)))

    took = {}
    for kind in ("threads", "mpi"):
        start = time.time()
        finish(kind, data, scratch / kind)
        took[kind] = time.time() - start
    undisturbed = final_files(scratch / "threads")
    if final_files(scratch / "mpi") != undisturbed:
        sys.exit("thread ranks and MPI ranks left different checkpoints")

    done = rounds = 0
    resumed_from = set()
    while done < kills:
        rounds += 1
        run = scratch / f"disturbed-{rounds}"
        while True:
            kind = ("threads", "mpi")[done % 2]
            if done == kills or not kill_after(random.uniform(0.02, took[kind]), kind, data, run):
                break
            done += 1
            if (run / "checkpoints").is_dir():
                resumed_from |= {p.name for p in (run / "checkpoints").glob("step-*")}
        finish("threads", data, run)
        files = final_files(run)
        for name in sorted(undisturbed.keys() | files.keys()):
            if undisturbed.get(name) != files.get(name):
                sys.exit(f"after {done} kills {name} of the final checkpoint differs")
        if steps_in(run) != [float(i) for i in range(1, STEPS + 1)]:
            sys.exit(f"after {done} kills metrics.csv holds the steps {steps_in(run)}")
        left = [p.name for p in run.rglob(".*") if p != run / ".lock"]
        if left:
            sys.exit(f"after {done} kills these were left behind: {left}")
    print(f"{done} kills in {rounds} runs; checkpoints seen at a kill: {len(resumed_from)}; all final bytes equal")
