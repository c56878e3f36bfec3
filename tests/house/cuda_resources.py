"""What every kernel needs of a GPU, as ptxas counts it: registers, static shared memory, spills. docs/cuda_resources.md
is the committed table; a kernel that spills, is missing or is new fails, and so does one whose registers grow by more
than a few. The attention kernels of 16-bit types must hold tensor-core instructions.

    tests/house/cuda_resources.py build/cuda/tests/house/build.json --update     writes the present table
"""
import pathlib
import re
import sys

from house import ROOT, build, not_run, run

TABLE = ROOT / "docs/cuda_resources.md"
ARCHITECTURES = [80, 90, 100]
REGISTERS_ALLOWED = 8  # more than in the table: what another patch release of ptxas may take
TENSOR_CORE = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")
# Kernels that must hold them.
ON_TENSOR_CORES = re.compile(r"attention\w*<.*(bf16|fp16)")
PLAIN = re.compile(r"plain|attention_delta|merge_attention")

HEADING = """# What each kernel needs

Registers a thread, static shared memory a block in bytes, and bytes that spill from registers to memory, for each
kernel of the library and each architecture that it is compiled for, as ptxas (CUDA {version}) reports them. Dynamic
shared memory is asked for at the launch and does not show here. CUB's own kernels (sorting) are left out.

Written by `tests/house/cuda_resources.py build/cuda/tests/house/build.json --update`; the test `house.cuda_resources`
compares it with what is compiled.

| kernel | {columns} | shared memory | spills |
|---|{rule}---:|---:|
"""


def demangled(names):
    done = run(["c++filt"], input="\n".join(names) + "\n")
    return dict(zip(names, done.stdout.splitlines()))


def short(name):
    """`ops::cuda_detail::norm_rows<bf16, 256>` of ptxas' mangled name."""
    name = re.sub(r"\btessera::v\d+_\d+\w*::", "", name)
    name = re.sub(r"^void ", "", name)
    # The parameter list is the last parenthesis at depth 0 of <>.
    depth = 0
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0 and not name.startswith("(anonymous namespace)", i):
            name = name[:i]
            break
    name = re.sub(r"\((?:bool|int|unsigned int|long)\)", "", name)
    name = re.sub(r"\(\w[\w:]*::\w+\)", "", name)  # the type in front of an enumeration's value
    name = name.replace("exec::detail::", "").replace("exec::element_array<", "array<").replace("> >", ">>")
    return re.sub(r" +", " ", name).strip().replace("|", "\\|")


def parse(text):
    """mangled name -> (registers, shared, spills) of what `ptxas -v` prints."""
    found = {}
    entry, spills = None, 0
    for line in text.splitlines():
        match = re.search(r"Compiling entry function '(\w+)' for 'sm_\d+", line)
        if match:
            entry, spills = match.group(1), 0
        match = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if match and entry:
            spills += int(match.group(1)) + int(match.group(2))
        match = re.search(r"Used (\d+) registers", line)
        if match and entry:
            shared = re.search(r"(\d+) bytes smem", line)
            found[entry] = (int(match.group(1)), int(shared.group(1)) if shared else 0, spills)
            entry = None
    return found


def measured(folder):
    """short name -> architecture -> (registers, shared, spills), and the PTX of each kernel by short name."""
    kernels, ptx = {}, {}
    for path in sorted(folder.glob("*.ptxas")):
        architecture = int(re.search(r"\.sm_(\d+)\.ptxas$", path.name).group(1))
        found = parse(path.read_text())
        names = demangled(list(found))
        for mangled, figures in found.items():
            if not re.match(r"(void )?tessera::", names[mangled]):
                continue
            at = kernels.setdefault(short(names[mangled]), {})
            before = at.get(architecture, (0, 0, 0))
            at[architecture] = tuple(max(pair) for pair in zip(before, figures))
        text = path.with_suffix(".ptx").read_text()
        for match in re.finditer(r"(?ms)^[^\n]*\.entry (\w+)\(.*?^\}", text):
            if match.group(1) in names:
                ptx.setdefault(short(names[match.group(1)]), []).append(match.group(0))
    return kernels, ptx


def rows(kernels):
    for name, at in sorted(kernels.items()):
        yield (name, [at[a][0] for a in ARCHITECTURES], max(f[1] for f in at.values()),
               sum(f[2] for f in at.values()))


def table(kernels, version):
    columns = " | ".join(f"sm_{a}" for a in ARCHITECTURES)
    text = HEADING.format(version=version, columns=columns, rule="---:|" * len(ARCHITECTURES))
    return text + "".join(f"| `{name}` | {' | '.join(map(str, registers))} | {shared} | {spills} |\n"
                          for name, registers, shared, spills in rows(kernels))


