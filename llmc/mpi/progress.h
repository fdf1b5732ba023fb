// progress.h: what each operation sends, receives and reduces.
//
//   all-reduce      the buffer is cut into parts, each owned by a rank. Everybody sends each owner its part;
//                   the owner adds them up in rank order and sends the result back: a reduce-scatter, then
//                   an all-gather. Averaged over ranks, 2 (n-1)/n of the buffer is sent, as by a ring. Two
//                   ranks exchange small buffers whole instead: the same bytes in one round.
//   reduce-scatter  its first half, all-gather: its second half; (n-1)/n of the whole buffer each
//   broadcast       the root sends to each
//
// A small all-reduce has fewer owners than ranks, which saves messages; they rotate with the call number.
#ifndef LLMC_MPI_PROGRESS_H
#define LLMC_MPI_PROGRESS_H

#include "llmc/mpi/transport.h"

namespace nccl_mpi {

inline void expect_contributions(Group *g, int index, size_t first, size_t elements) {
    Op *op = &g->ops[index];
    op->first = first;
    op->elements = elements;
    op->reduces = true;
    op->missing = g->comm->size - 1;
    g->remaining++;
    for (int r = 0; r < g->comm->size; r++) {
        if (r != g->comm->rank) add_transfer(g, index, true, r, 0, NULL, elements * op->width);
    }
}

inline void start_all_reduce(Group *g, int index) {
    Op *op = &g->ops[index];
    int n = g->comm->size, rank = g->comm->rank;
    size_t count = op->call.count, w = op->width;
    if (n == 2 &&
        count * w <=
            state().limits.together) {  // staged, so recv may be written while the message is on its way
        add_transfer(g, index, false, 1 - rank, 0, op->send, count * w);
        expect_contributions(g, index, 0, count);
        return;
    }
    size_t part = std::max((count + n - 1) / n, state().limits.part / w);
    part = (part + 15) / 16 * 16;
    int owners =
        std::max((int)((count + part - 1) / part), 1);  // an empty all-reduce still meets, to be compared
    int shift = (int)(op->call.sequence % n);
    for (int k = 0; k < owners; k++) {
        if ((k + shift) % n != rank) continue;
        expect_contributions(g, index, k * part, std::min(part, count - k * part));
        op->shares = true;
    }
    for (int i = 0; i < owners; i++) {  // each rank begins elsewhere, lest all send to the same owner first
        int k = (i + rank) % owners, owner = (k + shift) % n;
        if (owner == rank) continue;
        size_t first = k * part, bytes = std::min(part, count - first) * w;
        int sent = add_transfer(g, index, false, owner, 0, op->send + first * w, bytes);
        int result = add_transfer(g, index, true, owner, 1, op->recv + first * w, bytes);
        g->transfers[result].after = sent;
    }
}

inline void start_op(Group *g, int index) {
    Op *op = &g->ops[index];
    int n = g->comm->size, rank = g->comm->rank, root = op->call.root;
    size_t bytes = op->call.count * op->width;
    op->tag = is_p2p(op) ? (int)P2P_TAG : (int)(op->call.sequence % 4096) * 4;
    op->due = delay_until();
    switch (op->call.op) {
        case NCCL_MPI_ALL_REDUCE:
            if (n > 1) start_all_reduce(g, index);
            else if (op->recv != op->send) memcpy(op->recv, op->send, bytes);
            break;
        case NCCL_MPI_REDUCE_SCATTER:
            if (n > 1) expect_contributions(g, index, rank * op->call.count, op->call.count);
            else if (op->recv != op->send) memcpy(op->recv, op->send, bytes);
            for (int i = 1; i < n; i++) {
                int r = (rank + i) % n;
                add_transfer(g, index, false, r, 0, op->send + r * bytes, bytes);
            }
            break;
        case NCCL_MPI_ALL_GATHER:
            if (op->recv + rank * bytes != op->send && bytes)
                memcpy(op->recv + rank * bytes, op->send, bytes);
            for (int i = 1; i < n; i++) {
                int to = (rank + i) % n, from = (rank + n - i) % n;
                add_transfer(g, index, false, to, 0, op->send, bytes);
                add_transfer(g, index, true, from, 0, op->recv + from * bytes, bytes);
            }
            break;
        case NCCL_MPI_BROADCAST:
            if (rank != root) add_transfer(g, index, true, root, 0, op->recv, bytes);
            else if (op->recv != op->send && bytes) memcpy(op->recv, op->send, bytes);
            for (int i = 1; rank == root && i < n; i++)
                add_transfer(g, index, false, (rank + i) % n, 0, op->send, bytes);
            break;
        case NCCL_MPI_SEND: add_transfer(g, index, false, op->peer, 0, op->send, bytes); break;
        default: add_transfer(g, index, true, op->peer, 0, op->recv, bytes); break;
    }
}

inline bool header_fits(const Op *op, const Transfer *t, const Header *h) {
    int expected = op->call.op == NCCL_MPI_RECV ? (int)NCCL_MPI_SEND : op->call.op;
    bool same_root = is_p2p(op) || h->root == op->call.root;
    return h->op == expected && h->type == op->call.type && h->redop == op->call.redop && same_root &&
           h->count == op->call.count && h->sequence == op->call.sequence && h->phase == t->phase &&
           h->bytes == t->bytes;
}

inline void arrived(Group *g, Transfer *t) {
    Op *op = &g->ops[t->op];
    t->state = Transfer::DONE;
    g->remaining--;
    g->comm->counters[op->call.op].bytes_received += t->bytes;
    if (t->data) state().pool.give(t->block);
    else op->missing--;
}

inline void receive_payload(Group *g, int index) {
    post_payload(g, index);
    settle(g, index);
}

// The requests of this transfer have completed: on to its next state.
inline void advance(Group *g, int index) {
    Transfer *t = &g->transfers[index];
    if (!t->receive) {
        t->state = Transfer::DONE;
        state().pool.give(t->block);
        g->remaining--;
        for (int i = 0; i < (int)g->transfers.size(); i++) {
            if (g->transfers[i].state == Transfer::BLOCKED && g->transfers[i].after == index)
                receive_payload(g, i);
        }
        return;
    }
    if (t->state == Transfer::PAYLOAD) {
        arrived(g, t);
        return;
    }
    const Header *h = (const Header *)t->block;
    if (!header_fits(&g->ops[t->op], t, h)) mismatch(g->comm, &g->ops[t->op], h, t->peer);
    if (t->bytes <= state().limits.together) {
        t->payload = t->block + sizeof *h;
        if (t->data && t->bytes) memcpy(t->data, t->payload, t->bytes);
        arrived(g, t);
        return;
    }
    if (!t->data) {
        state().pool.give(t->block);
        t->block = t->payload = state().pool.take(t->bytes);
    }
    // In place, this writes where our contribution is sent from. Its owner has read it, so this is done at
    // once or soon.
    if (t->after >= 0 && g->transfers[t->after].state != Transfer::DONE) t->state = Transfer::BLOCKED;
    else receive_payload(g, index);
}

inline bool complete_requests(Group *g) {
    if (g->requests.empty()) return false;
    int n = (int)g->requests.size(), completed = 0;
    std::vector<int> &which = g->completed;
    which.resize(g->requests.size());
    MPI_Testsome(n, g->requests.data(), &completed, which.data(), MPI_STATUSES_IGNORE);
    if (completed <= 0) return false;
    for (int i = 0; i < completed; i++) which[i] = g->owners[which[i]];
    int kept = 0;
    for (int i = 0; i < n; i++) {
        if (g->requests[i] == MPI_REQUEST_NULL) continue;
        g->requests[kept] = g->requests[i];
        g->owners[kept++] = g->owners[i];
    }
    g->requests.resize(kept);
    g->owners.resize(kept);
    for (int i = 0; i < completed; i++) {
        if (--g->transfers[which[i]].open == 0) advance(g, which[i]);
    }
    return true;
}

// Does a part that this op sends still wait to be posted (a delayed message)? An in-place result must not overwrite it.
inline bool unsent(const Group *g, int op) {
    for (size_t i = g->posted; i < g->transfers.size(); i++) {
        if (!g->transfers[i].receive && g->transfers[i].op == op) return true;
    }
    return false;
}

// Adds up an op's own part once all contributions are there and, in an all-reduce, sends the result to the
// others.
inline bool reduce_ready(Group *g) {
    bool moved = false;
    for (int i = 0; i < (int)g->ops.size(); i++) {
        Op *op = &g->ops[i];
        if (!op->reduces || op->missing > 0 || unsent(g, i)) continue;
        std::vector<const char *> inputs(g->comm->size);
        std::vector<char *> blocks;
        inputs[g->comm->rank] = op->send + op->first * op->width;
        for (const Transfer &t : g->transfers) {
            if (!t.receive || t.op != i || t.data || t.phase != 0) continue;
            inputs[t.peer] = t.payload;
            blocks.push_back(t.block);
        }
        char *out = op->recv + (op->call.op == NCCL_MPI_ALL_REDUCE ? op->first * op->width : 0);
        reduce(out, inputs.data(), g->comm->size, op->elements, op->call.type, op->call.redop);
        for (char *block : blocks) state().pool.give(block);
        op->reduces = false;
        g->remaining--;
        for (int k = 1; op->shares && k < g->comm->size; k++) {
            add_transfer(g, i, false, (g->comm->rank + k) % g->comm->size, 1, out, op->elements * op->width);
        }
        moved = true;
    }
    return moved;
}

// Does what can be done now. True once the whole group is complete. `moved` tells whether anything happened.
inline bool progress(Group *g, bool *moved) {
    *moved = false;
    if (g->done) return true;
    if (g->comm->finished != g->turn) return false;
    if (!g->started) {
        g->started = true;
        for (int i = 0; i < (int)g->ops.size(); i++) start_op(g, i);
    }
    for (bool more = true; more && g->remaining > 0;) {
        more = post_sends(g);
        if (match_receives(g)) more = true;
        if (complete_requests(g)) more = true;
        if (reduce_ready(g)) more = true;
        if (more) *moved = true;
    }
    if (g->remaining > 0) return false;
    g->done = true;
    g->comm->finished++;
    return true;
}

// What this rank's unfinished groups wait for, for the report of a hang: one line each.
inline std::string waiting_report() {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    std::string text;
    for (const std::shared_ptr<Group> &g : state().active) {
        text += "nccl: rank " + std::to_string(rank) + " waits in " + g->name;
        if (!g->label.empty()) text += ", labelled " + g->label;
        if (!g->started) text += ": not begun, behind an earlier operation of its stream or communicator";
        for (int receive = 0; receive < 2 && g->started; receive++) {
            std::string ranks;
            for (const Transfer &t : g->transfers) {
                std::string peer = " " + std::to_string(t.peer);
                bool open = t.receive == (receive != 0) && t.state != Transfer::DONE;
                if (open && (ranks + " ").find(peer + " ") == std::string::npos) ranks += peer;
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
