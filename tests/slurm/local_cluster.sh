#!/usr/bin/env bash
# A real Slurm of two virtual nodes with fake GPUs, for the tests: munged, slurmctld and two slurmd as plain processes.
#   local_cluster.sh start DIR [PID]   starts it and prints the path of its slurm.conf, for SLURM_CONF; it goes, and DIR
#                                      with it, when process PID has gone
#   local_cluster.sh stop DIR          cancels its jobs and ends its processes
#   local_cluster.sh kill DIR NODE     SIGKILLs a node with all that runs on it; nodes must have names of their own
#   local_cluster.sh halt DIR          ends slurmctld
#   local_cluster.sh revive DIR NAME   starts a node, or slurmctld, again with the state it had
#   local_cluster.sh forget DIR        starts slurmctld again, with no job that it had
# Where `unshare` may, each node has its own host name and an /etc/hosts with both, as torchrun needs over two nodes.
# Everything lives in DIR (at most 60 characters: sockets lie below it); nothing in /etc, /run or /var is used.
# Needs: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge
set -euo pipefail

command=${1:?command} dir=${2:?folder}
conf=$dir/slurm.conf nodes=(node1 node2) gpus=8
PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$conf
unset "${!SBATCH_@}" SLURM_JOB_ID

is_ours() { # pid-file: its process still runs, and is one of this folder
  [[ -s $1 ]] && tr '\0' ' ' 2>/dev/null <"/proc/$(<"$1")/cmdline" | grep -qF -- "$dir"
}
daemon() { # name command...
  local name=$1
  shift
  setsid "$@" </dev/null >>"$dir/log/$name.out" 2>&1 &
  echo $! >"$dir/pid/$name"
}
stop_daemon() { # name
  local file=$dir/pid/$1 i
  for ((i = 0; i < 80; i++)); do
    is_ours "$file" || return 0
    if ((i == 0)); then kill -TERM "$(<"$file")"; elif ((i == 79)); then kill -KILL "$(<"$file")"; fi
    sleep 0.1
  done
}
free_ports() { # count: the first of a run of ports that nobody listens on
  local base i
  for ((base = 16000 + RANDOM % 3000; base < 20000; base += $1)); do
    for ((i = 0; i < $1; i++)); do
      if (exec 3<>"/dev/tcp/127.0.0.1/$((base + i))") 2>/dev/null; then continue 2; fi
    done
    echo "$base"
    return 0
  done
  return 1
}

has_namespaces() {
  unshare --mount --uts sh -c 'hostname x && mount --bind /etc/hosts /etc/hosts' 2>/dev/null
}
in_node() { # name command...: with the node's own host name, seen by nobody else
  local name=$1
  shift
  if [[ -e $dir/hosts ]]; then
    # shellcheck disable=SC2016 # expanded by the inner shell
    exec unshare --mount --uts sh -c 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"' \
      sh "$dir/hosts" "$name" "$@"
  fi
  exec "$@"
}

