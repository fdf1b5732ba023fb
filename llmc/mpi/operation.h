// operation.h: what an operation, a message and a group of operations are, and the state that holds them.
#ifndef LLMC_MPI_OPERATION_H
#define LLMC_MPI_OPERATION_H

#include <cuda_runtime.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "llmc/host/stall.h"
#include "llmc/mpi/reduce.h"
#include "llmc/mpi/traffic.h"

// What a communicator, an operation and a group are on the virtual clock of the stand-ins: see clock.h.
#ifndef __CUDACC__
struct CommClock {
    std::vector<size_t> ranks;   // [size] in the job
    Placement place;
    size_t world;
    CpuPart part;
    bool gradients;              // it sums them
    uint64_t now;                // ns: end of its last group
    unsigned epoch;
    std::vector<int> processes;  // of a simulation: those that are ranks of it, and where they meet
    CpuChannel *channel;
};
struct OpClock {
    uint64_t mine, theirs;       // when this rank was ready; when the receiver of a message was
    MPI_Request request;
};
struct GroupClock {
    uint64_t host, ready;        // when the host handed it over, when this rank was ready
    CpuMoment end;
    cudaStream_t stops;          // a stream that stands still until the group has ended, or NULL
};
#else
struct CommClock {};
struct OpClock {};
struct GroupClock {};
#endif

struct ncclComm {
    MPI_Comm mpi;
    int rank, size;
    std::string name;
    uint64_t issued, finished;            // groups; one runs at a time, in the order of issue
    uint64_t collectives;                 // issued
    std::vector<uint64_t> sent_to;        // sends issued, per peer
    std::vector<uint64_t> received_from;  // receives issued, per peer
    std::vector<char> connected_to, connected_from;  // per peer, and by kind of collective, small and large
    char connected[NCCL_MPI_OPS][2];
    NcclMpiCounter counters[NCCL_MPI_OPS];
    CommClock clock;
};

namespace nccl_mpi {

// Repeats a call. Every message begins with its sender's, so that the receiver can compare it with its own.
struct Header {
    int32_t op, type, redop, root;  // NcclMpiOp; root of a broadcast, destination of a send, else -1
    uint64_t count, sequence;       // as in the call; its number on this communicator (send/recv: for this pair)
    uint64_t ready;                 // virtual time at which the sender, and those of whom it had heard, were ready
    uint64_t unused[3];
};
static_assert(sizeof(Header) == 64, "nothing between the fields, which travel as bytes");

// A message from or to one rank. Those of phase 1, the results of an all-reduce, leave and are taken when all of
// phase 0 is through.
struct Message {
    enum State { WAITING, HEADER, PAYLOAD, DONE };
    bool receive;
    int peer, phase;
    char *data;  // NULL: a contribution, which stays in its block until it is reduced
    size_t bytes;
    double due;  // injected delay of a send
    State state;
    char *block;           // header and payload, or header alone
    MPI_Request requests[2];  // of the block; of a payload by itself
};

struct Op {
    Header call;
    const char *send;
    char *recv;
    size_t width;            // bytes of an element
    int peer;                // of send and recv
    bool reduces, shares;    // has a part to reduce; must send the result to the others
    size_t first, elements;  // that part
    int tag, phase;
    double due;              // injected delay: when the next message may be taken
    std::vector<Message> messages;
    OpClock clock;
};

struct Call {
    Op op;
    ncclComm_t comm;
    cudaStream_t stream;
};

// The operations between ncclGroupStart and ncclGroupEnd on one communicator, or a single one.
struct Group {
    ncclComm_t comm;
    std::string name, label;
    uint64_t turn;
    bool started, done;
    std::vector<Op> ops;
    std::vector<cudaStream_t> streams;  // each once
    GroupClock clock;
};

// Ends the job after `seconds` of patience for the others to print too. Under Open MPI's mpirun we just exit:
// it kills the others, whereas after MPI_Abort one run in twenty saw mpirun 4.1.4 itself crash or hang.
[[noreturn]] inline void end_job(double seconds) {
    fflush(stderr);
    usleep((useconds_t)(1e6 * seconds));
    if (!getenv("OMPI_COMM_WORLD_SIZE")) MPI_Abort(MPI_COMM_WORLD, 1);
    _exit(1);
}

// Staging blocks are kept by size class: a step needs the same ones again and again.
struct Pool {
    std::vector<char *> unused[64];

