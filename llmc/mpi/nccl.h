// nccl.h: the NCCL calls that the trainers use, carried by MPI. For ranks without GPUs (with the stand-ins of llmc/cpu)
// and for several ranks that share one GPU. Same names, arguments and error codes as NVIDIA's header; what is missing
// here is not used. MPI_COMM_WORLD must exist: call MPI_Init_thread first. On the CPU one thread makes all calls
// (MPI_THREAD_FUNNELED is enough); on a GPU a helper thread progresses them and MPI_THREAD_MULTIPLE is needed.
//
// As strict as NCCL, or stricter:
//   - operations of one communicator run one after the other in the order of issue, whatever stream they are on; those
//     of different communicators overlap; a group's operations progress together;
//   - a send completes only when its receive has begun, so a wrong order of sends and receives hangs, is reported after
//     CPU_STALL_SECONDS (default 30) by every rank with what it waits for, and ends the job;
//   - ranks that disagree about an operation, count, type, reduction or root are reported with both sides' values;
//   - a reduction adds in rank order (see reduce.h): the same bits on every rank, every time.
// NCCL_DELAY=random:SEED:MICROSECONDS delays messages at random; results and termination must not depend on it.
// NCCL_TRAFFIC=1 prints calls and bytes of each communicator when it is destroyed.
//
// When a rank dies: mpirun notices a process that is killed, or that exits without MPI_Finalize, and kills the others,
// with a message (under srun, --kill-on-bad-exit=1 does). When mpirun itself is killed, Open MPI's ranks lose their
// connection to it and exit. Ours is the case that no launcher sees: all processes live, and none progresses.
//
// A host that blocks outside of CUDA (MPI_Barrier, MPI_Bcast, ...) does not run the CPU's streams: synchronise the
// streams first if another rank needs what is queued on them to get there.
#ifndef LLMC_MPI_NCCL_H
#define LLMC_MPI_NCCL_H

#include <sched.h>
#include <stdarg.h>

#ifdef __CUDACC__
#include "llmc/mpi/gpu_queue.h"
#else
#include "llmc/mpi/cpu_queue.h"
#endif

#define NCCL_OVER_MPI_COUNTERS 1  // tells a program that the counters below exist

