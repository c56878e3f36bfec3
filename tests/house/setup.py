"""tests/support/setup.sh installs what is missing where it may, and elsewhere lists it and stops. Stand-ins for
apt-get, sudo, id and a missing mpiexec play the machine."""
import os
import pathlib
import shutil
import sys
import tempfile

from house import ROOT, run

folder = pathlib.Path(tempfile.mkdtemp())
log = folder / "log"


def machine(user, apt=True, sudo=False):
    """A search path whose mpiexec is broken until apt-get installs."""
    path = folder / "bin"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    hidden = {"apt-get", "sudo", "id", "mpiexec"}
    for where in os.environ["PATH"].split(os.pathsep):
        if pathlib.Path(where).is_dir():
            for program in pathlib.Path(where).iterdir():
                link = path / program.name
                # A shell passes over folders, whatever their names.
                if program.name not in hidden and not link.is_symlink() and not program.is_dir():
                    link.symlink_to(program)

    def write(name, text):
        (path / name).write_text("#!/bin/sh\n" + text)
        (path / name).chmod(0o755)

    write("mpiexec", "exit 1\n")
    write("id", f"echo {user}\n")
    if apt:
        write("apt-get", f'echo "$*" >>{log}\ncase "$1" in install) printf "#!/bin/sh\\n" >{path}/mpiexec ;; esac\n')
    if sudo:
        write("sudo", 'shift; exec "$@"\n')
    log.write_text("")
    done = run(["bash", "-c", ". tests/support/setup.sh; tessera_setup; echo ready"],
               cwd=ROOT, env={**os.environ, "PATH": str(path)})
    return done.returncode, done.stdout, done.stderr, log.read_text()


def expect(what, fact):
    if not fact:
        sys.exit(f"set-up: {what}")


for user, sudo in ((0, False), (1000, True)):
    status, out, err, calls = machine(user, sudo=sudo)
    expect(f"user {user} installs mpich and goes on: {out} {err}", status == 0 and "ready" in out)
    expect("it installs what is missing and nothing else",
           [c.split()[-1] for c in calls.splitlines() if c.startswith("install")] == ["mpich"])
for options in ({"user": 1000}, {"user": 0, "apt": False}):
    status, out, err, calls = machine(**options)
    expect(f"where it may not install, it stops: {out} {err}", status != 0 and "ready" not in out and not calls)
    expect(f"it lists what is missing: {err}", "mpich" in err)
shutil.rmtree(folder)
