#!/usr/bin/env bash
# A throw-away Slurm cluster on this one host, to rehearse on and for tests. Needs root and
# Debian's packages:  apt-get install -y --no-install-recommends slurm-wlm munge iproute2
#
#   throwaway.sh start    bring munged + slurmctld + N slurmd up, wait until all nodes are idle
#   throwaway.sh stop     end exactly the processes that start made
#   throwaway.sh until PID   wait for the end of this process, then stop, and remove all files
#   throwaway.sh status   sinfo + squeue
#   throwaway.sh env      print the exports that it takes:  eval "$(throwaway.sh env)"
#
# Everything (keys, sockets, state, logs) is under SLURM_FIXTURE_DIR; /etc/slurm
# and /etc/munge are not touched. /etc/hosts gets one marked line per node, and stop removes them.
#
#   SLURM_FIXTURE_DIR    /tmp/slurm-fixture   where all of it lives
#   SLURM_FIXTURE_NODES  2                    how many emulated nodes (node1..nodeN)
#   SLURM_FIXTURE_APART  0                    how many more, in no partition but those of _EXTRA
#   SLURM_FIXTURE_CPUS   4                    CPUs that each node claims (need not exist)
#   SLURM_FIXTURE_GPUS   2                    fake GPUs that each node claims (0: no GRES)
#   SLURM_FIXTURE_ISOLATE  uts   none  | all slurmd share this host's name
#                                uts   | own hostname per node, address 127.0.1.K
#                                netns | own hostname and own network namespace, 10.77.0.K
#   SLURM_FIXTURE_SOCKETS  1                  into how many sockets, the GPUs in turn near each
#   SLURM_FIXTURE_THREADS  1                  threads of a core: CPUS are threads then
#   SLURM_FIXTURE_BIND   0                    1: bind tasks to their cores. Where a node claims CPUs
#                                             that the host lacks, tasks on them can't start.
#   SLURM_FIXTURE_PORT   16817                slurmctld's port; node K uses PORT+K
#   SLURM_FIXTURE_EXTRA  (empty)              more lines for slurm.conf, such as SlurmdTimeout=10
#   SLURM_FIXTURE_DBD    0                    1: also MariaDB + slurmdbd, so that sacct works; needs
#                                             apt-get install slurmdbd mariadb-server-core mariadb-client
set -euo pipefail

D=${SLURM_FIXTURE_DIR:-/tmp/slurm-fixture}
NODES=${SLURM_FIXTURE_NODES:-2}
APART=${SLURM_FIXTURE_APART:-0}
ALL=$((NODES + APART))
CPUS=${SLURM_FIXTURE_CPUS:-4}
GPUS=${SLURM_FIXTURE_GPUS:-2}
ISOLATE=${SLURM_FIXTURE_ISOLATE:-uts}
SOCKETS=${SLURM_FIXTURE_SOCKETS:-1}
THREADS=${SLURM_FIXTURE_THREADS:-1}
BIND=${SLURM_FIXTURE_BIND:-0}
PORT=${SLURM_FIXTURE_PORT:-16817}
DBD=${SLURM_FIXTURE_DBD:-0}
MARK="# slurm-fixture $D"
export SLURM_CONF=$D/slurm.conf
PATH=$PATH:/usr/sbin:/sbin

die() { echo "throwaway.sh: $*" >&2; exit 1; }

# A pid is alive if it exists and is no zombie: where pid 1 does not reap,
# an ended daemon stays in the process table and `kill -0` still succeeds.
alive() {
  [ -r "/proc/$1/stat" ] && [ "$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -c1)" != Z ]
}

kill_tree() { # pid $1 and all that it started, leaves first
  local c
  for c in $(pgrep -P "$1" || true); do kill_tree "$c"; done
  kill -9 "$1" 2>/dev/null || true
}

