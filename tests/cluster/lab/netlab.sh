#!/usr/bin/env bash
# netlab.sh - several real "hosts" on one Linux machine, reachable over ssh.
#
# A host is one network + UTS + PID + mount + IPC namespace: own IP, hostname,
# process table, /tmp, /run, /dev/shm and sshd on port 22.  A bridge in a
# namespace of its own is the switch, so the machine's own network is untouched.
#
#   netlab.sh up [N]                  make hosts node01..nodeNN and one "login" host
#   netlab.sh down                    end every process of every host, remove all
#   netlab.sh exec HOST CMD...        run CMD inside HOST without ssh, in the folder it was called from
#   netlab.sh root                    print the shared folder
#   netlab.sh fault HOST unplug       switch port down: carrier lost at both ends
#   netlab.sh fault HOST blackhole    switch port drops every frame, carrier stays
#   netlab.sh fault HOST rate 10mbit  bandwidth limit (tbf), both directions
#   netlab.sh fault HOST delay 50 [LOSS%]  delay each way in ms, by a userspace relay
#   netlab.sh fault HOST firewall PORT     HOST drops whatever comes to this TCP port
#   netlab.sh fault HOST crash        kill -9 every process; the kernel still sends RST
#   netlab.sh fault HOST poweroff     the same, but silent on the wire
#   netlab.sh fault HOST clear        undo all but crash and poweroff
#   netlab.sh boot HOST               start HOST again after crash or poweroff
#
# Several labs stand side by side under different NETLAB_NUMBERs (1 to 254; default 78): namespaces, switch, subnet
# 10.NUMBER.0 and the shared folder /tmp/netlabNUMBER follow from it.
#
# Needs: root, iproute2, nftables, util-linux, openssh-server; python3 for "delay".
set -euo pipefail

NUMBER=${NETLAB_NUMBER:-78}
ROOT=/tmp/netlab$NUMBER # visible inside every host: the "shared filesystem"
LAB=$ROOT/lab           # state: ssh keys, pids, logs
NET=10.$NUMBER.0
PREFIX=lab$NUMBER- # of the network namespaces
SWITCH=${PREFIX}switch
BIN=$(dirname "$(readlink -f "$0")")

die() {
    echo "netlab: $*" >&2
    exit 1
}
ns() { echo "$PREFIX$1"; } # network namespace of a host
port() { echo "p-$1"; }    # its port on the switch

write_config() { # HOSTS...
    local i=0 host
    mkdir -p "$LAB/ssh" "$LAB/pid" "$LAB/log"
    ssh-keygen -q -t ed25519 -N '' -C netlab -f "$LAB/ssh/id_ed25519"
    {
        echo "127.0.0.1 localhost"
        for host; do echo "$NET.$((10 + i++)) $host"; done
    } >"$LAB/hosts"
    for host; do
        mkdir -p "$LAB/etc/$host"
        ssh-keygen -q -t ed25519 -N '' -C "$host" -f "$LAB/etc/$host/ssh_host_ed25519_key"
        echo "$host,$(awk -v h="$host" '$2 == h {print $1}' "$LAB/hosts") $(cut -d' ' -f1,2 "$LAB/etc/$host/ssh_host_ed25519_key.pub")"
    done >"$LAB/ssh_known_hosts"
    for host; do
        cp "$LAB/hosts" "$LAB/etc/$host/hosts"
        echo "$host" >"$LAB/etc/$host/hostname"
        cp "$LAB/ssh_known_hosts" "$LAB/ssh/id_ed25519" "$LAB/etc/$host/"
        cp "$LAB/ssh/id_ed25519.pub" "$LAB/etc/$host/authorized_keys"
        cat >"$LAB/etc/$host/ssh_config" <<-END
			Host *
			    IdentityFile /etc/ssh/id_ed25519
			    BatchMode yes
			    ConnectTimeout 5
			    ServerAliveInterval 5
			    ServerAliveCountMax 3
		END
        cat >"$LAB/etc/$host/sshd_config" <<-END
			HostKey /etc/ssh/ssh_host_ed25519_key
			AuthorizedKeysFile /etc/ssh/authorized_keys
			PermitRootLogin prohibit-password
			PasswordAuthentication no
			KbdInteractiveAuthentication no
			UsePAM no
			UseDNS no
			AcceptEnv LANG LC_*
			MaxStartups 100
			MaxSessions 100
			PidFile /run/sshd.pid
		END
    done
}

