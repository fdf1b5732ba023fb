// operation.h: communicators, operations, messages and groups, the state that holds them,
// and the arithmetic of reductions.
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
    std::vector<size_t> ranks;  // [size] ranks of the job
    Placement place;
    size_t world;
    double now;  // ns: end of its last group
    unsigned epoch;
    std::vector<int> processes;  // of a simulation that are ranks of it
    int channel;                 // its number there
};
struct GroupClock {
    double ready;     // ns at which the host enqueued it, then this rank was ready, at last
                      // all were
    MPI_Request met;  // done when all are
    CpuMoment end;
};
#else
struct CommClock {};
struct GroupClock {};
#endif

struct ncclComm {
    MPI_Comm mpi;
    int rank, size;
    bool whole;  // of all MPI ranks, made by ncclCommInitRank
    std::string name;
    uint64_t issued, finished;        // groups; one runs at a time, in the order of issue
    uint64_t collectives;             // issued
    std::map<size_t, uint64_t> uses;  // operations issued on each way: see way_of
    NcclMpiCounter counters[NCCL_MPI_OPS];  // since the start or the last reset
    // [size] ranks in the order of NCCL_ORDER's ring; empty: sums in rank order.
    std::vector<int> ring;
    CommClock clock;
};

namespace nccl_mpi {

// Repeats a call. Every message begins with its sender's, so that the receiver can compare
// it with its own.
struct Header {
    // NcclMpiOp; root of a broadcast or reduction, peer of a message, else -1.
    int32_t op, type, redop, root;
    uint64_t count, sequence;  // as in the call; its number among the collectives or the
                               // peer's messages
};
static_assert(sizeof(Header) == 32, "no padding between the fields, which travel as bytes");

// A message from or to one rank. Phase 1 of an all-reduce, its results, starts after all
// messages of phase 0.
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
    size_t width;          // bytes of an element
    size_t reads, writes;  // bytes at send and at recv
    char *out;             // the part that this rank reduces
    size_t elements;       // of it
    size_t first;  // place in the ring of the rank that the sum begins with
    char *inputs;  // [size][elements]: the contributions to it, NULL if this rank reduces
                   // none
    int tag, phase;
    double due;  // injected delay: earliest time to take the next message
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
    volatile uint32_t *flags;  // of a GPU's queue: [0] raised by the result, [1] by the
                               // stream when it comes to it
    GroupClock clock;
};

// Ends the job. The other ranks get `seconds` to print, and mpirun a moment to read our own
// output. Under Open MPI's mpirun exiting is enough: it kills the others, whereas after
// MPI_Abort one run in twenty saw mpirun 4.1.4 itself crash or hang.
[[noreturn]] inline void end_job(double seconds) {
    fflush(stderr);
    usleep((useconds_t)(1e6 * std::max(seconds, 0.1)));
    if (!getenv("OMPI_COMM_WORLD_SIZE")) MPI_Abort(MPI_COMM_WORLD, 1);
    _exit(1);
}

// NCCL_ORDER: in which order the ranks' contributions to an element are added.
struct RingOrder {
    bool on;
    bool own;                 // every communicator has a ring of its own, as NCCL may find
    unsigned long long seed;  // of the ring; 0: the order of ranks
};

// Reads ring:SEED or any:SEED. Off if the variable is unset or empty: contributions are
// added in rank order.
inline RingOrder environment_order(const char *name) {
    RingOrder order = {};
    const char *text = getenv(name);
    int end = 0;
    if (!text || !*text) return order;
    order.own = strncmp(text, "any:", 4) == 0;
    sscanf(text, order.own ? "any:%llu%n" : "ring:%llu%n", &order.seed, &end);
    if (end == 0 || text[end] || strchr(text, '-'))
        environment_refuse(name, text, "ring:SEED or any:SEED");
    order.on = true;
    return order;
}

// Returns a ring of `size` ranks: their numbers in an order that the seed gives; 0 gives 0,
// 1, 2 ...
inline std::vector<int> ring_of(int size, uint64_t seed) {
    std::vector<int> ring((size_t)size);
    Random random = {true, seed, 0};
    for (int i = 0; i < size; i++) ring[(size_t)i] = i;
    for (int i = size - 1; i > 0 && seed != 0; i--)
        std::swap(ring[(size_t)i], ring[random_next(&random) % (size_t)(i + 1)]);
    return ring;
}