write_configuration() {
  local port host i address=127.0.0.1
  port=$(free_ports 3) host=$(hostname -s)
  if has_namespaces; then
    cp /etc/hosts "$dir/hosts"
    for i in "${!nodes[@]}"; do echo "127.0.0.$((11 + i)) ${nodes[i]}" >>"$dir/hosts"; done
  fi
  (umask 077 && head -c 1024 /dev/urandom >"$dir/munge/key")
  for ((i = 0; i < gpus; i++)); do ln -sf /dev/null "$dir/gpu/nvidia$i"; done
  echo "Name=gpu File=$dir/gpu/nvidia[0-$((gpus - 1))]" >"$dir/gres.conf"
  # cred_expire is also how long a requeued job waits before it starts again.
  cat >"$conf" <<C
ClusterName=btxtest
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/state/slurmctld.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdSpoolDir=$dir/spool.%n
SlurmdPidFile=$dir/state/%n.pid
SlurmdLogFile=$dir/log/%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=8
SlurmctldTimeout=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
MinJobAge=3600
CompleteWait=0
KillWait=5
PropagateResourceLimits=NONE
GresTypes=gpu
C
  for i in "${!nodes[@]}"; do
    if [[ -e $dir/hosts ]]; then address=127.0.0.$((11 + i)) host=${nodes[i]}; fi
    echo "NodeName=${nodes[i]} NodeHostname=$host NodeAddr=$address Port=$((port + 1 + i)) CPUs=64 Sockets=1" \
      "CoresPerSocket=64 ThreadsPerCore=1 RealMemory=500000 Gres=gpu:$gpus State=UNKNOWN" >>"$conf"
  done
  echo "PartitionName=test Nodes=ALL Default=YES DefaultTime=10 MaxTime=INFINITE State=UP" >>"$conf"
}
is_ready() {
  [[ $(sinfo --noheader --Node --format='%N %t' 2>/dev/null | sort -u | grep -c ' idle$') == "${#nodes[@]}" ]]
}
start_daemon() { # name [option]
  case $1 in
    slurmctld) daemon slurmctld slurmctld -D "${@:2}" -f "$conf" ;;
    *) daemon "$1" "$0" in_node "$dir" "$1" slurmd -D -N "$1" -f "$conf" ;;
  esac
}
start() {
  local name i
  ((${#dir} <= 60)) || { echo "local_cluster.sh: $dir is longer than 60 characters" >&2; exit 1; }
  mkdir -p "$dir"/{munge,state,log,pid,gpu}
  chmod 755 "$dir" "$dir/munge"
  write_configuration
  daemon munged munged --foreground --force --socket="$dir/munge/socket" --key-file="$dir/munge/key" \
    --log-file="$dir/log/munged.log" --pid-file="$dir/munge/pid" --seed-file="$dir/munge/seed"
  for ((i = 0; i < 100; i++)); do
    if munge --no-input --socket="$dir/munge/socket" >/dev/null 2>&1; then break; fi
    sleep 0.05
  done
  start_daemon slurmctld -c
  for name in "${nodes[@]}"; do
    mkdir -p "$dir/spool.$name"
    start_daemon "$name"
  done
  if [[ -n ${1:-} ]]; then daemon guard "$0" guard "$dir" "$1"; fi
  for ((i = 0; i < 200; i++)); do
    if is_ready; then echo "$conf" && return 0; fi
    sleep 0.1
  done
  tail -n 20 "$dir"/log/* >&2
  stop
  exit 1
}
guard() { # pid
  while kill -0 "$1" 2>/dev/null; do sleep 1; done
  rm "$dir/pid/guard"
  stop
  # What the tests mounted in it goes with it.
  awk -v dir="$dir/" 'index($2, dir) == 1 { print $2 }' /proc/self/mounts | xargs --no-run-if-empty umount || true
  rm -rf "${dir:?}"
}
kill_node() { # name: all at once, so that nothing of it is left to report what happened
  local pid namespace victims=()
  namespace=$(readlink "/proc/$(<"$dir/pid/$1")/ns/uts")
  for pid in /proc/[0-9]*; do
    if [[ $(readlink "$pid/ns/uts" 2>/dev/null) == "$namespace" ]]; then victims+=("${pid#/proc/}"); fi
  done
  kill -STOP "${victims[@]}" 2>/dev/null || true
  kill -KILL "${victims[@]}" 2>/dev/null || true
}
stop() {
  local name i
  timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
  for ((i = 0; i < 80; i++)); do
    [[ -n $(timeout 5 squeue --noheader --states=running,completing 2>/dev/null) ]] || break
    sleep 0.1
  done
  for name in guard "${nodes[@]}" slurmctld munged; do stop_daemon "$name"; done
}

case $command in
  start | guard) "$command" "${3:-}" ;;
  stop) stop ;;
  kill) kill_node "${3:?node}" ;;
  halt) stop_daemon slurmctld ;;
  revive) start_daemon "${3:?daemon}" ;;
  forget) start_daemon slurmctld -c ;;
  in_node) in_node "${@:3}" ;; # used by start
  *) echo "local_cluster.sh: start, stop, kill, halt, revive or forget, not '$command'" >&2 && exit 2 ;;
esac
