"""What the house tests share. Each of them is one rule: a function that takes a Tree and returns the violations
it finds, one line each. `judge` first plants violations in copies of the tree and sees them reported, so that a
rule that has gone blind fails, and then applies the rule to the tree as it is.
"""
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOT_RUN = 77  # ctest's SKIP_RETURN_CODE


class Tree(dict):
    """Texts of the repository's files by path, such as `include/tessera/core/view.hpp`."""

    def having(self, path, text):
        return Tree({**self, path: text})

    def without(self, path):
        return Tree({p: t for p, t in self.items() if p != path})

    def under(self, *folders):
        """The files below any of the folders, in order."""
        return {p: t for p, t in sorted(self.items()) if p.startswith(tuple(f + "/" for f in folders))}

    def headers(self):
        return self.under("include/tessera")


def read_tree():
    """All files of the work tree that git would keep, by git's own list where there is one."""
    try:
        listed = subprocess.run(
            ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        listed = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")
                  if p.is_file() and p.relative_to(ROOT).parts[0] not in (".git", "build", "runs")]
    tree = Tree()
    for path in filter(None, listed):
        try:
            tree[path] = (ROOT / path).read_text()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            tree[path] = ""  # binary, deleted but not committed, or a link
    return Tree({p: t for p, t in tree.items() if (ROOT / p).exists()})


def judge(rule, plants):
    """`plants` maps a description to a function that spoils a Tree, or to (function, text that the report must
    hold). Ends the program with the verdict."""
    tree = read_tree()
    before = rule(tree)
    for description, plant in plants.items():
        spoil, expected = plant if isinstance(plant, tuple) else (plant, "")
        found = [line for line in rule(spoil(tree)) if line not in before]
        if not any(expected in line for line in found):
            print("\n".join(before))
            sys.exit(f"this test does not see a planted violation: {description}")
    print(f"{len(plants)} planted violations seen")
    for line in before:
        print(line)
    sys.exit(1 if before else 0)


def without_comments(text, keep_strings=False):
    """C++ text with comments, and the insides of string literals, blanked; lines keep their numbers."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'', re.S)

    def blank(match):
        piece = match.group(0)
        if piece[0] in "\"'":
            return piece if keep_strings else piece[0] * 2
        return "\n" * piece.count("\n")

    return pattern.sub(blank, text)


def includes(text):
    """(line number, name) of each include; names without the brackets."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
        if match:
            found.append((number, match.group(1)))
    return found


class Build:
    """How this build compiles: written by CMake, given to each test as its first argument."""

    def __init__(self, path):
        known = json.loads(pathlib.Path(path).read_text())
        self.compiler = known["compiler"]
        self.nvcc = known.get("nvcc", "")
        self.folder = pathlib.Path(known["folder"])
        self.version = known["version"]
        # With every part of Tessera that this build has; third-party headers as system headers.
        self.everything = ["-std=c++20", f"-I{ROOT}/include"]
        self.everything += [f"-D{d}" for d in known["definitions"]]
        self.everything += [f"-isystem{d}" for d in known["includes"] if d not in (f"{ROOT}/include", "/usr/include")]
        self.everything += [o for o in known["options"] if o]
        self.bare = ["-std=c++20", f"-I{ROOT}/include"]

    def scratch(self, name):
        folder = self.folder / "house" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def run(command, **options):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, errors="replace",
                          stdin=subprocess.DEVNULL if "input" not in options else None, **options)


def check_run(command, **options):
    done = run(command, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(str(c) for c in command)}\n{done.stdout}{done.stderr}\nstatus {done.returncode}")
    return done.stdout


def build():
    return Build(sys.argv[1])


def not_run(why):
    print(f"not run: {why}")
    sys.exit(NOT_RUN)


def is_inner(path):
    """Headers that only their own room includes."""
    return bool(re.search(r"/(detail|host|cuda)/", path[len("include/tessera/"):]))


def without_nccl(paths):
    """Headers but those that include NCCL's, which few machines have: tests/compile/cuda compiles these."""
    return [path for path in paths if not re.search(r"/nccl\w*\.hpp$", path)]


def find_compiler(name):
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if (pathlib.Path(folder) / name).exists():
            return name
    return None
