#!/usr/bin/env bash
# From a fresh clone to a mixture of experts that transformers loads: environment, then the demo.
#   bash scripts/quickstart.sh                 the demo (minutes); arguments go to `btx-nemo demo`
#   bash scripts/quickstart.sh --size small    every step in a minute, too small to learn much
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup_env.sh
source scripts/setup_env.sh
btx_setup_env
exec "$PY" -m btx_nemo demo "$@"
