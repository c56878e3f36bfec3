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



def long_comments(path):
    """clang-format would break a formula or an example where its line is full: it leaves comments alone, and
    their lines are measured here."""
    lines = (ROOT / path).read_text().splitlines()
    return [f"{path}:{n}" for n, line in enumerate(lines, 1) if len(line) > WIDTH and line.lstrip().startswith("//")]


WIDTH = int(re.search(r"ColumnLimit: (\d+)", (ROOT / ".clang-format").read_text()).group(1))
scratch = build().scratch("format")
(scratch / ".clang-format").write_text((ROOT / ".clang-format").read_text())
(scratch / "planted.cpp").write_text("int   f( ){return 1 ;}\n")
if is_laid_out(scratch / "planted.cpp"):
    sys.exit("this test does not see a badly laid out file")
(scratch / "planted.cpp").write_text("///     w = w" + " - rate * m" * 10 + "\nint f();\n")
if not is_laid_out(scratch / "planted.cpp") or long_comments(scratch / "planted.cpp") != [f"{scratch / 'planted.cpp'}:1"]:
    sys.exit("this test does not see a comment that is too long, or breaks it")

files = [p for p in read_tree() if re.search(r"\.(hpp|cpp|cuh|cu)$", p) and not p.startswith("single_include/")]
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    wrong = [path for path, good in zip(files, pool.map(is_laid_out, files)) if not good]
if wrong:
    sys.exit("not laid out by clang-format; run  clang-format -i " + " ".join(wrong))
found = [place for path in files for place in long_comments(path)]
if found:
    sys.exit(f"comments of more than {WIDTH} columns: " + " ".join(found))
