#!/usr/bin/env python3
# timeout: 60
"""The pictures of docs/schedules/ are what examples/pipeline_schedules draws today, and the table of
docs/schedules.md is what it prints."""
import pathlib
import subprocess
import sys
import tempfile

program = pathlib.Path(sys.argv[1]).resolve() / "examples" / "pipeline_schedules"
with tempfile.TemporaryDirectory(prefix="tessera-schedules-") as folder:
    printed = subprocess.run([program, folder], check=True, capture_output=True, text=True).stdout
    drawn = {p.name: p.read_text() for p in pathlib.Path(folder).iterdir()}
kept = {p.name: p.read_text() for p in pathlib.Path("docs/schedules").iterdir()}
failures = [f"docs/schedules/{name} is not what {program.name} draws; run: {program} docs/schedules"
            for name in sorted({*drawn, *kept}) if drawn.get(name) != kept.get(name)]
if printed not in pathlib.Path("docs/schedules.md").read_text():
    failures.append(f"docs/schedules.md lacks this, word for word:\n{printed}")
refused = subprocess.run([program, "/", "0", "4"], capture_output=True, text=True)
if refused.returncode != 1 or "E-layout-040" not in refused.stderr:
    failures.append(f"no stages: exit status {refused.returncode}, {refused.stderr}")
print(*failures, sep="\n")
sys.exit(bool(failures))
