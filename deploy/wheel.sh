#!/usr/bin/env bash
# Builds the wheel and checks that it holds exactly the four packages, with their commands.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"${BARNRAISE_VENV:-.venv}/bin/python" -m build --wheel --outdir "$out" . >"$out/log" 2>&1 || { cat "$out/log"; exit 1; }
"${BARNRAISE_VENV:-.venv}/bin/python" - "$out" <<'PY'
import sys
import zipfile
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("*.whl")
names = zipfile.ZipFile(wheel).namelist()
tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
wanted = {"node", "coordinator", "aggregation", "protos"}
if tops != wanted:
    raise SystemExit(f"{wheel.name} holds {sorted(tops)} instead of {sorted(wanted)}")
entry = next(name for name in names if name.endswith("entry_points.txt"))
commands = zipfile.ZipFile(wheel).read(entry).decode()
for command in ("node", "coordinator", "barnraise-node", "barnraise-coordinator"):
    if f"{command} = " not in commands:
        raise SystemExit(f"{wheel.name} has no command {command}")
print(f"{wheel.name}: {len(names)} files in {', '.join(sorted(tops))}")
PY
