#!/usr/bin/env bash
#SBATCH --job-name=btx-joint
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
# train_mix.sh [mix|router] [--config-name=NAME] [overrides...]: trains the mixture, all of it together, into
# $BTX_RUNS/joint; from $BTX_RUNS/mix, or from where train_router.sh left it. The configuration is conf/train/mix.yaml.
#   sbatch --nodes=2 slurm/train_mix.sh layout.tp=4
#   bash slurm/train_mix.sh
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh && -n ${SLURM_JOB_ID:-} ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  for ((try = 0; try < 12; try++)); do # a controller that is being restarted is back in a minute
    here=$(scontrol show job "$SLURM_JOB_ID") && break
    sleep 5
  done
  here=${here#*Command=} here=${here%%/train_mix.sh*}
fi
if [[ -z $here || ! -f $here/common.sh ]]; then
  printf '%s: common.sh is not beside this script; run or submit it from the folder slurm/\n' "${0##*/}" >&2
  exit 2
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

btx_arguments "init_from out" "$@"
btx_one_of "start" "${WORDS[0]-mix}" mix router
btx_setup "$here" joint
btx_config mix

start=${WORDS[0]-mix} out=$RUNS/joint
if [[ $start == mix ]]; then ready=$RUNS/mix; else ready=$RUNS/$start/DONE; fi
[[ -e $ready ]] || btx_die 2 "$ready is missing: there is nothing finished to start from; run mix.sh (or train_router.sh) first"
btx_begin "$out" "$out/DONE" "$start=$RUNS/$start"
btx_log "joint training into $out"
btx_train "$out" "$(btx_setting init_from "$RUNS/$start")" "$(btx_setting out "$out")"
