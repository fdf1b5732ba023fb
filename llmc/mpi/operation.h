// operation.h: communicators, operations, messages and groups, the state that holds them, and the arithmetic of
// reductions.
#ifndef LLMC_MPI_OPERATION_H
#define LLMC_MPI_OPERATION_H

#include <cuda_runtime.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llmc/host/bf16.h"
#include "llmc/host/memory.h"
#include "llmc/cpu/stall.h"
#include "llmc/mpi/types.h"

// The virtual clock's part of a communicator and a group: see timing.h.
#ifndef __CUDACC__
struct CommClock {
    std::vector<size_t> ranks;   // [size] ranks of the job
    Placement place;
    size_t world;
    double now;                  // ns: end of its last group
    unsigned epoch;
    std::vector<int> processes;  // of a simulation that are ranks of it
    int channel;                 // its number there
};
struct GroupClock {
    double ready;                // ns at which the host enqueued it, then this rank was ready, at last all were
    MPI_Request met;             // done when all are
    CpuMoment end;
};
#else
struct CommClock {};
struct GroupClock {};
#endif

struct ncclComm {
    MPI_Comm mpi;
    int rank, size;
    bool whole;                           // of all MPI ranks, made by ncclCommInitRank
    std::string name;
    uint64_t issued, finished;            // groups; one runs at a time, in the order of issue
    uint64_t collectives;                 // issued
    std::map<size_t, uint64_t> uses;      // operations issued on each way: see way_of
    uint64_t number, splits;              // its own, the same on all its ranks; communicators split off it so far
    std::vector<int> ring, at;            // [size] ranks in the order of NCCL_ORDER, and the place of each in it
    NcclMpiCounter counters[NCCL_MPI_OPS];  // since the start or the last reset
    CommClock clock;
};

