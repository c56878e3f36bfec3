"""The README's program is examples/minimal.cpp, compiles, and prints what the README says it prints."""
import re
import sys

from house import ROOT, build, check_run, judge, read_tree

MARKED = re.compile(r"(?s)^[ \t]*// \[doc: minimal\][ \t]*\n(.*?)^[ \t]*// \[/doc\]", re.M)


def fenced(text, language):
    """Bodies of the fenced blocks of a language, with the places they start at."""
    return [(m.start(), m.group(1)) for m in re.finditer(rf"(?ms)^```{language}\n(.*?)^```", text)]


def program_of(tree):
    marked = MARKED.search(tree.get("examples/minimal.cpp", ""))
    return marked.group(1) if marked else tree.get("examples/minimal.cpp", "")


def parts(tree):
    readme = tree.get("README.md", "")
    programs = fenced(readme, r"(?:cpp|c\+\+)")
    if not programs:
        return None, None, readme
    place, program = programs[0]
    outputs = [body for at, body in fenced(readme, "(?:text|console)?") if at > place]
    return program, outputs[0] if outputs else None, readme


def rule(tree):
    program, output, readme = parts(tree)
    if program is None:
        return ["README.md shows no program (```cpp)"]
    found = []
    if program.strip() != program_of(tree).strip():
        found.append("README.md's program is not that of examples/minimal.cpp")
    if len(program.strip().splitlines()) > 14:
        found.append("README.md's program is longer than it says")
    for command in ("./examples/quickstart.sh", "./tests/run.sh"):
        if command not in readme:
            found.append(f"README.md does not give the command {command}")
        elif command[2:] not in tree:
            found.append(f"{command} does not exist")
    folder = this_build.scratch("readme")
    source = folder / "readme.cpp"
    text = program if "int main" in program else tree.get("examples/minimal.cpp", "")
    key = hash(text)
    if key not in outputs:
        source.write_text(text)
        check_run([this_build.compiler, *this_build.bare, "-O1", "-Wall", "-Wextra", "-Werror", source, "-o",
                   folder / "readme"])
        outputs[key] = check_run([folder / "readme"])
    if output is None:
        found.append("README.md does not show what the program prints (```text)")
    elif output.strip() != outputs[key].strip():
        found.append(f"README.md says the program prints\n{output}\nand it prints\n{outputs[key]}")
    return found


this_build = build()
outputs = {}


def edited(old, new):
    return lambda tree: tree.having("README.md", tree["README.md"].replace(old, new, 1))


if "README.md" not in read_tree():
    sys.exit("there is no README.md")
program, output, _ = parts(read_tree())
judge(rule, {
    "another program": (edited("#include", "#include <vector>\n#include"), "is not that of"),
    "another output": (edited(output or "\n", "something else\n"), "prints"),
    "a command that is not given": (edited("./tests/run.sh", "./tests/walk.sh"), "does not give"),
})
