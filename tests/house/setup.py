"""tests/support/setup.sh installs what is missing where it may, and elsewhere lists it and stops; bench/run.sh asks
it for what its build needs; examples/quickstart.sh puts its text in place whole. Stand-ins for apt-get, sudo, id, a
missing mpiexec and the programs that the scripts start play the machine."""
import os
import pathlib
import shutil
import sys
import tempfile

from house import ROOT, run

folder = pathlib.Path(tempfile.mkdtemp())
path = folder / "bin"
log = folder / "log"
has_benchmark = folder / "benchmark"
SETUP = ["bash", "-c", ". tests/support/setup.sh; tessera_setup; echo ready"]
BENCH = ["./bench/run.sh", "--out", folder / "results"]

# The preprocessor, on a machine whose Google Benchmark is the test's choice.
COMPILER = f"""text=
case " $* " in *" -E "*) text=$(cat) ;; esac
case "$text" in *benchmark/benchmark.h*) [ -e {has_benchmark} ]; exit ;; esac
printf '%s\\n' "$text" | {shutil.which("g++")} "$@"
"""
APT_GET = f"""echo "$*" >>{log}
[ "$1" = install ] || exit 0
printf '#!/bin/sh\\n' >{path}/mpiexec
case "$*" in *libbenchmark-dev*) : >{has_benchmark} ;; esac
"""
CMAKE = f'[ "$1" = --version ] || {{ echo "cmake $*" >>{log}; exit 1; }}\n'


def machine(**programs):
    """A search path with the programs of this one and some of the test's in their places."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    hidden = {"apt-get", "sudo", *programs}
    for where in os.environ["PATH"].split(os.pathsep):
        if pathlib.Path(where).is_dir():
            for program in pathlib.Path(where).iterdir():
                link = path / program.name
                # A shell passes over folders, whatever their names.
                if program.name not in hidden and not link.is_symlink() and not program.is_dir():
                    link.symlink_to(program)
    for name, text in programs.items():
        (path / name).write_text("#!/bin/sh\n" + text)
        (path / name).chmod(0o755)


def on_machine(command, cwd=ROOT):
    return run(command, cwd=cwd, env={**os.environ, "PATH": str(path)})


def fresh_machine(command, user, apt=True, sudo=False):
    """Runs the command where mpiexec is broken and Google Benchmark missing until apt-get installs them."""
    programs = {"mpiexec": "exit 1\n", "id": f"echo {user}\n", "g++": COMPILER, "cmake": CMAKE}
    if apt:
        programs["apt-get"] = APT_GET
    if sudo:
        programs["sudo"] = 'shift; exec "$@"\n'
    machine(**programs)
    has_benchmark.unlink(missing_ok=True)
    log.write_text("")
    done = on_machine(command)
    return done.returncode, done.stdout, done.stderr, log.read_text().splitlines()


def installed(calls):
    return [c.split("--no-install-recommends ")[1] for c in calls if c.startswith("install")]


def expect(what, fact):
    if not fact:
        sys.exit(f"set-up: {what}")


for user, sudo in ((0, False), (1000, True)):
    status, out, err, calls = fresh_machine(SETUP, user, sudo=sudo)
    expect(f"user {user} installs mpich and goes on: {out} {err}", status == 0 and "ready" in out)
    expect(f"it installs what is missing and nothing else: {calls}", installed(calls) == ["mpich"])

    status, out, err, calls = fresh_machine(BENCH, user, sudo=sudo)
    expect(f"bench/run.sh installs what it needs and nothing else: {calls} {err}",
           installed(calls) == ["mpich libbenchmark-dev"])
    expect(f"it builds the benchmarks, and no tests, which need more: {calls}",
           calls[-1].startswith("cmake --preset") and {"-DTESSERA_BUILD_TESTS=OFF", "-DTESSERA_BUILD_BENCH=ON"}
           <= set(calls[-1].split()))
for options in ({"user": 1000}, {"user": 0, "apt": False}):
    status, out, err, calls = fresh_machine(SETUP, **options)
    expect(f"where it may not install, it stops: {out} {err}", status != 0 and "ready" not in out and not calls)
    expect(f"it lists what is missing: {err}", "mpich" in err)
    status, out, err, calls = fresh_machine(BENCH, **options)
    expect(f"bench/run.sh stops there, too: {calls} {err}", status != 0 and "libbenchmark-dev" in err and not calls)

# A start of the quickstart that is interrupted in the middle of the text, and one that is not. Whoever has the older
# text open keeps it.
clone = folder / "clone"
for script in ("examples/quickstart.sh", "tests/support/setup.sh"):
    (clone / script).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / script, clone / script)
answer = "bible(KJV) > gen1:1-rev22:21\\nGenesis 1\\n\\n  1 In the\\n  beginning\\n  2 And the\\n\\n"
text = clone / "runs/quickstart/king_james.txt"
text.parent.mkdir(parents=True)
text.write_text("older")
opened = text.open()
for ending, status, expected in (("kill -9 $$\n", "cut", "older"), ("", "whole", "Genesis 1")):
    machine(bible=f"printf '{answer}'\n{ending}", cmake="", mpiexec=f'[ "$1" = --version ] || echo trained >{log}\n')
    log.write_text("")
    done = on_machine(["./examples/quickstart.sh"], cwd=clone)
    expect(f"a {status} answer of the bible: {done}", (done.returncode == 0) == (status == "whole"))
    expect(f"training starts with a whole text only: {log.read_text()}", bool(log.read_text()) == (status == "whole"))
    expect(f"the text in its place is whole: {text.read_text()}", text.read_text().startswith(expected))
expect(f"each verse is a line: {text.read_text()!r}", "\n  1 In the   beginning\n  2 And the\n" in text.read_text())
expect("a text that is open is not written to", opened.read() == "older")
shutil.rmtree(folder)
