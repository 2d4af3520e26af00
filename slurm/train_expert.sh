#!/usr/bin/env bash
#SBATCH --job-name=btx-expert
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
# train_expert.sh <domain> [--config-name=NAME] [overrides...]: trains the specialist of one domain into
# $BTX_RUNS/expert-<domain>, from $BTX_SEED.
#   sbatch slurm/train_expert.sh math layout.tp=2            on a cluster; sbatch options go before the script
#   sbatch --array=0-2 slurm/train_expert.sh math code prose an array: each task trains the domain of its number
#   bash slurm/train_expert.sh math                          on this machine
# <domain>.<stage> goes into $BTX_RUNS/expert-<domain>.<stage>: something to start the expert from, with init_from.
# The same command again resumes; it does nothing once DONE is there. The configuration is conf/train/expert.yaml.
# Site settings: SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT, and SBATCH_GRES: "gpu:4", or
# "none" on nodes without GPUs and where GPUs are asked for in another way (--gpus-per-node adds to --gres).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh && -n ${SLURM_JOB_ID:-} ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  for ((try = 0; try < 12; try++)); do # a controller that is being restarted is back in a minute
    here=$(scontrol show job "$SLURM_JOB_ID") && break
    sleep 5
  done
  here=${here#*Command=} here=${here%%/train_expert.sh*}
fi
if [[ -z $here || ! -f $here/common.sh ]]; then
  printf '%s: common.sh is not beside this script; run or submit it from the folder slurm/\n' "${0##*/}" >&2
  exit 2
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

btx_arguments "domain out" "$@"
((${#WORDS[@]})) || btx_die 2 "no domain; usage: train_expert.sh <domain> [--config-name=NAME] [overrides...]"
for word in "${WORDS[@]}"; do btx_check_expert "$word"; done
index=0
if [[ -n ${SLURM_ARRAY_TASK_ID:-} && ${BTX_LOCAL:-0} != 1 ]]; then
  index=$(btx_integer SLURM_ARRAY_TASK_ID "$SLURM_ARRAY_TASK_ID")
elif ((${#WORDS[@]} > 1)); then
  btx_die 2 "${#WORDS[@]} domains; name one, or submit an array: sbatch --array=0-$((${#WORDS[@]} - 1))"
fi
((index < ${#WORDS[@]})) || btx_die 2 "array task $index, but there are ${#WORDS[@]} domains; submit --array=0-$((${#WORDS[@]} - 1))"
expert=${WORDS[index]}
btx_setup "$here" "expert-$expert"
btx_config expert

out=$RUNS/expert-$expert
btx_begin_from "$out"
btx_log "expert $expert into $out"
btx_train "$out" "$(btx_setting domain "${expert%%.*}")" "$(btx_setting out "$out")" export=true