namespace nccl_mpi {

__attribute__((format(printf, 2, 3))) inline ncclResult_t fail(ncclResult_t result, const char *format, ...) {
    char text[512];
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

// Starting a communicator is the one thing that blocks the host, as in NCCL. Ends the job if it lasts too long.
inline void wait_for(MPI_Request *request, const char *what) {
    const char *text = getenv("CPU_STALL_SECONDS");
    double patience = text && atof(text) > 0 ? atof(text) : 30, start = MPI_Wtime();
    for (int done = 0;;) {
        MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (done) return;
        if (MPI_Wtime() - start > patience) {
            int rank;
            MPI_Comm_rank(MPI_COMM_WORLD, &rank);
            fprintf(stderr, "nccl: rank %d waited %.0f s in %s for the other ranks to call it, ending the job\n", rank,
                    patience, what);
            end_job(2);
        }
        sched_yield();
    }
}

inline ncclComm_t new_communicator(MPI_Comm mpi, const std::string &name) {
    ncclComm_t comm = new ncclComm();
    comm->mpi = mpi;
    MPI_Comm_rank(mpi, &comm->rank);
    MPI_Comm_size(mpi, &comm->size);
    comm->name = name;
    comm->sent_to.assign(comm->size, 0);
    comm->received_from.assign(comm->size, 0);
    return comm;
}

// A unique id names the rank that made it, and which of its ids it is.
struct Id {
    char magic[8];
    int32_t creator, tag;
};

// Hands one communicator's share of a closed group to the streams.
inline ncclResult_t issue_group(const std::vector<Op> &ops, ncclComm_t comm, const std::vector<cudaStream_t> &streams) {
    std::shared_ptr<Group> g(new Group());
    g->comm = comm;
    g->turn = comm->issued++;
    g->ops = ops;
    g->label = current_label();
    if (ops.size() > 1) g->name = "ncclGroup: ";
    for (size_t i = 0; i < g->ops.size(); i++) {
        Op *op = &g->ops[i];
        Header *call = &op->call;
        if (call->op == NCCL_MPI_SEND) call->sequence = comm->sent_to[op->peer]++;
        else if (call->op == NCCL_MPI_RECV) call->sequence = comm->received_from[op->peer]++;
        else call->sequence = comm->collectives++;
        comm->counters[call->op].calls++;
        if (i < 4) g->name += (i ? " and " : "") + describe(call);
        else if (i == 4) g->name += " and more";
    }
    g->name += " (" + comm->name + ")";
    std::string error;
    if (!queue_group(g, streams, &error)) return fail(ncclSystemError, "%s", error.c_str());
    return ncclSuccess;
}

// The pending operations of the outermost group, one group for each communicator in order of first use.
inline ncclResult_t issue_pending() {
    auto pending = std::move(state().pending);
    state().pending.clear();
    ncclResult_t result = ncclSuccess;
    while (!pending.empty() && result == ncclSuccess) {
        ncclComm_t comm = pending.front().second.first;
        std::vector<Op> ops;
        std::vector<cudaStream_t> streams;
        decltype(pending) others;
        for (auto &p : pending) {
            if (p.second.first != comm) {
                others.push_back(p);
                continue;
            }
            ops.push_back(p.first);
            streams.push_back(p.second.second);
        }
        result = issue_group(ops, comm, streams);
        pending.swap(others);
    }
    return result;
}

inline bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    return (const char *)a < (const char *)b + b_bytes && (const char *)b < (const char *)a + a_bytes;
}

// Checks a call and queues it. other: the root or the peer, -1 if the operation has none. send and recv hold
// send_parts and recv_parts times count elements; in place, recv + recv_at * count is the same memory as send + send_at * count.
inline ncclResult_t call(NcclMpiOp kind, const void *send, void *recv, size_t count, int type, int redop, int other,
                         int send_parts, int recv_parts, int send_at, int recv_at, ncclComm_t comm, cudaStream_t stream) {
    static const char *const names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                        "ncclBroadcast", "ncclSend", "ncclRecv"};
    const char *name = names[kind];
    if (!comm) return fail(ncclInvalidArgument, "%s: no communicator", name);
    size_t width = type_bytes(type);
    if (width == 0) return fail(ncclInvalidArgument, "%s: datatype %d is not carried", name, type);
    bool reduces = kind == NCCL_MPI_ALL_REDUCE || kind == NCCL_MPI_REDUCE_SCATTER;
    if (reduces && !redop_name(redop)) return fail(ncclInvalidArgument, "%s: reduction %d is not carried", name, redop);
    if (kind >= NCCL_MPI_BROADCAST && (other < 0 || other >= comm->size)) {
        return fail(ncclInvalidArgument, "%s: rank %d does not exist, %s has %d", name, other, comm->name.c_str(), comm->size);
    }
    if (count > (SIZE_MAX >> 2) / width / (size_t)comm->size) {
        return fail(ncclInvalidArgument, "%s: a count of %zu is beyond any memory", name, count);
    }
    size_t bytes = count * width, send_bytes = bytes * send_parts, recv_bytes = bytes * recv_parts;
    if (send_bytes && !is_device_memory(send, send_bytes)) {
        return fail(ncclInvalidArgument, "%s: %zu bytes at %p are not inside one device allocation", name, send_bytes, send);
    }
    if (recv_bytes && !is_device_memory(recv, recv_bytes)) {
        return fail(ncclInvalidArgument, "%s: %zu bytes at %p are not inside one device allocation", name, recv_bytes, recv);
    }
    bool in_place = (const char *)send + bytes * send_at == (char *)recv + bytes * recv_at;
    if (!in_place && overlap(send, send_bytes, recv, recv_bytes)) {
        return fail(ncclInvalidArgument, "%s: the buffers overlap without being in place", name);
    }
    if (!is_stream(stream)) return fail(ncclInvalidArgument, "%s: no such stream", name);
    Op op;
    memset(&op, 0, sizeof op);
    op.call.op = kind;
    op.call.type = type;
    op.call.redop = reduces ? redop : -1;
    op.call.root = other;
    op.call.count = count;
    op.send = (const char *)send;
    op.recv = (char *)recv;
    op.width = width;
    op.peer = other;
    state().pending.push_back({op, {comm, stream}});
    return state().group_depth > 0 ? ncclSuccess : issue_pending();
}

}  // namespace nccl_mpi

inline const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled cuda error";
        case ncclSystemError: return "unhandled system error";
        case ncclInternalError: return "internal error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "remote process exited or there was a network error";
        case ncclInProgress: return "operation in progress";
        default: return "unknown result code";
    }
}

// One sentence about the last call that failed, "" before.
inline const char *ncclGetLastError(ncclComm_t) { return nccl_mpi::state().last_error.c_str(); }

// Errors end the job at once, so a communicator that can be asked is well.
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    if (!comm || !error) return nccl_mpi::fail(ncclInvalidArgument, "ncclCommGetAsyncError: null argument");
    *error = ncclSuccess;
    return ncclSuccess;
}

