"""What including a public header costs, in preprocessed lines, against the committed budget.

A header may grow by 5%; one that outgrows its budget fails, and one without an entry too.
    tests/house/include_budget.py build/release/tests/house/build.json --update    writes the present figures
"""
import concurrent.futures
import os
import re
import sys

from house import ROOT, build, is_inner, not_run, read_tree, run, without_nccl

BUDGET = ROOT / "tests/house/include_budget.txt"
ALLOWANCE = 1.05
this_build = build()


def lines_of(header):
    done = run([this_build.compiler, *this_build.everything, "-E", "-x", "c++", "-"],
               input=f"#include <{header}>\n")
    if done.returncode != 0:
        sys.exit(f"{header} cannot be preprocessed:\n{done.stderr[:2000]}")
    return done.stdout.count("\n")


def compare(budget, measured):
    found = []
    for header, lines in measured.items():
        if header not in budget:
            found.append(f"{header}: {lines} lines and no entry in tests/house/include_budget.txt (--update)")
        elif lines > budget[header] * ALLOWANCE:
            found.append(f"{header}: {lines} lines, the budget is {budget[header]} (+{lines / budget[header] - 1:.0%})")
    return found + [f"{header}: has an entry and does not exist" for header in budget if header not in measured]


# The rule on planted figures.
assert compare({"a": 1000}, {"a": 1050}) == []
assert len(compare({"a": 1000}, {"a": 1051})) == 1
assert len(compare({}, {"a": 1})) == 1
assert len(compare({"a": 1}, {})) == 1

compiler = run([this_build.compiler, "-dumpfullversion"]).stdout.split(".")[0]
is_gcc = "Free Software Foundation" in run([this_build.compiler, "--version"]).stdout
text = BUDGET.read_text() if BUDGET.exists() else ""
measured_with = re.search(r"g\+\+ (\d+)", text)
if not is_gcc or (measured_with and measured_with.group(1) != compiler and "--update" not in sys.argv):
    not_run(f"the budget was measured with g++ {measured_with and measured_with.group(1)}")

headers = [p[len("include/"):] for p in without_nccl(read_tree().headers())
           if p.endswith(".hpp") and not is_inner(p)]
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    measured = dict(zip(headers, pool.map(lines_of, headers)))

if "--update" in sys.argv:
    rows = "".join(f"{lines:8d} {header}\n" for header, lines in sorted(measured.items()))
    BUDGET.write_text("# Preprocessed lines of each public header, all parts on, by "
                      f"g++ {compiler}. Written by tests/house/include_budget.py --update.\n{rows}")
    sys.exit(0)

budget = {header: int(lines) for lines, header in re.findall(r"(?m)^ *(\d+) (\S+)$", text)}
found = compare(budget, measured)
print("\n".join(found))
sys.exit(1 if found else 0)
