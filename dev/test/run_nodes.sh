#!/usr/bin/env bash
# run_nodes.sh [BUILD]: training over a network, on one machine. Each host is a Linux network
# namespace with a cable (veth) to a bridge. Open MPI starts its daemon on them through a script
# that acts as ssh, and may use TCP only. The golden case must give the bits of the same layout
# without a network. The byte counters of the cables must show the layout's traffic. Ends with `N
# passed, N failed`. Skips if namespaces cannot be made (no iproute2, no permission) or there is no
# Open MPI.
#
# All hosts, the bridge too, live in namespaces of their own, and so do their processes. When this
# script ends, in any way, the kernel removes the hosts and every process on them.
#
# needs: fp32/train_gpt_3d
. "$(dirname "$0")/report.sh"
build=$(realpath -m "$build")
trainer=$build/train_gpt_3d

if [ "${NODES_INSIDE:-}" != 1 ]; then
    cpu_only 'the hosts would share GPUs, which NCCL refuses'
    [ -x "$trainer" ] || { report 1 "nodes: $trainer is not built"; finish; }
    [ "${MPI:-openmpi}" = openmpi ] && mpirun --version 2>/dev/null | grep -q 'Open MPI) 4' ||
        skip 'mpirun is not that of Open MPI 4'
    for tool in ip unshare mount hostname; do
        command -v $tool >/dev/null || skip "no $tool"
    done
    # Without root the same is done in a user namespace, where the system allows those.
    private=(unshare --mount --net --pid --fork --kill-child --mount-proc)
    [ "$(id -u)" = 0 ] || private+=(--user --map-root-user)
    network='mount -t tmpfs tmpfs /run
        mkdir /run/netns
        ip link add hub type bridge
        ip netns add host
        ip link add wire type veth peer name eth0 netns host
        ip netns exec host unshare --uts hostname host'
    why=$(timeout 20 "${private[@]}" sh -ec "$network" 2>&1) ||
        skip "cannot make network namespaces: ${why%%$'\n'*}"
    rmdir "$dir"
    NODES_INSIDE=1 exec "${private[@]}" dev/test/run_nodes.sh "$build"
fi

trap 'exit 1' HUP INT TERM
# Ours alone; gone with the namespace. In /dev/shm Open MPI names its segments by the host and
# mpirun's PID. PIDs start from 1 here, so another such test would have the same names.
mount -t tmpfs tmpfs /run && mkdir /run/netns /run/tmp || exit 1
[ ! -d /dev/shm ] || mount -t tmpfs tmpfs /dev/shm || exit 1
export TMPDIR=/run/tmp OMP_NUM_THREADS=1
shown=/run/out

# ---- four hosts on one bridge --------------------------------------------------------------------

ip link set lo up
ip link add hub type bridge && ip link set hub up || exit 1
for i in 1 2 3 4; do
    ip netns add host$i && ip link add wire$i type veth peer name eth0 netns host$i || exit 1
    ip link set wire$i master hub up
    ip -n host$i addr add 10.77.0.$i/24 dev eth0
    ip -n host$i link set lo up
    ip -n host$i link set eth0 up
done

