#!/usr/bin/env bash
# Regenerates protos/*_pb2*; with --check it changes nothing and fails if the committed files differ from what comes out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}

generate() {
  PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc -I. \
    --python_out="$1" --mypy_out="quiet:$1" --grpc_python_out="$1" --mypy_grpc_out="quiet:$1" protos/*.proto
}

case "${1:-}" in
  "")
    rm -f protos/*_pb2.py protos/*_pb2.pyi protos/*_pb2_grpc.py protos/*_pb2_grpc.pyi
    generate .
    ;;
  --check)
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    generate "$fresh"
    same=0
    for name in $({ ls protos; ls "$fresh/protos"; } | grep -E '_pb2(_grpc)?\.pyi?$' | sort -u); do
      diff -u --label "committed protos/$name" --label "generated protos/$name" -N \
        "protos/$name" "$fresh/protos/$name" || same=1
    done
    if [ "$same" -ne 0 ]; then
      echo "protos/*_pb2* differ from protos/*.proto: run 'bash deploy/protos.sh' and commit" >&2
      exit 1
    fi
    ;;
  *)
    echo "usage: bash deploy/protos.sh [--check]" >&2
    exit 2
    ;;
esac
