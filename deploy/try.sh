#!/usr/bin/env bash
# Installs and runs a whole training run on this machine: bash deploy/try.sh [options of `coordinator simulate`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash deploy/install.sh
exec "${BARNRAISE_VENV:-.venv}/bin/coordinator" simulate "$@"
