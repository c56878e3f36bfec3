"""clang-format decides the layout of C++ files."""
import re
import sys

from house import ROOT, build, find_compiler, not_run, read_tree, run

if not find_compiler("clang-format"):
    not_run("there is no clang-format")
version = re.search(r"version (\d+)", run(["clang-format", "--version"]).stdout)
if not version or version.group(1) != "14":
    not_run(f"the layout is that of clang-format 14, here is {version and version.group(1)}")

scratch = build().scratch("format")
(scratch / ".clang-format").write_text((ROOT / ".clang-format").read_text())
(scratch / "planted.cpp").write_text("int   f( ){return 1 ;}\n")
if run(["clang-format", "--dry-run", "-Werror", scratch / "planted.cpp"]).returncode == 0:
    sys.exit("this test does not see a badly laid out file")

files = [p for p in read_tree() if re.search(r"\.(hpp|cpp|cuh|cu)$", p) and not p.startswith("single_include/")]
done = run(["clang-format", "--dry-run", "-Werror", *files], cwd=ROOT)
wrong = sorted({line.split(":")[0] for line in done.stderr.splitlines() if "-Wclang-format-violations" in line})
if wrong:
    print("not laid out by clang-format; run  clang-format -i " + " ".join(wrong))
sys.exit(1 if wrong or done.returncode else 0)
