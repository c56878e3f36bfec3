"""clang-tidy finds nothing in the headers (.clang-tidy says what it looks for)."""
import re
import sys

from house import ROOT, build, find_compiler, not_run, read_tree, run, without_nccl

if not find_compiler("clang-tidy"):
    not_run("there is no clang-tidy")
version = re.search(r"version (\d+)", run(["clang-tidy", "--version"]).stdout)
if not version or version.group(1) != "14":
    not_run(f"the checks are those of clang-tidy 14, here is {version and version.group(1)}")

this_build = build()
scratch = this_build.scratch("tidy")
flags = [f for f in this_build.everything if f != "-fopenmp"]


def findings(text, name):
    source = scratch / name
    source.write_text(text)
    done = run(["clang-tidy", "--quiet", f"--config-file={ROOT}/.clang-tidy", source, "--", *flags])
    return sorted(set(re.findall(r"(?m)^.*(?:warning|error): .*$", done.stdout + done.stderr)))


planted = findings("#include <cstring>\nint f(int* p) { return std::memcmp(p, p + 1, sizeof(p)) == 0; }\n"
                   "struct s { int* p; };\nbool g(s a) { int i = 0; for (; i < 3; i++); return true; }\n", "planted.cpp")
if not planted:
    sys.exit("this test does not see a planted fault")

headers = [p[len("include/"):] for p in without_nccl(read_tree().headers()) if p.endswith(".hpp")]
found = findings("".join(f"#include <{h}>\n" for h in headers), "headers.cpp")
print("\n".join(line.replace(f"{ROOT}/", "") for line in found))
sys.exit(1 if found else 0)
