#!/usr/bin/env bash
#SBATCH --job-name=btx-pair
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.out
# pair.sh <domain> [--config-name=RECIPE] [overrides...]: the two-expert model that the trainings of a domain start from,
# into $BTX_RUNS/pair-<domain>: $BTX_ANCHOR, and beside it an expert that starts from $BTX_SEED. The recipe is
# conf/mix/two_expert.yaml. A pair of other models that is there is put aside, into $BTX_RUNS/stale.
#   BTX_ANCHOR=/models/post-trained BTX_SEED=/models/base sbatch slurm/pair.sh math format=megatron
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh && -n ${SLURM_JOB_ID:-} ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  for ((try = 0; try < 12; try++)); do # a controller that is being restarted is back in a minute
    here=$(scontrol show job "$SLURM_JOB_ID") && break
    sleep 5
  done
  here=${here#*Command=} here=${here%%/pair.sh*}
fi
if [[ -z $here || ! -f $here/common.sh ]]; then
  printf '%s: common.sh is not beside this script; run or submit it from the folder slurm/\n' "${0##*/}" >&2
  exit 2
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

btx_arguments "seed experts out missing" "$@"
((${#WORDS[@]} == 1)) || btx_die 2 "${#WORDS[@]} domains; usage: pair.sh <domain> [--config-name=RECIPE] [overrides...]"
domain=${WORDS[0]}
btx_check_domain "$domain"
btx_setup "$here" "pair-$domain"
btx_config two_expert

out=$RUNS/pair-$domain
for model in "$BTX_ANCHOR" "$BTX_SEED"; do
  [[ -d $model ]] || btx_die 2 "the model $model is not a folder; set BTX_SEED and BTX_ANCHOR to the models' folders"
  btx_finished "$model"
done
btx_begin "$out" "$out" "seed=$BTX_ANCHOR" "expert-$domain=$BTX_SEED" # `mix` renames the folder into place when it is whole
btx_log "pair of $domain into $out"
rc=0
settings=("$(btx_setting seed "$BTX_ANCHOR")" "$(btx_setting "experts.$domain" "$BTX_SEED")" "$(btx_setting out "$out")")
btx_one mix "${CONFIG[@]}" "${settings[@]}" "${OVERRIDES[@]}" || rc=$?
btx_finish "$rc" "$out"
