// transport.h: turns the operations of a communicator into MPI messages.
//
//   all-reduce      Cuts the buffer into a part for each rank, or fewer if it is small. Every
//                   rank sends each owner its part. The owner adds them up in rank order and
//                   sends the result back: a reduce-scatter, then an all-gather. Two ranks
//                   exchange a small buffer whole: one message each way, not two.
//   reduce-scatter  The first half of an all-reduce.
//   all-gather      Its second half.
//   broadcast       The root sends to each.
//   reduce          Each sends to the root, which adds up in rank order. The root sends each
//                   an empty message, so that two roots notice each other.
//
// Every message is two of MPI's: a header that repeats the sender's call, then the payload.
// The receiver compares the header with its own call. Unequal counts, types, reductions or
// roots are reported with both sides' values and cannot corrupt memory. Nothing here blocks:
// the scheduler calls progress() repeatedly.
//
// MPI matches two messages of one sender with one tag on one MPI communicator in the order
// of sending. Hence these rules:
//   - An NCCL communicator has an MPI communicator of its own, and runs its groups one by
//     one.
//   - A collective's tag holds its call number and phase, so it never meets the message of
//     another collective.
//   - The tag of a send or receive holds its number among the messages to or from that
//     peer. The k-th ncclSend to a peer meets its k-th ncclRecv from us.
//   - Payloads have the tag after their header's, and are asked for in the order of the
//     headers.
// Headers of sends and broadcasts go by MPI_Issend, which completes only once the peer has
// begun the matching operation. A send without its receive hangs here as it does in NCCL.
// The other collectives wait for every rank anyway, so they need no acknowledgement (no rank
// is ever more than one of them ahead).
#ifndef LLMC_MPI_TRANSPORT_H
#define LLMC_MPI_TRANSPORT_H

#include "llmc/mpi/timing.h"

