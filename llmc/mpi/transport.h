// transport.h: how the operations of a communicator become MPI messages.
//
// Every message begins with a header that repeats the sender's call. The receiver compares it with its own call, so
// unequal counts, types, reductions or roots are reported with both sides' values instead of corrupting memory.
// Up to Limits.together the payload travels with its header, in one message, through a staging block; a larger one
// follows as messages of its own, straight from and to the buffers of the call.
//
// Nothing here blocks: progress() does what can be done now and is called again by the scheduler.
//
// Which message meets which receive follows from MPI's rule that two messages of one sender with one tag on one MPI
// communicator are matched in the order in which they were sent:
//   - each NCCL communicator has an MPI communicator of its own, and runs one group at a time in the order of issue;
//   - a collective's header tag holds its call number, so it never meets the message of another collective; if an owner
//     sends twice in one all-reduce (contribution, then result), they arrive in that order and say which they are;
//   - all send/recv headers share a tag, hence the k-th ncclSend to a peer meets its k-th ncclRecv from us;
//   - a payload's tag holds the call number and phase of its header, which has arrived before it is received.
// Headers of sends and broadcasts go by MPI_Issend, which completes only once the peer has begun the matching
// operation: a send whose receive is never posted hangs here as it does in NCCL. The other collectives wait for
// something from every rank anyway, so they spare the acknowledgement (no rank is ever more than one of them ahead).
#ifndef LLMC_MPI_TRANSPORT_H
#define LLMC_MPI_TRANSPORT_H

#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1  // the C interface is all we use
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "llmc/mpi/reduce.h"

typedef enum {
    NCCL_MPI_ALL_REDUCE,
    NCCL_MPI_REDUCE_SCATTER,
    NCCL_MPI_ALL_GATHER,
    NCCL_MPI_BROADCAST,
    NCCL_MPI_SEND,
    NCCL_MPI_RECV,
    NCCL_MPI_OPS
} NcclMpiOp;

// What one rank did on one communicator: calls issued, and payload bytes (no headers) that left and reached it.
typedef struct {
    size_t calls, bytes_sent, bytes_received;
} NcclMpiCounter;

struct ncclComm {
    MPI_Comm mpi;
    int rank, size;
    std::string name;
    uint64_t issued, finished;      // groups; one runs at a time, in the order of issue
    uint64_t collectives;           // issued
    std::vector<uint64_t> sent_to, received_from;  // sends and receives issued, per peer
    NcclMpiCounter counters[NCCL_MPI_OPS];
};

