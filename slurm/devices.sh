# shellcheck shell=bash
# Sourced where ranks are started: settings of NCCL and Transformer Engine, by what is there. What is set already stays.

btx_tune() { # python arguments of the training...
  local python=$1 argument capability shards=0
  shift
  export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null) || return 0
  [[ $capability =~ ^([0-9]{1,3})\.[0-9] ]] || return 0
  capability=${BASH_REMATCH[1]}
  for argument in "$@"; do
    if [[ $argument =~ ^[+]*layout\.(tp|cp)=([2-9]|[1-9][0-9]+)$ ]]; then shards=1; fi
  done
  ((shards)) || return 0
  # Before Blackwell a tensor- or context-parallel layer overlaps with its communication only in launch order.
  if ((capability < 10)); then export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}; fi
  # Transformer Engine's norms leave some multiprocessors to that communication, from Hopper on.
  if ((capability >= 9)) && "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("transformer_engine"))'; then
    export NVTE_FWD_LAYERNORM_SM_MARGIN=${NVTE_FWD_LAYERNORM_SM_MARGIN:-16}
    export NVTE_BWD_LAYERNORM_SM_MARGIN=${NVTE_BWD_LAYERNORM_SM_MARGIN:-16}
  fi
}
