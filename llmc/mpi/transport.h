// transport.h: how the operations of a communicator become MPI messages.
//
// Every message begins with a header that repeats the sender's call. The receiver compares it with its own
// call, so unequal counts, types, reductions or roots are reported with both sides' values instead of
// corrupting memory. A small payload travels with its header through a staging block; a larger one follows as
// a message of its own, straight from and to the buffers of the call.
//
// Nothing here blocks: progress() does what can be done now and is called again by the scheduler.
//
// Which message meets which receive follows from MPI's rule that two messages of one sender with one tag on
// one MPI communicator are matched in the order in which they were sent:
//   - an NCCL communicator has an MPI communicator of its own, and runs its groups one by one;
//   - a collective's tag holds its call number and phase, so it never meets the message of another collective;
//   - all sends share a tag, hence the k-th ncclSend to a peer meets its k-th ncclRecv from us;
//   - payloads have the tag after their header's, and are asked for in the order of the headers.
// Headers of sends and broadcasts go by MPI_Issend, which completes only once the peer has begun the matching
// operation: a send whose receive is never posted hangs here as it does in NCCL. The other collectives wait
// for something from every rank anyway, so they spare the acknowledgement (no rank is ever more than one of
// them ahead).
#ifndef LLMC_MPI_TRANSPORT_H
#define LLMC_MPI_TRANSPORT_H

#include "llmc/mpi/clock.h"

namespace nccl_mpi {

// Two ranks disagree about a call: says what each of them asked for and ends the job.
[[noreturn]] inline void mismatch(const ncclComm *comm, const Op *mine, const Header *theirs, int peer) {
    fflush(stdout);
    std::string ours = describe(&mine->call), other = describe(theirs);
    // At once, or the words of the two ranks could come mixed.
    fprintf(stderr,
            "nccl: ranks disagree on communicator \"%s\": call %llu of rank %d is %s, call %llu of rank %d is %s\n",
            comm->name.c_str(), (unsigned long long)mine->call.sequence, comm->rank, ours.c_str(),
            (unsigned long long)theirs->sequence, peer, other.c_str());
    end_job(0);
}

enum { P2P_TAG = 16384, CONNECT_TAG = 16386 };  // all tags stay below 32767, which every MPI allows

inline bool is_p2p(const Op *op) { return op->call.op == NCCL_MPI_SEND || op->call.op == NCCL_MPI_RECV; }

inline bool together(const Message *m) { return m->bytes <= state().together; }

// data NULL: a contribution, which is received into a block of its own.
inline void add_message(Op *op, bool receive, int peer, int phase, const void *data, size_t bytes) {
    Message m;
    memset(&m, 0, sizeof m);
    m.receive = receive;
    m.peer = peer;
    m.phase = phase;
    m.data = (char *)data;
    m.bytes = bytes;
    m.due = receive ? 0 : delay_until();
    op->messages.push_back(m);
}

inline MPI_Datatype element(const Op *op) {
    return op->width == 1 ? MPI_BYTE : op->width == 2 ? MPI_INT16_T : op->width == 4 ? MPI_INT32_T : MPI_INT64_T;
}

inline void post_send(Group *g, const Op *op, Message *m) {
    int tag = op->tag + 2 * m->phase, size = (int)(sizeof(Header) + (together(m) ? m->bytes : 0));
    m->block = state().pool.take((size_t)size);
    memcpy(m->block, &op->call, sizeof(Header));
    if (together(m) && m->bytes) memcpy(m->block + sizeof(Header), m->data, m->bytes);
    bool waits = op->call.op == NCCL_MPI_SEND || op->call.op == NCCL_MPI_BROADCAST;
    if (waits) MPI_Issend(m->block, size, MPI_BYTE, m->peer, tag, g->comm->mpi, &m->requests[0]);
    else MPI_Isend(m->block, size, MPI_BYTE, m->peer, tag, g->comm->mpi, &m->requests[0]);
    m->requests[1] = MPI_REQUEST_NULL;
    if (!together(m))
        MPI_Isend(m->data, (int)(m->bytes / op->width), element(op), m->peer, tag + 1, g->comm->mpi,
                  &m->requests[1]);
    m->state = Message::PAYLOAD;
}

inline bool header_fits(const Op *op, const Header *h) {
    int expected = op->call.op == NCCL_MPI_RECV ? (int)NCCL_MPI_SEND : op->call.op;
    return h->op == expected && h->type == op->call.type && h->redop == op->call.redop &&
           (is_p2p(op) || h->root == op->call.root) && h->count == op->call.count &&
           h->sequence == op->call.sequence;
}

// Takes a message that a probe has found, as the one that the operation expects from its sender.
inline void take_message(Group *g, Op *op, int phase, MPI_Message message, MPI_Status *status) {
    int size;
    MPI_Get_count(status, MPI_BYTE, &size);
    Message *m = NULL;
    for (Message &x : op->messages) {
        if (x.receive && x.state == Message::WAITING && x.peer == status->MPI_SOURCE && x.phase == phase) m = &x;
    }
    char *block = state().pool.take((size_t)size);
    if (!m) {  // nothing is expected from that rank: it must have called something else
        MPI_Mrecv(block, size, MPI_BYTE, &message, MPI_STATUS_IGNORE);
        mismatch(g->comm, op, (const Header *)block, status->MPI_SOURCE);
    }
    m->block = block;
    m->state = Message::HEADER;
    MPI_Imrecv(block, size, MPI_BYTE, &message, &m->requests[0]);
    op->due = delay_until();
}

// Takes what has arrived for an operation. A collective looks for messages of any rank even if it expects none,
// so that a rank which called something else is found out.
inline bool take_messages(Group *g, Op *op, int phase, int source) {
    bool moved = false;
    for (int found = 1; found && is_due(op->due);) {
        MPI_Message message;
        MPI_Status status;
        MPI_Improbe(source, op->tag + 2 * phase, g->comm->mpi, &found, &message, &status);
        if (found) take_message(g, op, phase, message, &status);
        moved = moved || found;
        if (is_p2p(op)) break;  // the next one from that peer is another operation's
    }
    return moved;
}

// Moves a posted or taken message on; true if it has gone through now.
inline bool complete(Group *g, Op *op, Message *m) {
    int done;
    MPI_Testall(2 - (m->state == Message::HEADER), m->requests, &done, MPI_STATUSES_IGNORE);
    if (!done) return false;
    if (m->state == Message::HEADER) {
        if (!header_fits(op, (const Header *)m->block))
            mismatch(g->comm, op, (const Header *)m->block, m->peer);
        clock_hear(op, (const Header *)m->block);
        if (!together(m)) {
            if (!m->data) {
                state().pool.give(m->block);
                m->block = state().pool.take(sizeof(Header) + m->bytes);
            }
            m->requests[0] = MPI_REQUEST_NULL;
            MPI_Irecv(m->data ? m->data : m->block + sizeof(Header), (int)(m->bytes / op->width), element(op), m->peer,
                      op->tag + 2 * m->phase + 1, g->comm->mpi, &m->requests[1]);
            m->state = Message::PAYLOAD;
            return complete(g, op, m);
        }
        if (m->data && m->bytes) memcpy(m->data, m->block + sizeof(Header), m->bytes);
    }
    m->state = Message::DONE;
    if (m->data) state().pool.give(m->block);
    return true;
}

}  // namespace nccl_mpi

#endif
