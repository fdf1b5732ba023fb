// nccl.h: the NCCL calls that the trainers use, carried by MPI. For ranks without GPUs (with the stand-ins of
// llmc/cpu) and for several ranks that share one GPU. Same names, arguments and error codes as NVIDIA's
// header; what is missing here is not used. MPI_COMM_WORLD must exist: call MPI_Init_thread first. On the CPU
// one thread makes all calls (MPI_THREAD_FUNNELED is enough); on a GPU a helper thread progresses them and
// MPI_THREAD_MULTIPLE is needed.
//
// As strict as NCCL, or stricter:
//   - operations of one communicator run one after the other in the order of issue, whatever stream they are
//     on; those of different communicators overlap; a group's operations progress together;
//   - a send completes only when its receive has begun, so a wrong order of sends and receives hangs; every
//     rank then says what it waits for and the job ends, after CPU_STALL_SECONDS (default 30);
//   - ranks that disagree about an operation, count, type, reduction or root are reported with both values;
//   - the first use of a communicator blocks the host and is refused beside other operations, see connect.h;
//   - a reduction adds in rank order (see reduce.h): the same bits on every rank, every time.
// NCCL_DELAY=random:SEED:MICROSECONDS delays messages at random; results must not depend on it.
// NCCL_TRAFFIC=1 prints calls and bytes of each communicator when it is destroyed.
//
// When a rank dies: mpirun notices a process that is killed, or that exits without MPI_Finalize, and kills
// the others, with a message (under srun, --kill-on-bad-exit=1 does). When mpirun itself is killed, Open
// MPI's ranks lose their connection to it and exit. Ours is the case that no launcher sees: all processes
// live, and none progresses.
//
// A host that blocks outside of CUDA (MPI_Barrier, MPI_Bcast, ...) does not run the CPU's streams:
// synchronise the streams first if another rank needs what is queued on them to get there.
#ifndef LLMC_MPI_NCCL_H
#define LLMC_MPI_NCCL_H

#include "llmc/mpi/communicator.h"

#define NCCL_OVER_MPI 1  // tells a program which NCCL it has: ranks may share a device, and their traffic is counted

namespace nccl_mpi {

// Counts what a ring would send and receive: rank r keeps part r of an all-reduced buffer, the last rank of a
// broadcast sends nothing on.
inline void count_traffic(ncclComm_t comm, const Op *op) {
    NcclMpiCounter *c = &comm->counters[op->call.op];
    size_t n = (size_t)comm->size, rank = (size_t)comm->rank, count = op->call.count, bytes = count * op->width;
    size_t own = (count / n + (rank < count % n)) * op->width, root = (size_t)op->call.root;
    c->calls++;
    switch (op->call.op) {
        case NCCL_MPI_ALL_REDUCE: c->bytes_sent += 2 * (bytes - own), c->bytes_received += 2 * (bytes - own); break;
        case NCCL_MPI_SEND: c->bytes_sent += bytes; break;
        case NCCL_MPI_RECV: c->bytes_received += bytes; break;
        case NCCL_MPI_BROADCAST:
            c->bytes_sent += (rank + 1) % n == root ? 0 : bytes;
            c->bytes_received += rank == root ? 0 : bytes;
            break;
        default: c->bytes_sent += (n - 1) * bytes, c->bytes_received += (n - 1) * bytes; break;
    }
}

// Hands the calls of a closed group on one communicator to the streams.
inline ncclResult_t issue_group(ncclComm_t comm, const std::vector<Call> &calls) {
    std::shared_ptr<Group> g(new Group());
    std::vector<cudaStream_t> streams;
    g->comm = comm;
    g->turn = comm->issued++;
    g->label = current_label();
    if (calls.size() > 1) g->name = "ncclGroup: ";
    for (size_t i = 0; i < calls.size(); i++) {
        g->ops.push_back(calls[i].op);
        streams.push_back(calls[i].stream);
        if (std::find(g->streams.begin(), g->streams.end(), streams[i]) == g->streams.end())
            g->streams.push_back(streams[i]);
        Op *op = &g->ops[i];
        Header *call = &op->call;
        if (call->op == NCCL_MPI_SEND) call->sequence = comm->sent_to[op->peer]++;
        else if (call->op == NCCL_MPI_RECV) call->sequence = comm->received_from[op->peer]++;
        else call->sequence = comm->collectives++;
        count_traffic(comm, op);
        if (i < 4) g->name += (i ? " and " : "") + describe(call);
        else if (i == 4) g->name += " and more";
    }
    g->name += " (" + comm->name + ")";
    clock_issue(g.get());
    std::string error;
    if (!queue_group(g, streams, &error)) return fail(ncclSystemError, "%s", error.c_str());
    return ncclSuccess;
}

// The pending operations of the outermost group, one group for each communicator in order of first use.
inline ncclResult_t issue_pending() {
    std::vector<Call> pending = std::move(state().pending);
    state().pending.clear();
    ncclResult_t result = connect(pending);
    while (!pending.empty() && result == ncclSuccess) {
        ncclComm_t comm = pending[0].comm;
        std::vector<Call> calls, others;
        for (Call &c : pending) (c.comm == comm ? calls : others).push_back(c);
        result = issue_group(comm, calls);
        pending.swap(others);
    }
    return result;
}

inline bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    return (const char *)a < (const char *)b + b_bytes && (const char *)b < (const char *)a + a_bytes;
}