addr() { # address of node $1
  case $ISOLATE in
    none) echo 127.0.0.1 ;;
    uts) echo "127.0.1.$1" ;;
    netns) echo "10.77.0.$1" ;;
    *) die "SLURM_FIXTURE_ISOLATE=$ISOLATE?" ;;
  esac
}

near_cores() { # gres.conf of node $1, whose GPUs are near one socket each
  local g per=$((CPUS / SOCKETS / THREADS))
  for g in $(seq 0 $((GPUS - 1))); do
    local from=$((g % SOCKETS * per))
    echo "NodeName=node$1 Name=gpu Type=fake File=$D/dev/nvidia$g Cores=$from-$((from + per - 1))"
  done
}

write_conf() {
  local ctl=127.0.0.1 k g
  [ "$ISOLATE" = netns ] && ctl=10.77.0.254
  local host
  host=$(hostname -s)
  cat >"$D/slurm.conf" <<CONF
ClusterName=fixture
SlurmctldHost=$host($ctl)
SlurmctldPort=$PORT
# Root runs all of it: slurmd must be root to start jobs as their users.
SlurmUser=root
SlurmdUser=root
# Own munge socket, so no system-wide munged is needed or disturbed.
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it may start again (default 120 s).
AuthInfo=socket=$D/run/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd.%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.%n.log
MailProg=/bin/true
# No cgroups: children are found by walking /proc, and GPUs are numbered, not fenced off.
ProctrackType=proctrack/linuxproc
TaskPlugin=$([ "$BIND" = 1 ] && echo task/affinity || echo task/none)
JobAcctGatherType=jobacct_gather/none
# Finished jobs also go to a plain text file, which needs no database.
JobCompType=jobcomp/filetxt
JobCompLoc=$D/log/jobcomp.log
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Believe the CPU counts below, not what the host has.
SlurmdParameters=config_overrides
ReturnToService=2
# A dead node is seen in half a minute.
SlurmdTimeout=10
# Tests should not wait for the defaults made for real clusters.
SchedulerParameters=sched_interval=1,bf_interval=2,bf_continue,sched_min_interval=0,batch_sched_delay=0
KillWait=5
MinJobAge=600
CompleteWait=0
# Partition 'high' takes nodes from 'low' by requeueing its jobs.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
CONF
  if [ "$DBD" = 1 ]; then
    cat >>"$D/slurm.conf" <<CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((PORT - 1))
# the munge socket to use towards slurmdbd
AccountingStoragePass=$D/run/munge.socket
AccountingStorageTRES=gres/gpu
CONF
    cat >"$D/slurmdbd.conf" <<CONF
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((PORT - 1))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$D/run/munge.socket
LogFile=$D/log/slurmdbd.log
PidFile=$D/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((PORT - 2))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
CONF
    chmod 600 "$D/slurmdbd.conf"
  else
    echo "AccountingStorageType=accounting_storage/none" >>"$D/slurm.conf"
  fi
  if [ "$GPUS" -gt 0 ]; then echo "GresTypes=gpu" >>"$D/slurm.conf"; fi
  : >"$D/gres.conf"
  # Named, because slurmd refuses to start where autodetection finds no
  # /sys/fs/cgroup, although nothing here uses cgroups.
  echo "CgroupPlugin=cgroup/v1" >"$D/cgroup.conf"
  for k in $(seq "$ALL"); do
    echo "NodeName=node$k NodeAddr=$(addr "$k") NodeHostname=$( [ "$ISOLATE" = none ] && echo "$host" || echo "node$k") Port=$((PORT + k)) Sockets=$SOCKETS CoresPerSocket=$((CPUS / SOCKETS / THREADS)) ThreadsPerCore=$THREADS RealMemory=1000$( [ "$GPUS" -gt 0 ] && echo " Gres=gpu:fake:$GPUS") State=UNKNOWN" >>"$D/slurm.conf"
    # One /dev/null-like device for each fake GPU, so that Slurm can number them.
    if [ "$GPUS" -gt 0 ]; then
      if [ "$SOCKETS" -gt 1 ]; then near_cores "$k"; else
        echo "NodeName=node$k Name=gpu Type=fake File=$D/dev/nvidia[0-$((GPUS - 1))]"
      fi >>"$D/gres.conf"
    fi
  done
  for g in $(seq 0 $((GPUS - 1))); do
    [ -e "$D/dev/nvidia$g" ] || mknod -m 666 "$D/dev/nvidia$g" c 1 3
  done
  cat >>"$D/slurm.conf" <<CONF
PartitionName=main Nodes=node[1-$NODES] Default=YES MaxTime=INFINITE State=UP PriorityTier=5 PreemptMode=OFF
PartitionName=low  Nodes=node[1-$NODES] MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=node[1-$NODES] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
${SLURM_FIXTURE_EXTRA:-}
CONF
}

