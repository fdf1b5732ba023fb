// communicator.h: how communicators begin, connect, split, count their traffic and end.
//
// NCCL connects lazily: at the first message to a rank, the first one from it, and the
// first collective of each kind. Then ranks exchange addresses and map buffers, separately
// for small and large collectives, which different algorithms carry. All this happens
// inside the call: the HOST waits there for the other ranks, and its allocations may wait
// for running work. If a host has first enqueued an operation on another communicator or
// stream, two ranks may wait for each other. So the stand-in refuses the call while another
// operation is in flight.
//
// ncclCommDestroy is collective too. It returns when all ranks of the communicator have
// called it, in a group as well. So ranks destroy their communicators in one order, for
// instance the order of the splits.
#ifndef LLMC_MPI_COMMUNICATOR_H
#define LLMC_MPI_COMMUNICATOR_H

#include <sched.h>
#include <stdarg.h>

#if defined(__CUDACC__) || defined(GPU_QUEUE)
#include "llmc/mpi/gpu_queue.h"
#else
#include "llmc/mpi/cpu_queue.h"
#endif

namespace nccl_mpi {

__attribute__((format(printf, 2, 3))) inline ncclResult_t fail(ncclResult_t result,
                                                               const char *format, ...) {
    char text[768];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    State &s = state();
    s.last_error = text;
    if (s.group_depth > 0 && s.group_error == ncclSuccess) s.group_error = result;
    return result;
}

// Completes queued work, then waits on the host until all ranks of a communicator are in
// this call. Reports ranks in different calls. Ends the job if there is no progress for too
// long.
inline void meet(const ncclComm *comm, const std::string &call) {
    enum { WIDTH = 32 };  // bytes for the name of a call
    cudaDeviceSynchronize();
    if (simulates()) return;
    std::vector<char> calls((size_t)comm->size * WIDTH);
    const char *first = calls.data(), *other = first;
    call.copy(&calls[(size_t)comm->rank * WIDTH], WIDTH - 1);
    MPI_Request request;
    Stall stall = {0, 0};
    state().host_waits_in = call + " of " + comm->name;
    MPI_Iallgather(MPI_IN_PLACE, 0, MPI_CHAR, calls.data(), WIDTH, MPI_CHAR, comm->mpi,
                   &request);
    for (int done = 0;;) {
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (done) break;
        if (stall_wait(&stall)) give_up();
        sched_yield();
    }
    state().host_waits_in.clear();
    for (int r = 0; r < comm->size; r++, other += WIDTH) {
        if (strcmp(first, other) == 0) continue;
        // All ranks have the same answers, so that they all say the same sentence.
        fprintf(stderr,
                "nccl: ranks disagree on communicator \"%s\": rank 0 is in %s, rank %d is "
                "in %s\n",
                comm->name.c_str(), first, r, other);
        end_job(0);
    }
}

enum { LARGE = 65536 };  // bytes of a collective from which another algorithm carries it

// Returns the number of an operation's way: a kind of collectives, small or large, or to a
// peer, or from it.
inline size_t way_of(const Operation &op) {
    if (!is_p2p(&op)) return 2 * (size_t)op.call.op + (op.call.count * op.width >= LARGE);
    return 2 * (size_t)(NCCL_MPI_OPS + op.call.root) + (op.call.op == NCCL_MPI_RECV);
}

// Refuses a group whose operations use ways for the first time beside another operation.
inline ncclResult_t first_uses(const Group *group) {
    if (simulates()) return ncclSuccess;
    for (const Operation &op : group->ops) {
        bool alone = op.comm->size == 1 || (is_p2p(&op) && op.call.root == op.comm->rank);
        if (alone || op.comm->uses[way_of(op)] > 0)
            continue;  // nearly always; there may be thousands of active groups
        for (const std::shared_ptr<Group> &g : queue_active()) {
            bool behind = g->comm == op.comm && g->stream == group->stream;
            if (behind || g->comm->size == 1) continue;
            return fail(ncclInvalidUsage,
                        "rank %d: %s (%s) is the first of its kind there, so NCCL connects "
                        "now and the host waits for "
                        "the other ranks; that is refused while %s is in flight: connect "
                        "at the start, one after the "
                        "other in the same order on all ranks, and synchronise after each",
                        op.comm->rank, describe(&op.call).c_str(), op.comm->name.c_str(),
                        g->name.c_str());
        }
    }
    return ncclSuccess;
}

// Adds the counts of a communicator that ends to this rank's report of traffic.
inline void report_traffic(const ncclComm *comm) {
    const char *wanted = getenv("NCCL_TRAFFIC");
    for (int op = 0; wanted && strcmp(wanted, "1") == 0 && op < NCCL_MPI_OPS; op++) {
        const NcclMpiCounter *c = &comm->counters[op];
        char line[256];
        snprintf(line, sizeof line,
                 "traffic: %s rank %d of %d, %s: %zu calls, %zu bytes sent, %zu received\n",
                 comm->name.c_str(), comm->rank, comm->size, nccl_mpi_op_name(op), c->calls,
                 c->bytes_sent, c->bytes_received);
        if (c->calls) state().traffic += line;
    }
}

// Prints the reports of all ranks on rank 0 when the communicator of all ranks ends. mpirun
// may lose or mix the last lines of many ranks.
inline void print_traffic(const ncclComm *comm) {
    std::string &mine = state().traffic, all = mine;
    int length = (int)mine.size(), total = 0;
    std::vector<int> lengths((size_t)comm->size), at((size_t)comm->size);
    MPI_Gather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, 0, comm->mpi);
    for (int r = 0; r < comm->size; r++) {
        at[(size_t)r] = total;
        total += lengths[(size_t)r];
    }
    all.resize((size_t)total);
    MPI_Gatherv(mine.data(), length, MPI_CHAR, &all[0], lengths.data(), at.data(), MPI_CHAR,
                0, comm->mpi);
    if (comm->rank == 0) fputs(all.c_str(), stderr);
    mine.clear();
}

