"""The README's program is examples/minimal.cpp, compiles, and prints what the README says it prints."""
import re
import sys

from house import ROOT, build, check_run, judge, read_tree

MARKED = re.compile(r"(?s)^[ \t]*// \[doc: minimal\][ \t]*\n(.*?)^[ \t]*// \[/doc\]", re.M)


def fenced(text):
    """(language, body) of each fenced block, in order."""
    return re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", text)


def program_of(tree):
    marked = MARKED.search(tree.get("examples/minimal.cpp", ""))
    return marked.group(1) if marked else tree.get("examples/minimal.cpp", "")


def parts(tree):
    readme = tree.get("README.md", "")
    blocks = fenced(readme)
    programs = [i for i, (language, _) in enumerate(blocks) if language == "cpp"]
    if not programs:
        return None, None, readme
    outputs = [body for language, body in blocks[programs[0] + 1:] if language in ("", "text")]
    return blocks[programs[0]][1], outputs[0] if outputs else None, readme


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
_, shown, _ = parts(read_tree())
judge(rule, {
    "another program": (edited("#include", "#include <vector>\n#include"), "is not that of"),
    "another output": (edited(shown or "\n", "something else\n"), "prints"),
    "a command that is not given": (edited("./tests/run.sh", "./tests/walk.sh"), "does not give"),
})
