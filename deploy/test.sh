#!/usr/bin/env bash
# Installs what the tests need and runs them.
#
#   bash deploy/test.sh            all but the longest: what CI runs
#   bash deploy/test.sh --long     the longest too: whole runs in real processes, and many random schedules
#   bash deploy/test.sh ARGS …     pytest's own arguments, such as a file or -k
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash deploy/install.sh test
# Two processes side by side on two cores: more threads each would only wait for one another.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
python=${BARNRAISE_VENV:-.venv}/bin/python
pytest() { "$python" -m pytest "$@"; }
side_by_side=(-n logical --maxprocesses 4 --dist worksteal)

case "${1:-}" in
  "")
    pytest "${side_by_side[@]}" -m "not long and not e2e"
    # Real processes with their deadlines have the machine to themselves.
    pytest -m "e2e and not long"
    ;;
  --long)
    shift
    pytest "$@"
    ;;
  *)
    pytest -m "not long" "$@"
    ;;
esac