# Runs as PID 1 of a host, in fresh namespaces.
host_init() { # HOST
    local host=$1 etc=$LAB/etc/$1 scratch=$LAB/etc/$1/tmp
    hostname "$host"
    mount --make-rprivate /
    mount --bind "$etc/hosts" /etc/hosts
    mount --bind "$etc/hostname" /etc/hostname
    mount --bind "$etc" /etc/ssh
    # A private /tmp that still shows the shared directory.
    mkdir -p "$scratch"
    mount -t tmpfs -o mode=1777 tmpfs "$scratch"
    if [[ $ROOT == /tmp/* ]]; then
        mkdir -p "$scratch/${ROOT#/tmp/}"
        mount --rbind "$ROOT" "$scratch/${ROOT#/tmp/}"
    fi
    mount --move "$scratch" /tmp
    mount -t tmpfs -o mode=755 tmpfs /run
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    mkdir -p /run/sshd /run/lock
    /usr/sbin/sshd -D -e &
    trap 'exit 0' TERM
    while :; do wait -n || sleep 1 || :; done # PID 1: reap orphans
}

start_host() { # HOST
    local host=$1 outer net
    net=/run/netns/$(ns "$host") # here, because below it would be a child of the background process for a moment
    setsid nsenter --net="$net" \
        unshare --uts --ipc --pid --mount --fork --kill-child --mount-proc \
        "$BIN/netlab.sh" _init "$host" >"$LAB/log/$host.log" 2>&1 </dev/null &
    outer=$!
    for _ in {1..100}; do
        pgrep -P "$outer" >"$LAB/pid/$host" && return
        sleep 0.02
    done
    die "$host did not start; see $LAB/log/$host.log"
}

up() { # N
    local n=$1 i=0 host hosts
    [[ -e $LAB ]] && die "a lab exists in $LAB; run: $0 down"
    mapfile -t hosts < <(
        echo login
        seq -f 'node%02g' 1 "$n"
    )
    write_config "${hosts[@]}"
    ip netns add "$SWITCH"
    ip -n "$SWITCH" link add br0 type bridge
    ip -n "$SWITCH" link set br0 up
    for host in "${hosts[@]}"; do
        ip netns add "$(ns "$host")"
        ip link add eth0 netns "$(ns "$host")" type veth peer name "$(port "$host")" netns "$SWITCH"
        ip -n "$(ns "$host")" link set lo up
        ip -n "$(ns "$host")" addr add "$NET.$((10 + i++))/24" dev eth0
        ip -n "$(ns "$host")" link set eth0 up
        ip -n "$SWITCH" link set "$(port "$host")" master br0 up
        start_host "$host"
    done
    for host in "${hosts[@]}"; do await_ssh "$host"; done
}

await_ssh() { # HOST
    for _ in {1..100}; do
        in_host login ssh "$1" true 2>/dev/null && return
        sleep 0.05
    done
    die "no ssh to $1; see $LAB/log/$1.log"
}

in_host() { # HOST CMD...
    local pid folder=$PWD
    [[ $folder != /tmp/* || $folder/ == "$ROOT"/* ]] || folder=/ # a host has its own /tmp
    pid=$(cat "$LAB/pid/$1" 2>/dev/null) || die "no host $1"
    shift
    nsenter -t "$pid" --net --uts --ipc --pid --mount env -C "$folder" "$@"
}

down() {
    local f host
    for f in "$LAB"/pid/*; do
        [[ -e $f ]] && { kill -9 "$(cat "$f")" 2>/dev/null || true; }
    done
    for host in $(ip netns list | awk -v p="^$PREFIX" '$1 ~ p {print $1}'); do ip netns del "$host"; done
    rm -rf --one-file-system "$LAB"
}

fault() { # HOST KIND [ARG...]
    local host=$1 kind=$2 p d b
    p=$(port "$host") d=d-$host b=b-$host
    shift 2
    case $kind in
    unplug) ip -n "$SWITCH" link set "$p" down ;;
    blackhole) bridge -n "$SWITCH" link set dev "$p" state 0 ;;
    rate)
        tc -n "$SWITCH" qdisc replace dev "$p" root tbf rate "$1" burst 128kb latency 200ms
        tc -n "$(ns "$host")" qdisc replace dev eth0 root tbf rate "$1" burst 128kb latency 200ms
        ;;
    delay)
        ip -n "$SWITCH" link add "$d" type veth peer name "$b"
        ip -n "$SWITCH" link set "$p" nomaster
        ip -n "$SWITCH" link set "$b" master br0 up
        ip -n "$SWITCH" link set "$d" up
        setsid ip netns exec "$SWITCH" python3 "$BIN/delaywire.py" "$p" "$d" "$1" "${2:-0}" \
            >"$LAB/log/delay-$host.log" 2>&1 </dev/null &
        echo $! >"$LAB/pid/delay-$host"
        ;;
    firewall)
        ip netns exec "$(ns "$host")" nft -f - <<<"table inet faults {
            chain in { type filter hook input priority 0; tcp dport $1 drop; }; }"
        ;;
    crash) kill -9 "$(cat "$LAB/pid/$host")" ;;
    poweroff) fault "$host" blackhole && fault "$host" crash ;;
    clear)
        if [[ -e $LAB/pid/delay-$host ]]; then
            kill "$(cat "$LAB/pid/delay-$host")" || true
            rm "$LAB/pid/delay-$host"
            ip -n "$SWITCH" link del "$d"
            ip -n "$SWITCH" link set "$p" master br0
        fi
        tc -n "$SWITCH" qdisc del dev "$p" root 2>/dev/null || true
        tc -n "$(ns "$host")" qdisc del dev eth0 root 2>/dev/null || true
        ip netns exec "$(ns "$host")" nft flush ruleset
        ip -n "$SWITCH" link set "$p" up
        for _ in {1..50}; do # the carrier needs a moment after "up"
            bridge -n "$SWITCH" link set dev "$p" state 3 2>/dev/null && break
            sleep 0.1
        done
        ;;
    *) die "unknown fault $kind" ;;
    esac
}

cmd=${1:-}
[[ $cmd ]] && shift
case $cmd in
up) up "${1:-2}" ;;
down) down ;;
root) echo "$ROOT" ;;
exec) in_host "$@" ;;
fault) fault "$@" ;;
boot) fault "$1" clear && start_host "$1" && await_ssh "$1" ;;
_init) host_init "$1" ;;
*)
    sed -n '2,/^set/{/^set/!p}' "$0"
    exit 2
    ;;
esac
