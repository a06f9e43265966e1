#!/usr/bin/env bash
# Makes or refreshes .venv with the package, editable, on the pinned versions. Usage: bash deploy/install.sh [EXTRA …]
#
# Safe to interrupt and to repeat: what is complete is not done again. On a machine without an NVIDIA GPU the CPU build
# of torch is taken where one can be had, for the CUDA build is several gigabytes that nothing would use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${BARNRAISE_VENV:-.venv}
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf 'install: %s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  say "no Python 3.11, 3.12 or 3.13 here: install one, or name it with PYTHON=/path/to/python"
  exit 3
}

has_nvidia() { [ -e /dev/nvidiactl ] || { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }; }

reachable() {
  "$venv/bin/python" - "$1" <<'PY' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/torch/", method="HEAD"), timeout=4)
PY
}

# Only one at a time: two installations into one folder would mix.
if command -v flock >/dev/null 2>&1; then
  exec 9>"${venv%/}.lock"
  flock -n 9 || { say "another installation is under way: waiting for it"; flock 9; }
fi

extras=$(printf '%s\n' "$@" | sed '/^$/d' | sort -u | paste -sd, -)
spec=".${extras:+[$extras]}"
wanted=$(printf '%s' "$spec" | cat - pyproject.toml deploy/constraints.txt deploy/install.sh | cksum)
stamp=$venv/.barnraise-installed
kernels=$(find aggregation -name '*.py' -print0 | sort -z | xargs -0 cat | cksum)
compiled=$venv/.barnraise-compiled

# Once for all processes: each of them would take a quarter of a minute to do it at its start.
compile_kernels() {
  if [ "$(cat "$compiled" 2>/dev/null)" != "$kernels" ]; then
    say "compiling the kernels"
    "$venv/bin/python" -c '
import aggregation.codec.feedback, aggregation.outer, aggregation.rules
from aggregation.rules.sorting import compile_networks
compile_networks()
'
    printf '%s\n' "$kernels" >"$compiled"
  fi
}

if [ -f "$stamp" ] && grep -qxF "$wanted" "$stamp" && "$venv/bin/python" -c '' 2>/dev/null; then
  compile_kernels
  exit 0
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  say "making $venv with $($python --version 2>&1)"
  "$python" -m venv --clear "$venv" || { say "no venv module: on Debian, apt-get install python3-venv"; exit 3; }
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
torch=$(grep '^torch==' deploy/constraints.txt)
if ! "$venv/bin/python" -c "from importlib.metadata import version; v='${torch#torch==}'; raise SystemExit(version('torch').split('+')[0] != v)" 2>/dev/null; then
  say "installing $torch"
  if [ "$(uname -s)" = Linux ] && ! has_nvidia && reachable "$torch_cpu_index"; then
    "${pip[@]}" --index-url "$torch_cpu_index" "$torch"
  else
    "${pip[@]}" "$torch"
  fi
fi
say "installing barnraise${extras:+ with $extras} and what it needs (some minutes the first time)"
"${pip[@]}" -c deploy/constraints.txt -e "$spec"
# The stamp keeps a line for each set of extras that is complete on these versions.
printf '%s\n' "$wanted" >>"$stamp"
compile_kernels
