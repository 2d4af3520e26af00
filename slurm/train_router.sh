#!/usr/bin/env bash
#SBATCH --job-name=btx-router
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
# train_router.sh [--config-name=NAME] [overrides...]: trains the routers of $BTX_RUNS/mix and nothing else, into
# $BTX_RUNS/router. The configuration is conf/train/router.yaml.
#   sbatch slurm/train_router.sh layout.ep=4
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh && -n ${SLURM_JOB_ID:-} ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  for ((try = 0; try < 12; try++)); do # a controller that is being restarted is back in a minute
    here=$(scontrol show job "$SLURM_JOB_ID") && break
    sleep 5
  done
  here=${here#*Command=} here=${here%%/train_router.sh*}
fi
if [[ -z $here || ! -f $here/common.sh ]]; then
  printf '%s: common.sh is not beside this script; run or submit it from the folder slurm/\n' "${0##*/}" >&2
  exit 2
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

btx_arguments "init_from out" "$@"
btx_no_words
btx_setup "$here" router
btx_config router

mix=$RUNS/mix out=$RUNS/router
[[ -e $mix ]] || btx_die 2 "$mix is missing: the mixture is not assembled; run mix.sh first"
btx_begin "$out" "$out/DONE" "mix=$mix"
btx_log "training of the routers into $out"
btx_train "$out" "$(btx_setting init_from "$mix")" "$(btx_setting out "$out")"
