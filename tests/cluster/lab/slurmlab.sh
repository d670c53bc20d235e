#!/usr/bin/env bash
# slurmlab.sh - a Slurm cluster on the hosts of netlab.sh, without systemd.
#
#   slurmlab.sh up [N]         netlab up N if needed (N is 2 or more), then munged everywhere,
#                              slurmctld on "login", one slurmd per node; the last node
#                              has no GPUs and the partition "cpu", the others 8 and "main"
#   slurmlab.sh down           stop Slurm and remove the hosts
#   slurmlab.sh start-node HOST  (re)start munged and slurmd on HOST
#   slurmlab.sh run CMD...     run CMD on the login host (sinfo, sbatch, ...)
set -euo pipefail

BIN=$(dirname "$(readlink -f "$0")")
ROOT=$("$BIN/netlab.sh" root)
S=$ROOT/lab/slurm
LOG=$ROOT/slurm-log # stays after "down"
on() { "$BIN/netlab.sh" exec "$@"; }
export SLURM_TIME_FORMAT=standard

write_config() { # N
    local i gpu_nodes cpu_node
    cpu_node=$(printf 'node%02d' "$1")
    gpu_nodes=$(printf 'node[01-%02d]' $(($1 - 1)))
    rm -rf "$LOG"
    mkdir -p "$S/etc" "$S/state" "$LOG"
    dd if=/dev/urandom of="$S/munge.key" bs=128 count=1 status=none
    chmod 600 "$S/munge.key"
    cat >"$S/etc/slurm.conf" <<-END
		ClusterName=lab
		SlurmctldHost=login
		SlurmUser=root
		SlurmdUser=root
		AuthType=auth/munge
		MailProg=/bin/true
		MpiDefault=none
		ProctrackType=proctrack/linuxproc
		TaskPlugin=task/none
		JobAcctGatherType=jobacct_gather/none
		AccountingStorageType=accounting_storage/none
		JobCompType=jobcomp/filetxt
		JobCompLoc=$LOG/jobcomp.log
		SelectType=select/cons_tres
		SelectTypeParameters=CR_Core
		GresTypes=gpu
		# believe the node lines below, not the hardware found
		SlurmdParameters=config_overrides
		ReturnToService=2
		SlurmctldTimeout=10
		SlurmdTimeout=15
		KillWait=5
		UnkillableStepTimeout=20
		SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2,requeue_setup_env_fail
		SlurmctldPidFile=/run/slurmctld.pid
		SlurmdPidFile=/run/slurmd.pid
		StateSaveLocation=$S/state
		SlurmdSpoolDir=/run/slurmd
		SlurmctldLogFile=$LOG/slurmctld.log
		SlurmdLogFile=$LOG/slurmd-%n.log
		SlurmctldDebug=info
		SlurmdDebug=info
		NodeName=$gpu_nodes CPUs=64 RealMemory=8000 Gres=gpu:8 State=UNKNOWN
		# jobs in "urgent" take the nodes from those in "main"
		PreemptType=preempt/partition_prio
		PreemptMode=REQUEUE
		PartitionName=main Nodes=$gpu_nodes Default=YES MaxTime=INFINITE DefaultTime=10 PriorityTier=1 GraceTime=30 State=UP
		PartitionName=urgent Nodes=$gpu_nodes MaxTime=INFINITE DefaultTime=10 PriorityTier=2 PreemptMode=OFF State=UP
		NodeName=$cpu_node CPUs=64 RealMemory=8000 State=UNKNOWN
		PartitionName=cpu Nodes=$cpu_node MaxTime=INFINITE DefaultTime=10 State=UP
	END
    # Slurm counts a gpu only if gres.conf names a character device for it; a
    # bare Count=8 registers as 0 and drains the node.  These are eight /dev/null.
    mkdir -p "$S/dev"
    for i in {0..7}; do mknod -m 666 "$S/dev/gpu$i" c 1 3; done
    echo "NodeName=$gpu_nodes Name=gpu File=$S/dev/gpu[0-7]" >"$S/etc/gres.conf"
    echo "CgroupPlugin=cgroup/v1" >"$S/etc/cgroup.conf"
    touch "$S/etc/plugstack.conf"
}

start_munge() { # HOST
    on "$1" bash -c "
        mount --bind $S/etc /etc/slurm
        install -d -o munge -g munge -m 755 /run/munge
        install -o munge -g munge -m 400 $S/munge.key /run/munge/key
        runuser -u munge -- /usr/sbin/munged --key-file=/run/munge/key \
            --log-file=/run/munge/log --seed-file=/run/munge/seed"
}

start_node() {
    start_munge "$1"
    on "$1" setsid slurmd </dev/null
}

nodes() { (cd "$ROOT/lab/pid" && printf '%s\n' node*); }

up() { # N
    local h
    [[ -e $ROOT/lab ]] || "$BIN/netlab.sh" up "$1"
    write_config "$(nodes | wc -l)"
    start_munge login
    on login setsid slurmctld </dev/null
    for h in $(nodes); do start_node "$h"; done
    for _ in {1..300}; do
        [[ $(on login sinfo -h -t idle -o %D 2>/dev/null) == "$(nodes | wc -l)" ]] && return
        sleep 0.1
    done
    on login sinfo
    echo "nodes are not idle; see $LOG" >&2
    return 1
}

cmd=${1:-}
[[ $cmd ]] && shift
case $cmd in
up) up "${1:-2}" ;;
down) "$BIN/netlab.sh" down ;;
start-node) start_node "$1" ;;
run) on login "$@" ;;
*)
    sed -n '2,/^set/{/^set/!p}' "$0"
    exit 2
    ;;
esac
