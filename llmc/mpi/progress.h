// progress.h: what each operation sends, receives and reduces.
//
//   all-reduce      the buffer is cut into a part for each rank. Everybody sends each owner its part; the owner
//                   adds them up in rank order and sends the result back: a reduce-scatter, then an all-gather.
//                   To save messages a small buffer has one owner, which changes from call to call; two ranks
//                   exchange it whole.
//   reduce-scatter  its first half, all-gather: its second half
//   broadcast       the root sends to each
#ifndef LLMC_MPI_PROGRESS_H
#define LLMC_MPI_PROGRESS_H

#include "llmc/mpi/transport.h"

namespace nccl_mpi {

inline void expect_contributions(const ncclComm *comm, Op *op, size_t first, size_t elements) {
    op->first = first;
    op->elements = elements;
    op->reduces = true;
    for (int r = 0; r < comm->size; r++) {
        if (r != comm->rank) add_message(op, true, r, 0, NULL, elements * op->width);
    }
}

inline void start_all_reduce(const ncclComm *comm, Op *op) {
    int n = comm->size, rank = comm->rank;
    size_t count = op->call.count, w = op->width, part = (count + n - 1) / n;
    bool small = count * w <= state().small;
    if (n == 2 && small) {
        add_message(op, false, 1 - rank, 0, op->send, count * w);
        expect_contributions(comm, op, 0, count);
        return;
    }
    if (small) part = count;
    int owners = small ? 1 : n, shift = small ? (int)(op->call.sequence % n) : 0;
    for (int i = 0; i < owners; i++) {  // each rank begins elsewhere, lest all send to the same owner first
        int k = (i + rank) % owners, owner = (k + shift) % n;
        size_t first = std::min(k * part, count), elements = std::min(part, count - first);
        if (owner == rank) {
            expect_contributions(comm, op, first, elements);
            op->shares = true;
        } else {
            add_message(op, false, owner, 0, op->send + first * w, elements * w);
            add_message(op, true, owner, 1, op->recv + first * w, elements * w);
        }
    }
}

inline void copy_own(char *to, const char *from, size_t bytes) {
    if (to != from && bytes) memcpy(to, from, bytes);
}

inline void start_op(const ncclComm *comm, Op *op) {
    int n = comm->size, rank = comm->rank, root = op->call.root;
    size_t bytes = op->call.count * op->width;
    op->tag = is_p2p(op) ? (int)P2P_TAG : (int)(op->call.sequence % 4096) * 4;
    op->due = delay_until();
    switch (op->call.op) {
        case NCCL_MPI_ALL_REDUCE:
            if (n > 1) start_all_reduce(comm, op);
            else copy_own(op->recv, op->send, bytes);
            break;
        case NCCL_MPI_REDUCE_SCATTER:
            if (n > 1) expect_contributions(comm, op, rank * op->call.count, op->call.count);
            else copy_own(op->recv, op->send, bytes);
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
            if (rank != root) add_message(op, true, root, 0, op->recv, bytes);
            else copy_own(op->recv, op->send, bytes);
            for (int i = 1; rank == root && i < n; i++)
                add_message(op, false, (rank + i) % n, 0, op->send, bytes);
            break;
        case NCCL_MPI_SEND: add_message(op, false, op->peer, 0, op->send, bytes); break;
        default: add_message(op, true, op->peer, 0, op->recv, bytes); break;
    }
}

// Everything of phase 0 has come and gone: adds up this rank's part and, in an all-reduce, sends the result.
inline void end_phase(const ncclComm *comm, Op *op) {
    if (op->phase++ > 0 || !op->reduces) return;
    std::vector<const char *> inputs(comm->size);
    inputs[comm->rank] = op->send + op->first * op->width;
    for (const Message &m : op->messages) {
        if (m.receive && m.phase == 0) inputs[m.peer] = m.block + sizeof(Header);
    }
    char *out = op->recv + (op->call.op == NCCL_MPI_ALL_REDUCE ? op->first * op->width : 0);
    reduce(out, inputs.data(), comm->size, op->elements, op->call.type, op->call.redop);
    for (const Message &m : op->messages) {
        if (m.receive && m.phase == 0) state().pool.give(m.block);
    }
    for (int k = 1; op->shares && k < comm->size; k++)
        add_message(op, false, (comm->rank + k) % comm->size, 1, out, op->elements * op->width);
}

// Is this the operation that takes the next message from its peer?
inline bool first_receive(const Group *g, const Op *op) {
    for (const Op *earlier = g->ops.data(); earlier != op; earlier++) {
        if (earlier->call.op == NCCL_MPI_RECV && earlier->peer == op->peer &&
            earlier->messages[0].state == Message::WAITING) return false;
    }
    return true;
}

// Does what can be done now for one operation; true once it is complete. Sends of a group leave in the order of the
// list, whatever the delays, for matching relies on it: *held says that an earlier one has not left yet.
inline bool advance(Group *g, Op *op, bool *held, bool *moved) {
    while (op->phase < 2) {
        bool open = false;
        for (Message &m : op->messages) {
            if (m.receive || m.phase > op->phase || m.state != Message::WAITING) continue;
            *held = *held || !is_due(m.due);
            if (*held) break;
            post_send(g, op, &m);
            *moved = true;
        }
        if (!is_p2p(op)) {
            for (int phase = 0; phase <= op->phase; phase++)
                *moved = take_messages(g, op, phase, MPI_ANY_SOURCE) || *moved;
        } else if (op->call.op == NCCL_MPI_RECV && op->messages[0].state == Message::WAITING &&
                   first_receive(g, op)) {
            *moved = take_messages(g, op, 0, op->peer) || *moved;
        }
        for (Message &m : op->messages) {
            if (m.phase > op->phase || m.state == Message::DONE) continue;
            bool through = m.state != Message::WAITING && complete(g, op, &m);
            *moved = *moved || through;
            open = open || !through;
        }
        if (open) return false;
        end_phase(g->comm, op);
    }
    return clock_met(op);
}

// Does what can be done now. True once the whole group is complete. `moved` tells whether anything happened.
inline bool progress(Group *g, bool *moved) {
    *moved = false;
    if (g->done) return true;
    if (g->comm->finished != g->turn) return false;
    if (simulates()) return clock_progress(g, moved);
    if (!g->started) clock_begin(g);
    for (Op &op : g->ops) {
        if (g->started) break;
        clock_meet(g, &op);
        start_op(g->comm, &op);
    }
    g->started = true;
    for (bool more = true; more && !g->done;) {
        bool held = false;
        more = false;
        g->done = true;
        for (Op &op : g->ops) g->done = advance(g, &op, &held, &more) && g->done;
        *moved = *moved || more;
    }
    if (!g->done) return false;
    *moved = true;
    clock_end(g);
    g->comm->finished++;
    return true;
}

// What this rank's unfinished groups wait for, for the report of a hang: one line each.
inline std::string waiting_report() {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    std::string text, host = state().host_waits_in;
    if (!host.empty())
        text = "nccl: rank " + std::to_string(rank) + " waits on the host in " + host +
               " for the other ranks to call it\n";
    for (const std::shared_ptr<Group> &g : state().active) {
        text += "nccl: rank " + std::to_string(rank) + " waits in " + g->name;
        if (!g->label.empty()) text += ", labelled " + g->label;
        if (!g->started) text += ": not begun, behind an earlier operation of its stream or communicator";
        for (int receive = 0; receive < 2 && g->started; receive++) {
            std::string ranks;
            for (const Op &op : g->ops) {
                for (const Message &m : op.messages) {
                    std::string peer = " " + std::to_string(m.peer);
                    bool open = m.receive == (receive != 0) && m.state != Message::DONE;
                    if (open && (ranks + " ").find(peer + " ") == std::string::npos) ranks += peer;
                }
            }
            if (!ranks.empty())
                text += (receive ? "; nothing received from rank" : "; not received by rank") + ranks;
        }
        text += "\n";
    }
    return text;
}

}  // namespace nccl_mpi

#endif
