#!/usr/bin/env bash
#SBATCH --job-name=btx-anchor
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=16
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.out
# train_anchor.sh [--config-name=NAME] [overrides...]: trains the model that stands beside the experts in pairs, from
# $BTX_SEED into $BTX_RUNS/anchor. Only for those who have none; the configuration is conf/train/sft.yaml.
#   sbatch slurm/train_anchor.sh optim.lr=1e-5 global_batch_size=64; then with BTX_ANCHOR=$BTX_RUNS/anchor the others
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh && -n ${SLURM_JOB_ID:-} ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  for ((try = 0; try < 12; try++)); do # a controller that is being restarted is back in a minute
    here=$(scontrol show job "$SLURM_JOB_ID") && break
    sleep 5
  done
  here=${here#*Command=} here=${here%%/train_anchor.sh*}
fi
if [[ -z $here || ! -f $here/common.sh ]]; then
  printf '%s: common.sh is not beside this script; run or submit it from the folder slurm/\n' "${0##*/}" >&2
  exit 2
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

btx_arguments "out" "$@"
btx_no_words
btx_setup "$here" anchor
btx_config sft

out=$RUNS/anchor
btx_begin_from "$out"
btx_log "anchor into $out"
btx_train "$out" "$(btx_setting out "$out")" export=true