namespace nccl_mpi {

struct Header {
    int32_t op, type, redop, root;  // NcclMpiOp; root of a broadcast, destination of a send, else -1
    int32_t phase;                  // of an all-reduce: 0 contribution, 1 result
    int32_t unused[3];
    uint64_t count, sequence;       // as in the call; its number on this communicator (send/recv: for this pair)
    uint64_t bytes;                 // payload of this message
    uint64_t padding;
};
static_assert(sizeof(Header) == 64, "payloads behind headers stay aligned");

struct Transfer {
    enum State { WAITING, HEADER, BLOCKED, PAYLOAD, DONE };
    bool receive;
    int op, peer, phase;  // op: index in the group
    char *data;           // NULL: a contribution, which stays in its block until it is reduced
    size_t bytes;
    int after;            // an earlier send from the memory that this receive writes; -1: none
    double due;           // injected delay
    State state;
    char *block, *payload;  // staging: header and payload, or header alone; where the contribution lies
    int open;               // MPI requests not yet complete
};

struct Op {
    Header call;
    const char *send;
    char *recv;
    size_t width;            // bytes of an element
    int peer;                // of send and recv
    size_t first, elements;  // the part that this rank reduces
    int missing;             // contributions to it that have not arrived
    bool reduces, shares;    // has a part to reduce; must send the result to the others
    int tag;
    double due;
};

// The operations between ncclGroupStart and ncclGroupEnd on one communicator, or a single one.
struct Group {
    ncclComm_t comm;
    std::string name, label;
    uint64_t turn;
    bool started, done;
    size_t remaining;  // transfers and reductions
    std::vector<Op> ops;
    std::vector<Transfer> transfers;
    std::vector<MPI_Request> requests;
    std::vector<int> owners, completed;  // transfer of each request; room for MPI_Testsome
    size_t posted;            // transfers before this one are receives, or sends that have been posted
};

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
            MPI_Abort(MPI_COMM_WORLD, 1);
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

// The same on all ranks. Tests make them tiny, so that small buffers take the paths of large ones.
struct Limits {
    size_t together = 32768;  // bytes of a payload that travels with its header: a copy is cheaper than a message
    size_t part = 8192;       // bytes below which an all-reduce is not cut, to save messages
    size_t piece = 1 << 30;   // bytes in one MPI message, whose count is an int
};

struct State {
    Pool pool;
    Limits limits;
    std::vector<std::shared_ptr<Group>> active;  // issued, not finished: for the report of a hang
    int group_depth;
    ncclResult_t group_error;
    std::vector<std::pair<Op, std::pair<ncclComm_t, cudaStream_t>>> pending;  // of the open group
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
        MPI_Abort(MPI_COMM_WORLD, 2);
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

inline std::string describe(const Header *h) {
    static const char *const names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                        "ncclBroadcast", "ncclSend", "ncclRecv"};
    char text[160], extra[48] = "";
    bool known = h->op >= 0 && h->op < NCCL_MPI_OPS;
    if (h->op <= NCCL_MPI_REDUCE_SCATTER && redop_name(h->redop)) snprintf(extra, sizeof extra, ", %s", redop_name(h->redop));
    if (h->op == NCCL_MPI_BROADCAST) snprintf(extra, sizeof extra, " from root %d", h->root);
    if (h->op == NCCL_MPI_SEND) snprintf(extra, sizeof extra, " to rank %d", h->root);
    if (h->op == NCCL_MPI_RECV) snprintf(extra, sizeof extra, " from rank %d", h->root);
    snprintf(text, sizeof text, "%s of %llu %s%s", known ? names[h->op] : "an unknown operation",
             (unsigned long long)h->count, type_name(h->type), extra);
    return text;
}

// Ends the job after `seconds` of patience for the others to print too. The ranks do not all do so at once: mpirun has
// trouble with many aborts at the same moment.
[[noreturn]] inline void end_job(double seconds) {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    fflush(stderr);
    usleep((useconds_t)(1e6 * seconds + 30e3 * std::min(rank, 30)));
    MPI_Abort(MPI_COMM_WORLD, 1);
    _exit(1);
}

// Two ranks disagree about a call: says what each of them asked for and ends the job.
[[noreturn]] inline void mismatch(const ncclComm *comm, const Op *mine, const Header *theirs, int peer) {
    fflush(stdout);
    fprintf(stderr, "nccl: ranks disagree on communicator \"%s\": call %llu of rank %d is %s, call %llu of rank %d is %s\n",
            comm->name.c_str(), (unsigned long long)mine->call.sequence, comm->rank, describe(&mine->call).c_str(),
            (unsigned long long)theirs->sequence, peer, describe(theirs).c_str());
    end_job(0);
}

enum { P2P_TAG = 16384 };  // all tags stay below 32767, which every MPI allows

inline bool is_p2p(const Op *op) { return op->call.op == NCCL_MPI_SEND || op->call.op == NCCL_MPI_RECV; }

inline int payload_tag(const Op *op, int phase) {
    return is_p2p(op) ? P2P_TAG + 1 + (int)(op->call.sequence % 8192) : op->tag + 1 + phase;
}

inline int add_transfer(Group *g, int op, bool receive, int peer, int phase, const void *data, size_t bytes) {
    Transfer t;
    memset(&t, 0, sizeof t);
    t.receive = receive;
    t.op = op;
    t.peer = peer;
    t.phase = phase;
    t.data = (char *)data;
    t.bytes = bytes;
    t.after = -1;
    t.due = delay_until();
    g->transfers.push_back(t);
    g->remaining++;
    return (int)g->transfers.size() - 1;
}

inline void advance(Group *g, int index);

// Keeps a request until it completes; most small ones already have.
inline void add_request(Group *g, int transfer, MPI_Request request) {
    int done;
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done) return;
    g->requests.push_back(request);
    g->owners.push_back(transfer);
    g->transfers[transfer].open++;
}

// After its requests have been posted: on, if none of them is open.
inline void settle(Group *g, int transfer) {
    if (g->transfers[transfer].open == 0) advance(g, transfer);
}

// The bytes of a large payload, in messages that MPI can count.
inline void post_payload(Group *g, int index) {
    Transfer *t = &g->transfers[index];
    int tag = payload_tag(&g->ops[t->op], t->phase);
    char *data = t->data ? t->data : t->payload;
    t->state = Transfer::PAYLOAD;
    size_t piece = state().limits.piece;
    for (size_t at = 0; at < t->bytes; at += piece) {
        int size = (int)std::min(t->bytes - at, piece);
        MPI_Request request;
        if (t->receive) MPI_Irecv(data + at, size, MPI_BYTE, t->peer, tag, g->comm->mpi, &request);
        else MPI_Isend(data + at, size, MPI_BYTE, t->peer, tag, g->comm->mpi, &request);
        add_request(g, index, request);
    }
}