    char *take(size_t bytes) {
        int size_class = 8;
        while (((size_t)1 << size_class) < bytes) size_class++;
        if (!unused[size_class].empty()) {
            char *block = unused[size_class].back();
            unused[size_class].pop_back();
            return block;
        }
        char *base = (char *)aligned_alloc(64, ((size_t)1 << size_class) + 64);
        if (!base) {
            fprintf(stderr, "nccl: out of host memory for a staging block of %zu bytes\n", bytes);
            end_job(0);
        }
        memcpy(base, &size_class, sizeof size_class);
        return base + 64;
    }

    void give(char *block) {
        int size_class;
        memcpy(&size_class, block - 64, sizeof size_class);
        unused[size_class].push_back(block);
    }
};

struct State {
    Pool pool;
    // The same on all ranks. Tests make them 0, so that small buffers take the paths of large ones.
    size_t small = 32768;     // bytes of an all-reduce up to which few messages beat short ones
    size_t together = 32768;  // bytes of a payload that travels with its header: saves a message
    std::vector<std::shared_ptr<Group>> active;  // issued, not finished: for the report of a hang
    int group_depth;
    ncclResult_t group_error;
    std::vector<Call> pending;       // of the open group
    std::vector<ncclComm_t> ending;  // likewise, to be destroyed
    std::string host_waits_in;       // a call that has to wait for other ranks
    std::string last_error;
    uint64_t unique_ids;
    uint64_t delay_state;
    double delay_max;  // seconds; 0: none
};

inline State &state() {
    static State s;
    return s;
}

// NCCL_DELAY=random:SEED:MICROSECONDS holds every send and receive back for a random time up to that.
inline void delays_start() {
    State &s = state();
    const char *text = getenv("NCCL_DELAY");
    unsigned long long seed = 0, most = 0;
    if (!text || s.delay_max > 0) return;
    if (sscanf(text, "random:%llu:%llu", &seed, &most) != 2) {
        fprintf(stderr, "nccl: NCCL_DELAY=%s is not random:SEED:MICROSECONDS\n", text);
        end_job(0);
    }
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    s.delay_state = seed * 1000003 + (uint64_t)rank + 1;
    s.delay_max = 1e-6 * (double)most;
}

inline double delay_until() {
    State &s = state();
    if (s.delay_max == 0) return 0;
    uint64_t x = s.delay_state += 0x9e3779b97f4a7c15ull;  // splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return MPI_Wtime() + s.delay_max * (double)((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

inline bool is_due(double due) { return due == 0 || MPI_Wtime() >= due; }

inline const char *op_name(int op) { return nccl_mpi_op_name(op); }

inline std::string describe(const Header *h) {
    char text[160], extra[48] = "";
    const char *reduction = redop_name(h->redop);
    if (reduction && h->op <= NCCL_MPI_REDUCE_SCATTER) snprintf(extra, sizeof extra, ", %s", reduction);
    if (h->op == NCCL_MPI_BROADCAST) snprintf(extra, sizeof extra, " from root %d", h->root);
    if (h->op == NCCL_MPI_SEND) snprintf(extra, sizeof extra, " to rank %d", h->root);
    if (h->op == NCCL_MPI_RECV) snprintf(extra, sizeof extra, " from rank %d", h->root);
    snprintf(text, sizeof text, "%s of %llu %s%s", op_name(h->op), (unsigned long long)h->count,
             type_name(h->type), extra);
    return text;
}

}  // namespace nccl_mpi

#endif
