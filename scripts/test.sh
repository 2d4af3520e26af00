#!/usr/bin/env bash
# Runs the tests; makes the environment first if it is missing. Arguments go to pytest.
#   bash scripts/test.sh                      everything this machine can run
#   bash scripts/test.sh -m "not slow"        the quick suite
#   PYTHON=python3.12 bash scripts/test.sh    on Python 3.12 and Megatron-Core 0.19
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
btx_setup_env
exec "$PY" -m pytest "$@"
