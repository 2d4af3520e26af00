#!/usr/bin/env bash
#SBATCH --job-name=btx-mix
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.out
# mix.sh <domain>... [--allow-missing] [--config-name=RECIPE] [overrides...]: assembles the finished experts and the
# seed into $BTX_RUNS/mix. The recipe is conf/mix/btx.yaml. Experts are read from their hf/, or else as they trained.
# For recipes that merge pairs the seed is the anchor: $BTX_ANCHOR.
#   sbatch slurm/mix.sh math code prose top_k=2
#   bash slurm/mix.sh math code prose
# It waits for nothing: an expert without its DONE is an error, or with --allow-missing left out, which manifest.json
# then says. A mix of other experts that is there is put aside, into $BTX_RUNS/stale.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh && -n ${SLURM_JOB_ID:-} ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  for ((try = 0; try < 12; try++)); do # a controller that is being restarted is back in a minute
    here=$(scontrol show job "$SLURM_JOB_ID") && break
    sleep 5
  done
  here=${here#*Command=} here=${here%%/mix.sh*}
fi
if [[ -z $here || ! -f $here/common.sh ]]; then
  printf '%s: common.sh is not beside this script; run or submit it from the folder slurm/\n' "${0##*/}" >&2
  exit 2
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

btx_arguments "seed experts out missing" "$@"
((${#WORDS[@]})) || btx_die 2 "no domain; usage: mix.sh <domain>... [--allow-missing] [overrides...]"
seen=" "
for domain in "${WORDS[@]}"; do
  btx_check_domain "$domain"
  [[ $seen != *" $domain "* ]] || btx_die 2 "domain '$domain' is named twice; name it once"
  seen+="$domain "
done
btx_setup "$here" mix
btx_config btx

# Slurm takes `afterok` on a job it no longer knows as satisfied: only the experts' own files count.
mix=$RUNS/mix sources=() inputs=("seed=$BTX_ANCHOR") missing=""
for domain in "${WORDS[@]}"; do
  run=$RUNS/expert-$domain
  if ((ALLOW_MISSING)) && [[ ! -e $run/DONE ]]; then
    btx_log "expert $domain is not finished: the mix goes on without it"
    missing+=${missing:+,}$domain
    continue
  fi
  [[ -e $run/DONE ]] || btx_die 2 "$run/DONE is missing: expert $domain is not finished; run train_expert.sh $domain first"
  if [[ -d $run/hf ]]; then run=$run/hf; fi
  sources+=("$(btx_setting "experts.$domain" "$run")")
  inputs+=("expert-$domain=$run")
done
((${#sources[@]})) || btx_die 2 "no expert is finished; run train_expert.sh first"
[[ -d $BTX_ANCHOR ]] || btx_die 2 "the seed $BTX_ANCHOR is not a folder; set BTX_SEED (or for pairs BTX_ANCHOR) to the model's folder"
btx_finished "$BTX_ANCHOR"

btx_begin "$mix" "$mix" "${inputs[@]}" # `mix` renames the folder into place when it is whole
btx_log "mix of ${#sources[@]} expert(s) into $mix"
rc=0
settings=("$(btx_setting seed "$BTX_ANCHOR")" "${sources[@]}" "$(btx_setting out "$mix")")
if [[ -n $missing ]]; then settings+=("missing=[$missing]"); fi
btx_one mix "${CONFIG[@]}" "${settings[@]}" "${OVERRIDES[@]}" || rc=$?
btx_finish "$rc" "$mix"