// Returns a seed for a communicator's own ring. Its first rank says which, so that all of
// its ranks have the same.
inline uint64_t ring_seed(const ncclComm *comm) {
    State &s = state();
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    Random random = {true, s.order.seed + 1000003 * s.communicators + 7919 * (uint64_t)rank,
                     0};
    uint64_t seed = random_next(&random);
    MPI_Bcast(&seed, 1, MPI_UINT64_T, 0, comm->mpi);
    return seed;
}

inline ncclComm_t new_communicator(MPI_Comm mpi, const std::string &name,
                                   const ncclConfig_t *config) {
    ncclComm_t comm = new ncclComm();
    comm->mpi = mpi;
    MPI_Comm_rank(mpi, &comm->rank);
    MPI_Comm_size(mpi, &comm->size);
    comm->name = name;
    State &s = state();
    if (s.order.on && !simulates())
        comm->ring = ring_of(comm->size, s.order.own ? ring_seed(comm) : s.order.seed);
    s.communicators++;
    clock_communicator(comm, config);
    return comm;
}

}  // namespace nccl_mpi

inline const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess           ? "no error"
           : result == ncclSystemError     ? "unhandled system error"
           : result == ncclInvalidArgument ? "invalid argument"
           : result == ncclInvalidUsage    ? "invalid usage"
                                           : "unknown result code";
}

// Returns one error message about the last call that failed, "" before.
inline const char *ncclGetLastError(ncclComm_t) {
    return nccl_mpi::state().last_error.c_str();
}

// Always reports success: errors end the job at once.
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) {
    return *error = ncclSuccess;
}

// Makes the id of the communicator of all ranks. Hand it to the other ranks, for instance
// by MPI_Bcast.
inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    *id = {"llmcmpi"};
    return ncclSuccess;
}

// Makes the communicator of all MPI ranks, in the order of `rank`; ncclCommSplit makes
// smaller ones. Blocks until all ranks have called it.
inline ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id,
                                     int rank) {
    int world;
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (nranks != world || rank < 0 || rank >= nranks ||
        strcmp(id.internal, "llmcmpi") != 0)
        return nccl_mpi::fail(
            ncclInvalidArgument,
            "ncclCommInitRank: rank %d of %d with %d MPI ranks, or a wrong id", rank,
            nranks, world);
    nccl_mpi::state().delay.state += (unsigned)rank;  // each rank has its own delays
    std::string error = nccl_mpi::queue_start();
    if (!error.empty())
        return nccl_mpi::fail(ncclInvalidUsage, "ncclCommInitRank: %s", error.c_str());
    *comm = nccl_mpi::new_communicator(MPI_COMM_WORLD, "world", NULL);
    nccl_mpi::meet(*comm, "ncclCommInitRank");
    MPI_Comm_split(MPI_COMM_WORLD, 0, rank, &(*comm)->mpi);
    (*comm)->rank = rank;
    (*comm)->whole = true;
    return ncclSuccess;
}

// Splits comm: the ranks with one colour form a communicator, ordered by key, then by rank.
// All ranks of comm call it, with nothing of comm in flight. Completes queued work.
// NCCL_SPLIT_NOCOLOR gives NULL. commName appears in reports.
inline ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                                  ncclConfig_t *config) {
    if (color < NCCL_SPLIT_NOCOLOR)
        return nccl_mpi::fail(ncclInvalidArgument, "ncclCommSplit: a negative colour");
    if (nccl_mpi::state().group_depth > 0)
        return nccl_mpi::fail(ncclInvalidUsage, "ncclCommSplit inside a group");
    if (comm->finished != comm->issued)
        return nccl_mpi::fail(ncclInvalidUsage,
                              "ncclCommSplit of %s, which has operations in flight",
                              comm->name.c_str());
    // All ranks meet before MPI_Comm_split, which could not name a missing one.
    nccl_mpi::meet(comm, "ncclCommSplit");
    MPI_Comm mpi;
    MPI_Comm_split(comm->mpi, color == NCCL_SPLIT_NOCOLOR ? MPI_UNDEFINED : color, key,
                   &mpi);
    *newcomm = NULL;
    if (mpi == MPI_COMM_NULL) return ncclSuccess;
    const char *name = config ? config->commName : NULL;
    *newcomm = nccl_mpi::new_communicator(
        mpi, name ? name : comm->name + "/" + std::to_string(color), config);
    return ncclSuccess;
}

inline ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    *count = comm->size;
    return ncclSuccess;
}

inline ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

// Beyond NCCL: restarts the counts of this rank on the communicator.
inline void ncclMpiResetCounters(ncclComm_t comm) {
    memset(comm->counters, 0, sizeof comm->counters);
}

// Completes queued work, waits for all ranks of comm to call it, then frees.
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    nccl_mpi::meet(comm, "ncclCommDestroy");
    nccl_mpi::report_traffic(comm);
    if (comm->whole) nccl_mpi::print_traffic(comm);
    MPI_Comm_free(&comm->mpi);
    delete comm;
    return ncclSuccess;
}

#endif