// Checks a call and queues it. other: the root or the peer, -1 if the operation has none. send and recv hold
// send_parts and recv_parts times count elements; in place, recv + recv_at * count is the same memory as send
// + send_at * count.
inline ncclResult_t call(NcclMpiOp kind, const void *send, void *recv, size_t count, int type, int redop,
                         int other, int send_parts, int recv_parts, int send_at, int recv_at, ncclComm_t comm,
                         cudaStream_t stream) {
    const char *name = op_name(kind);
    if (!comm) return fail(ncclInvalidArgument, "%s: no communicator", name);
    size_t width = type_bytes(type);
    if (width == 0) return fail(ncclInvalidArgument, "%s: datatype %d is not carried", name, type);
    bool reduces = kind == NCCL_MPI_ALL_REDUCE || kind == NCCL_MPI_REDUCE_SCATTER;
    if (reduces && !redop_name(redop))
        return fail(ncclInvalidArgument, "%s: reduction %d is not carried", name, redop);
    if (kind >= NCCL_MPI_BROADCAST && (other < 0 || other >= comm->size)) {
        return fail(ncclInvalidArgument, "%s: rank %d does not exist, %s has %d", name, other,
                    comm->name.c_str(), comm->size);
    }
    if (count > INT_MAX && !simulates())
        return fail(ncclInvalidArgument, "%s: a count of %zu is beyond an MPI message", name, count);
    size_t bytes = count * width, send_bytes = bytes * send_parts, recv_bytes = bytes * recv_parts;
    if (send_bytes && !is_device_memory(send, send_bytes)) {
        return fail(ncclInvalidArgument, "%s: %zu bytes at %p are not inside one device allocation", name,
                    send_bytes, send);
    }
    if (recv_bytes && !is_device_memory(recv, recv_bytes)) {
        return fail(ncclInvalidArgument, "%s: %zu bytes at %p are not inside one device allocation", name,
                    recv_bytes, recv);
    }
    bool in_place = (const char *)send + bytes * send_at == (char *)recv + bytes * recv_at;
    if (!in_place && overlap(send, send_bytes, recv, recv_bytes)) {
        return fail(ncclInvalidArgument, "%s: the buffers overlap without being in place", name);
    }
    if (!is_stream(stream)) return fail(ncclInvalidArgument, "%s: no such stream", name);
    Op op = Op();
    op.call.op = kind;
    op.call.type = type;
    op.call.redop = reduces ? redop : -1;
    op.call.root = other;
    op.call.count = count;
    op.send = (const char *)send;
    op.recv = (char *)recv;
    op.width = width;
    op.peer = other;
    state().pending.push_back({op, comm, stream});
    return state().group_depth > 0 ? ncclSuccess : issue_pending();
}

}  // namespace nccl_mpi

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
    if (error == ncclSuccess) error = nccl_mpi::issue_pending();
    s.pending.clear();
    nccl_mpi::destroy(s.ending);
    s.ending.clear();
    return error;
}

// recvbuff[i] = reduction of sendbuff[i] over the ranks, count elements each. In place: the same pointer.
inline ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_ALL_REDUCE, sendbuff, recvbuff, count, datatype, op, -1, 1, 1, 0, 0, comm,
                          stream);
}

// Rank r gets part r of the reduction: sendbuff has nranks * recvcount elements. In place: recvbuff = part r
// of sendbuff.
inline ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                                      ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                      cudaStream_t stream) {
    int n = comm ? comm->size : 1, rank = comm ? comm->rank : 0;
    return nccl_mpi::call(NCCL_MPI_REDUCE_SCATTER, sendbuff, recvbuff, recvcount, datatype, op, -1, n, 1,
                          rank, 0, comm, stream);
}

// Part r of recvbuff (nranks * sendcount elements) is rank r's sendbuff. In place: sendbuff = part r of
// recvbuff.
inline ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                                  ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
    int n = comm ? comm->size : 1, rank = comm ? comm->rank : 0;
    return nccl_mpi::call(NCCL_MPI_ALL_GATHER, sendbuff, recvbuff, sendcount, datatype, -1, -1, 1, n, 0, rank,
                          comm, stream);
}

// Every recvbuff becomes the root's sendbuff, which other ranks need not have. In place: the same pointer.
inline ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                                  int root, ncclComm_t comm, cudaStream_t stream) {
    int is_root = comm && comm->rank == root;
    return nccl_mpi::call(NCCL_MPI_BROADCAST, is_root ? sendbuff : recvbuff, recvbuff, count, datatype, -1,
                          root, is_root, 1, 0, 0, comm, stream);
}

// Point to point, to oneself too (in a group with the matching call). The k-th send to a peer meets its k-th
// receive.
inline ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_SEND, sendbuff, NULL, count, datatype, -1, peer, 1, 0, 0, 0, comm, stream);
}

inline ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return nccl_mpi::call(NCCL_MPI_RECV, NULL, recvbuff, count, datatype, -1, peer, 0, 1, 0, 0, comm, stream);
}

#endif