// Whoever calls this must take part in the communicator; hand the id to the others, for instance with MPI_Bcast.
inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    if (!id) return nccl_mpi::fail(ncclInvalidArgument, "ncclGetUniqueId: null argument");
    nccl_mpi::Id mine = {"llmcmpi", 0, 16384 + (int32_t)(nccl_mpi::state().unique_ids++ % 16384)};
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    mine.creator = rank;
    memset(id, 0, sizeof *id);
    memcpy(id, &mine, sizeof mine);
    return ncclSuccess;
}

// Blocks until all nranks ranks have called it. They tell the id's creator who they are, and it tells all who all are,
// on MPI_COMM_WORLD with tags from 16384 on.
inline ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId unique, int rank) {
    nccl_mpi::Id id;
    memcpy(&id, &unique, sizeof id);
    int world, world_rank;
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    if (!comm || nranks < 1 || nranks > world || rank < 0 || rank >= nranks || strcmp(id.magic, "llmcmpi") != 0) {
        return nccl_mpi::fail(ncclInvalidArgument, "ncclCommInitRank: rank %d of %d with %d MPI ranks, or a wrong id", rank,
                              nranks, world);
    }
    nccl_mpi::delays_start();
    std::string error;
    if (!nccl_mpi::queue_start(&error)) return nccl_mpi::fail(ncclInvalidUsage, "ncclCommInitRank: %s", error.c_str());
    std::vector<int> members(nranks, -1);
    int me[3] = {rank, world_rank, nranks}, them[3];
    MPI_Request request;
    if (world_rank == id.creator) {
        members[rank] = world_rank;
        for (int i = 1; i < nranks; i++) {
            MPI_Irecv(them, 3, MPI_INT, MPI_ANY_SOURCE, id.tag, MPI_COMM_WORLD, &request);
            nccl_mpi::wait_for(&request, "ncclCommInitRank");
            if (them[2] != nranks || members[them[0]] >= 0) {
                fprintf(stderr, "nccl: ncclCommInitRank was called as rank %d of %d by MPI rank %d, as rank %d of %d by %d\n",
                        rank, nranks, world_rank, them[0], them[2], them[1]);
                MPI_Abort(MPI_COMM_WORLD, 1);
            }
            members[them[0]] = them[1];
        }
        for (int i = 0; i < nranks; i++) {
            if (i != rank) MPI_Send(members.data(), nranks, MPI_INT, members[i], id.tag, MPI_COMM_WORLD);
        }
    } else {
        MPI_Send(me, 3, MPI_INT, id.creator, id.tag, MPI_COMM_WORLD);
        MPI_Irecv(members.data(), nranks, MPI_INT, id.creator, id.tag, MPI_COMM_WORLD, &request);
        nccl_mpi::wait_for(&request, "ncclCommInitRank");
    }
    MPI_Group all, some;
    MPI_Comm mpi;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, nranks, members.data(), &some);
    MPI_Comm_create_group(MPI_COMM_WORLD, some, id.tag, &mpi);
    MPI_Group_free(&some);
    MPI_Group_free(&all);
    *comm = nccl_mpi::new_communicator(mpi, nranks == world ? "world" : "part of the world");
    return ncclSuccess;
}

// All ranks of comm call it; those with the same colour form a communicator, ordered by key, then by rank.
// NCCL_SPLIT_NOCOLOR gives none (NULL). config->commName names it in reports.
inline ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config) {
    if (!comm || !newcomm || color < NCCL_SPLIT_NOCOLOR) {
        return nccl_mpi::fail(ncclInvalidArgument, "ncclCommSplit: null argument or a negative colour");
    }
    if (nccl_mpi::state().group_depth > 0) return nccl_mpi::fail(ncclInvalidUsage, "ncclCommSplit inside a group");
    // Everybody arrives before MPI_Comm_split, which could not say who is missing.
    MPI_Request request;
    MPI_Ibarrier(comm->mpi, &request);
    std::string what = "ncclCommSplit of " + comm->name;
    nccl_mpi::wait_for(&request, what.c_str());
    MPI_Comm mpi;
    MPI_Comm_split(comm->mpi, color == NCCL_SPLIT_NOCOLOR ? MPI_UNDEFINED : color, key, &mpi);
    *newcomm = NULL;
    if (mpi == MPI_COMM_NULL) return ncclSuccess;
    const char *name = config ? config->commName : NULL;
    *newcomm = nccl_mpi::new_communicator(mpi, name ? name : comm->name + "/" + std::to_string(color));
    return ncclSuccess;
}

inline ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    if (!comm || !count) return nccl_mpi::fail(ncclInvalidArgument, "ncclCommCount: null argument");
    *count = comm->size;
    return ncclSuccess;
}