struct State {
    size_t small = 32768;  // least bytes of a part of an all-reduce, as few messages beat
                           // short ones; tests make it 0
    // Issued, not finished: for the report of a hang.
    std::vector<std::shared_ptr<Group>> active;
    int group_depth;
    ncclResult_t group_error;
    // To which calls add their operations, NULL before the first.
    std::shared_ptr<Group> open;
    std::string host_waits_in;  // a call that has to wait for other ranks
    std::string last_error, traffic;
    Random delay = environment_random("NCCL_DELAY", true);  // of every message
    RingOrder order = environment_order("NCCL_ORDER");
    uint64_t communicators;  // that this rank has taken part in making
};

inline State &state() {
    static State s;
    return s;
}

inline double delay_until() {
    Random &d = state().delay;
    return d.on ? MPI_Wtime() +
                      1e-6 * (double)d.most * (double)random_next(&d) / (double)UINT64_MAX
                : 0;
}

inline bool is_p2p(const Operation *op) {
    return op->call.op == NCCL_MPI_SEND || op->call.op == NCCL_MPI_RECV;
}

inline std::string describe(const Header *h) {
    char text[160], extra[48] = "";
    const char *redop = h->redop == ncclSum ? ", sum" : ", max";
    if (h->op <= NCCL_MPI_REDUCE_SCATTER) snprintf(extra, sizeof extra, "%s", redop);
    if (h->op == NCCL_MPI_REDUCE)
        snprintf(extra, sizeof extra, "%s to root %d", redop, h->root);
    if (h->op == NCCL_MPI_BROADCAST)
        snprintf(extra, sizeof extra, " from root %d", h->root);
    if (h->op == NCCL_MPI_SEND) snprintf(extra, sizeof extra, " to rank %d", h->root);
    if (h->op == NCCL_MPI_RECV) snprintf(extra, sizeof extra, " from rank %d", h->root);
    snprintf(text, sizeof text, "%s of %llu %s%s", nccl_mpi_op_name(h->op),
             (unsigned long long)h->count, NCCL_MPI_TYPES[h->type].name, extra);
    return text;
}

// ---- reductions ----

template <typename T>
T widen(T x) {
    return x;
}
template <typename T>
void narrow(T *out, T x) {
    *out = x;
}
// Widens a bfloat16 to a float. No integers are carried, so 16 bits are a bfloat16.
inline float widen(uint16_t x) {
    return bf16_to_float(x);
}
inline void narrow(uint16_t *out, float x) {
    *out = bf16_from_float(x);
}

// Returns the rank at a place of the ring, counted from the one that a sum begins with.
inline int ring_rank(const Operation *op, int i) {
    const std::vector<int> &ring = op->comm->ring;
    return ring.empty() ? i : ring[(op->first + (size_t)i) % ring.size()];
}

// Reduces element by element: out[i] = ((x0 + x1) + x2) + ... over the inputs in rank
// order. So the bits depend neither on the rank that computes, nor on the cut of the
// buffer, nor on the order of arrival. NCCL promises none of this. With NCCL_ORDER the sum
// takes the way of NCCL's ring algorithm: once round a ring, from the owner's successor to
// the owner. Then it depends on the element's place in the buffer. bfloat16 is summed in
// fp32 and rounded once, at the end.
template <typename T>
void reduce(const Operation *op) {
    enum { BLOCK = 1024 };  // fits the first-level cache
    decltype(widen(T())) sum[BLOCK];
    for (size_t begin = 0; begin < op->elements; begin += BLOCK) {
        size_t size = std::min(op->elements - begin, (size_t)BLOCK);
        for (int i = 0; i < op->comm->size; i++) {
            const T *in = (const T *)op->inputs + ring_rank(op, i) * op->elements + begin;
            if (i == 0) {
                for (size_t k = 0; k < size; k++) sum[k] = widen(in[k]);
            } else if (op->call.redop == ncclSum) {
                for (size_t k = 0; k < size; k++) sum[k] = sum[k] + widen(in[k]);
            } else {
                for (size_t k = 0; k < size; k++) {  // a NaN on any rank reaches the result
                    auto x = widen(in[k]);
                    sum[k] = sum[k] != sum[k] || sum[k] >= x ? sum[k] : x;
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