namespace nccl_mpi {

// Reports two ranks that disagree about a call, with both calls, and ends the job. One
// fprintf, or the words of the two ranks could mix.
[[noreturn]] inline void mismatch(const Operation *mine, const Header *theirs, int peer) {
    fflush(stdout);
    std::string ours = describe(&mine->call), other = describe(theirs);
    fprintf(stderr,
            "nccl: ranks disagree on communicator \"%s\": call %llu of rank %d is %s, call "
            "%llu of rank %d is %s\n",
            mine->comm->name.c_str(), (unsigned long long)mine->call.sequence,
            mine->comm->rank, ours.c_str(), (unsigned long long)theirs->sequence, peer,
            other.c_str());
    end_job(0);
}

inline void add_message(Operation *op, bool receive, int peer, int phase, const void *data,
                        size_t bytes) {
    op->messages.push_back(
        {receive, peer, phase, (char *)data, bytes, Message::WAITING, {}});
}

inline MPI_Datatype element(const Operation *op) {
    return op->width == 2 ? MPI_INT16_T : op->width == 4 ? MPI_INT32_T : MPI_INT64_T;
}

inline void post_send(const Operation *op, Message *m) {
    int tag = op->tag + 2 * m->phase;
    bool waits = op->call.op == NCCL_MPI_SEND || op->call.op == NCCL_MPI_BROADCAST;
    if (waits)
        MPI_Issend(&op->call, sizeof op->call, MPI_BYTE, m->peer, tag, op->comm->mpi,
                   &m->requests[0]);
    else
        MPI_Isend(&op->call, sizeof op->call, MPI_BYTE, m->peer, tag, op->comm->mpi,
                  &m->requests[0]);
    MPI_Isend(m->data, (int)(m->bytes / op->width), element(op), m->peer, tag + 1,
              op->comm->mpi, &m->requests[1]);
    m->state = Message::POSTED;
}

inline bool header_fits(const Operation *op, const Header *h) {
    int expected = op->call.op == NCCL_MPI_RECV ? NCCL_MPI_SEND : op->call.op;
    return h->op == expected && h->type == op->call.type && h->redop == op->call.redop &&
           h->count == op->call.count && h->sequence == op->call.sequence &&
           (is_p2p(op) || h->root == op->call.root);
}

// Takes a header that a probe has found for the operation, and begins to receive its
// payload.
inline void take_message(Operation *op, int phase, MPI_Message message, int peer) {
    Header theirs;
    MPI_Mrecv(&theirs, sizeof theirs, MPI_BYTE, &message, MPI_STATUS_IGNORE);
    Message *m = NULL;
    for (Message &x : op->messages) {
        if (x.receive && x.state == Message::WAITING && x.peer == peer && x.phase == phase)
            m = &x;
    }
    if (!m || !header_fits(op, &theirs)) mismatch(op, &theirs, peer);
    m->requests[0] = MPI_REQUEST_NULL;
    MPI_Irecv(m->data, (int)(m->bytes / op->width), element(op), peer,
              op->tag + 2 * phase + 1, op->comm->mpi, &m->requests[1]);
    m->state = Message::POSTED;
    op->due = delay_until();
}

// Takes the messages that have arrived for an operation. A collective looks for messages of
// any rank even if it expects none, so that it notices a rank in another call.
inline bool take_messages(Operation *op, int phase) {
    int source = is_p2p(op) ? op->call.root : MPI_ANY_SOURCE;
    bool moved = false;
    for (int found = 1; found && (op->due == 0 || MPI_Wtime() >= op->due);) {
        MPI_Message message;
        MPI_Status status;
        MPI_Improbe(source, op->tag + 2 * phase, op->comm->mpi, &found, &message, &status);
        if (found) take_message(op, phase, message, status.MPI_SOURCE);
        moved = moved || found;
    }
    return moved;
}

// ---- operations ----

inline void copy_own(char *to, const char *from, size_t bytes) {
    if (to != from && bytes) memcpy(to, from, bytes);
}

// Expects every rank's contribution to the part at `out`. own: this rank's. owner: the rank
// at which a sum on the ring ends.
inline void expect_contributions(Operation *op, const char *own, char *out, size_t elements,
                                 size_t owner) {
    size_t bytes = elements * op->width;
    const std::vector<int> &ring = op->comm->ring;
    for (size_t i = 0; i < ring.size(); i++) {
        if (ring[i] == (int)owner) op->first = i + 1;
    }
    op->out = out;
    op->elements = elements;
    op->inputs = (char *)host_resize(NULL, op->comm->size * bytes, 1);
    for (int r = 0; r < op->comm->size; r++) {
        if (r == op->comm->rank)
            copy_own(op->inputs + r * bytes, own, bytes);
        else
            add_message(op, true, r, 0, op->inputs + r * bytes, bytes);
    }
}

inline void start_all_reduce(Operation *op) {
    size_t n = (size_t)op->comm->size, rank = (size_t)op->comm->rank;
    size_t count = op->call.count, w = op->width;
    if (n == 2 && count * w <= state().small) {
        add_message(op, false, 1 - (int)rank, 0, op->send, count * w);
        return expect_contributions(op, op->send, op->recv, count, 0);
    }
    bool ring = !op->comm->ring.empty();  // then part k has owner k, as in NCCL, and a
                                          // small buffer has n parts too
    size_t part = std::max({(count + n - 1) / n, ring ? 0 : state().small / w, (size_t)1});
    size_t owners = count > 0 ? (count + part - 1) / part : 1;
    for (size_t i = 0; i < owners;
         i++) {  // each rank begins with another owner, to spread the load
        size_t k = (i + rank) % owners, owner = ring ? k : (k + op->call.sequence) % n;
        size_t first = k * part, elements = std::min(part, count - first);
        if (owner == rank) {
            expect_contributions(op, op->send + first * w, op->recv + first * w, elements,
                                 owner);
            for (size_t r = 1; r < n; r++)
                add_message(op, false, (int)((rank + r) % n), 1, op->recv + first * w,
                            elements * w);
        } else {
            add_message(op, false, (int)owner, 0, op->send + first * w, elements * w);
            add_message(op, true, (int)owner, 1, op->recv + first * w, elements * w);
        }
    }
}

inline void start_op(Operation *op) {
    int n = op->comm->size, rank = op->comm->rank, root = op->call.root;
    size_t bytes = op->call.count * op->width;
    // Tags go to 32767, which every MPI allows.
    op->tag = ((int)(op->call.sequence % 4096) + 4096 * is_p2p(op)) * 4;
    op->phase = simulates() ? 2 : 0;
    op->due = delay_until();
    if (simulates()) return;
    switch (op->call.op) {
        case NCCL_MPI_ALL_REDUCE: start_all_reduce(op); break;
        case NCCL_MPI_REDUCE_SCATTER:
            expect_contributions(op, op->send + rank * bytes, op->recv, op->call.count,
                                 (size_t)rank);
            for (int i = 1; i < n; i++) {
                int r = (rank + i) % n;
                add_message(op, false, r, 0, op->send + r * bytes, bytes);
            }
            break;
        case NCCL_MPI_ALL_GATHER:
            copy_own(op->recv + rank * bytes, op->send, bytes);
            for (int i = 1; i < n; i++) {
                int to = (rank + i) % n, from = (rank + n - i) % n;
                add_message(op, false, to, 0, op->send, bytes);
                add_message(op, true, from, 0, op->recv + from * bytes, bytes);
            }
            break;
        case NCCL_MPI_BROADCAST:
            if (rank != root)
                add_message(op, true, root, 0, op->recv, bytes);
            else
                copy_own(op->recv, op->send, bytes);
            for (int i = 1; rank == root && i < n; i++)
                add_message(op, false, (rank + i) % n, 0, op->send, bytes);
            break;
        case NCCL_MPI_REDUCE:
            if (rank == root) {
                expect_contributions(op, op->send, op->recv, op->call.count, (size_t)root);
                for (int i = 1; i < n; i++)
                    add_message(op, false, (rank + i) % n, 0, NULL, 0);
            } else {
                add_message(op, false, root, 0, op->send, bytes);
                add_message(op, true, root, 0, NULL, 0);
            }
            break;
        case NCCL_MPI_SEND: add_message(op, false, root, 0, op->send, bytes); break;
        default: add_message(op, true, root, 0, op->recv, bytes); break;
    }
}

// Advances one operation without waiting. Returns true once it is complete.
inline bool advance(Operation *op, bool *moved) {
    bool sends = op->call.op == NCCL_MPI_SEND;  // then no message comes to us
    while (op->phase < 2) {
        bool open = false;
        for (int phase = 0; !sends && phase <= op->phase; phase++)
            *moved = take_messages(op, phase) || *moved;
        for (Message &m : op->messages) {
            if (m.phase > op->phase || m.state == Message::DONE) continue;
            bool posted = !m.receive && m.state == Message::WAITING;
            if (posted) post_send(op, &m);
            int through = 0;
            if (m.state == Message::POSTED)
                MPI_Testall(2, m.requests, &through, MPI_STATUSES_IGNORE);
            if (through) m.state = Message::DONE;
            *moved = *moved || posted || through;
            open = open || !through;
        }
        if (open) return false;
        if (op->phase++ > 0 || !op->inputs) continue;
        reduce_any(op);
        free(op->inputs);
    }
    return true;
}

// Advances a group without waiting. Returns true once all of it is complete; *moved is true
// if anything happened.
inline bool progress(Group *g, bool *moved) {
    *moved = false;
    if (g->comm->finished != g->turn) return false;
    if (!g->started) {
        clock_begin(g);
        for (Operation &op : g->ops) start_op(&op);
        g->started = true;
    }
    g->done = clock_met(g);
    for (Operation &op : g->ops) g->done = advance(&op, moved) && g->done;
    if (!g->done) return false;
    *moved = true;
    clock_end(g);
    g->comm->finished++;
    return true;
}

// Returns one line for each unfinished group of this rank with the peers it waits for: the
// report of a hang.
inline std::string waiting_report() {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    std::string text, waits = "nccl: rank " + std::to_string(rank) + " waits ",
                      host = state().host_waits_in;
    if (!host.empty())
        text = waits + "on the host in " + host + " for the other ranks to call it\n";
    for (const std::shared_ptr<Group> &g : state().active) {
        std::string lists[2];  // of ranks to which it sends, and from which it receives
        for (const Operation &op : g->ops) {
            for (const Message &m : op.messages) {
                std::string peer = " " + std::to_string(m.peer), &list = lists[m.receive];
                bool open = m.phase <= op.phase && m.state != Message::DONE;
                if (open && (list + " ").find(peer + " ") == std::string::npos)
                    list += peer;
            }
        }
        text += waits + "in " + g->name;
        if (!g->started)
            text +=
                ": not begun, behind an earlier operation of its stream or communicator";
        if (!lists[0].empty()) text += "; not received by rank" + lists[0];
        if (!lists[1].empty()) text += "; nothing received from rank" + lists[1];
        text += "\n";
    }
    return text;
}

// Ends the job after too long without progress. All ranks of a deadlock stall at nearly the
// same time; the two seconds let each of them print first.
[[noreturn]] inline void give_up() {
    fprintf(stderr,
            "%snccl: no progress, ending the job (CPU_STALL_SECONDS sets the patience)\n",
            waiting_report().c_str());
    end_job(2);
}

}  // namespace nccl_mpi

#endif