namespace nccl_mpi {

// Repeats a call. Every message begins with its sender's, so that the receiver can compare it with its own.
struct Header {
    int32_t op, type, redop, root;  // NcclMpiOp; root of a broadcast, peer of a send or receive, else -1
    uint64_t count, sequence;       // as in the call; its number among the collectives or the peer's messages
};
static_assert(sizeof(Header) == 32, "no padding between the fields, which travel as bytes");

// A message from or to one rank. Phase 1 of an all-reduce, its results, starts after all messages of phase 0.
struct Message {
    enum State { WAITING, POSTED, DONE };
    bool receive;
    int peer, phase;
    char *data;
    size_t bytes;
    State state;
    MPI_Request requests[2];  // of header and payload
};

struct Operation {
    ncclComm_t comm;
    Header call;
    const char *send;
    char *recv;
    size_t width;            // bytes of an element
    size_t reads, writes;    // bytes at send and at recv
    char *out;               // the part that this rank reduces
    size_t elements;         // of it
    size_t first, chunk;     // its first element in the whole buffer, of which each rank owns `chunk` elements
    char *inputs;            // [size][elements]: the contributions to it, NULL if this rank reduces none
    int tag, phase;
    double due;              // injected delay: earliest time to take the next message
    std::vector<Message> messages;
};

// The operations between ncclGroupStart and ncclGroupEnd, or a single one.
struct Group {
    ncclComm_t comm;
    cudaStream_t stream;
    std::string name;
    uint64_t turn;
    bool started, done;
    std::vector<Operation> ops;
    volatile uint32_t *flags;  // of a GPU's queue: [0] raised by the result, [1] by the stream when it comes to it
    GroupClock clock;
};

// Ends the job. The other ranks get `seconds` to print, and mpirun a moment to read our own output. Under Open MPI's
// mpirun exiting is enough: it kills the others, whereas after MPI_Abort one run in twenty saw mpirun 4.1.4 itself
// crash or hang.
[[noreturn]] inline void end_job(double seconds) {
    fflush(stderr);
    usleep((useconds_t)(1e6 * std::max(seconds, 0.1)));
    if (!getenv("OMPI_COMM_WORLD_SIZE")) MPI_Abort(MPI_COMM_WORLD, 1);
    _exit(1);
}

// NCCL_ORDER: reductions add as NCCL's ring does. The seed places the ranks on the ring, 0 in their own order. Every
// communicator of a size has the same ring, or each one its own.
struct RingOrder {
    bool ring, own;
    unsigned long long seed;
};

// Reads ring:SEED or any:SEED. Rank order if the variable is unset or empty.
inline RingOrder environment_order(const char *name) {
    RingOrder o = {false, false, 0};
    const char *text = getenv(name);
    int end = 0;
    if (!text || !*text) return o;
    if (strncmp(text, "any:", 4) == 0) o.own = true;
    bool known = o.own || strncmp(text, "ring:", 5) == 0;
    const char *seed = known ? strchr(text, ':') + 1 : text;
    if (known && *seed >= '0' && *seed <= '9') sscanf(seed, "%llu%n", &o.seed, &end);
    if (end == 0 || seed[end]) environment_refuse(name, text, "ring:SEED or any:SEED");
    o.ring = true;
    return o;
}

struct State {
    size_t small = 32768;  // least bytes of a part of an all-reduce, as few messages beat short ones; tests make it 0
    std::vector<std::shared_ptr<Group>> active;  // issued, not finished: for the report of a hang
    int group_depth;
    ncclResult_t group_error;
    std::shared_ptr<Group> open;     // to which calls add their operations, NULL before the first
    std::string host_waits_in;       // a call that has to wait for other ranks
    std::string last_error, traffic;
    Random delay = environment_random("NCCL_DELAY", true);  // of every message
    RingOrder order = environment_order("NCCL_ORDER");      // in which reductions add
};

inline State &state() {
    static State s;
    return s;
}

inline double delay_until() {
    Random &d = state().delay;
    return d.on ? MPI_Wtime() + 1e-6 * (double)d.most * (double)random_next(&d) / (double)UINT64_MAX : 0;
}

inline bool is_p2p(const Operation *op) { return op->call.op == NCCL_MPI_SEND || op->call.op == NCCL_MPI_RECV; }

inline std::string describe(const Header *h) {
    char text[160], extra[48] = "";
    if (h->op <= NCCL_MPI_REDUCE_SCATTER) snprintf(extra, sizeof extra, h->redop == ncclSum ? ", sum" : ", max");
    if (h->op == NCCL_MPI_BROADCAST) snprintf(extra, sizeof extra, " from root %d", h->root);
    if (h->op == NCCL_MPI_SEND) snprintf(extra, sizeof extra, " to rank %d", h->root);
    if (h->op == NCCL_MPI_RECV) snprintf(extra, sizeof extra, " from rank %d", h->root);
    snprintf(text, sizeof text, "%s of %llu %s%s", nccl_mpi_op_name(h->op), (unsigned long long)h->count,
             NCCL_MPI_TYPES[h->type].name, extra);
    return text;
}

// ---- reductions ----

template <typename T>
T widen(T x) { return x; }
template <typename T>
void narrow(T *out, T x) { *out = x; }
// No integers are carried: 16 bits are a bfloat16.
inline float widen(uint16_t x) { return bf16_to_float(x); }
inline void narrow(uint16_t *out, float x) { *out = bf16_from_float(x); }

// Places the ranks of a communicator on its ring.
inline void order_ring(ncclComm *comm) {
    const RingOrder &o = state().order;
    Random r = {true, o.seed, 0};
    if (!o.ring) return;
    if (o.own) r.state += comm->number;
    bool shuffled = r.state != 0;
    comm->ring.resize((size_t)comm->size);
    comm->at.resize((size_t)comm->size);
    for (int i = 0; i < comm->size; i++) comm->ring[(size_t)i] = i;
    for (size_t i = (size_t)comm->size; shuffled && i-- > 1;)
        std::swap(comm->ring[i], comm->ring[random_next(&r) % (i + 1)]);
    for (int i = 0; i < comm->size; i++) comm->at[(size_t)comm->ring[(size_t)i]] = i;
}

// Returns the rank whose input is the k-th that is added to an element of this owner. On a ring a sum starts behind the
// owner, goes round and ends there.
inline int rank_to_add(const ncclComm *comm, size_t owner, size_t k) {
    if (comm->ring.empty()) return (int)k;
    return comm->ring[((size_t)comm->at[owner] + 1 + k) % comm->ring.size()];
}

// Reduces element by element: out[i] = ((x0 + x1) + x2) + ... over the inputs in rank order. So the bits depend neither
// on the rank that computes, nor on the cut of the buffer, nor on the order of arrival. NCCL promises less: with
// NCCL_ORDER they depend on the cut, as there. bfloat16 is summed in fp32 and rounded once, at the end.
template <typename T>
void reduce(const Operation *op) {
    enum { BLOCK = 1024 };  // fits the first-level cache
    decltype(widen(T())) sum[BLOCK];
    size_t size = 0;
    for (size_t begin = 0; begin < op->elements; begin += size) {
        size_t place = op->first + begin, owner = place / op->chunk;
        size = std::min({op->elements - begin, (owner + 1) * op->chunk - place, (size_t)BLOCK});
        for (size_t k = 0; k < (size_t)op->comm->size; k++) {
            const T *in = (const T *)op->inputs + (size_t)rank_to_add(op->comm, owner, k) * op->elements + begin;
            if (k == 0) {
                for (size_t i = 0; i < size; i++) sum[i] = widen(in[i]);
            } else if (op->call.redop == ncclSum) {
                for (size_t i = 0; i < size; i++) sum[i] = sum[i] + widen(in[i]);
            } else {
                for (size_t i = 0; i < size; i++) {  // a NaN on any rank reaches the result
                    auto x = widen(in[i]);
                    sum[i] = sum[i] != sum[i] || sum[i] >= x ? sum[i] : x;
                }
            }
        }
        for (size_t i = 0; i < size; i++) narrow((T *)op->out + begin + i, sum[i]);
    }
}

inline void reduce_any(const Operation *op) {
    if (op->call.type == ncclBfloat16) reduce<uint16_t>(op);
    if (op->call.type == ncclFloat32) reduce<float>(op);
    if (op->call.type == ncclFloat64) reduce<double>(op);
}

}  // namespace nccl_mpi

#endif
