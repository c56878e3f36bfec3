"""Compiles the cases of one *_fail.cpp: 0 must compile, each other must not, with the message it expects.

The expectation is a regular expression in a comment on the wrong line, `// expect-error: REGEX`; it must match the
compiler's output, and an error must be reported for a place in the user's file.
"""
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "house"))
from house import ROOT, build, find_compiler, run  # noqa: E402

this_build = build()
source = pathlib.Path(sys.argv[2])
text = source.read_text()
cases = {int(number): expected for number, expected in
         re.findall(r"(?s)#(?:el)?if MISUSE == (\d+)\n.*?// expect-error: ([^\n]*)", text)}
if not cases or len(cases) != len(re.findall(r"#(?:el)?if MISUSE ==", text)):
    sys.exit(f"{source.name}: every case needs its // expect-error: line")


def parsed_once(compiler, flags):
    """What the cases include, precompiled: the option that puts it in front of a case."""
    prelude = this_build.scratch("misuse") / f"{source.stem}.{pathlib.Path(compiler).name}.hpp"
    prelude.write_text("\n".join(re.findall(r"(?m)^#(?:include|define) .*$", text)) + "\n")
    clang = "clang" in prelude.name
    precompiled = prelude.with_suffix(".hpp.pch" if clang else ".hpp.gch")
    done = run([compiler, *[f for f in flags if f != "-fsyntax-only"], "-x", "c++-header", prelude, "-o", precompiled])
    if done.returncode != 0:
        sys.exit(f"{compiler}: what {source.name} includes does not compile:\n{done.stderr[:4000]}")
    return ["-include-pch", precompiled] if clang else ["-Winvalid-pch", "-include", prelude]


failures = 0
for compiler in [this_build.compiler] + ([c for c in ["clang++"] if find_compiler(c)]):
    flags = [*this_build.bare, "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-fdiagnostics-color=never"]
    if "requires: mpi" in text:
        flags = [f for f in this_build.everything if f != "-fopenmp"] + flags[2:]
    flags += [f"-I{ROOT}/{folder}" for folder in re.findall(r"(?m)^// include: (\S+)$", text)]
    flags += parsed_once(compiler, flags)
    control = run([compiler, *flags, "-DMISUSE=0", source])
    if control.returncode != 0:
        print(f"{compiler}: the right program does not compile:\n{control.stderr[:4000]}")
        failures += 1
    for number, expected in sorted(cases.items()):
        done = run([compiler, *flags, f"-DMISUSE={number}", source])
        message = " ".join(done.stderr.split())
        if done.returncode == 0:
            print(f"{compiler}: case {number} compiles")
            failures += 1
        elif not re.search(expected, message):
            print(f"{compiler}: case {number}: no '{expected}' in\n{done.stderr[:4000]}")
            failures += 1
        elif source.name not in done.stderr:
            print(f"{compiler}: case {number}: the message does not lead to the user's line")
            failures += 1
print(f"{len(cases)} wrong programs, {failures} failures")
sys.exit(1 if failures else 0)