inline ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    if (!comm || !rank) return nccl_mpi::fail(ncclInvalidArgument, "ncclCommUserRank: null argument");
    *rank = comm->rank;
    return ncclSuccess;
}

// Beyond NCCL: what this rank did on the communicator since it was made or the counters were reset.
inline NcclMpiCounter ncclMpiCounter(ncclComm_t comm, NcclMpiOp op) { return comm->counters[op]; }
inline size_t ncclMpiBytesSent(ncclComm_t comm) {
    size_t bytes = 0;
    for (int op = 0; op < NCCL_MPI_OPS; op++) bytes += comm->counters[op].bytes_sent;
    return bytes;
}
inline void ncclMpiResetCounters(ncclComm_t comm) { memset(comm->counters, 0, sizeof comm->counters); }
inline const char *ncclMpiName(ncclComm_t comm) { return comm->name.c_str(); }

// Completes what is queued, then frees. All ranks of comm call it.
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    static const char *const names[] = {"all-reduce", "reduce-scatter", "all-gather", "broadcast", "send", "recv"};
    if (comm->finished != comm->issued) nccl_mpi::queue_drain();
    const char *traffic = getenv("NCCL_TRAFFIC");
    for (int op = 0; traffic && strcmp(traffic, "1") == 0 && op < NCCL_MPI_OPS; op++) {
        const NcclMpiCounter *c = &comm->counters[op];
        if (!c->calls) continue;
        fprintf(stderr, "traffic: %s rank %d of %d, %s: %zu calls, %zu bytes sent, %zu received\n", comm->name.c_str(),
                comm->rank, comm->size, names[op], c->calls, c->bytes_sent, c->bytes_received);
    }
    MPI_Comm_free(&comm->mpi);
    delete comm;
    return ncclSuccess;
}

// A rank that gives up cannot leave the others in the middle of an operation: this ends the job.
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
    fprintf(stderr, "nccl: ncclCommAbort was called on %s\n", comm ? comm->name.c_str() : "no communicator");
    fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, 1);
    return ncclSuccess;
}

inline ncclResult_t ncclGroupStart() {
    nccl_mpi::state().group_depth++;
    return ncclSuccess;
}

// The end of the outermost group issues its operations, or none of them if one was refused.
inline ncclResult_t ncclGroupEnd() {
    nccl_mpi::State &s = nccl_mpi::state();
    if (s.group_depth == 0) return nccl_mpi::fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--s.group_depth > 0) return ncclSuccess;
    ncclResult_t error = s.group_error;
    s.group_error = ncclSuccess;
    if (error == ncclSuccess) return nccl_mpi::issue_pending();
    s.pending.clear();
    return error;
}

// recvbuff[i] = reduction of sendbuff[i] over the ranks, count elements each. In place: the same pointer.
inline ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_ALL_REDUCE, sendbuff, recvbuff, count, datatype, op, -1, 1, 1, 0, 0, comm, stream);
}

// Rank r gets part r of the reduction: sendbuff has nranks * recvcount elements. In place: recvbuff = part r of sendbuff.
inline ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
                                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    int n = comm ? comm->size : 1, rank = comm ? comm->rank : 0;
    return nccl_mpi::call(NCCL_MPI_REDUCE_SCATTER, sendbuff, recvbuff, recvcount, datatype, op, -1, n, 1, rank, 0, comm,
                          stream);
}

// Part r of recvbuff (nranks * sendcount elements) is rank r's sendbuff. In place: sendbuff = part r of recvbuff.
inline ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
                                  ncclComm_t comm, cudaStream_t stream) {
    int n = comm ? comm->size : 1, rank = comm ? comm->rank : 0;
    return nccl_mpi::call(NCCL_MPI_ALL_GATHER, sendbuff, recvbuff, sendcount, datatype, -1, -1, 1, n, 0, rank, comm, stream);
}

// Every recvbuff becomes the root's sendbuff, which other ranks need not have. In place: the same pointer.
inline ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    int is_root = comm && comm->rank == root;
    return nccl_mpi::call(NCCL_MPI_BROADCAST, is_root ? sendbuff : recvbuff, recvbuff, count, datatype, -1, root, is_root, 1,
                          0, 0, comm, stream);
}

// Point to point, to oneself too (in a group with the matching call). The k-th send to a peer meets its k-th receive.
inline ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_SEND, sendbuff, NULL, count, datatype, -1, peer, 1, 0, 0, 0, comm, stream);
}

inline ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_RECV, NULL, recvbuff, count, datatype, -1, peer, 0, 1, 0, 0, comm, stream);
}

#endif
