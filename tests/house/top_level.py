"""The top level of the repository is a short list: a new folder is a decision, not an accident."""
from house import judge

FOLDERS = {"include", "examples", "tests", "bench", "docs", "single_include"}
FILES = {"CMakeLists.txt", "CMakePresets.json", "README.md", "CHANGELOG.md", "LICENSE", "CONTRIBUTING.md"}


def rule(tree):
    found = set()
    for path in tree:
        top, *rest = path.split("/")
        if not top.startswith(".") and top not in (FOLDERS if rest else FILES):
            found.add(f"{top}{'/' if rest else ''} stands at the top level")
    return sorted(found)


judge(rule, {
    "a folder": lambda tree: tree.having("scripts/x.py", ""),
    "a file": lambda tree: tree.having("notes.txt", ""),
})
