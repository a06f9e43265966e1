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
if [ "${1:-}" = --long ]; then
  shift
  exec "$python" -m pytest "$@"
fi
exec "$python" -m pytest -m "not long" "$@"