start() {
  [ "$(id -u)" = 0 ] || die "needs root"
  for p in munged slurmctld slurmd sinfo; do command -v $p >/dev/null || die "no $p: apt-get install slurm-wlm munge"; done
  [ -e "$D/run/slurmctld.pid" ] && alive "$(cat "$D/run/slurmctld.pid")" && die "already running in $D"
  rm -rf "$D"
  mkdir -p "$D"/{state,log,run,dev,spool,munge}
  chmod 755 "$D" "$D/run"
  chmod 700 "$D/munge" "$D/state"
  local k
  for k in $(seq "$ALL"); do mkdir -p "$D/spool/node$k"; done
  dd if=/dev/urandom of="$D/munge/key" bs=128 count=1 2>/dev/null
  chmod 400 "$D/munge/key"
  write_conf
  cp /etc/hosts "$D/hosts.before"
  if [ "$ISOLATE" != none ]; then
    # Locked: another cluster may be starting, or ending and writing the file anew.
    for k in $(seq "$ALL"); do echo "$(addr "$k") node$k $MARK"; done |
      flock /etc/hosts sh -c 'cat >>/etc/hosts'
  fi
  munged --socket="$D/run/munge.socket" --key-file="$D/munge/key" --pid-file="$D/run/munged.pid" \
    --log-file="$D/munge/log" --seed-file="$D/munge/seed"
  if [ "$ISOLATE" = netns ]; then net_up; fi
  if [ "$DBD" = 1 ]; then dbd_up; fi
  slurmctld || die "slurmctld did not start: $(tail -n 5 "$D/log/slurmctld.log")"
  for k in $(seq "$ALL"); do
    case $ISOLATE in
      none) slurmd -N "node$k" ;;
      uts) unshare --uts sh -c "hostname node$k && exec slurmd -N node$k" ;;
      # not `ip netns exec`: that mounts a new /sys, without the cgroups
      netns) nsenter --net="/run/netns/sf$k" unshare --uts sh -c "hostname node$k && exec slurmd -N node$k" ;;
    esac || die "slurmd of node$k did not start: $(tail -n 3 "$D/log/slurmd.node$k.log")"
  done
  for _ in $(seq 150); do
    [ "$(sinfo -h -N -o '%N %t' 2>/dev/null | sort -u | grep -c ' idle$')" = "$ALL" ] && registered && { sinfo; return 0; }
    sleep 0.2
  done
  sinfo || true
  tail -n 20 "$D"/log/*.log >&2
  die "the nodes did not become idle in 30 s"
}

dbd_up() { # MariaDB on loopback, then slurmdbd, then the cluster's name in it
  mariadb-install-db --no-defaults --user=root --datadir="$D/db" --auth-root-authentication-method=normal \
    --skip-test-db >"$D/log/mariadb-install.log" 2>&1
  setsid mariadbd --no-defaults --user=root --datadir="$D/db" --socket="$D/run/db.sock" --bind-address=127.0.0.1 \
    --port=$((PORT - 2)) --pid-file="$D/run/mariadb.pid" --innodb-buffer-pool-size=64M \
    >"$D/log/mariadb.log" 2>&1 </dev/null &
  local sql="mariadb --no-defaults --user=root --socket=$D/run/db.sock"
  for _ in $(seq 150); do $sql -e 'select 1' >/dev/null 2>&1 && break; sleep 0.2; done
  $sql -e "create database slurm_acct; create user slurm@127.0.0.1 identified by 'slurm'; grant all on slurm_acct.* to slurm@127.0.0.1; create user slurm@localhost identified by 'slurm'; grant all on slurm_acct.* to slurm@localhost"
  slurmdbd || die "slurmdbd did not start: $(tail -n 5 "$D/log/slurmdbd.log")"
  for _ in $(seq 100); do sacctmgr -n show cluster >/dev/null 2>&1 && break; sleep 0.2; done
  sacctmgr -i add cluster fixture >/dev/null || die "sacctmgr: $(tail -n 5 "$D/log/slurmdbd.log")"
}

registered() { # with slurmdbd, slurmctld is ready once it has told slurmdbd its port
  [ "$DBD" != 1 ] || [ "$(sacctmgr -nP show cluster format=ControlPort 2>/dev/null)" = "$PORT" ]
}

net_up() { # one bridge on this host, one namespace + veth for each node
  ip link add sfbr0 type bridge
  ip addr add 10.77.0.254/24 dev sfbr0
  ip link set sfbr0 up
  local k
  for k in $(seq "$ALL"); do
    ip netns add "sf$k"
    ip link add "sfv$k" type veth peer name eth0 netns "sf$k"
    ip link set "sfv$k" master sfbr0 up
    ip -n "sf$k" addr add "10.77.0.$k/24" dev eth0
    ip -n "sf$k" link set eth0 up
    ip -n "sf$k" link set lo up
  done
}

net_down() {
  local k
  for k in $(ip netns list 2>/dev/null | awk '/^sf[0-9]+/{print substr($1,3)}'); do ip netns del "sf$k"; done
  ip link del sfbr0 2>/dev/null || true
}

stop() {
  [ -d "$D/run" ] || return 0
  if [ -e "$D/run/slurmctld.pid" ] && alive "$(cat "$D/run/slurmctld.pid")"; then
    timeout 5 squeue -h -o %A | sort -u | timeout 5 xargs -r scancel 2>/dev/null || true
    for _ in $(seq 40); do [ -z "$(timeout 5 squeue -h -t running,completing 2>/dev/null)" ] && break; sleep 0.2; done
  fi
  local f pid p
  for f in "$D"/run/slurmd.*.pid "$D"/run/{slurmctld,slurmdbd,mariadb,munged}.pid; do
    [ -s "$f" ] || continue
    pid=$(cat "$f")
    alive "$pid" && kill "$pid"
    for _ in $(seq 50); do alive "$pid" || break; sleep 0.1; done
    alive "$pid" && kill -9 "$pid"
    rm -f "$f"
  done
  # Steps outlive a slurmd that was killed (a test of a dying node): end them
  # too. They are known by slurmd's working directory, the log folder.
  for p in $(pgrep -x slurmstepd || true); do
    case $(readlink "/proc/$p/cwd") in "$D"/log*) kill_tree "$p" ;; esac
  done
  # shellcheck disable=SC2016  # the inner shell's words
  flock /etc/hosts sh -c 'grep -v "$1" /etc/hosts >"$2"; cat "$2" >/etc/hosts' - "$MARK" "$D/hosts.new"
  ip link show sfbr0 >/dev/null 2>&1 && net_down
  return 0
}

case ${1:-} in
  start) start ;;
  stop) stop ;;
  until)
    while alive "$2"; do sleep 1; done
    stop
    rm -rf "$D"
    ;;
  status) sinfo -N -l; squeue ;;
  env)
    echo "export SLURM_CONF=$D/slurm.conf"
    echo "export DLOJZ_SITE=$(cd "$(dirname "$0")/.." && pwd)/tests/slurm/fixture.toml"
    ;;
  *) die "usage: $0 start|stop|until PID|status|env" ;;
esac
