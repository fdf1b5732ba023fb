// timing.h: communication on the virtual clock of the stand-ins (llmc/cpu/clock.h).
//
// A group of operations begins when all ranks of it are ready: each has come to it on its streams, and the communicator
// is done with the group before. A message needs both ranks, as NCCL's sends wait for their receives; a broadcast is
// ready when its root and the receiver are. Ranks tell each other when they were ready in the headers of the messages
// that they exchange anyway; the receiver of a message tells its sender by a message of its own. It ends when its cost
// is over (llmc/sim/cost.h), by the bytes and by where the communicator's ranks sit.
// In a simulation no data move, and the processes meet in shared memory (llmc/cpu/simulate.h).
//
// defines: simulates, clock_*, simulated_communicator, name_members; on a GPU they do nothing
#ifndef LLMC_MPI_TIMING_H
#define LLMC_MPI_TIMING_H

#include "llmc/mpi/operation.h"

namespace nccl_mpi {

#ifdef __CUDACC__

inline bool simulates() { return false; }
inline void clock_communicator(ncclComm_t) {}
inline void clock_issue(Group *) {}
inline void clock_begin(Group *) {}
inline void clock_meet(const Group *, Operation *) {}
inline bool clock_met(Operation *) { return true; }
inline void clock_hear(Operation *, const Header *) {}
inline void clock_end(Group *) {}
inline bool clock_progress(Group *, bool *) { return false; }
inline ncclComm_t simulated_communicator(const char *, bool) { return NULL; }
inline void name_members(const int *, int) {}

#else

enum { CLOCK_TAG = 16388 };  // behind those of transport.h

inline bool simulates() { return cpu_simulates(); }

// Fills in who the ranks are, from the MPI communicator, and what the communicator is for, from its name.
inline void clock_communicator(ncclComm_t comm) {
    if (!cpu_clock().on) return;
    CommClock *c = &comm->clock;
    if (c->ranks.empty()) {
        MPI_Group ours, world;
        std::vector<int> local((size_t)comm->size), global((size_t)comm->size);
        for (int i = 0; i < comm->size; i++) local[(size_t)i] = i;
        MPI_Comm_group(comm->mpi, &ours);
        MPI_Comm_group(MPI_COMM_WORLD, &world);
        MPI_Group_translate_ranks(ours, comm->size, local.data(), world, global.data());
        MPI_Group_free(&ours);
        MPI_Group_free(&world);
        c->ranks.assign(global.begin(), global.end());
    }
    int world = 1;
    if (simulates()) world = cpu_simulation().size;
    else MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (comm->name == "tensor" || comm->name == "pipeline" || comm->name == "embedding")
        for (size_t &rank : c->ranks) rank += cpu_clock().shift;
    c->place = placement_ranks(&cpu_clock().cluster, c->ranks.data(), c->ranks.size(), (size_t)world);
    c->world = (size_t)world;
    c->part = comm->name == "tensor" ? TIME_TENSOR : comm->name == "pipeline" ? TIME_PIPELINE : TIME_DATA;
    c->place.alone = c->part == TIME_TENSOR;
    if (comm->name == "embedding") c->place = placement_of_ends(c->place, cpu_clock().stage_ranks);
}

// A message between the two ranks. The ranks of the sender's stage in its node, or its island, send theirs at the same
// time: as many as there are from one stage to the next, which are the ranks between the two.
inline double clock_message_seconds(const ncclComm *comm, double bytes, int peer) {
    const Cluster *cluster = &cpu_clock().cluster;
    const CommClock *c = &comm->clock;
    size_t a = c->ranks[(size_t)comm->rank], b = c->ranks[(size_t)peer];
    size_t between = a < b ? b - a : a - b, around = c->world - between;
    return cost_send_between(cluster, bytes, a, b, std::min(between, around));
}

// Collectives of one kind in a group are one collective over all of their bytes; its messages go at the same time.
inline double clock_seconds(const Group *g) {
    const Cluster *cluster = &cpu_clock().cluster;
    double bytes[NCCL_MPI_OPS] = {0}, seconds = 0, message = 0;
    for (const Operation &op : g->ops) {
        int kind = op.call.op;
        double n = kind == NCCL_MPI_REDUCE_SCATTER || kind == NCCL_MPI_ALL_GATHER ? (double)g->comm->size : 1;
        double all = n * (double)op.width * (double)op.call.count;
        if (op.peer >= 0 && kind >= NCCL_MPI_SEND)
            message = std::max(message, clock_message_seconds(g->comm, all, op.peer));
        else bytes[kind] += all;
    }
    static const CollectiveKind kinds[] = {COLLECTIVE_ALL_REDUCE, COLLECTIVE_REDUCE_SCATTER, COLLECTIVE_ALL_GATHER,
                                           COLLECTIVE_BROADCAST};
    for (int kind = NCCL_MPI_ALL_REDUCE; kind <= NCCL_MPI_BROADCAST; kind++)
        if (bytes[kind] > 0) seconds += cost_collective(cluster, kinds[kind], bytes[kind], g->comm->clock.place);
    return std::max(seconds, message);
}

// The host hands a group over. Where the cluster's software does not overlap communication with compute, the stream on
// whose results it waits stands still meanwhile: for a tensor collective until that has ended, for a message as long as
// sending takes.
inline void clock_issue(Group *g) {
    CpuClock &clock = cpu_clock();
    if (!clock.on) return;
    clock.host = cpu_later(clock.host, cpu_ns(clock.cluster.launch_host));
    g->clock.host = clock.host;
    cudaStream_t stream = g->streams[0], origin = stream->origin;
    if (!origin || origin == stream || !cpu_is_stream(origin) || !origin->times.computes) return;
    if (g->comm->clock.part == TIME_TENSOR && !clock.cluster.tensor_overlap) g->clock.stops = origin;
    if (g->comm->clock.part != TIME_PIPELINE || g->ops[0].call.op != NCCL_MPI_SEND) return;
    clock.stated = clock.cluster.host_transfer + (clock.cluster.pipeline_overlap ? 0 : clock_seconds(g));
    clock.stated_part = TIME_PIPELINE;
    if (clock.stated > 0) cpu_enqueue_work(origin, "ncclSend", [] { return true; });
}

// All of the group's streams have come to it: this rank is ready.
inline void clock_begin(Group *g) {
    CpuClock &clock = cpu_clock();
    if (!clock.on) return;
    CommClock *c = &g->comm->clock;
    uint64_t ready = c->epoch == clock.epoch ? std::max(c->now, g->clock.host) : g->clock.host;
    for (cudaStream_t s : g->streams) ready = std::max(ready, s->times.now);
    g->clock.ready = ready;
    for (Operation &op : g->ops) op.call.ready = ready;
}

// A receive begins and tells its sender so; a send listens for that.
inline void clock_meet(const Group *g, Operation *op) {
    op->clock.request = MPI_REQUEST_NULL;
    if (!cpu_clock().on) return;
    op->clock.mine = g->clock.ready;
    if (op->call.op == NCCL_MPI_RECV)
        MPI_Isend(&op->clock.mine, 1, MPI_UINT64_T, op->peer, CLOCK_TAG, g->comm->mpi, &op->clock.request);
    if (op->call.op == NCCL_MPI_SEND)
        MPI_Irecv(&op->clock.theirs, 1, MPI_UINT64_T, op->peer, CLOCK_TAG, g->comm->mpi, &op->clock.request);
}

inline bool clock_met(Operation *op) {
    if (!cpu_clock().on || op->clock.request == MPI_REQUEST_NULL) return true;
    int done;
    MPI_Test(&op->clock.request, &done, MPI_STATUS_IGNORE);
    return done;
}

// The sender of a message that has come was ready then, and so were those of whom it had heard.
inline void clock_hear(Operation *op, const Header *theirs) {
    op->call.ready = std::max(op->call.ready, theirs->ready);
}

inline void clock_end(Group *g) {
    CpuClock &clock = cpu_clock();
    if (!clock.on) return;
    uint64_t begin = g->clock.ready;
    bool collective = false;
    for (const Operation &op : g->ops) {
        begin = std::max(begin, std::max(op.call.ready, op.call.op == NCCL_MPI_SEND ? op.clock.theirs : 0));
        collective = collective || op.call.op < NCCL_MPI_SEND;
    }
    CommClock *c = &g->comm->clock;
    c->now = cpu_later(begin, cpu_ns(clock_seconds(g)));
    c->epoch = clock.epoch;
    for (cudaStream_t s : g->streams) cpu_clock_communicated(&s->times, begin, c->now, c->part, collective);
    g->clock.end = g->streams[0]->times.last;
    g->clock.end.ns = c->now, g->clock.end.epoch = clock.epoch, g->clock.end.stream = g->streams[0]->number;
}

// ---- simulation ----

// A group of a simulation is one meeting, of those processes that are ranks of its communicator.
inline bool clock_progress(Group *g, bool *moved) {
    CommClock *c = &g->comm->clock;
    uint64_t latest = 0;
    bool alone = c->processes.size() < 2;
    if (!g->started) {
        clock_begin(g);
        if (!alone) cpu_arrive(c->channel, g->turn, g->clock.ready, c->processes);
        g->started = true;
    }
    if (!alone && !cpu_all_arrived(c->channel, g->turn, c->processes.size(), &latest)) return false;
    g->clock.ready = std::max(g->clock.ready, latest);
    clock_end(g);
    g->comm->finished++;
    return g->done = *moved = true;
}

inline void name_members(const int *ranks, int count) { cpu_simulation().members.assign(ranks, ranks + count); }

// The communicator of the ranks that ncclMpiMembers named last; the first one is of all of the job. NULL if this rank
// is in none.
inline ncclComm_t simulated_communicator(const char *name, bool in_one) {
    CpuSimulation &s = cpu_simulation();
    std::vector<int> members = std::move(s.members);
    s.members.clear();
    for (int r = 0; s.splits == 0 && r < s.size; r++) members.push_back(r);
    if (s.splits == CPU_SIMULATED_SPLITS) cpu_abort("a simulated rank makes at most %d communicators", s.splits);
    if (!in_one) return s.splits++, (ncclComm_t)NULL;
    ncclComm_t comm = new ncclComm();
    comm->size = (int)members.size();
    comm->name = name;
    comm->sent_to.assign(members.size(), 0);
    comm->received_from.assign(members.size(), 0);
    for (int i = 0; i < comm->size; i++) {
        int process = cpu_process_of(members[(size_t)i]);
        if (process >= 0) comm->clock.processes.push_back(process);
        if (members[(size_t)i] == s.rank) comm->rank = i;
        comm->clock.ranks.push_back((size_t)members[(size_t)i]);
    }
    std::sort(comm->clock.processes.begin(), comm->clock.processes.end());
    if (!comm->clock.processes.empty())
        comm->clock.channel = &s.shared[comm->clock.processes[0]].channels[s.splits];
    s.splits++;
    clock_communicator(comm);
    return comm;
}

#endif

}  // namespace nccl_mpi

#endif
