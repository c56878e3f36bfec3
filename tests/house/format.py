"""clang-format decides the layout of C++ files."""
import concurrent.futures
import os
import re
import sys

from house import ROOT, build, find_compiler, not_run, read_tree, run

if not find_compiler("clang-format"):
    not_run("there is no clang-format")
version = re.search(r"version (\d+)", run(["clang-format", "--version"]).stdout)
if not version or version.group(1) != "14":
    not_run(f"the layout is that of clang-format 14, here is {version and version.group(1)}")



def is_laid_out(path):
    # By its output: --dry-run reports the closing comments of `namespace a::inline b` that it would not change.
    return run(["clang-format", path], cwd=ROOT).stdout == (ROOT / path).read_text()


scratch = build().scratch("format")
(scratch / ".clang-format").write_text((ROOT / ".clang-format").read_text())
(scratch / "planted.cpp").write_text("int   f( ){return 1 ;}\n")
if is_laid_out(scratch / "planted.cpp"):
    sys.exit("this test does not see a badly laid out file")

files = [p for p in read_tree() if re.search(r"\.(hpp|cpp|cuh|cu)$", p) and not p.startswith("single_include/")]
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    wrong = [path for path, good in zip(files, pool.map(is_laid_out, files)) if not good]
if wrong:
    sys.exit("not laid out by clang-format; run  clang-format -i " + " ".join(wrong))
