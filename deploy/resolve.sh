#!/usr/bin/env bash
# Checks that the declared dependencies can be had for other versions of Python: bash deploy/resolve.sh 3.12 3.13
#
# Only metadata are fetched. What exists as source only, and is pure Python, is built once as a wheel for all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${BARNRAISE_VENV:-.venv}/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=("$python" -m pip --disable-pip-version-check --quiet)

mapfile -t pure < <(grep -E '^(prefetch[-_]generator|python-baseconv|varint)==' deploy/constraints.txt)
"${pip[@]}" wheel --no-deps --wheel-dir "$work/wheels" "${pure[@]}" 2>"$work/log" || { cat "$work/log"; exit 1; }
"$python" -c '
import tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["dependencies"]))
' >"$work/requirements.txt"
resolve() {
  local version=$1
  local report=$work/$version.json log=$work/$version.log
  "${pip[@]}" install --dry-run --ignore-installed --only-binary=:all: --python-version "$version" \
    --target "$work/none" --find-links "$work/wheels" --report "$report" \
    -c deploy/constraints.txt -r "$work/requirements.txt" 2>"$log" || { cat "$log"; return 1; }
  echo "Python $version: $("$python" -c 'import json, sys; print(len(json.load(open(sys.argv[1]))["install"]))' "$report") packages"
}

all=()
for version in "$@"; do
  resolve "$version" &
  all+=($!)
done
failed=0
for one in "${all[@]}"; do
  wait "$one" || failed=1
done
exit "$failed"
