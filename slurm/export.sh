#!/usr/bin/env bash
#SBATCH --job-name=btx-export
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=32G
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.out
# export.sh [joint|router] [overrides...]: writes the trained mixture of $BTX_RUNS/joint (or router) as a Hugging Face
# folder, $BTX_RUNS/export. An export of an earlier training that is there is put aside, into $BTX_RUNS/stale.
#   sbatch slurm/export.sh dtype=bfloat16
#   bash slurm/export.sh
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh && -n ${SLURM_JOB_ID:-} ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  for ((try = 0; try < 12; try++)); do # a controller that is being restarted is back in a minute
    here=$(scontrol show job "$SLURM_JOB_ID") && break
    sleep 5
  done
  here=${here#*Command=} here=${here%%/export.sh*}
fi
if [[ -z $here || ! -f $here/common.sh ]]; then
  printf '%s: common.sh is not beside this script; run or submit it from the folder slurm/\n' "${0##*/}" >&2
  exit 2
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

btx_arguments "in out" "$@"
btx_one_of "training" "${WORDS[0]-joint}" joint router
((${#CONFIG[@]} == 0)) || btx_die 2 "${CONFIG[0]@Q}: an export has no configuration"
btx_setup "$here" export

run=${WORDS[0]-joint} out=$RUNS/export
[[ -e $RUNS/$run/DONE ]] || btx_die 2 "$RUNS/$run/DONE is missing: the mixture is not trained; run train_mix.sh first"
btx_begin "$out" "$out" "$run=$RUNS/$run" # `export` renames the folder into place when it is whole
btx_log "export into $out"
rc=0
btx_one export "in=$RUNS/$run" "out=$out" "${OVERRIDES[@]}" || rc=$?
btx_finish "$rc" "$out"
