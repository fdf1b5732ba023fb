// transport.h: how the operations of a communicator become MPI messages.
//
// Every message begins with a header that repeats the sender's call. The receiver compares it with its own
// call, so unequal counts, types, reductions or roots are reported with both sides' values instead of
// corrupting memory. Up to Limits.together the payload travels with its header, in one message, through a
// staging block; a larger one follows as messages of its own, straight from and to the buffers of the call.
//
// Nothing here blocks: progress() does what can be done now and is called again by the scheduler.
//
// Which message meets which receive follows from MPI's rule that two messages of one sender with one tag on
// one MPI communicator are matched in the order in which they were sent:
//   - an NCCL communicator has an MPI communicator of its own, and runs its groups one by one;
//   - a collective's header tag holds its call number, so it never meets the message of another collective;
//   - of an owner's two messages in an all-reduce, the contribution comes first, and both say which they are;
//   - all send/recv headers share a tag, hence the k-th ncclSend to a peer meets its k-th ncclRecv from us;
//   - a payload's tag holds the call number and phase of its header, which has arrived before it is received.
// Headers of sends and broadcasts go by MPI_Issend, which completes only once the peer has begun the matching
// operation: a send whose receive is never posted hangs here as it does in NCCL. The other collectives wait
// for something from every rank anyway, so they spare the acknowledgement (no rank is ever more than one of
// them ahead).
#ifndef LLMC_MPI_TRANSPORT_H
#define LLMC_MPI_TRANSPORT_H

#include "llmc/mpi/operation.h"

namespace nccl_mpi {

// Two ranks disagree about a call: says what each of them asked for and ends the job.
[[noreturn]] inline void mismatch(const ncclComm *comm, const Op *mine, const Header *theirs, int peer) {
    fflush(stdout);
    std::string ours = describe(&mine->call), other = describe(theirs);
    fprintf(stderr, "nccl: ranks disagree on communicator \"%s\": ", comm->name.c_str());
    fprintf(stderr, "call %llu of rank %d is %s, ", (unsigned long long)mine->call.sequence, comm->rank,
            ours.c_str());
    fprintf(stderr, "call %llu of rank %d is %s\n", (unsigned long long)theirs->sequence, peer,
            other.c_str());
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

void advance(Group *g, int index);  // progress.h

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

// Takes the message that a probe has found for a receive of this op; a peer's phases come in the list's
// order.
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

// A collective looks for messages even if it expects none, so that a rank which called something else is
// found out. Of several receives from one peer only the first waiting one may take a message.
inline bool match_receives(Group *g) {
    bool moved = false;
    for (int i = 0; i < (int)g->ops.size(); i++) {
        if (is_p2p(&g->ops[i])) continue;
        while (is_due(g->ops[i].due) && probe(g, i, -1, MPI_ANY_SOURCE)) moved = true;
    }
    for (int i = 0; i < (int)g->transfers.size(); i++) {
        const Transfer *t = &g->transfers[i];
        if (!t->receive || t->state != Transfer::WAITING || !is_p2p(&g->ops[t->op]) || !is_due(t->due))
            continue;
        bool first = true;
        for (int j = 0; j < i && first; j++) {
            const Transfer *u = &g->transfers[j];
            first = !(u->receive && u->peer == t->peer && u->state == Transfer::WAITING &&
                      is_p2p(&g->ops[u->op]));
        }
        if (first && probe(g, t->op, i, t->peer)) moved = true;
    }
    return moved;
}

}  // namespace nccl_mpi

#endif
