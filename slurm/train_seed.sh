#!/usr/bin/env bash
#SBATCH --job-name=btx-seed
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
# train_seed.sh [--config-name=NAME] [overrides...]: trains a fresh model that the specialists start from into
# $BTX_RUNS/seed. Only for those who have none; the configuration is conf/train/tiny_seed.yaml.
#   bash slurm/train_seed.sh
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh && -n ${SLURM_JOB_ID:-} ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  for ((try = 0; try < 12; try++)); do # a controller that is being restarted is back in a minute
    here=$(scontrol show job "$SLURM_JOB_ID") && break
    sleep 5
  done
  here=${here#*Command=} here=${here%%/train_seed.sh*}
fi
if [[ -z $here || ! -f $here/common.sh ]]; then
  printf '%s: common.sh is not beside this script; run or submit it from the folder slurm/\n' "${0##*/}" >&2
  exit 2
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

btx_arguments "domain out export" "$@"
btx_no_words
btx_setup "$here" seed
btx_config tiny_seed

out=$RUNS/seed
btx_begin "$out" "$out/DONE"
btx_log "seed into $out"
btx_train "$out" "$(btx_setting out "$out")" export=true
