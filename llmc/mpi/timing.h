// timing.h: communication on the virtual clock of the stand-ins (llmc/cpu/clock.h).
//
// A group of operations begins when all ranks of its communicator are ready. Each must have
// come to it on its stream, and the communicator must have finished the group before. So
// every rank takes part in each group on the clock, also in a group of messages. The ranks
// agree on the latest time by MPI. In a simulation no data move, and the processes meet in
// shared memory (llmc/cpu/simulate.h). A group ends when its cost is over (llmc/sim/cost.h).
// The cost follows from its bytes and from the places of the communicator's ranks.
//
// defines: simulates, clock_*; on a GPU they do nothing
#ifndef LLMC_MPI_TIMING_H
#define LLMC_MPI_TIMING_H

#include "llmc/mpi/operation.h"

namespace nccl_mpi {

#if defined(__CUDACC__) || defined(GPU_QUEUE)

inline bool simulates() {
    return false;
}
inline void clock_communicator(ncclComm_t, const ncclConfig_t *) {
}
inline void clock_issue(const std::shared_ptr<Group> &) {
}
inline void clock_begin(Group *) {
}
inline void clock_end(Group *) {
}
inline bool clock_met(Group *) {
    return true;
}

#else

inline bool simulates() {
    return cpu_simulates();
}

// Places the ranks of a new communicator; only a simulation's config knows how many they
// are. They sit `shift` places higher (see CpuClock), unless the group has those places in
// it: then it has both.
inline void clock_communicator(ncclComm_t comm, const ncclConfig_t *config) {
    if (!cpu_clock().on) return;
    CommClock *c = &comm->clock;
    int world;
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    c->world = (size_t)world;
    c->channel = cpu_simulation().splits;
    if (simulates() && config) comm->size = (int)config->count;
    for (int i = 0; i < comm->size; i++) {
        int rank = config && config->ranks ? config->ranks[i] : i;
        int process = cpu_process_of(rank);
        c->ranks.push_back((size_t)rank);
        if (process >= 0) c->processes.push_back(process);
        if (simulates() && rank == cpu_simulation().rank) comm->rank = i;
    }
    size_t there = c->ranks[(size_t)comm->rank] + cpu_clock().shift;
    if (std::find(c->ranks.begin(), c->ranks.end(), there) == c->ranks.end())
        for (size_t &rank : c->ranks) rank += cpu_clock().shift;
    c->place =
        placement_ranks(&cpu_clock().cluster, c->ranks.data(), c->ranks.size(), c->world);
    if (config && config->groups > 0) c->place = placement_among(c->place, config->groups);
    c->place.alone = config && config->waited;
}

// Returns the seconds of a message to the peer. The ranks of the sender's stage in its node,
// or its island, send at the same time. Their number is the distance between sender and
// peer.
inline double clock_message_seconds(const ncclComm *comm, double bytes, int peer) {
    const Cluster *cluster = &cpu_clock().cluster;
    const CommClock *c = &comm->clock;
    size_t a = c->ranks[(size_t)comm->rank], b = c->ranks[(size_t)peer];
    size_t between = a < b ? b - a : a - b, around = c->world - between;
    return cost_send(cluster, bytes, a, b, std::min(between, around));
}

// Returns the seconds of a group. Collectives of one kind are one collective over all of
// their bytes. Messages begin together. Messages that leave this rank share its way out, and
// arriving ones share its way in. The node's links and the network are separate ways.
inline double clock_seconds(const Group *g) {
    const Cluster *cluster = &cpu_clock().cluster;
    double bytes[NCCL_MPI_OPS] = {0}, seconds = 0, latency = 0, message = 0;
    double ways[2][2] = {{0}};
    for (const Operation &op : g->ops) {
        int kind = op.call.op;
        double n = kind == NCCL_MPI_REDUCE_SCATTER || kind == NCCL_MPI_ALL_GATHER
                       ? (double)g->comm->size
                       : 1;
        double all = n * (double)op.width * (double)op.call.count;
        if (kind < NCCL_MPI_SEND) {
            bytes[kind] += all;
        } else if (op.call.root != g->comm->rank) {
            const std::vector<size_t> &ranks = g->comm->clock.ranks;
            size_t node = (size_t)cluster->gpus_per_node;
            bool far = ranks[(size_t)op.call.root] / node !=
                       ranks[(size_t)g->comm->rank] / node;
            double empty = clock_message_seconds(g->comm, 0, op.call.root);
            double &way = ways[kind == NCCL_MPI_RECV][far];
            way += clock_message_seconds(g->comm, all, op.call.root) - empty;
            latency = std::max(latency, empty);
            message = std::max(message, latency + way);
        }
    }
    for (int kind = NCCL_MPI_ALL_REDUCE; kind < NCCL_MPI_SEND; kind++)
        if (bytes[kind] > 0)
            seconds += cost_collective(cluster, (CollectiveKind)kind, bytes[kind],
                                       g->comm->clock.place);
    return std::max(seconds, message);
}

// Puts a group that has been enqueued on the host's clock. If the cluster's software does
// not overlap communication, the compute stream that the group waited for stops too. It
// stops until the end of a collective for which compute waits, or for the time of sending a
// message.
inline void clock_issue(const std::shared_ptr<Group> &g) {
    CpuClock &clock = cpu_clock();
    if (!clock.on) return;
    g->clock.ready = cpu_clock_host_works(cpu_ns(clock.cluster.launch_host));
    cudaStream_t origin = g->stream->origin;
    if (!origin || origin == g->stream || !origin->times.computes) return;
    if (!is_p2p(&g->ops[0])) {
        if (!g->comm->clock.place.alone || clock.cluster.tensor_overlap) return;
        return cpu_enqueue(origin, "cudaStreamWaitEvent", [g, origin] {
            if (g->done) cpu_clock_wait(&origin->times, g->clock.end);
            return g->done;
        });
    }
    if (g->ops[0].call.op != NCCL_MPI_SEND) return;
    clock.next.seconds = clock.cluster.host_transfer +
                         (clock.cluster.pipeline_overlap ? 0 : clock_seconds(g.get()));
    clock.next.part = TIME_PIPELINE;
    if (clock.next.seconds > 0) cpu_enqueue_work(origin, "ncclSend", [] {});
}

// Notes that this rank is ready: the group's stream has come to it. Tells the others.
inline void clock_begin(Group *g) {
    CpuClock &clock = cpu_clock();
    if (!clock.on) return;
    CommClock *c = &g->comm->clock;
    double before = c->epoch == clock.epoch ? c->now : 0;
    g->clock.ready = std::max({g->clock.ready, before, g->stream->times.now});
    if (simulates())
        cpu_arrive(c->channel, g->clock.ready, c->processes);
    else
        MPI_Iallreduce(MPI_IN_PLACE, &g->clock.ready, 1, MPI_DOUBLE, MPI_MAX, g->comm->mpi,
                       &g->clock.met);
}

// Returns true once all ranks of the group's communicator are ready.
inline bool clock_met(Group *g) {
    CommClock *c = &g->comm->clock;
    int met = true;
    if (simulates()) return cpu_all_arrived(c->channel, c->processes, &g->clock.ready);
    if (cpu_clock().on) MPI_Test(&g->clock.met, &met, MPI_STATUS_IGNORE);
    return met;
}

inline void clock_end(Group *g) {
    CpuClock &clock = cpu_clock();
    if (!clock.on) return;
    bool collective = !is_p2p(&g->ops[0]);
    CommClock *c = &g->comm->clock;
    c->now = g->clock.ready + cpu_ns(clock_seconds(g));
    c->epoch = clock.epoch;
    TimePart part = !collective ? TIME_PIPELINE : c->place.alone ? TIME_TENSOR : TIME_DATA;
    cpu_clock_communicated(&g->stream->times, g->clock.ready, c->now, part, collective);
    g->clock.end = g->stream->times.last;
}

#endif

}  // namespace nccl_mpi

#endif