# Called as ssh is: agent ADDRESS COMMAND. It runs on the host of that address, under a name of its
# own. Open MPI believes that processes with the same host name share memory.
cat >/run/agent <<'END'
#!/bin/sh
host=host${1##*.}
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
END
chmod +x /run/agent

# Keep-alive probes tell Open MPI's daemons that a host is gone; by default this takes minutes.
# shellcheck disable=SC2054
launch=(mpirun --allow-run-as-root --oversubscribe --bind-to none
        --mca plm rsh --mca plm_rsh_agent /run/agent --mca pml ob1 --mca btl tcp,self
        --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24
        --mca oob_tcp_keepalive_time 4 --mca oob_tcp_keepalive_intvl 1
        --mca oob_tcp_keepalive_probes 4
        -x CPU_STALL_SECONDS -x OMP_NUM_THREADS)

# over_network SECONDS HOSTS RANKS_PER_HOST FLAGS...: mpirun runs on the first host. Output in
# /run/out.
over_network() {
    local limit=$1 hosts=$2 each=$3 list='' i
    shift 3
    for ((i = 1; i <= hosts; i++)); do list+=,10.77.0.$i:$each; done
    timeout -k 5 "$limit" /run/agent 10.77.0.1 exec "${launch[@]}" --host "${list:1}" -n \
        $((hosts * each)) \
        "$trainer" "$@" >/run/out 2>&1 </dev/null
}

sent_by() {  # bytes that a host has put on its cable
    ip -s link show dev "wire$1" | awk '/RX:/ {getline; print $1}'
}

# ---- the golden case over them -------------------------------------------------------------------

golden="--init dev/test/golden --train-data dev/test/golden/train.bin --seq 24 --global-batch 8
        --micro-batch 2 --steps 5 --lr 1e-3 --lr-final 1 --val-every 0"
message=$((8 * 24 * 32 * 4))  # bytes of the activations between two layers, over the global batch

# same_as_local NAME HOSTS RANKS_PER_HOST LEAST FLAGS...: LEAST bytes have to leave each host in a
# step, whatever the algorithm. More than eight times as much would mean useless messages.
same_as_local() {
    local name=$1 hosts=$2 each=$3 least=$(($4 * 5)) i code=0 bytes before=() start=() text=''
    shift 4
    rm -rf /run/net /run/local
    # Connecting and warming up send bytes before the first step. A run of no steps measures them.
    for ((i = 1; i <= hosts; i++)); do start[i]=$(sent_by "$i"); done
    # shellcheck disable=SC2086
    over_network 120 "$hosts" "$each" $golden "$@" --steps 0 || code=1
    for ((i = 1; i <= hosts; i++)); do
        before[i]=$(sent_by "$i")
        before[i]=$((before[i] + before[i] - start[i]))
    done
    # shellcheck disable=SC2086
    over_network 120 "$hosts" "$each" $golden "$@" --log /run/net.jsonl --out /run/net
    report $? "$name: runs on $hosts hosts with $each ranks each, without PMIx, \"MPI bootstrap\""
    for ((i = 1; i <= hosts; i++)); do
        bytes=$(($(sent_by "$i") - before[i]))
        text+=", $((bytes / 1024)) KiB by host $i"
        [ $bytes -ge $least ] && [ $bytes -le $((8 * least)) ] || code=1
    done
    report $code "$name: sent over the network${text}; at least $((least / 1024)) KiB each"
    # shellcheck disable=SC2086
    timeout -k 5 120 mpirun --allow-run-as-root --oversubscribe --bind-to none \
        -n $((hosts * each)) "$trainer" $golden "$@" --log /run/local.jsonl --out /run/local \
        >/run/out 2>&1 </dev/null
    report $? "$name: runs on one host"
    diff <(numbers /run/net.jsonl) <(numbers /run/local.jsonl) >/run/out 2>&1 &&
        [ "$(wc -l </run/net.jsonl)" = 5 ]
    report $? "$name: losses and norms have the same bits"
    for i in model optimizer; do
        cmp /run/net/step-00000005/$i.safetensors /run/local/step-00000005/$i.safetensors \
            >>/run/out 2>&1 || code=2
    done
    report $((code == 2)) "$name: weights and optimizer have the same bits"
    # The file has the five losses of an independent implementation.
    paste <(sed -n '/"losses"/,/]/p' dev/test/golden/expected.json | grep -o '[0-9.]\{6,\}') \
          <(sed 's/.*"loss":\([^,]*\).*/\1/' /run/net.jsonl) |
        awk '
            { d = $1 - $2; if (d < -1e-5 || d > 1e-5 || NF != 2) bad = 1; print }
            END { exit bad || NR != 5 }' >/run/out
    report $? "$name: losses are those of the golden case"
}

# Stages on different hosts: the activations go forth, their gradients back.
same_as_local 't=2 p=2, a stage per host' 2 2 $message --tensor 2 --pipeline 2
# A rank per host: four all-reduces in each of the two layers of a stage.
same_as_local 't=2 p=2, a rank per host' 4 1 $((8 * message)) --tensor 2 --pipeline 2
# Replicas on different hosts: the reduced half of the gradients, then half of the weights.
same_as_local 'd=4, two replicas per host' 2 2 $((53600 * 4)) --data 4

# ---- hosts that go away --------------------------------------------------------------------------

# Processes of the job. /proc shows those of this test only, and grep does not match itself.
ranks_left() { grep -lsz 'train_gpt_[3]d' /proc/[0-9]*/cmdline | wc -l; }

# lose_host NAME COMMAND...: does that in the middle of training; the job must end by itself within
# 35 s.
lose_host() {
    local name=$1 job code begin
    shift
    : >/run/out  # or the steps of the job before would be taken for its own
    # shellcheck disable=SC2086
    CPU_STALL_SECONDS=8 over_network 60 2 2 $golden --tensor 2 --pipeline 2 --steps 100000 &
    job=$!
    await grep -q '^step *3/' /run/out
    "$@"
    begin=$SECONDS
    wait $job
    code=$?
    for _ in {1..50}; do
        [ "$(ranks_left)" = 0 ] && break
        sleep 0.2
    done
    grep -q '^step *3/' /run/out && [ $code != 0 ] && [ $code != 124 ] &&
        [ $((SECONDS - begin)) -le 35 ] &&
        [ "$(ranks_left)" = 0 ]
    report $? "$name: the job ended with $code in $((SECONDS - begin)) s, $(ranks_left) ranks left"
}

kill_host() { ip netns pids "$1" | xargs kill -KILL; }
lose_host 'a host crashes' kill_host host2
lose_host 'a cable is pulled' ip link set wire2 down

finish
