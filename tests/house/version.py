"""The version stands in core/version.hpp; CMake, the ABI namespace and the changelog say the same."""
import re

from house import build, judge

configured = build().version


def rule(tree):
    number = int(re.search(r"#define TESSERA_VERSION (\d+)", tree["include/tessera/core/version.hpp"]).group(1))
    version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    found = []
    if configured != version:
        found.append(f"CMake was configured as {configured}, core/version.hpp says {version}")
    changelog = re.search(r"(?m)^## \[?(\d+\.\d+\.\d+)", tree.get("CHANGELOG.md", ""))
    if not changelog or changelog.group(1) != version:
        found.append(f"CHANGELOG.md opens with {changelog and changelog.group(1)}, core/version.hpp says {version}")
    tag = re.search(r"#define TESSERA_STABLE_ABI (\w+)", tree["include/tessera/core/abi.hpp"]).group(1)
    if tag != f"v{number // 10000}_{number // 100 % 100}":
        found.append(f"the ABI namespace is {tag}, the version {version}")
    return found


judge(rule, {
    "another version": lambda tree: tree.having("include/tessera/core/version.hpp", "#define TESSERA_VERSION 90807"),
    "another changelog": (lambda tree: tree.having("CHANGELOG.md", "# Changes\n\n## 9.8.7\n"), "CHANGELOG"),
    "another namespace": (lambda tree: tree.having("include/tessera/core/abi.hpp", "#define TESSERA_STABLE_ABI v9_8"),
                          "namespace"),
})
