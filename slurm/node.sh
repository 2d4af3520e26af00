#!/usr/bin/env bash
# node.sh <launcher...>: the one Slurm task of a node.
# The stop request (USR1) is for the ranks, and Slurm sends it to every process of the step. torchrun does not know USR1
# and would die of it, so it ignores it; its ranks set handlers of their own. (A TERM torchrun knows: it passes it on and
# kills the ranks 30 s later, saved or not.) After a stop the status is 0, or srun would kill the nodes that still save.
set -euo pipefail

stopped=0
trap 'stopped=1' USR1 TERM
# shellcheck source=slurm/devices.sh
source "$(dirname "${BASH_SOURCE[0]}")/devices.sh"
btx_tune "$@"
(
  trap '' USR1
  exec "$@"
) &
pid=$!
while :; do
  rc=0
  wait "$pid" || rc=$?
  kill -0 "$pid" 2>/dev/null || break
done
if ((stopped)); then exit 0; fi
exit "$rc"
