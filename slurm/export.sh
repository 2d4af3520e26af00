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
# export.sh [overrides...]: writes the trained mixture of $BTX_RUNS/joint as a Hugging Face folder, $BTX_RUNS/export.
#   sbatch slurm/export.sh
#   bash slurm/export.sh
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  here=$(scontrol show job "${SLURM_JOB_ID:?}" | sed -n 's|^ *Command=\(/.*\)/export\.sh\( .*\)*$|\1|p')
  here=${here%%$'\n'*}
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

btx_check_overrides "in out" "$@"
btx_setup "$here"

joint=$RUNS/joint out=$RUNS/export
if [[ $joint/DONE -nt $out && -e $out ]]; then
  btx_die 2 "$out is older than the training of $joint; remove it and export again"
fi
if [[ ! -e $out ]]; then # `export` renames the folder into place when it is whole
  [[ -e $joint/DONE ]] || btx_die 2 "$joint/DONE is missing: the mixture is not trained; run mix.sh first"
  btx_log "export into $out"
  rc=0
  btx_one export "in=$joint" "out=$out" "$@" || rc=$?
fi
btx_finish "${rc:-0}" "$out"