def committed(text):
    """short name -> (registers of each architecture, shared)."""
    found = {}
    for match in re.finditer(r"(?m)^\| `(.*)` \|((?: \d+ \|)+)$", text):
        figures = [int(f) for f in re.findall(r"\d+", match.group(2))]
        found[match.group(1)] = (figures[:len(ARCHITECTURES)], figures[len(ARCHITECTURES)])
    return found


def judge(kernels, ptx, text):
    known = committed(text)
    found = []
    for name, at in kernels.items():
        missing = [a for a in ARCHITECTURES if a not in at]
        if missing:
            found.append(f"{name}: not compiled for {missing}")
    if found:
        return found
    for name, registers, shared, spills in rows(kernels):
        if spills:
            where = ", ".join(f"sm_{a}" for a in ARCHITECTURES if kernels[name][a][2])
            found.append(f"{name}: {spills} bytes spill from registers on {where}")
        if name not in known:
            found.append(f"{name}: is not in docs/cuda_resources.md (--update)")
            continue
        for architecture, now, then in zip(ARCHITECTURES, registers, known[name][0]):
            if now > then + REGISTERS_ALLOWED:
                found.append(f"{name}: {now} registers on sm_{architecture}, the table says {then} (--update)")
        if shared > known[name][1]:
            found.append(f"{name}: {shared} bytes of shared memory, the table says {known[name][1]} (--update)")
    found += [f"{name}: is in docs/cuda_resources.md and is not compiled (--update)" for name in known
              if name not in kernels]
    wanted = [name for name in kernels if ON_TENSOR_CORES.search(name) and not PLAIN.search(name)]
    for name in wanted:
        if not all(TENSOR_CORE.search(body) for body in ptx.get(name, [""])):
            found.append(f"{name}: holds no tensor-core instruction")
    if not wanted:
        found.append("no attention kernel was found to look for tensor-core instructions in")
    return found


# The rule on planted figures.
LOG = """ptxas info    : Compiling entry function '_ZN7tessera1kIfEEvPT_' for 'sm_90'
ptxas info    : Function properties for _ZN7tessera1kIfEEvPT_
    0 bytes stack frame, {0} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 4096 bytes smem
"""
assert parse(LOG.format(0)) == {"_ZN7tessera1kIfEEvPT_": (32, 4096, 0)}
assert parse(LOG.format(8)) == {"_ZN7tessera1kIfEEvPT_": (32, 4096, 8)}
assert short("void tessera::v0_1_avx2_omp::ops::cuda_detail::k<tessera::v0_1::bf16, (int)4>(float*, int)") == \
    "ops::cuda_detail::k<bf16, 4>"
good = {a: (32, 4096, 0) for a in ARCHITECTURES}
body = {"ops::attention_tiles<bf16>": ["mma.sync.aligned"]}
plain_table = table({"ops::attention_tiles<bf16>": good}, "13.0")
assert judge({"ops::attention_tiles<bf16>": good}, body, plain_table) == []
for kernels, ptx, text in (
        ({"ops::attention_tiles<bf16>": {**good, 80: (32, 4096, 4)}}, body, plain_table),
        ({"ops::attention_tiles<bf16>": {**good, 80: (64, 4096, 0)}}, body, plain_table),
        ({"ops::attention_tiles<bf16>": {**good, 80: (32, 8192, 0)}}, body, plain_table),
        ({"ops::attention_tiles<bf16>": {80: (32, 4096, 0)}}, body, plain_table),
        ({"ops::attention_tiles<bf16>": good, "ops::new": good}, body, plain_table),
        ({"ops::attention_tiles<bf16>": good}, {"ops::attention_tiles<bf16>": ["fma.rn.f32"]}, plain_table),
        ({"ops::attention_tiles<bf16>": good}, body, plain_table.replace("|\n| `ops", "|\n| `gone` | 1 | 1 | 1 | 0 | 0 |\n| `ops"))):
    if len(judge(kernels, ptx, text)) != 1:
        sys.exit(f"this test does not see a planted fault: {kernels} {judge(kernels, ptx, text)}")

this_build = build()
if not this_build.nvcc:
    not_run("this build is without cuda")
folder = pathlib.Path(this_build.folder).parent / "compile/cuda"
kernels, ptx = measured(folder)
version = re.search(r"release ([\d.]+)", run([this_build.nvcc, "--version"]).stdout).group(1)
if "--update" in sys.argv:
    TABLE.write_text(table(kernels, version))
written = TABLE.read_text() if TABLE.exists() else ""
of = re.search(r"\(CUDA ([\d.]+)\)", written)
if of and of.group(1) != version:
    not_run(f"the table is that of CUDA {of.group(1)}, here is {version}")
found = judge(kernels, ptx, written)
print(f"{len(kernels)} kernels for {len(ARCHITECTURES)} architectures")
print("\n".join(found))
sys.exit(1 if found else 0)
