// connect.h: how communicators connect, and end.
//
// NCCL connects lazily. The first message to a rank, the first one from it, and the first collective of each kind
// exchange addresses and allocate and map buffers, for each algorithm anew: small and large collectives are
// carried by different ones. All this happens inside the call, where the HOST waits until the other ranks have come to
// the same call, and what it allocates may have to wait for what runs on the device. A host that had first
// enqueued an operation on another communicator or stream may thus be waited for by the very rank that it waits for.
// A program that never meets this on a CPU may meet it on GPUs. So it is made here, always: the host waits, and where
// anything else is in flight the call is refused.
//
// ncclCommDestroy is a collective call as well: it returns when all ranks of the communicator have called it.
// Those of one ncclGroupStart .. ncclGroupEnd end together, in whatever order each rank names them.
#ifndef LLMC_MPI_CONNECT_H
#define LLMC_MPI_CONNECT_H

#include <sched.h>
#include <stdarg.h>

#include <deque>

#ifdef __CUDACC__
#include "llmc/mpi/gpu_queue.h"
#else
#include "llmc/mpi/cpu_queue.h"
#endif

namespace nccl_mpi {

__attribute__((format(printf, 2, 3))) inline ncclResult_t fail(ncclResult_t result, const char *format, ...) {
    char text[768];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    State &s = state();
    s.last_error = text;
    if (s.group_depth > 0 && s.group_error == ncclSuccess) s.group_error = result;
    const char *debug = getenv("NCCL_DEBUG");
    if (debug && strcmp(debug, "WARN") == 0) fprintf(stderr, "nccl: %s\n", text);
    return result;
}

// Waits for other ranks on the host; the device goes on with what it has. Ends the job if it lasts too long.
inline void wait_for(MPI_Request *request, const std::string &what) {
    double patience = stall_patience();
    Stall stall = {0, 0};
    state().host_waits_in = what;
    bool before = queue_open_memory(true);
    for (int done = 0;;) {
        MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (done) break;
        if (stall_wait(&stall, MPI_Wtime()) > patience) {
            fputs(waiting_report().c_str(), stderr);
            fprintf(stderr, "nccl: no progress for %.0f s, ending the job\n", patience);
            end_job(2);
        }
        queue_poll();
        sched_yield();
    }
    queue_open_memory(before);
    state().host_waits_in.clear();
}

// The ranks of a communicator come to one call, which is named: two that come to different ones are reported.
struct Meeting {
    ncclComm_t comm;
    std::vector<char> calls;  // of all ranks, WIDTH bytes each
    MPI_Request request;
    enum { WIDTH = 32 };
};

inline void meet_begin(Meeting *m, ncclComm_t comm, const std::string &call) {
    m->comm = comm;
    m->calls.assign((size_t)comm->size * Meeting::WIDTH, 0);
    snprintf(m->calls.data() + (size_t)comm->rank * Meeting::WIDTH, Meeting::WIDTH, "%s", call.c_str());
    bool before = queue_open_memory(true);
    MPI_Iallgather(MPI_IN_PLACE, 0, MPI_CHAR, m->calls.data(), Meeting::WIDTH, MPI_CHAR, comm->mpi, &m->request);
    queue_open_memory(before);
}

inline void meet_end(Meeting *m, const std::string &what) {
    wait_for(&m->request, what);
    // All ranks have the same answers, so that whichever of them comes first says the same sentence.
    const char *first = m->calls.data();
    for (int r = 1; r < m->comm->size; r++) {
        const char *other = m->calls.data() + r * Meeting::WIDTH;
        if (strcmp(first, other) == 0) continue;
        fprintf(stderr, "nccl: ranks disagree on communicator \"%s\": rank 0 is in %s, rank %d is in %s\n",
                m->comm->name.c_str(), first, r, other);
        end_job(0);
    }
}

enum { LARGE = 65536 };  // bytes of a collective from which another algorithm carries it

// Whether the operation's way is connected, as a reference to be set; NULL if it needs none.
inline char *connection(const Call &c) {
    ncclComm_t comm = c.comm;
    if (comm->size == 1) return NULL;
    if (!is_p2p(&c.op)) return &comm->connected[c.op.call.op][c.op.call.count * c.op.width >= LARGE];
    if (c.op.peer == comm->rank) return NULL;
    return &(c.op.call.op == NCCL_MPI_SEND ? comm->connected_to : comm->connected_from)[c.op.peer];
}

inline std::string full_name(const Group &g) {
    return g.name + (g.label.empty() ? "" : ", labelled " + g.label + ",");
}

// Connects what the calls of a group use for the first time, all of it together.
inline ncclResult_t connect(const std::vector<Call> &calls) {
    if (simulates()) return ncclSuccess;
    for (const Call &c : calls) {
        char *connected = connection(c);
        if (!connected || *connected) continue;  // nearly always; what is active may be thousands
        for (const std::shared_ptr<Group> &g : queue_active()) {
            bool same = g->comm == c.comm && g->streams.size() == 1 && g->streams[0] == c.stream;
            if (same || g->comm->size == 1) continue;
            return fail(ncclInvalidUsage,
                        "rank %d: %s (%s) is the first of its kind there, so NCCL connects now and the host waits for "
                        "the other ranks; that is refused while %s is in flight: connect at the start, one after the "
                        "other in the same order on all ranks, and synchronise after each", c.comm->rank,
                        describe(&c.op.call).c_str(), c.comm->name.c_str(), full_name(*g).c_str());
        }
    }
    std::vector<MPI_Request> requests;
    std::deque<Meeting> meetings;
    std::string what;
    for (const Call &c : calls) {
        char *connected = connection(c), nothing = 0;
        if (!connected || *connected) continue;
        *connected = 1;
        what += (what.empty() ? "the first " : " and ") + describe(&c.op.call) + " (" + c.comm->name + ")";
        if (is_p2p(&c.op)) {
            int arrived = CONNECT_TAG + (c.op.call.op == NCCL_MPI_RECV), awaited = 2 * CONNECT_TAG + 1 - arrived;
            requests.resize(requests.size() + 2);
            bool before = queue_open_memory(true);
            MPI_Isend(&nothing, 0, MPI_BYTE, c.op.peer, arrived, c.comm->mpi, &requests.end()[-2]);
            MPI_Irecv(&nothing, 0, MPI_BYTE, c.op.peer, awaited, c.comm->mpi, &requests.end()[-1]);
            queue_open_memory(before);
        } else {
            meetings.emplace_back();
            meet_begin(&meetings.back(), c.comm, std::string("the first ") + op_name(c.op.call.op));
        }
    }
    for (MPI_Request &r : requests) wait_for(&r, what);
    for (Meeting &m : meetings) meet_end(&m, what);
    return ncclSuccess;
}

// Completes what is queued, waits for all ranks of each communicator, then frees them.
inline void destroy(const std::vector<ncclComm_t> &comms) {
    const char *traffic = getenv("NCCL_TRAFFIC");
    std::deque<Meeting> meetings(comms.size());
    for (ncclComm_t comm : comms) {
        if (comm->finished != comm->issued) queue_drain();
    }
    for (size_t i = 0; i < comms.size() && !simulates(); i++) meet_begin(&meetings[i], comms[i], "ncclCommDestroy");
    for (Meeting &m : meetings)
        if (!simulates()) meet_end(&m, "ncclCommDestroy of " + m.comm->name);
    for (ncclComm_t comm : comms) {
        for (int op = 0; traffic && strcmp(traffic, "1") == 0 && op < NCCL_MPI_OPS; op++) {
            const NcclMpiCounter *c = &comm->counters[op];
            if (!c->calls) continue;
            fprintf(stderr, "traffic: %s rank %d of %d, %s: %zu calls, %zu bytes sent, %zu received\n",
                    comm->name.c_str(), comm->rank, comm->size, op_name(op), c->calls, c->bytes_sent,
                    c->bytes_received);
        }
        if (!simulates()) MPI_Comm_free(&comm->mpi);
        delete comm;
    }
}

}  // namespace nccl_mpi

#endif