inline void post_send(Group *g, int index) {
    Transfer *t = &g->transfers[index];
    const Op *op = &g->ops[t->op];
    Header h = op->call;
    h.phase = t->phase;
    h.bytes = t->bytes;
    bool together = t->bytes <= state().limits.together;
    size_t size = sizeof h + (together ? t->bytes : 0);
    t->block = state().pool.take(size);
    memcpy(t->block, &h, sizeof h);
    if (together && t->bytes) memcpy(t->block + sizeof h, t->data, t->bytes);
    MPI_Request request;
    bool waits = op->call.op == NCCL_MPI_SEND || op->call.op == NCCL_MPI_BROADCAST;
    if (waits) MPI_Issend(t->block, (int)size, MPI_BYTE, t->peer, op->tag, g->comm->mpi, &request);
    else MPI_Isend(t->block, (int)size, MPI_BYTE, t->peer, op->tag, g->comm->mpi, &request);
    add_request(g, index, request);
    t->state = Transfer::HEADER;
    g->comm->counters[op->call.op].bytes_sent += t->bytes;
    if (!together) post_payload(g, index);
    settle(g, index);
}

// Sends leave strictly in the order of the list, whatever the delays: matching relies on it.
inline bool post_sends(Group *g) {
    bool moved = false;
    for (; g->posted < g->transfers.size(); g->posted++) {
        const Transfer *t = &g->transfers[g->posted];
        if (t->receive) continue;
        if (!is_due(t->due)) break;
        post_send(g, (int)g->posted);
        moved = true;
    }
    return moved;
}

// Takes the message that a probe has found for a receive of `op` (all phases of a peer come in the list's order).
inline void take_message(Group *g, int op_index, int only, MPI_Message message, MPI_Status *status) {
    int size, peer = status->MPI_SOURCE, index = only;
    MPI_Get_count(status, MPI_BYTE, &size);
    char *block = state().pool.take((size_t)size);
    for (int i = 0; index < 0 && i < (int)g->transfers.size(); i++) {
        const Transfer *t = &g->transfers[i];
        if (t->receive && t->op == op_index && t->peer == peer && t->state == Transfer::WAITING) index = i;
    }
    if (index < 0) {  // nothing is expected from that rank: it must have called something else
        MPI_Mrecv(block, size, MPI_BYTE, &message, MPI_STATUS_IGNORE);
        mismatch(g->comm, &g->ops[op_index], (const Header *)block, peer);
    }
    Transfer *t = &g->transfers[index];
    t->block = block;
    t->state = Transfer::HEADER;
    MPI_Request request;
    MPI_Imrecv(block, size, MPI_BYTE, &message, &request);
    add_request(g, index, request);
    g->ops[op_index].due = delay_until();
    settle(g, index);
}

inline bool probe(Group *g, int op_index, int only, int source) {
    MPI_Message message;
    MPI_Status status;
    int found = 0;
    MPI_Improbe(source, g->ops[op_index].tag, g->comm->mpi, &found, &message, &status);
    if (found) take_message(g, op_index, only, message, &status);
    return found != 0;
}

// A collective looks for messages even if it expects none, so that a rank which called something else is found out.
// Of several receives from one peer only the first waiting one may take a message.
inline bool match_receives(Group *g) {
    bool moved = false;
    for (int i = 0; i < (int)g->ops.size(); i++) {
        if (is_p2p(&g->ops[i])) continue;
        while (is_due(g->ops[i].due) && probe(g, i, -1, MPI_ANY_SOURCE)) moved = true;
    }
    for (int i = 0; i < (int)g->transfers.size(); i++) {
        const Transfer *t = &g->transfers[i];
        if (!t->receive || t->state != Transfer::WAITING || !is_p2p(&g->ops[t->op]) || !is_due(t->due)) continue;
        bool first = true;
        for (int j = 0; j < i && first; j++) {
            const Transfer *u = &g->transfers[j];
            first = !(u->receive && u->peer == t->peer && u->state == Transfer::WAITING && is_p2p(&g->ops[u->op]));
        }
        if (first && probe(g, t->op, i, t->peer)) moved = true;
    }
    return moved;
}

}  // namespace nccl_mpi

#endif
